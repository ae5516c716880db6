"""Who can take part in `make bench-peers`: ours in each width and layout, and the peers, each with what it needs.

Memory is estimated, on the high side, from peaks that were measured: it decides only who is loaded together.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.contenders import Contender
from bench.home import BenchHome
from bench.ours import HeteroContender
from bench.peers.environments import OWN, PeerError, interpreter, missing
from bench.peers.formats import HUGGING_FACE, path_of
from bench.peers.process import PeerProgram, ProcessPeer
from hetero_api.model_config import ModelConfig

MAX_SEQS: Final = 64
MAX_CONTEXT: Final = 16_384
"""Tokens of all sequences together: the largest workload has 8,721."""
LINK: Final = "llama.cpp F16"
"""The peer that is measured in every group, so that groups can be compared."""
LONGEST: Final = 2048
"""Tokens of one sequence, prompt and output, unless more are asked for."""
GB: Final = 10**9
_LIBRARIES: Final = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"))
_TCMALLOC: Final = "libtcmalloc_minimal.so.4"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured: a model, by its name and directory, on so many threads."""

    home: BenchHome
    model: str
    directory: Path
    config: ModelConfig
    threads: int
    max_model_len: int = LONGEST

    def cache_bytes(self, element_bytes: int) -> int:
        """Of `MAX_CONTEXT` tokens' keys and values."""
        config = self.config
        return MAX_CONTEXT * 2 * config.num_layers * config.num_kv_heads * config.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class Entrant(ABC):
    """One row of the table. `bits`: of a weight, as stored, scales not counted."""

    name: str
    bits: int
    fixed_bytes: float
    bytes_per_weight: float
    ours: bool = False

    def memory_bytes(self, setting: Setting) -> float:
        """Of all its processes, at the peak."""
        weights = self.bytes_per_weight * setting.config.num_parameters
        return self.fixed_bytes + weights + setting.cache_bytes(4 if self.ours else 2)

    @abstractmethod
    def open(self, setting: Setting) -> Contender:
        """A contender that is not started. Raises PeerError with what is missing."""


EXPECTED: Final = {"promptTokens": 144, "outputTokens": 128, "concurrency": 8}
"""What ours are told to be placed for: one group serves one request, 8 and 32 of these lengths."""


@dataclass(frozen=True, slots=True)
class Ours(Entrant):
    """`hetero up`, over gRPC."""

    ranks: int = 1
    cores: int = 2
    quantization: str = "none"
    dtype: str = "float32"
    engine: Mapping[str, str] = field(default_factory=dict)
    """Further fields of spec.engine."""

    def open(self, setting: Setting) -> HeteroContender:
        """A group of this checkout."""
        return self.open_from(None, setting)

    def open_from(self, checkout: Path | None, setting: Setting) -> HeteroContender:
        """A group of another checkout's code; None: of this one's. Each checkout keeps what it measures for itself."""
        kv_bytes = setting.cache_bytes(4) // self.ranks
        weights = 4 * setting.config.num_parameters // self.ranks
        return HeteroContender(
            name=self.name,
            checkout=checkout,
            model=setting.directory,
            ranks=self.ranks,
            cores=self.cores,
            quantization=self.quantization,
            dtype=self.dtype,
            max_model_len=setting.max_model_len,
            home=setting.home.group(f"{self.name} of {checkout.name}" if checkout else self.name),
            memory_bytes=int(1.2 * weights) + kv_bytes + 2 * GB,
            engine={"kvCacheMemoryBytes": str(kv_bytes), **self.engine},
            placement={"workload": EXPECTED},
        )


@dataclass(frozen=True, slots=True)
class Peer(Entrant):
    """A program of bench.peers in an environment, on the model in a format."""

    environment: str = OWN
    module: str = ""
    format: str = HUGGING_FACE
    dtype: str = ""
    preload: tuple[str, ...] = ()
    """Libraries in the environment that are loaded first."""
    lookup_tokens: int = 0
    """Most tokens that it proposes by its prompt lookup."""

    def open(self, setting: Setting) -> Contender:
        if why := missing(setting.home, self.environment):
            raise PeerError(why)
        path = path_of(setting.home, setting.model, setting.directory, self.format)
        if not path.exists():
            raise PeerError(f"{self.format} is not made: python -m bench.peers.install --model {setting.model}")
        program = PeerProgram(
            python=interpreter(setting.home, self.environment),
            module=self.module,
            model=path,
            dtype=self.dtype,
            threads=setting.threads,
            max_seqs=MAX_SEQS,
            max_context=MAX_CONTEXT,
            cache_bytes=setting.cache_bytes(2),
            lookup_tokens=self.lookup_tokens,
            log=setting.home.log(f"peer-{self.name.replace(' ', '-')}"),
            variables=self._variables(setting.home),
        )
        return ProcessPeer(self.name, program)

    def _variables(self, home: BenchHome) -> Mapping[str, str]:
        if not self.preload:
            return {}
        libraries = [folder / _TCMALLOC for folder in _LIBRARIES if (folder / _TCMALLOC).is_file()]
        if not libraries:
            raise PeerError(f"{self.name} is meant to run with {_TCMALLOC}: apt-get install libtcmalloc-minimal4")
        libraries += [home.environment(self.environment) / name for name in self.preload]
        return {"LD_PRELOAD": os.pathsep.join(map(str, libraries))}


OURS: Final = (
    Ours("hetero 16-bit 1x2", 16, 0.8 * GB, 5.0, ours=True),
    Ours("hetero 16-bit 2x1", 16, 1.2 * GB, 5.0, ours=True, ranks=2, cores=1),
    Ours("hetero 16-bit 1x2, fp16 cache", 16, 0.8 * GB, 5.0, ours=True, engine={"kvCacheDtype": "float16"}),
    Ours("hetero bf16 1x2", 16, 0.8 * GB, 3.0, ours=True, dtype="bfloat16"),
    Ours("hetero int8", 8, 0.8 * GB, 3.0, ours=True, quantization="int8"),
    Ours("hetero int8 2x1", 8, 1.2 * GB, 3.0, ours=True, quantization="int8", ranks=2, cores=1),
    Ours("hetero int4", 4, 0.8 * GB, 2.5, ours=True, quantization="int4"),
    Ours("hetero int4 2x1", 4, 1.2 * GB, 2.5, ours=True, quantization="int4", ranks=2, cores=1),
)


def _transformers(name: str, bits: int, dtype: str) -> Peer:
    module = "bench.peers.transformers_peer"
    return Peer(name, bits, 1.0 * GB, 1.2 * bits / 8, environment=OWN, module=module, dtype=dtype)


def _llama_cpp(name: str, bits: int, dtype: str) -> Peer:
    return Peer(
        name, bits, 0.3 * GB, 1.2 * bits / 8, environment="llama.cpp", module="bench.peers.llama_cpp_peer",
        format=f"gguf-{dtype}", dtype=dtype,
    )  # fmt: skip


def _openvino(name: str, bits: int, dtype: str) -> Peer:
    return Peer(
        name, bits, 0.6 * GB, 3.0 * bits / 8, environment="openvino", module="bench.peers.openvino_peer",
        format=f"openvino-{dtype.removesuffix('-f32')}", dtype=dtype,
    )  # fmt: skip


def _ctranslate2(name: str, bits: int, dtype: str) -> Peer:
    return Peer(
        name, bits, 1.0 * GB, 1.2 * bits / 8, environment="ctranslate2", module="bench.peers.ctranslate2_peer",
        format=f"ctranslate2-{dtype}", dtype=dtype,
    )  # fmt: skip


def _vllm(name: str, bits: int, dtype: str) -> Peer:
    return Peer(
        name, bits, 4.2 * GB, 1.5 * bits / 8, environment="vllm", module="bench.peers.vllm_peer", dtype=dtype,
        preload=("lib/libiomp5.so",),
    )  # fmt: skip


PEERS: Final = (
    _llama_cpp(LINK, 16, "f16"),
    _llama_cpp("llama.cpp Q8_0", 8, "q8_0"),
    _llama_cpp("llama.cpp Q4_1", 4, "q4_1"),
    _llama_cpp("llama.cpp Q4_0", 4, "q4_0"),
    _openvino("OpenVINO fp16", 16, "fp16"),
    _openvino("OpenVINO fp16, fp32 arithmetic", 16, "fp16-f32"),
    _openvino("OpenVINO int8", 8, "int8"),
    _openvino("OpenVINO int4", 4, "int4"),
    _ctranslate2("CTranslate2 fp32", 32, "float32"),
    _ctranslate2("CTranslate2 int8", 8, "int8"),
    _transformers("transformers fp32", 32, "float32"),
    _transformers("transformers bf16", 16, "bfloat16"),
    _vllm("vLLM fp32", 32, "float32"),
    _vllm("vLLM bf16", 16, "bfloat16"),
)
ALL: Final[Sequence[Entrant]] = (*OURS, *PEERS)


def chosen(names: Iterable[str]) -> list[Entrant]:
    """Entrants whose name contains one of `names`, without regard to case; all if there are none. Raises ValueError."""
    wanted = [name.lower() for name in names]
    for name in wanted:
        if not any(name in entrant.name.lower() for entrant in ALL):
            raise ValueError(f"nobody's name contains {name!r}: {', '.join(entrant.name for entrant in ALL)}")
    return [entrant for entrant in ALL if not wanted or any(name in entrant.name.lower() for name in wanted)]


def groups(entrants: Sequence[Entrant], setting: Setting, available_bytes: float) -> list[list[Entrant]]:
    """Entrants that fit the memory together, ours with as many as fit; the link, if it takes part, is in every group.

    One that does not fit beside the link gets a group of the two all the same.
    """
    link = [entrant for entrant in entrants if entrant.name == LINK]
    base = sum(entrant.memory_bytes(setting) for entrant in link)
    made: list[list[Entrant]] = []
    used = available_bytes
    for entrant in (entrant for entrant in entrants if entrant not in link):
        if not made or used + entrant.memory_bytes(setting) > available_bytes:
            made.append([*link])
            used = base
        made[-1].append(entrant)
        used += entrant.memory_bytes(setting)
    return made or ([link] if link else [])
