"""How often a device draws another token than the host from the same logits, in 10,000 draws of all kinds.

    python -m bench.sampling_identity [--draws 10000] [--device cpu|cuda]

Host and device add the same noise, of the same integers, but may round its logarithms and the scores otherwise. Only
near ties can then fall out differently. Two tables: the device's own kernels, and torch's with noise that
was computed in float64 and rounded once, which stands for a device with other logarithms. On "cpu" the host plays the
device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from bench.report import aligned
from hetero_api.sharding import UnitRange
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.sampling.base import HOST_SAMPLER, ShardSampler
from hetero_worker.sampling.device import DeviceSampler
from hetero_worker.sampling.device_kernels import Best, SamplingKernels, TorchSamplingKernels
from hetero_worker.sampling.noise import TO_UNIFORM, words_of_range
from hetero_worker.sampling.request import SamplingRow, SequenceSampling

VOCABULARY: Final = 2048
HIDDEN: Final = 64
BATCH: Final = 100
KINDS: Final[dict[str, dict[str, Any]]] = {
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k, top_p": {"top_k": 40, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "penalties, bias": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "bias_token_ids": [3], "biases": [2.0]},
}


class RoundedNoise(TorchSamplingKernels):
    """Noise that is computed in float64 and rounded once; words without fractions, which one draw in hundreds has."""

    name = "torch, noise rounded otherwise"

    def noisy_best(
        self, logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int
    ) -> Best:
        """As SamplingKernels.noisy_best."""
        words = words_of_range(keys, begin, logits.shape[1]).double()
        noise = -(-(-(words + 0.5) * TO_UNIFORM).log1p()).log()
        scores = logits.index_select(0, rows) / temperatures.unsqueeze(1) + noise.float()
        best, columns = scores.max(dim=1)
        return Best(best, columns + begin)


def random_logits(generator: torch.Generator) -> torch.Tensor:
    """Return float32 [BATCH, VOCABULARY], peaked in one row and flat in another."""
    spread = torch.logspace(-1, 0.8, BATCH).unsqueeze(1)
    return torch.randn(BATCH, VOCABULARY, generator=generator) * spread


def model_logits(generator: torch.Generator) -> torch.Tensor:
    """Return logits as a tiny model's output head makes them: normed hidden states times an embedding."""
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.3
    hidden = torch.randn(BATCH, HIDDEN, generator=generator)
    return torch.nn.functional.rms_norm(hidden, (HIDDEN,)) @ embedding.T


def rows_of(fields: dict[str, Any], first: int) -> list[SamplingRow]:
    """Return BATCH draws with seeds of their own, after a prompt and some output."""
    return [
        SequenceSampling(
            ranks_pb2.Sampling(**{"temperature": 0.9, "top_p": 1.0, "seed": first + i, **fields}), [1, 2, 3], [3, 9, 9]
        ).draw()
        for i in range(BATCH)
    ]


def tokens_by(sampler: ShardSampler, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Return the sampler's tokens of a whole vocabulary."""
    ranges = [UnitRange(0, VOCABULARY)]
    return sample_tokens(logits, rows, head_ranges=ranges, exchange=LocalExchange(), sampler=sampler).tokens


def differing(
    kernels: SamplingKernels, backend: CudaBackend | TorchReference, source: Any, fields: dict[str, Any], draws: int
) -> int:
    """Count the draws of which host and device have different tokens."""
    sampler = DeviceSampler(backend.device, kernels, backend.staging().start_to_host)
    generator, count = torch.Generator().manual_seed(7), 0
    for first in range(0, draws, BATCH):
        logits, rows = source(generator), rows_of(fields, first)
        ours, theirs = tokens_by(HOST_SAMPLER, logits, rows), tokens_by(sampler, logits.to(backend.device), rows)
        count += int(np.count_nonzero(np.array(ours) != np.array(theirs)))
    return count


def lines(draws: int, backend: CudaBackend | TorchReference) -> Iterator[tuple[str, ...]]:
    """Yield the table's lines."""
    yield "kernels", "logits", "draws with", "draws", "other tokens"
    for kernels in (backend.sampling_kernels(), RoundedNoise()):
        for name, source in {"random": random_logits, "tiny model": model_logits}.items():
            for kind, fields in KINDS.items():
                part = draws // (2 * len(KINDS))
                yield kernels.name, name, kind, str(part), str(differing(kernels, backend, source, fields, part))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    backend = CudaBackend(0, pool="bench") if options.device == "cuda" else TorchReference()
    backend.open()
    print(aligned(list(lines(options.draws, backend))))


if __name__ == "__main__":
    main()
