"""What bounds a layer of experts, and that each way computes the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bench.experts import SHAPE, KtLayers, Layers, OneByOne, active, least_seconds, line, medians
from bench.limits import Limits
from bench.peers import kt_experts
from hetero_api.model_config import ModelConfig
from hetero_worker.layers.native_linear import NativeLinear
from tests.support.native_compute import op_queue_of

pytestmark = pytest.mark.unit

SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
LIMITS = Limits(threads=2, read_bytes_per_s=1e9, fp32_flops=1e9, bf16_flops=2e9, int8_ops=4e9)


def test_reading_bounds_few_rows_and_operations_many() -> None:
    config = ModelConfig.from_hf({**SHAPE, **SMALL})
    few, many = (
        least_seconds(config, LIMITS, expert_bytes=1000.0, active=2.0, rows=rows, arithmetic="int8") for rows in (1, 64)
    )
    assert few == pytest.approx(2 * 2 * 3 * 64 * 32 / 4e9)
    assert many == pytest.approx(64 * few)
    slow = least_seconds(config, LIMITS, expert_bytes=1e6, active=8.0, rows=1, arithmetic="int8")
    assert slow == pytest.approx(8e-3)
    assert line("int4", 8, 0.002, 0.001).split() == ["int4", "8", "2.000", "500", "50%"]


def test_ways_take_turns_over_the_same_layers() -> None:
    config, op_queue = ModelConfig.from_hf({**SHAPE, **SMALL}).quantized("int4"), op_queue_of()
    kernels = {"together": NativeLinear(op_queue), "one by one": OneByOne(op_queue)}
    ways = {name: Layers(config, kernel, op_queue, layers=2) for name, kernel in kernels.items()}
    hidden = torch.randn(5, 64)
    assert set(medians({name: partial(layers.seconds, hidden) for name, layers in ways.items()}, 0.0)) == set(ways)
    assert ways["together"].chosen(hidden) == ways["one by one"].chosen(hidden)
    together, one_by_one = (layers.mlps[1](hidden) for layers in ways.values())
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)


ANSWERING = """
import json, sys
print(json.dumps({"facts": {"variant": "played"}, "expert_bytes": 12}), flush=True)
for line in sys.stdin:
    if not (chosen := json.loads(line)["chosen"]):
        sys.exit("nothing was chosen")
    print(json.dumps({"seconds": len(chosen)}), flush=True)
"""


def test_a_peers_layers_are_asked_for_the_same_choices_and_its_end_is_told(tmp_path: Path) -> None:
    config, op_queue = ModelConfig.from_hf({**SHAPE, **SMALL}), op_queue_of()
    ours = Layers(config, NativeLinear(op_queue), op_queue, layers=3)
    chosen = ours.chosen(torch.randn(5, 64))
    assert [(len(layer), {len(set(row)) for row in layer}) for layer in chosen] == [(5, {2})] * 3
    assert active([[[0, 1], [1, 2]], [[3, 4], [3, 4]]]) == 2.5
    with KtLayers([sys.executable, "-c", ANSWERING], tmp_path / "log", threads=1) as peer:
        assert (peer.facts, peer.expert_bytes) == ({"variant": "played"}, 12)
        assert peer.seconds(chosen) == 3
        with pytest.raises(RuntimeError, match="nothing was chosen"):
            peer.seconds([])


def played_kernel(calls: list[tuple[int, ...]]) -> ModuleType:
    """kt-kernel as far as it is asked here: it gives ones."""

    class Moe:
        def __init__(self, config: SimpleNamespace) -> None:
            self.config = config

        def load_weights_task(self, order: int) -> Callable[[], None]:
            return lambda: None

        def forward_task(self, *given: int) -> Callable[[], None]:
            calls.append((self.config.layer_idx, given[1]))
            return lambda: None

    class Engine:
        backend_ = None

        def __init__(self, pool: SimpleNamespace) -> None:
            calls.append(tuple(pool.subpool_thread_count))

        def submit(self, task: Callable[[], None]) -> None:
            task()

        def sync(self) -> None:
            """Nothing is under way."""

    def config(*given: int) -> SimpleNamespace:
        return SimpleNamespace(quant_config=SimpleNamespace())

    module = ModuleType("kt_kernel")
    moe = SimpleNamespace(MOEConfig=config, AVX2RawInt4_MOE=Moe, AMXBF16_MOE=Moe)
    module.__dict__.update(
        __cpu_variant__="played",
        kt_kernel_ext=SimpleNamespace(moe=moe, WorkerPoolConfig=SimpleNamespace, CPUInfer=Engine),
    )
    return module


@pytest.mark.parametrize(
    ("method", "expert_bytes"), [("BF16", 3 * 64 * 32 * 2), ("RAWINT4", 3 * 64 * 32 // 2 + 3 * 64 * 2)]
)
def test_kt_kernel_has_matrices_of_its_format_and_computes_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch, method: str, expert_bytes: int
) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setitem(sys.modules, "kt_kernel", played_kernel(calls))
    monkeypatch.setattr(torch, "empty_like", torch.ones_like)
    layers = kt_experts.Layers(method, [64, 32, 8, 2], layers=2, threads=3, rows=4)
    assert layers.expert_bytes == expert_bytes
    assert layers.seconds([[[0, 1], [2, 3]]] * 2) > 0
    assert calls == [(3,), (0, 2), (1, 2)]
