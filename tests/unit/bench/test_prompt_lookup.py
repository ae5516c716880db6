"""llama.cpp's prompt lookup decoding, behind a played library: the tokens of plain decoding, in fewer calls."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.peers.driver import Options
from bench.peers.llama_cpp_peer import LlamaCppPeer

pytestmark = pytest.mark.unit

VOCABULARY = 50
PROMPT = [7, 8, 9, 10, 11, 3, 7, 8]


class PlayedLibrary:
    """llama.cpp's C API for one sequence. The next token depends on the last two; what is cached must be in order."""

    def __init__(self) -> None:
        self.cached: list[int] = []
        self.calls = 0
        self.rows: list[Any] = []
        self.__version__ = "0"

    def llama_log_callback(self, function: Any) -> Any:
        return function

    def llama_vocab_n_tokens(self, _vocabulary: Any) -> int:
        return VOCABULARY

    def llama_batch_init(self, size: int, _embeddings: int, _sequences: int) -> Any:
        return SimpleNamespace(
            n_tokens=0, token=[0] * size, pos=[0] * size, logits=[False] * size, n_seq_id=[0] * size,
            seq_id=[[0] for _ in range(size)],
        )  # fmt: skip

    def llama_memory_clear(self, _memory: Any, _data: bool) -> None:
        self.cached = []

    def llama_memory_seq_rm(self, _memory: Any, _sequence: int, begin: int, _end: int) -> None:
        assert 0 < begin < len(self.cached)
        del self.cached[begin:]

    def llama_decode(self, _context: Any, batch: Any) -> int:
        self.calls += 1
        self.rows = []
        for i in range(batch.n_tokens):
            assert batch.pos[i] == len(self.cached)
            self.cached.append(batch.token[i])
            row = np.zeros(VOCABULARY, dtype=np.float32)
            row[follower(self.cached)] = 1.0
            self.rows.append(row)
        return 0

    def llama_get_logits_ith(self, _context: Any, i: int) -> Any:
        return self.rows[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: SimpleNamespace()


def follower(tokens: list[int]) -> int:
    """Counts up, and begins again behind 11, now and then with another token."""
    return 7 if tokens[-1] == 3 else 3 if tokens[-1] == 11 else 12 if len(tokens) == 17 else min(tokens[-1] + 1, 11)


class PlayedLookup:
    """Proposes what followed the last token before; the last proposed one is wrong each time."""

    def __init__(self, *, num_pred_tokens: int) -> None:
        self._most = num_pred_tokens

    def __call__(self, input_ids: Any) -> Any:
        tokens = input_ids.tolist()
        at = tokens.index(tokens[-1]) + 1
        followed = tokens[at : at + self._most] if at < len(tokens) else []
        return np.array([*followed[:-1], *(49 for _ in followed[-1:])], dtype=np.intc)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> PlayedLibrary:
    played = PlayedLibrary()
    monkeypatch.setitem(sys.modules, "llama_cpp", played)
    speculative = SimpleNamespace(LlamaPromptLookupDecoding=PlayedLookup)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    return played


def peer(lookup_tokens: int) -> LlamaCppPeer:
    return LlamaCppPeer(
        Options("model.gguf", "f16", threads=1, max_seqs=1, max_context=64, cache_bytes=0, lookup_tokens=lookup_tokens)
    )


@pytest.mark.parametrize("max_new", [1, 2, 20])
def test_it_gives_the_tokens_of_plain_decoding_in_fewer_calls(library: PlayedLibrary, max_new: int) -> None:
    expected = peer(0).generate([PROMPT], max_new).token_ids
    plain_calls, library.calls = library.calls, 0
    assert peer(4).generate([PROMPT], max_new).token_ids == expected
    assert len(expected[0]) == max_new
    if max_new > 2:
        assert library.calls < 0.6 * plain_calls
