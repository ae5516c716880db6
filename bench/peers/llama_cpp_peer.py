"""Peer: llama.cpp through llama-cpp-python's C API, since its Python class has no batches.

Continuous batching as llama.cpp's own server does it: prompts in batches of at most 2,048 tokens, then one token of
every sequence a call. The likeliest token is found with numpy. `dtype` is the GGUF's type and only told.

With `--lookup-tokens` a single prompt is continued by prompt lookup decoding: llama-cpp-python's
`LlamaPromptLookupDecoding` proposes, and one call computes all that it proposed. It knows one sequence only, so several
prompts are served without.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from bench.peers.driver import Generated, Options, serve

BATCH_TOKENS = 2048
KERNEL_TOKENS = 512
"""llama.cpp's defaults for both."""


@dataclass(frozen=True)
class Entry:
    """One token of a batch."""

    token: int
    position: int
    sequence: int
    wants_logits: bool


class LlamaCppPeer:
    """Loads a GGUF file."""

    def __init__(self, options: Options) -> None:
        self._llama: Any = import_module("llama_cpp")
        self._numpy: Any = import_module("numpy")
        self._dtype = options.dtype
        llama = self._llama
        llama.llama_backend_init()
        self._silence = llama.llama_log_callback(lambda level, text, data: None)  # noqa: ARG005 - kept: C calls it
        llama.llama_log_set(self._silence, ctypes.c_void_p(0))
        of_model = llama.llama_model_default_params()
        of_model.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(options.model.encode(), of_model)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {options.model}")
        of_context = llama.llama_context_default_params()
        of_context.n_ctx = options.max_context
        of_context.n_seq_max = options.max_seqs
        of_context.kv_unified = True
        of_context.n_batch, of_context.n_ubatch = BATCH_TOKENS, KERNEL_TOKENS
        of_context.n_threads = of_context.n_threads_batch = options.threads
        self._context = llama.llama_init_from_model(self._model, of_context)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no context of {options.max_context} tokens for {options.model}")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._lookup: Any = None
        if options.lookup_tokens:
            speculative: Any = import_module("llama_cpp.llama_speculative")
            self._lookup = speculative.LlamaPromptLookupDecoding(num_pred_tokens=options.lookup_tokens)

    def facts(self) -> dict[str, str]:
        system = self._llama.llama_print_system_info().decode()
        return {"arithmetic": _arithmetic(self._dtype), "llama-cpp-python": self._llama.__version__, "system": system}

    def generate(self, prompts: list[list[int]], max_new: int) -> Generated:
        began_s = time.perf_counter()
        self._forget()
        last: dict[int, int] = {}
        entries = [
            Entry(token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for start in range(0, len(entries), BATCH_TOKENS):
            last |= self._likeliest(entries[start : start + BATCH_TOKENS])
        first_token_s = time.perf_counter() - began_s
        output = [[last[sequence]] for sequence in range(len(prompts))]
        if self._lookup is not None and len(prompts) == 1:
            self._continue_by_lookup(prompts[0], output[0], max_new)
            return Generated(output, first_token_s)
        for step in range(max_new - 1):
            last = self._likeliest(
                [
                    Entry(output[sequence][-1], len(prompt) + step, sequence, wants_logits=True)
                    for sequence, prompt in enumerate(prompts)
                ]
            )
            for sequence, tokens in enumerate(output):
                tokens.append(last[sequence])
        return Generated(output, first_token_s)

    def _continue_by_lookup(self, prompt: list[int], output: list[int], max_new: int) -> None:
        """Append tokens until there are `max_new`: the likeliest ones, as without proposals."""
        numpy, llama = self._numpy, self._llama
        memory = llama.llama_get_memory(self._context)
        while len(output) < max_new:
            known = numpy.array([*prompt, *output], dtype=numpy.intc)
            proposed = [int(token) for token in self._lookup(known)][: max_new - len(output) - 1]
            entries = [
                Entry(token, position, 0, wants_logits=True)
                for position, token in enumerate([output[-1], *proposed], len(known) - 1)
            ]
            drawn = [int(logits.argmax()) for _, logits in self._decode(entries)]
            right = next((i for i, token in enumerate(proposed) if token != drawn[i]), len(proposed))
            output += drawn[: right + 1]
            if right < len(proposed):
                llama.llama_memory_seq_rm(memory, 0, len(prompt) + len(output) - 1, -1)

    def score(self, windows: list[list[int]]) -> list[float]:
        """Sum of -ln p of each window; a window may have 2,048 tokens."""
        return [self._score(window) for window in windows]

    def _score(self, window: list[int]) -> float:
        numpy, total = self._numpy, 0.0
        self._forget()
        entries = [Entry(token, position, 0, wants_logits=True) for position, token in enumerate(window)]
        for (entry, logits), target in zip(self._decode(entries), window[1:], strict=False):
            row = logits.astype(numpy.float64)
            top = row.max()
            total += float(top + numpy.log(numpy.exp(row - top).sum()) - row[target])
            assert entry.position + 1 < len(window)
        return total

    def _forget(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)

    def _likeliest(self, entries: list[Entry]) -> dict[int, int]:
        return {entry.sequence: int(logits.argmax()) for entry, logits in self._decode(entries)}

    def _decode(self, entries: list[Entry]) -> Iterator[tuple[Entry, Any]]:
        """One forward pass; the logits of the entries that want them, valid until the next pass."""
        batch, llama = self._batch, self._llama
        batch.n_tokens = len(entries)
        for i, entry in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = entry.token, entry.position, entry.wants_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, entry.sequence
        status = llama.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(entries)} tokens: status {status}; too little --max-context?")
        for i, entry in enumerate(entries):
            if entry.wants_logits:
                at = llama.llama_get_logits_ith(self._context, i)
                yield entry, self._numpy.ctypeslib.as_array(at, shape=(self._vocabulary,))


def _arithmetic(dtype: str) -> str:
    """llama.cpp multiplies 16-bit weights in floating point, and quantised ones with activations in 8 bits."""
    return "float32" if dtype in ("f32", "f16", "bf16") else "int8"


if __name__ == "__main__":
    serve(LlamaCppPeer)
