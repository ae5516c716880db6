"""`hetero plan` from examples alone: every model on every machine, without a manifest, weights or a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetero_api.contract import EXIT_USAGE
from hetero_client.cli import main
from hetero_client.cli.plan_inputs import HARDWARE, MODELS, from_examples
from hetero_placement.decision import bounds_of, quantized_config
from hetero_placement.memory_model import MemoryModel
from hetero_placement.solver import solve
from hetero_placement.sweep import rates_by_load

pytestmark = pytest.mark.unit

MACHINES = ("epyc9355-rtx5090", "xeon6454s-rtx4090", "xeon6980p-h100")
GPU_ONLY = "GPU only"


def plan(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main.app, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def deepseek() -> Any:
    code, text, problem = plan("--assume", "xeon6454s-rtx4090", "--model", "deepseek-v3", "--json")
    assert code == 0, problem
    return json.loads(text)


def check_plan(model: str, machine: str) -> None:
    """Every placement fits the machine's memory, by part as by rank, and more streams are faster."""
    inputs = from_examples(machine, model, quantization=None)
    config, spec = quantized_config(inputs.spec, inputs.config), inputs.spec
    dtype, bounds = spec.dtype_in_force, bounds_of(spec, config)
    decision = solve(config, inputs.hardware, dtype=dtype, placement=spec.placement, bounds=bounds)
    memory = MemoryModel(config, inputs.hardware.levelled(), bounds, dtype=dtype)
    planned = [option for option in decision.options if option.plan is not None]
    for option in planned:
        for rank, shard in enumerate(option.made.ranks):
            need = memory.need(rank, shard)
            assert need.total <= inputs.hardware.ranks[rank].memory_bytes
            assert shard.is_empty or memory.weight_parts(rank, shard).total == need.weights
    rates = rates_by_load(config, inputs.hardware, decision.options, dtype=dtype, bounds=bounds)
    # Sequences of some models end at 32k, with their output.
    long = ["prefill 32k"] if config.max_position > 32_768 else []
    assert [load.name for load in rates.loads] == ["decode 1", "decode 4", "decode 16", "prefill 2k", *long]
    for _, (one, four, sixteen, prefill_2k, *prefill_32k) in rates.rates:
        assert 0 < one < four < sixteen < prefill_2k
        assert all(rate > 0 for rate in prefill_32k)


def test_a_model_is_planned_on_a_machine() -> None:
    check_plan("glm-4.5-air", "epyc9355-rtx5090")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS.names)
def test_each_model_is_planned_on_each_machine(model: str, machine: str) -> None:
    check_plan(model, machine)


def test_memory_is_told_by_part_for_each_rank_of_each_placement(deepseek: Any) -> None:
    options = {option["name"]: option for option in deepseek["options"]}
    assert options[GPU_ONLY]["memoryBytes"] == []
    (chosen,) = (option for option in deepseek["options"] if option["chosen"])
    ranks = [rank for rank in chosen["memoryBytes"] if rank]
    experts = sum(rank["experts"] for rank in ranks)
    # 5 bits a weight in groups of 32.
    assert experts == pytest.approx(58 * 256 * 3 * 7168 * 2048 * 5 / 8, rel=0.01)
    for rank in ranks:
        total = rank.pop("total")
        assert sum(rank.values()) == total


def test_a_gpu_that_is_too_small_alone_is_told(deepseek: Any) -> None:
    options = {option["name"]: option for option in deepseek["options"]}
    assert options[GPU_ONLY]["whyNot"].startswith("weights and KV cache of one sequence ")
    assert "have 23.19 GB (spec.engine.gpuMemoryUtilization)" in options[GPU_ONLY]["whyNot"]


def test_the_tables_name_loads_parts_and_the_faster_side() -> None:
    code, text, problem = plan("--assume", "xeon6980p-h100", "--model", "gpt-oss-20b")
    assert code == 0, problem
    assert "gpt-oss-20b (mxfp4) on xeon6980p-h100" in text
    for name in ("decode 16", "prefill 32k", "attention", "shared experts", "vocabulary", "KV cache"):
        assert name in text
    assert "GPU ranks alone for prefill 2k, prefill 32k." in text


def test_widths_can_be_asked_for() -> None:
    wide = from_examples("xeon6980p-h100", "qwen3-30b-a3b", quantization="none")
    assert wide.title == "qwen3-30b-a3b (as stored) on xeon6980p-h100"
    assert wide.spec.model.quantization == "none"


def test_a_file_takes_the_place_of_an_example(tmp_path: Path) -> None:
    found = MODELS.find("gpt-oss-20b")
    assert found is not None
    copy = tmp_path / "mine.json"
    copy.write_bytes(found.read_bytes())
    hardware = HARDWARE.find("xeon6454s-rtx4090")
    assert from_examples(str(hardware), str(copy), quantization=None).title.startswith("mine (mxfp4)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a manifest, or both --assume and --model"),
        (("--model", "deepseek-v3"), "give a manifest, or both --assume and --model"),
        (("--assume", "cray", "--model", "deepseek-v3"), "examples: epyc9355-rtx5090"),
        (("--assume", "xeon6454s-rtx4090", "--model", "gpt-5"), "examples: deepseek-v3"),
        (("--assume", "rtx4090", "--model", "deepseek-v3"), "kinds.GPU.ranks: is required without a manifest"),
        (("examples/gpu-cpu.yaml", "--quantization", "int8"), "spec.model.quantization"),
    ],
)
def test_what_cannot_be_planned_is_a_usage_error(arguments: tuple[str, ...], message: str) -> None:
    code, _, problem = plan(*arguments)
    assert code == EXIT_USAGE
    assert message in " ".join(problem.replace("│", " ").split())
