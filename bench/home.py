"""The folder of what benchmarks make and keep: peers' environments, models of given shapes, models in peers' formats.

$HETERO_BENCH_HOME         default: `bench` below HETERO_HOME
├── environments/NAME/     a virtual environment a peer
├── models/NAME/           made models, Hugging Face directories
├── formats/MODEL/FORMAT   a model in a peer's format, a file or a directory
├── groups/NAME/           HETERO_HOME of a group of ours that is measured, with what it keeps from start to start
└── logs/                  what installations and peers wrote
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_client.home import HeteroHome

ENV_BENCH_HOME: Final = "HETERO_BENCH_HOME"
ROOT: Final = Path(__file__).parents[1]
"""Of the repository: where `-m bench.…` is found by any interpreter."""
RESULTS: Final = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class BenchHome:
    """Paths below one folder; nothing is created by looking."""

    root: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> BenchHome:
        """The folder that the environment names."""
        env = os.environ if environment is None else environment
        if env.get(ENV_BENCH_HOME):
            return cls(Path(env[ENV_BENCH_HOME]).expanduser().absolute())
        return cls(HeteroHome.from_environment(env).root / "bench")

    def environment(self, name: str) -> Path:
        return self.root / "environments" / name

    def model(self, name: str) -> Path:
        return self.root / "models" / name

    def format(self, model: str, name: str) -> Path:
        return self.root / "formats" / model / name

    def group(self, name: str) -> Path:
        return self.root / "groups" / name.replace(" ", "-")

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"
