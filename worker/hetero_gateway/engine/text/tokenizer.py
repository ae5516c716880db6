"""Text and conversations to token ids and back, by the files of a Hugging Face directory.

Needs `tokenizers` and `jinja2` only. Results equal those of transformers' fast tokenizer: plain text gets the special
tokens of tokenizer.json's post-processor, a rendered chat gets none on top of those the template wrote. Immutable
once made; encoding and decoding may be called from any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.models import BPE

from hetero_api.errors import ModelError
from hetero_api.gguf_model import gguf_files
from hetero_api.hf_config import read_json
from hetero_api.model_directory import MAX_TOKENIZER_BYTES, model_file, parse_json, read_model_file
from hetero_gateway.engine.config import check_prompt_bytes, check_prompt_length
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.text.byte_level import byte_level_alphabet
from hetero_gateway.engine.text.channels import ChannelText, HarmonyTokens, MarkedText
from hetero_gateway.engine.text.chat_template import ChatTemplate, with_tool_use
from hetero_gateway.engine.text.detokenizer import ByteLevelText, IncrementalDetokenizer, WindowText
from hetero_gateway.engine.text.gguf_tokenizer import read_gguf_tokenizer
from hetero_gateway.engine.text.tiktoken_tokenizer import TIKTOKEN_FILE, read_tiktoken_tokenizer
from hetero_gateway.engine.text.windows import WINDOW_CHARS, ids_by_windows

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"
TOOL_USE_FILE: Final = "additional_chat_templates/tool_use.jinja"
PROCESSOR_TEMPLATE_FILE: Final = "chat_template.json"

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte of SentencePiece's byte fallback."""
_SENTENCEPIECE_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_SHORT_CHARS: Final = 4096
"""Longest text that is not worth the detour to the library's threads."""
_LONG_CHARS: Final = 4 * WINDOW_CHARS
"""Longest text whose record by the library is taken whole."""
_NORMALIZER_SHRINKS: Final = 4
"""A normalizer may write a character of four bytes as one of one byte."""
_SPECIAL_TOKEN_NAMES: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TextTokenizer:
    """The model's tokenizer and, if it has one, its chat template."""

    def __init__(self, tokenizer: Tokenizer, *, byte_level: bool, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes_of = _ByteVocabulary(tokenizer, self._special_ids) if byte_level else None
        self._harmony = HarmonyTokens.find(tokenizer.token_to_id)
        self._longest_token_bytes = _longest_token_bytes(tokenizer, byte_level=byte_level)

    @classmethod
    def from_directory(cls, directory: Path) -> TextTokenizer:
        """Read tokenizer.json, or tiktoken.model, with tokenizer_config.json and chat_template.jinja.

        Without either file, read a GGUF file. Raises ModelError naming the file.
        """
        has_json, has_tiktoken = ((directory / name).exists() for name in (TOKENIZER_FILE, TIKTOKEN_FILE))
        if not has_json and not has_tiktoken and (files := gguf_files(directory)):
            return cls._from_gguf(files[0])
        config = _read_optional_object(directory / TOKENIZER_CONFIG_FILE)
        special_tokens = _special_tokens(config, _read_optional_object(directory / SPECIAL_TOKENS_FILE))
        is_tiktoken = has_tiktoken and not has_json
        if is_tiktoken:
            tokenizer = read_tiktoken_tokenizer(directory / TIKTOKEN_FILE, config)
        else:
            tokenizer = _build(directory / TOKENIZER_FILE)
            _add_listed(tokenizer, config, special_tokens.values(), source=directory / TOKENIZER_CONFIG_FILE)
        return cls(
            tokenizer,
            byte_level=_is_byte_level(_decoder_of(tokenizer)),
            chat_template=_read_chat_template(directory, config, special_tokens, sorts_tools=is_tiktoken),
        )

    @classmethod
    def _from_gguf(cls, path: Path) -> TextTokenizer:
        found = read_gguf_tokenizer(path)
        text, template = found.chat_template, None
        if text is not None:
            template = ChatTemplate(text, special_tokens=found.special_tokens, source=str(path))
        is_byte_level = _is_byte_level(_decoder_of(found.tokenizer))
        return cls(found.tokenizer, byte_level=is_byte_level, chat_template=template)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens with a text; the model's vocabulary may be padded beyond them."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def difference_to(self, other: TextTokenizer) -> str:
        """Return a token that another tokenizer has another id for, in words; "" if all ids mean the same."""
        own, others = (each._tokenizer.get_vocab(with_added_tokens=True) for each in (self, other))
        token = min(
            (token for token in own.keys() | others.keys() if own.get(token) != others.get(token)), default=None
        )
        if token is None:
            return ""
        return f"token {token!r} is {others.get(token, 'absent')} there, and {own.get(token, 'absent')} here"

    @property
    def has_chat_template(self) -> bool:
        """Return whether conversations can be encoded."""
        return self._chat_template is not None

    @property
    def chat_template(self) -> str:
        """Return the text of the chat template; empty if there is none."""
        return "" if self._chat_template is None else self._chat_template.text

    @property
    def special_ids(self) -> dict[str, int]:
        """Return the ids of all special tokens, by text."""
        texts = ((self._tokenizer.id_to_token(token_id), token_id) for token_id in self._special_ids)
        return {text: token_id for text, token_id in texts if text}

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written so; None if there is none."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def encode(self, text: str, *, max_model_len: int | None = None) -> list[int]:
        """Return the token ids of plain text, with the model's special tokens.

        Raises InvalidRequest if the tokenizer cannot encode it, or if they leave no room in `max_model_len`; None
        allows any number.
        """
        return self._token_ids(text, with_special_tokens=True, max_model_len=max_model_len)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation with the assistant's turn opened after it.

        Messages have `role` and `content`, and optional fields that the template knows (`tool_calls` as in the OpenAI
        API, `tool_call_id`, `name`); the template shows `tools` to the model, and `options` are variables that it
        knows. Raises InvalidRequest if the model has no chat template, if its template refuses the messages, or as
        `encode` does.
        """
        if self._chat_template is None:
            raise InvalidRequest(
                "chat",
                f"this model has no chat template ({CHAT_TEMPLATE_FILE}, or chat_template in "
                f"{TOKENIZER_CONFIG_FILE}); send text or token ids",
            )
        text = self._chat_template.render(messages, tools=tools, options=options)
        return self._token_ids(text, with_special_tokens=False, max_model_len=max_model_len)

    def _token_ids(self, text: str, *, with_special_tokens: bool, max_model_len: int | None) -> list[int]:
        if max_model_len is not None and self._longest_token_bytes is not None:
            num_bytes = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
            longest = self._longest_token_bytes
            check_prompt_bytes(num_bytes, longest_token_bytes=longest, max_model_len=max_model_len)
        try:
            ids = self._ids(text, with_special_tokens=with_special_tokens, most=max_model_len)
        except Exception as error:  # the library has no narrower one, e.g. for a vocabulary without its unknown token
            raise InvalidRequest("prompt", f"the model's tokenizer cannot encode it: {error}") from error
        if max_model_len is not None:
            all_counted = len(text) <= _LONG_CHARS or len(ids) <= max_model_len
            check_prompt_length(len(ids), max_model_len=max_model_len, all_counted=all_counted)
        return ids

    def _ids(self, text: str, *, with_special_tokens: bool, most: int | None) -> list[int]:
        """Return all ids, or the first ones if there are more than `most`."""
        if len(text) <= _SHORT_CHARS:
            return list(self._tokenizer.encode(text, add_special_tokens=with_special_tokens).ids)
        ids = ids_by_windows(self._encode_part, text, most=most) if len(text) > _LONG_CHARS else None
        if ids is None:
            # Unlike `encode`, this lets other threads run meanwhile.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=with_special_tokens)
            return list(encoding.ids)
        if with_special_tokens:
            ids[:0], ids[len(ids) :] = self._special_around(text[:_SHORT_CHARS])
        return ids

    def _encode_part(self, text: str) -> Encoding:
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return encoding

    def _special_around(self, text: str) -> tuple[list[int], list[int]]:
        """Return the special tokens that stand before a text, and behind it."""
        encoding = self._tokenizer.encode(text)
        own = [index for index, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
        return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        if len(token_ids) <= _SHORT_CHARS:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        # Unlike `decode`, this lets other threads run meanwhile.
        return str(self._tokenizer.decode_batch([token_ids], skip_special_tokens=True)[0])

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return str(self._tokenizer.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special ones as they are written; none for an id beyond the vocabulary.

        Exact for byte-level tokenizers; for others the text of the token alone.
        """
        if self._bytes_of is not None and token_id not in self._special_ids:
            return self._bytes_of[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return (token or "").encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace(_SENTENCEPIECE_SPACE, " ").encode()

    def detokenizer(
        self, stop: Sequence[str] = (), prompt: Sequence[int] = (), shown: Collection[int] = ()
    ) -> IncrementalDetokenizer:
        """Return the detokenizer of one completion, which ends at any of the strings `stop`.

        If the prompt opens a message in the Harmony format, the completion is taken as messages of its channels. Else
        the special tokens `shown` are part of the text.
        """
        header = self._harmony.open_header(prompt) if self._harmony is not None else None
        if self._harmony is None or header is None:
            if not shown:
                return IncrementalDetokenizer(self._text(), stop=stop)
            marks = {token_id: self._tokenizer.id_to_token(token_id) or "" for token_id in shown}
            return IncrementalDetokenizer(MarkedText(marks, new_text=self._text), stop=stop)
        text = ChannelText(self._harmony, header=header, new_text=self._text, written=self.written)
        return IncrementalDetokenizer(text, stop=stop, take_reasoning=text.take_reasoning)

    def _text(self) -> ByteLevelText | WindowText:
        if self._bytes_of is not None:
            return ByteLevelText(self._bytes_of.__getitem__)
        return WindowText(self.decode, is_silent=self._is_silent)

    def written(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones as they are written."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _is_silent(self, token_id: int) -> bool:
        return token_id in self._special_ids or self._tokenizer.id_to_token(token_id) is None


class _ByteVocabulary(dict[int, bytes]):
    """Bytes of each token of a byte-level tokenizer, kept once they were needed; special tokens have none."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(special_ids, b""))
        self._tokenizer = tokenizer
        self._alphabet = byte_level_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        known = self[token_id] = self._bytes(self._tokenizer.id_to_token(token_id))
        return known

    def _bytes(self, token: str | None) -> bytes:
        if token is None:
            return b""
        values = [self._alphabet.get(character) for character in token]
        known = [value for value in values if value is not None]
        # A token with a character outside the alphabet was added as it is, not in the byte alphabet.
        return bytes(known) if len(known) == len(values) else token.encode()


def _longest_token_bytes(tokenizer: Tokenizer, *, byte_level: bool) -> int | None:
    """Return the most bytes of text that one token can stand for; None where there is no such bound.

    Byte-level and byte-fallback tokenizers lose no text: each byte is in some token. Others may turn a word of any
    length into one unknown token.
    """
    model = tokenizer.model
    if not byte_level and not (isinstance(model, BPE) and model.byte_fallback):
        return None
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    # In the byte-level alphabet a character is a byte.
    longest = max(map(len, vocabulary) if byte_level else (len(token.encode()) for token in vocabulary), default=1)
    longest = max([longest, *(len(content.encode()) for content in added)])
    return longest if tokenizer.normalizer is None else longest * _NORMALIZER_SHRINKS


_MISSING_TOKENIZER: Final = (
    "no such file; it is the model's fast tokenizer (vocabulary, merges, special tokens). Download it with the model, "
    "or write it from the model's other tokenizer files with transformers: "
    "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
)


def _build(path: Path) -> Tokenizer:
    """Return the tokenizer. Raises ModelError.

    The library reads the file: text and objects in Python would take more memory than the tokenizer.
    """
    build: Callable[[str], Tokenizer] = Tokenizer.from_file
    try:
        tokenizer = build(str(model_file(path, max_bytes=MAX_TOKENIZER_BYTES)))
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing narrower
        parse_json(_read_text(path, missing=_MISSING_TOKENIZER), path)
        raise ModelError(f"{path}: is no tokenizer that this version of `tokenizers` reads: {error}") from error
    # Some files carry the settings of a training run; a prompt is never cut or padded silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _add_listed(tokenizer: Tokenizer, config: Mapping[str, Any], named: Collection[str], *, source: Path) -> None:
    """Add tokens that tokenizer_config.json lists, and make `named` ones special, as transformers does.

    Tokens that would get another id stay text, as do named ones without an id. Raises ModelError.
    """
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    try:
        listed = {int(key): _added_token(entry) for key, entry in (config.get("added_tokens_decoder") or {}).items()}
        special = {*named, *(_added_token(entry).content for entry in (extra if isinstance(extra, list) else ()))}
        ids = {text: tokenizer.token_to_id(text) for text in special}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{source}: added_tokens_decoder and additional_special_tokens must list tokens") from error
    found = tokenizer.get_added_tokens_decoder()
    named_alone = {token_id: _added_token(text) for text, token_id in ids.items() if token_id is not None}
    added: list[AddedToken] = []
    next_id = tokenizer.get_vocab_size()
    for token_id, token in sorted({**named_alone, **tokenizer.get_added_tokens_decoder(), **listed}.items()):
        token.special = token.special or token.content in special
        known = tokenizer.token_to_id(token.content)
        if token_id == (next_id if known is None else known) and token != found.get(token_id):
            added.append(token)
            next_id += known is None
    tokenizer.add_tokens(added)


def _added_token(entry: Any) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, special=True)
    return AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in _TOKEN_FLAGS if flag in entry})


def _decoder_of(tokenizer: Tokenizer) -> Any:
    """Return the `decoder` of the tokenizer's tokenizer.json."""
    decoder = tokenizer.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _is_byte_level(decoder: Any) -> bool:
    """Return whether the `decoder` of a tokenizer.json is ByteLevel and nothing else."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders") or []
        return len(steps) == 1 and _is_byte_level(steps[0])
    return bool(decoder.get("type") == "ByteLevel")


def _read_chat_template(
    directory: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str], *, sorts_tools: bool
) -> ChatTemplate | None:
    path, beside = directory / CHAT_TEMPLATE_FILE, directory / TOOL_USE_FILE
    if path.exists():
        text: Any = _read_text(path, missing="no such file")
        tool_use: Any = _read_text(beside, missing="no such file") if beside.exists() else None
    else:
        path = directory / TOKENIZER_CONFIG_FILE
        text, tool_use = _named_templates(config.get("chat_template"))
    if text is None:  # of a model of text and other media, which may have it there alone
        path = directory / PROCESSOR_TEMPLATE_FILE
        text = _read_optional_object(path).get("chat_template")
    if text is None:
        return None
    if not isinstance(text, str) or not isinstance(tool_use, str | None):
        raise ModelError(f"{path}: chat_template must be text or a list of named templates")
    text = with_tool_use(text, tool_use)
    return ChatTemplate(text, special_tokens=special_tokens, source=str(path), sorts_tools=sorts_tools)


def _named_templates(value: Any) -> tuple[Any, Any]:
    """Return the template for conversations, and the one for those with tools where a model has a list of both."""
    if not isinstance(value, list):
        return value, None
    named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    return named.get("default"), named.get("tool_use")


def _special_tokens(config: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and so on, as text; tokenizer_config.json goes before special_tokens_map.json."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name) or extra.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _read_optional_object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_text(path: Path, *, missing: str) -> str:
    try:
        return read_model_file(path, max_bytes=MAX_TOKENIZER_BYTES).decode()
    except FileNotFoundError as error:
        raise ModelError(f"{path}: {missing}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
