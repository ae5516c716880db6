"""Tokens to text, one at a time: the same text as all at once, and never half a character."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer

from hetero_gateway.engine.text.byte_level import byte_level_alphabet
from hetero_gateway.engine.text.detokenizer import IncrementalDetokenizer
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from tests.support.examples import examples
from tests.unit.engine.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

pytestmark = pytest.mark.unit

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
EMOJI = "🙂"


def text_tokenizer(tokenizer: Tokenizer) -> TextTokenizer:
    return TextTokenizer(tokenizer, byte_level=tokenizer is BYTE_LEVEL, chat_template=None)


def deltas(detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push([each]) for each in token_ids), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """A token a byte, whatever merges there are."""
    if tokenizer is BYTE_FALLBACK:
        names = [f"<0x{byte:02X}>" for byte in data]
    else:
        alphabet = {value: key for key, value in byte_level_alphabet().items()}
        names = [alphabet[byte] for byte in data]
    return [token_id(tokenizer, name) for name in names]


def token_id(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_to_id(name)
    assert found is not None
    return int(found)


both = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])


@both
def test_character_is_shown_once_its_last_byte_is_there(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, EMOJI.encode())
    assert deltas(text_tokenizer(tokenizer).detokenizer(), ids) == ["", "", "", EMOJI, ""]


@both
def test_incomplete_character_at_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    ids = [token_id(tokenizer, "t"), *byte_ids(tokenizer, EMOJI.encode()[:3])]
    shown = deltas(text_tokenizer(tokenizer).detokenizer(), ids)
    assert shown[0] == "t"
    assert set(shown[-1]) == {"\N{REPLACEMENT CHARACTER}"}
    assert "".join(shown) == text_tokenizer(tokenizer).decode(ids)


@both
def test_endless_bytes_that_are_no_text_are_shown_as_they_come(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"\x80" * 300)
    detokenizer = text_tokenizer(tokenizer).detokenizer()
    shown = [detokenizer.push([each]) for each in ids]
    assert len("".join(shown)) >= 300 - 4
    assert "".join([*shown, detokenizer.finish()]) == text_tokenizer(tokenizer).decode(ids)


@both
def test_special_tokens_and_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    eos = token_id(tokenizer, "</s>")
    text = tokenizer.encode("the dog", add_special_tokens=False).ids
    ids = [eos, text[0], 100_000, *text[1:], eos]
    assert "".join(deltas(text_tokenizer(tokenizer).detokenizer(), ids)) == tokenizer.decode(text)


def test_wrong_bytes_after_a_byte_fallback_character_leave_it_as_shown() -> None:
    ids = [*byte_ids(BYTE_FALLBACK, "é".encode() + EMOJI.encode()[:2]), token_id(BYTE_FALLBACK, "t")]
    shown = deltas(text_tokenizer(BYTE_FALLBACK).detokenizer(), ids)
    assert shown == ["", "é", "", "", "\N{REPLACEMENT CHARACTER}" * 2 + "t", ""]


def test_leading_space_of_a_word_survives_skipped_tokens() -> None:
    ids = [token_id(BYTE_FALLBACK, name) for name in ("▁the", "</s>", "▁dog")]
    shown = deltas(text_tokenizer(BYTE_FALLBACK).detokenizer(), ids)
    assert shown == ["the", "", " dog", ""]


@settings(max_examples=examples(500))
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 2), max_size=40))
def test_deltas_of_any_byte_level_tokens_make_the_full_text(ids: list[int]) -> None:
    tokenizer = text_tokenizer(BYTE_LEVEL)
    assert "".join(deltas(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids)


@given(data=st.data(), tokenizer=st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]), stop=st.booleans())
def test_how_tokens_are_cut_into_calls_makes_no_difference(
    data: st.DataObject, tokenizer: Tokenizer, stop: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=30))
    detokenizer = text_tokenizer(tokenizer).detokenizer(["s", "你好"] if stop else ())
    pieces, rest = [], ids
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        pieces.append(detokenizer.push(rest[:length]))
        rest = rest[length:]
    expected = "".join(deltas(text_tokenizer(tokenizer).detokenizer(["s", "你好"] if stop else ()), ids))
    assert "".join([*pieces, detokenizer.finish()]) == expected


@given(text=st.text(max_size=30))
def test_deltas_of_any_encoded_text_are_that_text(text: str) -> None:
    tokenizer = text_tokenizer(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert "".join(deltas(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids)


readable = st.text(st.characters(exclude_characters="\N{REPLACEMENT CHARACTER}", codec="utf-8"), min_size=1, max_size=3)


@given(pieces=st.lists(st.one_of(readable, st.sampled_from([" the", " dog", "  ", "stop"]))))
def test_deltas_of_byte_fallback_tokens_of_valid_text_make_the_full_text(pieces: list[str]) -> None:
    tokenizer = text_tokenizer(BYTE_FALLBACK)
    ids = BYTE_FALLBACK.encode("".join(pieces), add_special_tokens=False).ids
    assert "".join(deltas(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40))
def test_every_delta_is_valid_utf8(ids: list[int]) -> None:
    for delta in deltas(text_tokenizer(BYTE_LEVEL).detokenizer(), ids):
        delta.encode("utf-8")


def test_stop_string_across_tokens_cuts_the_text() -> None:
    tokenizer = text_tokenizer(BYTE_LEVEL)
    detokenizer = tokenizer.detokenizer(["世界"])
    ids = byte_ids(BYTE_LEVEL, "你好世界x".encode())
    assert "".join(deltas(detokenizer, ids)) == "你好"
    assert detokenizer.matched_stop == "世界"


def test_stop_string_completed_by_the_replacement_of_a_half_character_is_met_at_the_end() -> None:
    detokenizer = text_tokenizer(BYTE_LEVEL).detokenizer(["a\N{REPLACEMENT CHARACTER}"])
    assert "".join(deltas(detokenizer, byte_ids(BYTE_LEVEL, b"xa\xf0"))) == "x"
    assert detokenizer.matched_stop == "a\N{REPLACEMENT CHARACTER}"
