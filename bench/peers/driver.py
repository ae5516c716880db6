"""What every peer's program does: load a model, then answer one JSON request a line until standard input ends.

Runs on the interpreter of the peer's own environment, so this module takes nothing but the standard library.

    python -m bench.peers.NAME --model PATH --dtype NAME --threads N [--max-seqs N] [--max-context N] [--cache-bytes N]
        [--lookup-tokens N]

First line, when loaded: `{"load_s": …, "facts": {"arithmetic": …, versions}}`. Then, a request a line:

    {"prompts": [[ids]], "max_new": n}   all prompts at once, greedily, n tokens each, end tokens ignored
        -> {"elapsed_s", "first_token_s", "output_tokens", "heads"}
           first_token_s: until all prompts have their first token
           heads: the first tokens of the first completions, to see whether contenders agree
    {"windows": [[ids]]}                 each token but a window's first, given those before it in the window
        -> {"nll": [sum of -ln p of each window]}, or {"error": …} where the peer's interface does not tell

What libraries print goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol

HEAD_TOKENS = 12
HEADS = 2


@dataclass(frozen=True)
class Options:
    """What a peer is to load.

    `max_seqs` sequences at once, together of at most `max_context` tokens; peers that are told bytes get `cache_bytes`.
    """

    model: str
    dtype: str
    threads: int
    max_seqs: int
    max_context: int
    cache_bytes: int
    lookup_tokens: int
    """Most tokens to propose by the peer's own prompt lookup; 0: none are."""


@dataclass(frozen=True)
class Generated:
    """New tokens of each prompt, and seconds until the last prompt had its first one."""

    token_ids: list[list[int]]
    first_token_s: float


class Peer(Protocol):
    """An engine; the constructor loads."""

    def __init__(self, options: Options) -> None: ...

    def facts(self) -> dict[str, str]:
        """Versions, and `arithmetic`: the type that products are computed in."""
        ...

    def generate(self, prompts: list[list[int]], max_new: int) -> Generated: ...


def _answer(peer: Any, request: dict[str, Any]) -> dict[str, Any]:
    if "windows" in request:
        score = getattr(peer, "score", None)
        return {"error": "tells no log-probabilities"} if score is None else {"nll": score(request["windows"])}
    began_s = time.perf_counter()
    generated: Generated = peer.generate(request["prompts"], request["max_new"])
    elapsed_s = time.perf_counter() - began_s
    return {
        "elapsed_s": elapsed_s,
        "first_token_s": generated.first_token_s,
        "output_tokens": sum(map(len, generated.token_ids)),
        "heads": [tokens[:HEAD_TOKENS] for tokens in generated.token_ids[:HEADS]],
    }


def serve(peer_class: type[Peer]) -> None:
    """The program of a peer."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-seqs", type=int, default=32)
    parser.add_argument("--max-context", type=int, default=16_384)
    parser.add_argument("--cache-bytes", type=int, default=1 << 30)
    parser.add_argument("--lookup-tokens", type=int, default=0)
    options = Options(**vars(parser.parse_args()))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    began_s = time.perf_counter()
    peer = peer_class(options)
    load_s = time.perf_counter() - began_s
    print(json.dumps({"load_s": load_s, "facts": peer.facts()}), file=answers)
    for line in sys.stdin:
        print(json.dumps(_answer(peer, json.loads(line))), file=answers)
