"""Byte-level BPE of model families: how each splits text into words before it merges bytes.

What Hugging Face's tokenizer.json of those models says about splitting and normalising stands here, by the name that
GGUF files have for it (`tokenizer.ggml.pre`). llama.cpp's own expressions (llama-vocab.cpp) are those, put so that its
own matcher takes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_LLAMA3: Final = rf"{_WORDS}\p{{N}}{{1,3}}|{_SIGNS}{_ENDS}"
_QWEN2: Final = rf"{_WORDS}\p{{N}}|{_SIGNS}{_ENDS}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS}"
)
_CAPITALS: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_SMALL: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(before: str, *, but: str = "", contractions: str = "", numbers: str, signs: str) -> str:
    """Return the expression of tokenizers that split words where capitals begin; `but`: characters left out."""
    capitals, small = f"[{_CAPITALS}{but}]", f"[{_SMALL}{but}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{capitals}*{small}+{contractions}|{start}{capitals}+{small}*{contractions}"
    return rf"{before}{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{signs}|{_ENDS}"


_GPT4O: Final = _cased("", contractions=f"{_CONTRACTIONS}?", numbers=r"\p{N}{1,3}", signs=r"[\r\n/]*")
_TEKKEN: Final = _cased("", numbers=r"\p{N}", signs=r"[\r\n/]*")
_KIMI: Final = _cased(
    r"[\p{Han}]+|", but=r"&&[^\p{Han}]", contractions=f"{_CONTRACTIONS}?", numbers=r"\p{N}{1,3}", signs=r"[\r\n]*"
)
_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _ENDS,
)
_EAST_ASIAN: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_CASED: Final = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
"""Code points that DeepSeek LLM's expression lists as letters: most that have a case."""
_CODE_POINT: Final = r"\\x{\1}"
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    rf"\s?[{re.sub('([0-9a-f]+) ?', _CODE_POINT, _CASED)}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
_FALCON: Final = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class Splitting:
    """How text is split before merges, each match of an expression by itself, one expression after another."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a word that is a token is that token, whatever the merges say."""
    composes: bool = False
    """Whether text is put into Unicode's composed form (NFC) first."""
    adds_begin: bool = False
    """Whether the first token is put before a prompt where the file does not say."""


SPLITTINGS: Final[Mapping[str, Splitting]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4"), Splitting((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), Splitting((r"\p{N}", _GPT2))),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), Splitting((_LLAMA3,), ignore_merges=True, adds_begin=True)),
    "dbrx": Splitting((_LLAMA3,)),
    "smaug-bpe": Splitting((_LLAMA3,)),
    "glm4": Splitting((_LLAMA3,), ignore_merges=True),
    "chatglm-bpe": Splitting((_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Splitting((_QWEN2,), composes=True)),
    "qwen35": Splitting((_QWEN35,)),
    "gpt-4o": Splitting((_GPT4O,)),
    "llama4": Splitting((_GPT4O,)),
    "minimax-m2": Splitting((_GPT4O,)),
    "tekken": Splitting((_TEKKEN,), ignore_merges=True),
    "kimi-k2": Splitting((_KIMI,)),
    "deepseek-v3": Splitting(_DEEPSEEK3),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "deepseek-llm": Splitting(_DEEPSEEK_LLM),
    "falcon": Splitting(_FALCON),
}
"""By `tokenizer.ggml.pre`."""


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each character that byte-level BPE writes.

    Printable Latin-1 characters stand for themselves, other bytes for the characters from U+0100 on, in order
    (GPT-2's `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def byte_level_tokenizer(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], splitting: Splitting
) -> Tokenizer:
    """Return a tokenizer that splits text, then merges the bytes of each word.

    Tokens and merges are in the byte-level alphabet, merges in the order of their priority. Raises the library's own
    errors for merges whose parts or result are no tokens.
    """
    model = models.BPE(vocab=dict(vocabulary), merges=list(merges), ignore_merges=splitting.ignore_merges)
    tokenizer = Tokenizer(model)
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(text), "isolated") for text in splitting.expressions]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
