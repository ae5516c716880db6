"""The resource that ours is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.entrants import OURS, Ours, Setting
from bench.home import BenchHome
from bench.ours import HeteroContender
from hetero_api.manifest import parse_resource
from tests.unit.bench.bench_setup import CONFIG

pytestmark = pytest.mark.unit


def manifest(entrant: Ours) -> dict[str, Any]:
    setting = Setting(BenchHome(Path("/bench")), "model", Path("/models/model"), CONFIG, 2, max_model_len=4096)
    contender = entrant.open(setting)
    assert isinstance(contender, HeteroContender)
    return contender.manifest()


@pytest.mark.parametrize("entrant", OURS, ids=lambda entrant: entrant.name)
def test_it_is_valid(entrant: Ours) -> None:
    resource = parse_resource(manifest(entrant))
    assert resource.spec.model.quantization == entrant.quantization
    assert resource.spec.model.max_model_len == 4096
    assert resource.spec.pools[0].ranks == entrant.ranks


def test_ranks_share_the_cache_and_have_room_for_their_weights() -> None:
    whole, half = (parse_resource(manifest(entrant)).spec for entrant in OURS[:2])
    assert whole.engine.kv_cache_memory_bytes is not None
    assert half.engine.kv_cache_memory_bytes == whole.engine.kv_cache_memory_bytes / 2
    memory = whole.pools[0].memory_per_rank
    assert memory is not None
    assert memory > 4 * CONFIG.num_parameters + whole.engine.kv_cache_memory_bytes


def test_a_width_of_16_bits_says_nothing_of_quantisation() -> None:
    assert "quantization" not in manifest(OURS[0])["spec"]["model"]
