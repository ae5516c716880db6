"""Compiles the kernels of models for GPUs that are not there, into a folder that images bring along.

    python -m hetero_worker.backends.cuda.ahead --into FOLDER [--capabilities 80,90] CONFIG.json ...

A rank that begins on such a GPU finds the kernels of these models compiled (`shipped`). Without them it
compiles for some tens of seconds, each time that a pod has no cache from before. Quantised weights are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cuda.absent import AbsentRank
from hetero_worker.backends.cuda.launches import Launch, collected

CAPABILITIES: Final = (80, 86, 89, 90, 100, 120)
"""Compute capabilities of GPUs of data centres and workstations from Ampere on."""
_PROMPT: Final = 300
"""Tokens: long enough that rows which decode are cut into splits."""
_DRAWS: Final = (
    ranks_pb2.Sampling(temperature=0, top_p=1),
    ranks_pb2.Sampling(temperature=1, top_p=1),
    ranks_pb2.Sampling(temperature=1, top_p=0.9),
)


def main(arguments: Sequence[str]) -> int:
    """Compile; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="folder for what is compiled")
    parser.add_argument("--capabilities", type=_numbers, default=CAPABILITIES, help="of GPUs: 80,90")
    parser.add_argument("configs", nargs="+", type=Path, help="config.json of models")
    chosen = parser.parse_args(arguments)
    # A kernel is its machine code, and what Triton has to know of it: not the steps that led there.
    os.environ.update(TRITON_CACHE_DIR=str(chosen.into.resolve()), TRITON_STORE_BINARY_ONLY="1")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        compiled = processes.map(partial(compile_kernels, chosen.configs), chosen.capabilities)
        for capability, names in zip(chosen.capabilities, compiled, strict=True):
            print(f"compute capability {capability}: {len(names)} kernels")
    return 0


def compile_kernels(configs: Sequence[Path], capability: int) -> list[str]:
    """Compile all that models of these configurations launch on a GPU; return the kernels' names."""
    launches: dict[tuple[str, str], Launch] = {}
    for path in configs:
        config = ModelConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))
        launches |= {(each.name, each.specialization): each for each in launches_of(config, capability)}
    for launch in launches.values():
        launch.compile()
    return [name for name, _ in launches]


def launches_of(config: ModelConfig, capability: int) -> list[Launch]:
    """Return the launches of steps that read prompts, decode, and draw."""
    with collected(capability) as launches:
        rank = AbsentRank(config)
        for plan in _plans(rank):
            rank.execute(plan)
    return launches


def _plans(rank: AbsentRank) -> Iterator[ranks_pb2.StepPlan]:
    yield rank.prompts([_PROMPT] * len(_DRAWS), _DRAWS)
    yield ranks_pb2.StepPlan(decode_slots=range(len(_DRAWS)))
    yield ranks_pb2.StepPlan(decode_slots=[0])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
