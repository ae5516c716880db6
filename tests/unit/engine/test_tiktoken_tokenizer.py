"""Tokenizers of tiktoken.model files: tokens and text of tiktoken itself; what is damaged or unknown is refused."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.errors import ModelError
from hetero_gateway.engine.text.byte_level import byte_level_alphabet
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from tests.support.llama_cpp_files import expected_tokens, llama_cpp_models
from tests.support.mutations import mutated_bytes, mutated_json, survivors

pytestmark = pytest.mark.unit

KIMI: Final = "|".join((
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip
"""As published with Kimi-K2; independent of how the product writes it."""
CHARACTERS: Final = st.one_of(st.sampled_from("aAé你的 \n\t'1一,sS<|"), st.characters(codec="utf-8"))
NUM_SPECIAL: Final = 258
NAMES: Final = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 10: "<think>"}
TEMPLATE: Final = "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def _ranks(smollm2: Path) -> dict[bytes, int]:
    """Return the bytes, then what SmolLM2's merges make, in their order: a vocabulary that was trained."""
    merges = json.loads((smollm2 / "tokenizer.json").read_text())["model"]["merges"]
    alphabet = byte_level_alphabet()
    tokens = [bytes((byte,)) for byte in range(256)]
    for merge in merges:
        tokens.append(bytes(alphabet[character] for character in "".join(merge).replace(" ", "")))
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def _config(num_tokens: int, **changes: Any) -> dict[str, Any]:
    special = {
        str(num_tokens + index): {"content": text, "special": text != "<think>"} for index, text in NAMES.items()
    }
    return {
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "added_tokens_decoder": special, "chat_template": TEMPLATE,
    } | changes  # fmt: skip


def _lines(ranks: Mapping[bytes, int]) -> bytes:
    return b"".join(b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def _write(folder: Path, ranks: Mapping[bytes, int], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_bytes(_lines(ranks))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(len(ranks), **changes)))
    return folder


def _reference(ranks: Mapping[bytes, int]) -> tiktoken.Encoding:
    first = len(ranks)
    names = {index: NAMES.get(index, f"<|reserved_token_{first + index}|>") for index in range(NUM_SPECIAL)}
    special = {text: first + index for index, text in names.items()}
    return tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=dict(ranks), special_tokens=special)


@pytest.fixture(scope="module")
def pair(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextTokenizer, tiktoken.Encoding]:
    ranks = _ranks(smollm2)
    folder = _write(tmp_path_factory.mktemp("kimi"), ranks)
    return TextTokenizer.from_directory(folder), _reference(ranks)


def test_texts_of_all_scripts_have_the_tokens_and_text_of_tiktoken(
    pair: tuple[TextTokenizer, tiktoken.Encoding],
) -> None:
    ours, reference = pair
    texts = [text for text, _ in expected_tokens(llama_cpp_models(), "llama-bpe")]
    texts += ["[BOS]你好，world<|im_end|>", "我们的HTTPServer's 12345 items", "a" * 300, " \r\n\t x" * 20]
    assert len(texts) > 30
    for text in texts:
        ids = reference.encode(text, allowed_special="all")
        assert ours.encode(text) == ids, text
        shown = [token_id for token_id in ids if token_id not in ours.special_ids.values()]
        assert ours.decode(ids) == reference.decode(shown), text


@given(st.text(st.one_of(st.sampled_from("aAé你的 \n\t'1一,sS<|"), st.characters(codec="utf-8")), max_size=60))
def test_any_text_has_the_tokens_of_tiktoken(pair: tuple[TextTokenizer, tiktoken.Encoding], text: str) -> None:
    ours, reference = pair
    assert ours.encode(text) == reference.encode(text, allowed_special="all")


@pytest.mark.parametrize("seed", range(8))
def test_vocabularies_that_were_not_trained_have_the_tokens_of_tiktoken(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    tokens = {bytes((byte,)): None for byte in range(256)}
    while len(tokens) < 400:
        first, second = random_.choices([token for token in tokens if not token.strip(b"abc")], k=2)
        if len(first + second) <= 8:
            tokens[first + second] = None
    ranks = {token: rank for rank, token in enumerate(tokens)}
    ours, reference = TextTokenizer.from_directory(_write(tmp_path, ranks)), _reference(ranks)
    words = [token.decode() for token in tokens if len(token) > 1]
    for text in (*words, *("".join(random_.choices("aabbc", k=random_.randrange(1, 24))) for _ in range(200))):
        assert ours.encode(text) == reference.encode(text), text


def test_special_tokens_have_the_ids_behind_and_those_without_a_name_are_reserved(
    pair: tuple[TextTokenizer, tiktoken.Encoding],
) -> None:
    ours, reference = pair
    first = reference.n_vocab - NUM_SPECIAL
    assert ours.vocab_size == reference.n_vocab
    assert ours.special_ids["[EOS]"] == first + 1
    assert ours.special_ids[f"<|reserved_token_{first + 5}|>"] == first + 5
    assert "<think>" not in ours.special_ids
    assert ours.encode("<think>") == [first + 10]
    assert ours.decode([first, *ours.encode("hi<think>"), first + 2]) == "hi<think>"


def test_a_chat_shows_the_fields_of_tools_in_alphabetical_order(pair: tuple[TextTokenizer, tiktoken.Encoding]) -> None:
    ours, reference = pair
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}]
    ids = ours.encode_chat([{"role": "user", "content": "hi"}], tools=tools)
    assert reference.decode(ids) == (
        '[BOS][{"function": {"description": "d", "name": "f"}, "type": "function"}]hi<|im_end|>'
    )


BYTES: Final = {bytes((byte,)): byte for byte in range(256)}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", r"tiktoken\.model: has no token for byte 0"),
        (_lines(BYTES) + b"YWI=\n", r"line 257 is no token in base64 and its rank"),
        (_lines(BYTES) + b"YW!= 256\n", r"line 257 is no token in base64 and its rank"),
        (_lines(BYTES) + b"YWI= x\n", r"line 257 is no token in base64 and its rank"),
        (_lines(BYTES) + b"YWI= 257\n", r"must have each rank from 0 on once"),
        (_lines(BYTES) + b"YQ== 256\n", r"must have each rank from 0 on once"),
        (_lines(BYTES) + b64encode(b"a" * 257) + b" 256\n", r"line 257 has a token of 257 bytes"),
        (_lines(BYTES) + b64encode(b"[EOS]") + b" 256\n", r"_config\.json: tokens 256 and 258 are both"),
    ],
)
def test_a_damaged_file_is_refused_by_line(tmp_path: Path, lines: bytes, message: str) -> None:
    _write(tmp_path, BYTES if lines.count(b"\n") < 257 or b"W0VPU10" not in lines else BYTES | {b"[EOS]": 256})
    (tmp_path / "tiktoken.model").write_bytes(lines)
    with pytest.raises(ModelError, match=message):
        TextTokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, r"tokenizer_class in tokenizer_config\.json is 'QWenTokenizer'"),
        ({"tokenizer_class": None}, r"tokenizer_class in tokenizer_config\.json is None"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder must list tokens by their ids"),
        ({"added_tokens_decoder": {"256": {}}}, r"added_tokens_decoder\['256'\] has no content that is text"),
        ({"added_tokens_decoder": {"255": {"content": "x"}}}, r"\['255'\] must have an id from 256 to 513"),
        ({"added_tokens_decoder": {"514": {"content": "x"}}}, r"\['514'\] must have an id from 256 to 513"),
        ({"added_tokens_decoder": {"256": {"content": "x"}, "257": {"content": "x"}}}, "tokens 120 and 256 are both"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TextTokenizer.from_directory(_write(tmp_path, BYTES, **changes))


def test_a_tokenizer_json_beside_it_counts(smollm2: Path, tmp_path: Path) -> None:
    _write(tmp_path, BYTES)
    (tmp_path / "tokenizer.json").write_bytes((smollm2 / "tokenizer.json").read_bytes())
    assert TextTokenizer.from_directory(tmp_path).vocab_size > 40_000


@pytest.mark.parametrize("damaged", ["tiktoken.model", "tokenizer_config.json"])
def test_damaged_files(tmp_path: Path, damaged: str) -> None:
    ranks = BYTES | {b"ab": 256, b"abc": 257}
    path = _write(tmp_path, ranks) / damaged
    whole, config = path.read_bytes(), _config(len(ranks))

    def mutate(random_: random.Random) -> str:
        is_config = damaged == "tokenizer_config.json"
        path.write_bytes(mutated_json(config, random_) if is_config else mutated_bytes(whole, random_))
        return damaged

    def read() -> None:
        tokenizer = TextTokenizer.from_directory(tmp_path)
        tokenizer.decode(tokenizer.encode("abcd 你"))
        assert tokenizer.vocab_size < 1000

    assert survivors(read, mutate, seeds=range(4), count=250) > 0
