"""The tokenizer and chat template that a GGUF file holds in its metadata.

A GGUF file has the vocabulary, the merges or scores, and a name (`tokenizer.ggml.pre`) of how text is split before
(`byte_level`). A name that is not known is refused: put the model's tokenizer.json beside the file then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgufHeader, Scalar
from hetero_gateway.engine.text.byte_level import SPLITTINGS, byte_level_tokenizer
from hetero_gateway.engine.text.chat_template import with_tool_use

_FIELD: Final = "tokenizer.ggml."
_TOKENS: Final = f"{_FIELD}tokens"
_TYPES: Final = f"{_FIELD}token_type"
_SCORES: Final = f"{_FIELD}scores"
_MERGES: Final = f"{_FIELD}merges"
_CHAT_TEMPLATE: Final = "tokenizer.chat_template"
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
_SPECIAL_TOKENS: Final[Mapping[str, str]] = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id", "sep_token": "seperator_token_id", "mask_token": "mask_token_id",
}  # fmt: skip
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"


class GgufTokenizer(NamedTuple):
    """Tokenizer and chat template of a file."""

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]
    """bos_token, eos_token and so on, as templates know them."""


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Read the tokenizer of a GGUF file; of a split one, its first part. Raises ModelError naming file and field."""
    header = GgufHeader.read(path, lists=(_TOKENS, _TYPES, _SCORES, _MERGES))
    vocabulary = _Vocabulary(header)
    kinds = {"gpt2": vocabulary.byte_level, "llama": vocabulary.sentencepiece, "gemma4": vocabulary.merged_characters}
    kind = header.metadata.get(f"{_FIELD}model")
    if kind not in kinds:
        raise vocabulary.error("model", f"{kind!r} is not supported; supported: {', '.join(kinds)}")
    try:
        tokenizer = kinds[str(kind)]()
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: {_FIELD}*: is no tokenizer that `tokenizers` takes: {error}") from error
    template, tool_use = (header.metadata.get(name) for name in (_CHAT_TEMPLATE, f"{_CHAT_TEMPLATE}.tool_use"))
    if not isinstance(template, str | None) or not isinstance(tool_use, str | None):
        raise ModelError(f"{path}: {_CHAT_TEMPLATE} must be text")
    template = None if template is None else with_tool_use(template, tool_use)
    return GgufTokenizer(tokenizer, template, vocabulary.special_tokens)


class _Vocabulary:
    """Tokens of a file, and what makes a tokenizer of them."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._tokens = self._list("tokens", str)
        if not self._tokens:
            raise self.error("tokens", "is missing; put the model's tokenizer.json beside the file")
        self._types = self._list("token_type", int) or (1,) * len(self._tokens)
        if len(self._types) != len(self._tokens):
            raise self.error("token_type", f"lists {len(self._types)} tokens of {len(self._tokens)}")

    def error(self, name: str, problem: str) -> ModelError:
        """Return an error that names file and field."""
        return ModelError(f"{self._header.path}: {_FIELD}{name} {problem}")

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Tokens that templates know by name."""
        ids = {name: self._token_id(field) for name, field in _SPECIAL_TOKENS.items()}
        return {name: self._tokens[number] for name, number in ids.items() if number is not None}

    def byte_level(self) -> Tokenizer:
        """Return a tokenizer that merges bytes. Raises ModelError."""
        name = self._header.metadata.get(f"{_FIELD}pre")
        splitting = SPLITTINGS.get(str(name))
        if splitting is None:
            known = ", ".join(SPLITTINGS)
            raise self.error("pre", f"{name!r} is not supported; put the model's tokenizer.json beside it, or: {known}")
        merges = [self._merge(text) for text in self._list("merges", str)]
        tokenizer = byte_level_tokenizer(self._ids(), merges, splitting)
        return self._finished(tokenizer, adds_begin=splitting.adds_begin)

    def sentencepiece(self) -> Tokenizer:
        """Return a tokenizer that merges characters, and knows bytes by name. Raises ModelError."""
        scores = self._list("scores", float)
        if len(scores) != len(self._tokens):
            raise self.error("scores", f"lists {len(scores)} tokens of {len(self._tokens)}")
        has_prefix = bool(self._header.metadata.get(f"{_FIELD}add_space_prefix", True))
        return self._of_characters(self._merges(scores), has_prefix=has_prefix)

    def merged_characters(self) -> Tokenizer:
        """Return the same kind of tokenizer, whose merges are listed. Raises ModelError."""
        return self._of_characters([self._merge(text) for text in self._list("merges", str)], has_prefix=False)

    def _of_characters(self, merges: list[tuple[str, str]], *, has_prefix: bool) -> Tokenizer:
        """`has_prefix`: a space is put before text."""
        unknown = self.special_tokens.get("unk_token")
        tokenizer = Tokenizer(
            models.BPE(vocab=self._ids(), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        spaces = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
        steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
        return self._finished(tokenizer, adds_begin=True)

    def _finished(self, tokenizer: Tokenizer, *, adds_begin: bool) -> Tokenizer:
        """Add tokens that are never split, and those that stand around a prompt."""
        tokenizer.add_tokens([
            AddedToken(text, special=kind == _CONTROL, normalized=False)
            for text, kind in zip(self._tokens, self._types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and text
        ])  # fmt: skip
        around = {"bos": adds_begin, "eos": False}
        named: list[tuple[str, int]] = []
        pattern = ["$A"]
        for kind, default in around.items():
            number = self._token_id(f"{kind}_token_id")
            if number is None or not self._header.metadata.get(f"{_FIELD}add_{kind}_token", default):
                continue
            named.append((self._tokens[number], number))
            pattern.insert(0 if kind == "bos" else len(pattern), self._tokens[number])
        if named:
            tokenizer.post_processor = TemplateProcessing(single=pattern, special_tokens=named)
        return tokenizer

    def _ids(self) -> dict[str, int]:
        """Return the id of each token that stands for something."""
        listed = zip(self._tokens, self._types, strict=True)
        return {text: number for number, (text, kind) in enumerate(listed) if kind != _UNUSED}

    def _merge(self, text: str) -> tuple[str, str]:
        # A piece may begin with the character that separates them.
        first, _, second = text[1:].partition(" ")
        if not text or not second:
            raise self.error("merges", f"has an entry that is no pair: {text[:40]!r}")
        return text[0] + first, second

    def _merges(self, scores: Sequence[float]) -> list[tuple[str, str]]:
        """Return the pairs that make up each token, those of the highest score first."""
        ids = self._ids()
        found = [
            (scores[number], text[:at], text[at:])
            for text, number in ids.items()
            for at in range(1, len(text))
            if text[:at] in ids and text[at:] in ids
        ]
        found.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
        return [(first, second) for _, first, second in found]

    def _list(self, name: str, kind: type) -> Sequence[Any]:
        found: Sequence[Scalar] = self._header.lists.get(f"{_FIELD}{name}", ())
        if found and type(found[0]) is not kind:  # all of a list are of one type
            raise self.error(name, f"must list {kind.__name__}, not {type(found[0]).__name__}")
        return found

    def _token_id(self, name: str) -> int | None:
        number = self._header.metadata.get(f"{_FIELD}{name}")
        if number is None:
            return None
        if type(number) is not int or not 0 <= number < len(self._tokens):
            raise self.error(name, f"must be one of {len(self._tokens)} tokens, not {number!r}")
        return number
