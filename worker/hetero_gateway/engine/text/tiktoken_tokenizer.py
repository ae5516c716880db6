"""The tokenizer of a model that is published with `tiktoken.model` and no tokenizer.json: Kimi-K2.

Each line of the file is a token: its bytes in base64, and its rank, which is its id. tiktoken merges the two
neighbours whose bytes together are the token of the lowest rank. So every pair of tokens that makes up a token is a
merge here, in the order of ranks, and a word that is a token needs none. Special tokens have the ids behind, with the
texts of `added_tokens_decoder` in tokenizer_config.json. How text is split into words is Python code in the model's
repository, which is never run: it is known here by the name of its class.
"""

from __future__ import annotations

import dataclasses
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from hetero_api.errors import ModelError
from hetero_api.model_directory import read_model_file
from hetero_gateway.engine.text.byte_level import SPLITTINGS, Splitting, byte_level_alphabet, byte_level_tokenizer

TIKTOKEN_FILE: Final = "tiktoken.model"

_CONFIG_FILE: Final = "tokenizer_config.json"
_SPLITTINGS: Final[Mapping[str, Splitting]] = {
    "TikTokenTokenizer": dataclasses.replace(SPLITTINGS["kimi-k2"], ignore_merges=True)
}
"""By `tokenizer_class` in tokenizer_config.json."""
_NUM_SPECIAL: Final = 258
"""Special tokens that Kimi's tokenizer has, named or not."""
_MAX_BYTES: Final = 8 << 20
"""Kimi-K2's file has 2.8 MB."""
_MAX_TOKEN_BYTES: Final = 256
"""Kimi-K2's longest token has 128."""


def read_tiktoken_tokenizer(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a tiktoken.model and the tokenizer_config.json beside it.

    Raises ModelError naming file and field.
    """
    kind = config.get("tokenizer_class")
    splitting = _SPLITTINGS.get(str(kind))
    if splitting is None:
        raise ModelError(
            f"{path}: tokenizer_class in {_CONFIG_FILE} is {kind!r:.80}, whose way to split text is not known; put "
            f"a tokenizer.json of the model beside it, or: {', '.join(_SPLITTINGS)}"
        )
    ranks = _read_ranks(path)
    special = _special_tokens(config.get("added_tokens_decoder", {}), first=len(ranks), path=path)
    characters = {byte: character for character, byte in byte_level_alphabet().items()}
    texts = {token: token.decode("latin-1").translate(characters) for token in ranks}
    vocabulary = {texts[token]: rank for token, rank in ranks.items()}
    for number, token in enumerate(special, len(ranks)):
        if vocabulary.setdefault(token.content, number) != number:
            other = vocabulary[token.content]
            raise ModelError(f"{path} and {_CONFIG_FILE}: tokens {other} and {number} are both {token.content!r:.80}")
    merges = [
        (texts[token[:at]], texts[token[at:]])
        for token in ranks
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    try:
        tokenizer = byte_level_tokenizer(vocabulary, merges, splitting)
        tokenizer.add_tokens(special)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} and {_CONFIG_FILE} are no tokenizer that `tokenizers` takes: {error}") from error
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token, in the order of ranks."""
    ranks: dict[bytes, int] = {}
    try:
        data = read_model_file(path, max_bytes=_MAX_BYTES)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = b64decode(text, validate=True)
            ranks[token] = int(rank)
        except ValueError as error:
            raise ModelError(f"{path}: line {number} is no token in base64 and its rank: {line[:40]!r}") from error
        if not 0 < len(token) <= _MAX_TOKEN_BYTES:
            raise ModelError(f"{path}: line {number} has a token of {len(token)} bytes; 1 to {_MAX_TOKEN_BYTES} may be")
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    if [rank for _, rank in ordered] != list(range(len(ordered))):
        raise ModelError(f"{path}: must have each rank from 0 on once, and each token once; is the download complete?")
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise ModelError(f"{path}: has no token for byte {missing[0]}; is the download complete?")
    return dict(ordered)


def _special_tokens(listed: Any, *, first: int, path: Path) -> list[AddedToken]:
    """Return the tokens with the ids from `first` on."""
    where = path.parent / _CONFIG_FILE
    tokens = [AddedToken(f"<|reserved_token_{first + index}|>", special=True) for index in range(_NUM_SPECIAL)]
    if not isinstance(listed, dict):
        raise ModelError(f"{where}: added_tokens_decoder must list tokens by their ids")
    for key, entry in listed.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        # JSON may hold halves of surrogate pairs, which are no text.
        if not isinstance(content, str) or not content or content.encode(errors="replace").decode() != content:
            raise ModelError(f"{where}: added_tokens_decoder[{key[:20]!r}] has no content that is text")
        if not key.isdecimal() or len(key) > len(str(first)) + 1 or not 0 <= int(key) - first < _NUM_SPECIAL:
            ids = f"{first} to {first + _NUM_SPECIAL - 1}, behind the {first} of {path.name}"
            raise ModelError(f"{where}: added_tokens_decoder[{key[:20]!r}] must have an id from {ids}")
        tokens[int(key) - first] = AddedToken(content, special=bool(entry.get("special")), normalized=False)
    return tokens
