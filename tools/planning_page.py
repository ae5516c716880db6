"""Writes docs/planning.md: predictions for example models on example machines, and published figures beside ours.

Published figures stand here with their sources; everything else is computed, so the page says what the code says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from hetero_api.hf_config import read_json
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementShares
from hetero_api.spec_pools import PoolType
from hetero_client.cli.plan_inputs import HARDWARE, MODELS, from_examples
from hetero_placement.assumed_hardware import AssumedHardware, assume, whole_machine
from hetero_placement.cost_model import CostModel, StreamedSteps
from hetero_placement.decision import Bounds, bounds_of, quantized_config
from hetero_placement.hardware import Hardware
from hetero_placement.memory_model import MemoryModel
from hetero_placement.shard_plans import deal_within_layers
from hetero_placement.steps import LOADS, Load
from hetero_placement.streaming import StreamingCosts, plan_problem

PAGE: Final = Path("docs/planning.md")
GB: Final = 1e9
WITHIN: Final = 0.3
"""Part of a published figure that a prediction may differ by before the page calls it a miss."""
_STEP_ROWS: Final = 2048
_MACHINES: Final = tuple(name for name in HARDWARE.names if "-" in name)
_EPYC: Final[dict[str, Any]] = {"CPU": {"memoryBandwidth": 403e9}}


@dataclass(frozen=True, slots=True)
class Published:
    """A published figure, and the machine to predict it for."""

    source: int
    """Number in `_SOURCES`."""
    what: str
    machine: str
    model: str
    load: Load
    tokens_per_s: float
    quantization: str = "int4"
    sockets: int = 2
    has_gpu: bool = True
    changes: Any = None
    """Changes of the example machine, by kind."""
    streams: bool = False
    """Whether experts come to the GPU, for the whole prompt at once."""


_SOURCES: Final = (
    "KTransformers team, *GPT-4/o1-level Local VSCode Copilot on a Desktop with only 24GB VRAM* (DeepSeek-R1/V3 "
    "tutorial of KTransformers), 2025: two Xeon Gold 6454S with 8 channels of DDR5-4800 each, RTX 4090 or 4090D, "
    "Q4_K_M",
    "KTransformers team, *MiniMax-M2.1 tutorial* (kt-kernel with SGLang), 2026: two EPYC 9355 with DDR5-5600, taken as "
    "12 channels each, RTX 5090, the published FP8 weights",
    "Wang et al., *Achieving Cloud-Grade SLOs for Local Mixture-of-Experts Inference through CPU–GPU Hybrid Design*, "
    "OSDI 2026: dual-socket commodity CPUs and RTX 5090; its abstract names no CPU, two EPYC 9355 are taken",
    "LOFT, *1T MoE Kimi-K2.5 CPU Inference: Thread Optimization Through Long Context Operations*, 2026: llama.cpp on "
    "one EPYC 9175F with 12 channels of DDR5-6400, Q4_K_S; 10 to 13 tokens/s",
)
_XEON, _AMD = "xeon6454s-rtx4090", "epyc9355-rtx5090"
_ONE_PROCESS: Final[dict[str, Any]] = {"CPU": {"flops": {"bfloat16": 2.5e12}}}
PUBLISHED: Final = (
    Published(1, "KTransformers 0.2, decode", _XEON, "deepseek-v3", Load(500, 1), 12.2),
    Published(1, "KTransformers 0.2, decode, one socket", _XEON, "deepseek-v3", Load(500, 1), 8.73, sockets=1),
    Published(1, "KTransformers 0.2.1, decode after 2k", _XEON, "deepseek-v3", Load(1930, 1), 13.4),
    Published(1, "KTransformers 0.2.1, decode after 8k", _XEON, "deepseek-v3", Load(7678, 1), 12.4),
    Published(1, "KTransformers 0.3, prefill of 2k, AMX", _XEON, "deepseek-v3", Load(2048), 255, "int8"),
    Published(
        1, "llama.cpp, decode; as one rank of a socket's speed", _XEON, "deepseek-v3", Load(500, 1), 4.51,
        sockets=1, has_gpu=False,
    ),
    Published(
        1, "llama.cpp, prefill; the same, without AMX", _XEON, "deepseek-v3", Load(500), 10.3,
        sockets=1, has_gpu=False, changes=_ONE_PROCESS,
    ),
    Published(2, "kt-kernel, decode after 2k", _AMD, "minimax-m2", Load(2048, 1), 32.1, "none", changes=_EPYC),
    Published(2, "kt-kernel, decode after 32k", _AMD, "minimax-m2", Load(32768, 1), 27.6, "none", changes=_EPYC),
    Published(2, "kt-kernel, prefill of 2k", _AMD, "minimax-m2", Load(2048), 408, "none", changes=_EPYC),
    Published(
        2, "kt-kernel, prefill of 32k, streamed", _AMD, "minimax-m2", Load(32768), 2540, "none", changes=_EPYC,
        streams=True,
    ),
    Published(3, "decode, 4 bits", _AMD, "deepseek-v3", Load(2048, 1), 28),
    Published(3, "decode, FP8", _AMD, "deepseek-v3", Load(2048, 1), 21.5, "none"),
    Published(3, "prefill of 32k, streamed", _AMD, "deepseek-v3", Load(32768), 1200, "none", streams=True),
    Published(4, "llama.cpp, decode on one CPU", _AMD, "kimi-k2", Load(2048, 1), 11.5, sockets=1, has_gpu=False),
)  # fmt: skip
_INTRO: Final = """\
<!-- Generated from the examples and the cost model by `make docs`. Do not edit. -->
# Planning for a model that exceeds the GPU

`hetero plan` needs neither the machine nor the model to say what they would give together. `--assume` names hardware
and `--model` a model, each by a file or by the name of an example in `examples/hardware` and `examples/models`:

    hetero plan --assume xeon6454s-rtx4090 --model deepseek-v3

It prints every placement with its predicted speed and says why it picks one; tokens/s of one, four and sixteen
streams that decode (with 2,048 tokens in the cache of each) and of prompts of 2k and 32k; which ranks to use for
which load, be it the GPU alone, CPU ranks alone or both; and each rank's memory by part of the model. Without a
manifest every rank of the machine takes part, sequences have up to 33,792 tokens, a step up to 2,048, and weights get
4 bits at load, unless the checkpoint has them already. A manifest says all that itself:

    hetero plan examples/gpu-cpu-auto.yaml --assume xeon6454s-rtx4090 --model qwen3-30b-a3b

**Predictions are arithmetic.** A part takes as long as its bytes at the memory's bandwidth, or its operations at the
rate of a large matrix product, whichever is longer, and ranks wait for one another after each half of a layer.
`expertShare` of the hardware file is the part of both rates that layers of experts reach. The examples say 0.45 of
the bandwidth that is reached otherwise, which is about a third of what data sheets promise: the share that follows
from the first line of the table of published figures. `hetero plan` without `--assume` measures a machine instead,
and guesses nothing.

Assumed speeds know no time for starting kernels, so a GPU alone is predicted too fast where steps are short. GPU
ranks keep weights in 16 bits, whatever the checkpoint has; that, too, is counted, and it is why the attention of
DeepSeek-V3 does not fit a GPU of 24 GB.

## Example models on example machines

Attention, its cache, shared experts and the vocabulary on the GPU, all routed experts on CPU ranks, a rank a socket,
each with as many columns of every expert: tokens/s, and the memory that the GPU needs. Beside it CPU ranks alone, for
decode of one stream and a prompt of 2k. The best placement is often between these, with some experts on the GPU;
`hetero plan` finds it. Without experts, all columns of the MLP are on CPU ranks. A dash: sequences of the model end
before.

Ranks with whole experts wait for the one that has most of those that a token chose: of 8 experts over two sockets the
busier has five on average. Ranks with columns of every expert never wait, but compute more and smaller pieces.
`hetero plan` compares both for the workload of the manifest, unless `placement.experts` chooses.
"""
_PUBLISHED: Final = """
## Published figures beside predictions

Predicted is attention on the GPU and all experts on CPU ranks, a rank a socket; the GPU keeps the published widths, too
(8 bits for FP8), and CPU ranks get all 2,048 rows of a step at once, and columns of every expert, as these systems do.
Without a GPU all parts lie on the CPU. What is streamed comes to the GPU once for the whole prompt. Figures are
tokens/s. The first line is the one that `expertShare` was chosen by; it proves nothing.
"""
_STREAMED: Final = """
## Long prompts that stream experts

From some length on, it takes less time to copy a layer's experts to the GPU than to compute them on CPU ranks
([how](using.md#long-prompts-whose-experts-come-to-the-gpu)). For the placement of the table above, with steps of up to
8,192 tokens: the tokens of a step from which on that is so, those from which on copies cost nothing because computing
takes as long, the memory of both buffers on the GPU, and tokens/s of a prompt of 32k where experts stay and where
they come.
"""
_STREAMED_CHUNK: Final = 8192
_MISSES: Final = """
What differs by more than 30 % has its reasons:

- Streamed prompts of MiniMax-M2 are predicted by the full rates of bus and GPU, which no system reaches.
- Prefill on a CPU depends on kernels more than on hardware. KTransformers 0.3 was a preview; the same team states 418
  tokens/s for later kernels on a Xeon of that generation (*AMX.md*, 2025). llama.cpp used neither AMX nor all cores'
  rate for these widths.
"""


def generate_planning_page(root: Path) -> list[Path]:
    """Write the page under `root`; returns what was written, relative to `root`."""
    target = root / PAGE
    target.parent.mkdir(parents=True, exist_ok=True)
    sources = (f"{number}. {source}" for number, source in enumerate(_SOURCES, start=1))
    lines = [
        _INTRO,
        *_examples(),
        _STREAMED,
        *_streamed(),
        _PUBLISHED,
        *_published(),
        _MISSES,
        "Sources:",
        "",
        *sources,
    ]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [PAGE]


def predicted(figure: Published) -> float:
    """Return the tokens/s that the cost model predicts for a published figure's machine."""
    found = MODELS.find(figure.model)
    assert found is not None
    config = ModelConfig.from_hf(read_json(found), source=str(found)).quantized(figure.quantization)
    assumed = _machine(figure)
    resource = whole_machine(assumed, name="published", model={"dtype": "bfloat16"})
    hardware = assume(resource.spec, assumed)
    plan = _experts_on_cpu(config, hardware, has_gpu=figure.has_gpu)
    rows = figure.load.tokens if figure.streams else _STEP_ROWS
    bounds = Bounds(max_model_len=40_960, max_num_batched_tokens=rows)
    model = CostModel(config, hardware, dtype="bfloat16")
    streamed = StreamedSteps(1, StreamingCosts(model, plan).step_s) if figure.streams else None
    return model.tokens_per_s(plan, figure.load, bounds, streamed=streamed)


def _machine(figure: Published) -> AssumedHardware:
    found = HARDWARE.find(figure.machine)
    assert found is not None
    data = yaml.safe_load(found.read_text(encoding="utf-8"))
    kinds = data["kinds"]
    for kind, changes in (figure.changes or {}).items():
        kinds[kind].update(changes)
    kinds["CPU"].update(ranks=figure.sockets)
    if not figure.has_gpu:
        del kinds["GPU"]
    return AssumedHardware.model_validate(data)


def _published() -> Iterator[str]:
    yield from _header("Figure", "Model", "Machine", "Published", "Predicted", "Ratio", "Source", numbers=(3, 4, 5, 6))
    for figure in PUBLISHED:
        told = predicted(figure)
        ratio = told / figure.tokens_per_s
        miss = "" if abs(ratio - 1) <= WITHIN else " (miss)"
        rates = (_number(figure.tokens_per_s), _number(told), f"{ratio:.2f}{miss}")
        yield _row(figure.what, figure.model, figure.machine, *rates, str(figure.source))


def _examples() -> Iterator[str]:
    loads = [load.name for load in LOADS]
    yield from _header(
        "Model",
        "Machine",
        "GPU needs",
        *loads,
        *(f"CPU: {load}" for load in (loads[0], loads[3])),
        numbers=range(2, 10),
    )
    for model in MODELS.names:
        for machine in _MACHINES:
            yield _row(model, machine, *_example(model, machine))


def _streamed() -> Iterator[str]:
    names = "streams from", "copies hidden from", "two buffers", "prefill 32k, experts stay", "experts come"
    yield from _header("Model", "Machine", *names, numbers=range(2, 7))
    for model in MODELS.names:
        for machine in _MACHINES:
            if cells := list(_streamed_example(model, machine)):
                yield _row(model, machine, *cells)


def _streamed_example(model: str, machine: str) -> Iterator[str]:
    """Yield the threshold, the full chunk, the buffers, and two rates; nothing where nothing is streamed."""
    inputs = from_examples(machine, model, quantization=None)
    config, spec, hardware = quantized_config(inputs.spec, inputs.config), inputs.spec, inputs.hardware
    plan = _experts_on_cpu(config, hardware, has_gpu=True)
    if plan_problem(config, hardware, plan):
        return
    bounds = replace(bounds_of(spec, config), max_num_batched_tokens=_STREAMED_CHUNK, expert_streaming=None)
    cost = CostModel(config, hardware, dtype=spec.dtype_in_force)
    costs, load = StreamingCosts(cost, plan), LOADS[-1]
    streaming, _ = costs.decided(bounds)
    if streaming is None:
        return
    yield from (f"{streaming.min_rows:,}", f"{streaming.full_rows:,}", f"{streaming.buffer_bytes / GB:.1f} GB")
    for streamed in (None, StreamedSteps(streaming.min_rows, costs.step_s)):
        yield _number(cost.tokens_per_s(plan, load, bounds, streamed=streamed))


def example_plan(machine: str, model: str) -> ShardPlan:
    """Return the plan of an example: slices of routed experts on CPU ranks, a rank a socket, all else on the GPU."""
    inputs = from_examples(machine, model, quantization=None)
    return _experts_on_cpu(quantized_config(inputs.spec, inputs.config), inputs.hardware, has_gpu=True)


def _example(model: str, machine: str) -> Iterator[str]:
    """Yield the GPU's memory, rates with experts on CPU ranks, and two rates of CPU ranks alone."""
    inputs = from_examples(machine, model, quantization=None)
    config, spec, hardware = quantized_config(inputs.spec, inputs.config), inputs.spec, inputs.hardware
    dtype, bounds = spec.dtype_in_force, bounds_of(spec, config)
    cost = CostModel(config, hardware, dtype=dtype)
    memory = MemoryModel(config, hardware, bounds, dtype=dtype)
    mixed, alone = (_experts_on_cpu(config, hardware, has_gpu=has_gpu) for has_gpu in (True, False))
    need, has = memory.need(0, mixed.ranks[0]).total, hardware.ranks[0].memory_bytes
    yield f"{need / GB:.0f} of {has / GB:.0f} GB" + ("" if need <= has else " (too much)")
    for plan, loads in ((mixed, LOADS), (alone, (LOADS[0], LOADS[3]))):
        for load in loads:
            yield _number(cost.tokens_per_s(plan, load, bounds)) if load.fits(bounds) else "-"


def _experts_on_cpu(config: ModelConfig, hardware: Hardware, *, has_gpu: bool) -> ShardPlan:
    """Return the plan with slices of experts on CPU ranks, and everything else on the GPU, or on CPU ranks, too."""
    on_gpu = [float(rank.kind is PoolType.GPU) for rank in hardware.ranks]
    on_cpu = [1 - share for share in on_gpu]
    holders = on_gpu if has_gpu else on_cpu
    shares = PlacementShares(attention=holders, mlp=on_cpu, vocabulary=holders)
    return deal_within_layers(config, cores=[1] * len(hardware.ranks), shares=shares, in_slices=True)


def _number(value: float) -> str:
    """Return a number with three digits."""
    return f"{float(f'{value:.3g}'):,g}"


def _header(*names: str, numbers: Sequence[int]) -> Iterator[str]:
    yield _row(*names)
    yield _row(*("---:" if index in numbers else "---" for index in range(len(names))))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
