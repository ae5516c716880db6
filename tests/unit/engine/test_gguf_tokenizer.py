"""Tokenizers of GGUF metadata: the tokens of the tokenizer.json and of llama.cpp; what is not known is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
from tokenizers import Tokenizer

from hetero_api.errors import ModelError
from hetero_gateway.engine.text.chat_template import ChatTemplate
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from tests.support.llama_cpp_files import expected_tokens, llama_cpp_models

pytestmark = pytest.mark.unit

VOCABULARIES: Final = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt",
    "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
"""All that come with expected tokens but bert-bge: a WordPiece vocabulary is an encoder's, and no decoder has one."""
NEEDS_TOOLS: Final = ("tool_use", "Hermes")
NEEDS_MORE: Final = "fireworks-ai-llama-3-firefunction-v2"
"""Its template wants a variable that neither transformers nor we have."""
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number", "description": "One."}}},
    },
}
TEXTS: Final = (
    "Hello, world!",
    "It's 2024: 3.14159 ≈ π\n\n\tdef f(x):\r\n",
    "  naïve résumé 北京 🦙 ",
    "",
    "<|im_end|>a",
)
SPM_TOKENS: Final = ("<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "▁a", "ab", "<turn>", "c")
SPM_TYPES: Final = (2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 4, 5)


def _write(
    path: Path, model: str, fields: Mapping[str, Any], *, template: Any = "{{ bos_token }}{{ messages[0].content }}"
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_array(f"tokenizer.ggml.{name}", value)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _spm(**changes: Any) -> dict[str, Any]:
    scores = [float(-number) for number in range(len(SPM_TOKENS))]
    fields = {
        "tokens": list(SPM_TOKENS), "token_type": list(SPM_TYPES), "scores": scores, "bos_token_id": 1,
        "unknown_token_id": 0,
    }  # fmt: skip
    return {name: value for name, value in (fields | changes).items() if value is not None}


def test_a_file_gives_the_tokens_of_the_tokenizer_json_that_it_was_made_of(smollm2: Path, tmp_path: Path) -> None:
    stored = json.loads((smollm2 / "tokenizer.json").read_text())
    reference = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    vocabulary = sorted(stored["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in stored["added_tokens"]}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in stored["model"]["merges"]]
    fields = {
        "pre": "smollm",
        "tokens": [text for text, _ in vocabulary],
        "token_type": [3 if text in special else 1 for text, _ in vocabulary],
        "merges": merges,
        "bos_token_id": reference.token_to_id("<|im_start|>"),
    }
    _write(tmp_path / "tiny.gguf", "gpt2", fields)
    found = TextTokenizer.from_directory(tmp_path)
    for text in TEXTS:
        assert found.encode(text) == reference.encode(text, add_special_tokens=False).ids
        assert found.decode(found.encode(text)) == reference.decode(found.encode(text))
    assert found.vocab_size == len(vocabulary)
    assert found.encode_chat([{"role": "user", "content": "Hi"}]) == [1, *found.encode("Hi")]


def test_sentencepiece_merges_by_scores_and_falls_back_to_bytes(tmp_path: Path) -> None:
    _write(tmp_path / "tiny.gguf", "llama", _spm())
    found = TextTokenizer.from_directory(tmp_path)
    ids = {text: number for number, text in enumerate(SPM_TOKENS)}
    assert found.encode("ab é<turn>c") == [
        ids["<s>"], ids["▁a"], ids["b"], ids["▁"], ids["<0xC3>"], ids["<0xA9>"], ids["<turn>"], ids["▁"], ids["<unk>"],
    ]  # fmt: skip
    assert found.decode(found.encode("a ab")) == "a ab"


def test_a_template_for_tools_is_used_where_there_are_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    _write(tmp_path / "tiny.gguf", "llama", _spm(), template=named)
    found = TextTokenizer.from_directory(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    assert [found.decode(found.encode_chat(messages, tools=tools)) for tools in (None, [TOOL])] == ["a", "b"]


def test_the_file_says_whether_a_space_and_tokens_are_put_around(tmp_path: Path) -> None:
    fields = _spm(add_space_prefix=False, add_bos_token=False, add_eos_token=True, eos_token_id=2)
    _write(tmp_path / "tiny.gguf", "llama", fields)
    found = TextTokenizer.from_directory(tmp_path)
    assert found.encode("ab") == [SPM_TOKENS.index("ab"), SPM_TOKENS.index("</s>")]
    assert found.decode(found.encode(" a")) == " a"


def test_a_tokenizer_json_beside_the_file_counts(smollm2: Path, tmp_path: Path) -> None:
    _write(tmp_path / "tiny.gguf", "llama", _spm())
    (tmp_path / "tokenizer.json").write_bytes((smollm2 / "tokenizer.json").read_bytes())
    assert TextTokenizer.from_directory(tmp_path).vocab_size > len(SPM_TOKENS)


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("rwkv", _spm(), r"tiny.gguf: tokenizer.ggml.model 'rwkv' is not supported; supported: gpt2, llama"),
        ("gpt2", _spm(pre="viking"), r"tokenizer.ggml.pre 'viking' is not supported; put the model's tokenizer.json"),
        ("gpt2", _spm(pre="qwen2", merges=["ab"]), r"tokenizer.ggml.merges has an entry that is no pair: 'ab'"),
        ("gpt2", _spm(pre="qwen2", merges=["a x"]), r"tiny.gguf: tokenizer.ggml.\*: is no tokenizer that"),
        ("llama", _spm(tokens=None), r"tokenizer.ggml.tokens is missing"),
        ("llama", _spm(scores=None), r"tokenizer.ggml.scores lists 0 tokens of 12"),
        ("llama", _spm(scores=["x"] * 12), r"tokenizer.ggml.scores must list float, not str"),
        ("llama", _spm(token_type=[1]), r"tokenizer.ggml.token_type lists 1 tokens of 12"),
        ("llama", _spm(bos_token_id=99), r"tokenizer.ggml.bos_token_id must be one of 12 tokens, not 99"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, model: str, fields: Mapping[str, Any], message: str
) -> None:
    _write(tmp_path / "tiny.gguf", model, fields)
    with pytest.raises(ModelError, match=message):
        TextTokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokens_equal_those_that_llama_cpp_expects(tmp_path: Path, name: str) -> None:
    models = llama_cpp_models()
    (tmp_path / "model.gguf").write_bytes((models / f"ggml-vocab-{name}.gguf").read_bytes())
    found = TextTokenizer.from_directory(tmp_path)
    around = _around(found)
    for text, tokens in expected_tokens(models, name):
        assert found.encode(text) == [*around, *tokens]


def _around(tokenizer: TextTokenizer) -> Sequence[int]:
    """Tokens that stand before every prompt."""
    return tokenizer.encode("")


def test_templates_of_llama_cpp_render() -> None:
    templates = sorted((llama_cpp_models() / "templates").glob("*.jinja"))
    assert len(templates) > 50
    for path in templates:
        template = ChatTemplate(path.read_text(), special_tokens={"bos_token": "<s>"}, source=str(path))
        if path.stem == NEEDS_MORE:
            continue
        tools = [TOOL] if any(mark in path.stem for mark in NEEDS_TOOLS) else None
        assert "What is 2+2?" in template.render([{"role": "user", "content": "What is 2+2?"}], tools=tools), path.stem
