"""Text of prompts and completions: everything in the engine that knows characters rather than tokens.

channels       reasoning and text of answers in the Harmony format
tokenizer      text to tokens and back   detokenizer  tokens to text, as they come, up to a stop string
chat_template  chat to text              constraints  forms that text is bound to
gguf_tokenizer text to tokens by a GGUF file's metadata   tiktoken_tokenizer  the same by a tiktoken.model
byte_level     how models that merge bytes split text before   windows  tokens of long texts, part by part

answer_formats how models of each family write thoughts and calls of tools
answer_parser  answers to pieces, as they come             call_arguments  arguments of calls to JSON
call_grammars  forms of answers that must call a tool      asked_answer    what one chat asks for
"""
