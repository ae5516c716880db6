"""Steps that only decode are recorded and run again: to the last bit what they are operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.distributed.hierarchical import HierarchicalExchange
from hetero_worker.distributed.routes import routes_of
from hetero_worker.distributed.shm_exchange import ShmExchange
from hetero_worker.distributed.staging import PlainStaging
from hetero_worker.layers.fused_ops import PLAIN_OPS
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.layers.sampler import SampledRows
from hetero_worker.models.micro_batches import best_number
from hetero_worker.native.team import NativeTeam
from hetero_worker.sampling.request import SamplingRow
from tests.support.rank_group import GREEDY, PlanBuilder, RankGroup, Shares
from tests.support.shm_threads import exchanges
from tests.support.tcp_threads import NATIVE
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

ONE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
UNEVEN = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136), experts=((1, 5),))
NO_PART = Shares(kv_heads=((5, 3),), mlp_columns=((0, 50),), vocab_rows=(64, 136), experts=((0, 6),))
HELPED = Shares(kv_heads=((8, 0),), mlp_columns=((20, 30),), vocab_rows=(200, 0), experts=((2, 4),))
STAGES = Shares(
    kv_heads=((8, 0), (3, 5), (0, 8)), mlp_columns=((50, 0), (20, 30), (0, 50)), vocab_rows=(192, 8),
    experts=((6, 0), (2, 4), (0, 6)),
)  # fmt: skip
PLAIN = ("glm4", "smollm3", "deepseek-v3-dense", "gemma4", "gemma4-readers")
EXPERTS = ("mixtral", "qwen3-moe-some-dense", "glm4-moe-grouped", "gpt-oss", "minimax-m2", "deepseek-v3", "gemma4-moe")
"""Models of experts, with every rule of routing."""
SLICES = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136), expert_slices=(2, 5))
STATEFUL = ("qwen3-next-odd", "qwen3.5", "qwen3.5-moe")
"""Models with layers that keep a state of each sequence."""
LAYOUTS = {"one": ONE, "uneven": UNEVEN, "no part": NO_PART, "helped": HELPED, "stages": STAGES}
MORE = ("mistral-window", "qwen2-window", "gemma2", "glm4-moe-lite", "glm4-moe-lite-direct")
"""Variants made of parts that the others have."""
OF_EXPERTS = {"slices": SLICES}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    variants = "llama-biased", "qwen3", "gemma2", "gemma3", *PLAIN, *EXPERTS, *STATEFUL, *MORE
    return {variant: save_tiny(variant, tmp_path_factory.mktemp(variant)) for variant in variants}


def told(group: RankGroup) -> list[torch.Tensor]:
    """Logits of all steps of some sequences that come and go, and grow over blocks."""
    builder, logits = PlanBuilder(group), []

    def step(*slots: int) -> None:
        for slot in slots:
            builder.schedule(slot)
        logits.append(builder.run().logits)

    builder.start(0, [7, 150, 3])
    for _ in range(6):
        step(0)
    builder.start(1, [1])
    builder.start(2, [9, 8, 7, 6, 5])
    for _ in range(7):
        step(0, 1, 2)
    builder.release(0)
    for _ in range(5):
        step(2, 1)
    builder.start(0, [3, 4])
    for _ in range(6):
        step(0, 1, 2)
    return logits


def recordings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What forward passes said of recordings."""
    name = "hetero_worker.runners.recorded.forward"
    return [record.getMessage() for record in caplog.records if record.name == name]


def make_group(
    checkpoint: TinyCheckpoint,
    shares: Shares,
    stack: ExitStack,
    folder: Path,
    *,
    over: str,
    eager: bool,
    dtype: str = "float32",
) -> RankGroup:
    def make(plan: ShardPlan) -> list[HostExchange]:
        ends = NATIVE["tcp" if over == "tcp" else "shm"](folder, plan.world_size, routes=routes_of(plan))
        return list(stack.enter_context(ends))

    in_memory = shares is ONE or over == "threads"
    make_exchanges = None if in_memory else make
    return RankGroup(checkpoint.directory, shares, dtype=dtype, recorded=not eager, make_exchanges=make_exchanges)


WAYS = [(layout, over, "float32") for layout in LAYOUTS for over in ("threads", "native")]
BFLOAT16_WAYS = [("one", "native", "bfloat16"), ("uneven", "threads", "bfloat16"), ("uneven", "native", "bfloat16")]
BFLOAT16_WAYS += [("no part", "native", "bfloat16"), ("helped", "native", "bfloat16"), ("stages", "native", "bfloat16")]


SOME_WAYS = [("one", "native", "float32"), ("uneven", "native", "bfloat16")]
CASES = [(variant, *way) for variant in ("qwen3", "gemma3") for way in (*WAYS, *BFLOAT16_WAYS)]
CASES += [("qwen3", layout, "tcp", "float32") for layout in ("uneven", "helped", "stages")]
CASES += [(variant, *way) for variant in PLAIN for way in SOME_WAYS]
CASES += [(variant, *way) for variant in EXPERTS for way in SOME_WAYS]
CASES += [(variant, *way) for variant in STATEFUL for way in SOME_WAYS]
CASES += [
    (variant, layout, "native", "float32")
    for variant in ("deepseek-v3", "qwen3.5-moe", "gemma4-moe")
    for layout in ("no part", "helped", "stages")
]
CASES += [("glm4-moe-grouped", "slices", "native", dtype) for dtype in ("float32", "bfloat16")]
CASES.append(("gemma4-moe", "slices", "native", "float32"))
MORE_CASES = [(variant, *way) for variant in MORE for way in SOME_WAYS]
MORE_CASES += [("llama-biased", *way) for way in (*WAYS, *BFLOAT16_WAYS)]
MORE_CASES += [(variant, "uneven", "native", "float32") for variant in (*PLAIN, *EXPERTS, *STATEFUL, *MORE)]
"""`make test-all` tries these."""


@pytest.mark.parametrize(
    ("variant", "layout", "over", "dtype"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.extended) for case in MORE_CASES)],
)
def test_recorded_steps_are_what_steps_are(
    checkpoints: dict[str, TinyCheckpoint],
    variant: str,
    layout: str,
    over: str,
    dtype: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shares = (LAYOUTS | OF_EXPERTS)[layout]
    with ExitStack() as stack, caplog.at_level("INFO"):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        eager = told(
            make_group(checkpoints[variant], shares, stack, tmp_path / "a", over=over, eager=True, dtype=dtype)
        )
        assert not recordings(caplog)
        recorded = told(
            make_group(checkpoints[variant], shares, stack, tmp_path / "b", over=over, eager=False, dtype=dtype)
        )
    said = recordings(caplog)
    assert not [message for message in said if "operator by operator" in message]
    assert len([message for message in said if message.startswith("step of 3 rows recorded")]) == len(shares.vocab_rows)
    assert all(map(torch.equal, recorded, eager))


@pytest.mark.parametrize(("variant", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("gemma2", "float32")])
def test_a_recorded_step_is_one_call_with_its_logits(
    checkpoints: dict[str, TinyCheckpoint], variant: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that are capped are torch's to make."""
    builder = PlanBuilder(RankGroup(checkpoints[variant].directory, ONE, dtype=dtype))
    calls: list[str] = []

    def counted(name: str) -> Callable[..., object]:
        call = getattr(NativeTeam, name)

        def count(*arguments: object) -> object:
            calls.append(name)
            return call(*arguments)

        return count

    for name in ("run", "run_one"):
        monkeypatch.setattr(NativeTeam, name, counted(name))
    builder.start(0, [7, 150, 3])
    for _ in range(3):
        builder.schedule(0)
        calls.clear()
        builder.run()
    draws = ["run_one"]
    assert calls == (["run", *draws] if variant == "qwen3" else ["run", "run_one", "run_one", *draws])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["one", "uneven"])
def test_draws_of_all_kinds_are_what_they_are_of_steps_that_are_not_recorded(
    checkpoints: dict[str, TinyCheckpoint], layout: str, dtype: str
) -> None:
    kinds = [
        GREEDY,
        ranks_pb2.Sampling(temperature=0.8, top_p=1.0, seed=5),
        ranks_pb2.Sampling(temperature=1.5, top_p=0.7, top_k=40, seed=6, num_logprobs=3),
        ranks_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.7, presence_penalty=0.9, num_logprobs=0),
        ranks_pb2.Sampling(top_p=1.0, bias_token_ids=[9], biases=[2.5], end_token_ids=[3], min_tokens=9),
    ]
    masks = [bytes([0b10101010]) * 25, bytes([0b00001111]) * 25]

    def told(*, eager: bool) -> list[object]:
        builder = PlanBuilder(
            RankGroup(checkpoints["qwen3"].directory, LAYOUTS[layout], dtype=dtype, recorded=not eager)
        )
        for slot, kind in enumerate(kinds):
            builder.start(slot, [slot + 1, 2 * slot + 3], sampling=kind)
        outputs: list[object] = []
        for step in range(12):
            for slot in range(len(kinds)):
                builder.schedule(slot)
            plan = builder.take_plan()
            plan.masked_slots.extend([0, 1] if step % 3 == 2 else [])
            outcome = builder.send(plan, masks if plan.masked_slots else ())
            for slot, token in outcome.sampled:
                builder.sequences[slot].tokens.append(token)
            outputs += [outcome.sampled, list(outcome.outputs[0].logprobs)]
        return outputs

    assert told(eager=False) == told(eager=True)


def test_logits_of_all_recordings_are_in_the_same_memory(checkpoints: dict[str, TinyCheckpoint]) -> None:
    group = RankGroup(checkpoints["qwen3"].directory, ONE)
    seen: list[int] = []
    sample = group.recorders[0]

    def look(logits: torch.Tensor, rows: Sequence[SamplingRow], **others: Any) -> SampledRows:
        seen.append(logits.untyped_storage().data_ptr())
        return sample(logits, rows, **others)

    group.runners[0]._sample = look
    told(group)
    assert len(seen) > 20
    assert len(set(seen)) == 1


def test_micro_batches_are_recorded_too(
    checkpoints: dict[str, TinyCheckpoint], caplog: pytest.LogCaptureFixture
) -> None:
    """As many rows as stages are given in parts."""
    rows = 64

    def told(*, eager: bool) -> list[torch.Tensor]:
        group = RankGroup(
            checkpoints["qwen3"].directory, STAGES, recorded=not eager, num_blocks=400, max_num_batched_tokens=128,
            max_num_seqs=rows,
        )  # fmt: skip
        builder = PlanBuilder(group)
        for slot in range(rows):
            builder.start(slot, [slot + 1])
        logits = []
        for _ in range(4):
            for slot in range(rows):
                builder.schedule(slot)
            logits.append(builder.run().logits)
        return logits

    assert best_number(rows, 3) > 1
    eager = told(eager=True)
    with caplog.at_level("INFO"):
        recorded = told(eager=False)
    assert [message for message in recordings(caplog) if message.startswith(f"step of {rows} rows recorded")]
    assert all(map(torch.equal, recorded, eager))


@pytest.mark.parametrize(
    ("layout", "dtype", "over"),
    [
        ("uneven", "float32", "native"), ("no part", "float32", "native"), ("uneven", "bfloat16", "native"),
        ("uneven", "float32", "tcp"), ("stages", "float32", "tcp"),
    ],
)  # fmt: skip
def test_sums_of_native_exchanges_do_not_break_a_recording(
    checkpoints: dict[str, TinyCheckpoint],
    layout: str,
    dtype: str,
    over: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExitStack() as stack, caplog.at_level("INFO"):
        shares = LAYOUTS[layout]
        told(make_group(checkpoints["qwen3"], shares, stack, tmp_path, over=over, eager=False, dtype=dtype))
    said = [message for message in recordings(caplog) if "recorded" in message]
    assert said
    assert all("in 1 pieces" in message for message in said)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["uneven", "no part", "helped", "stages"])
def test_a_cpu_rank_beside_a_gpu_rank_records_whole_steps(
    checkpoints: dict[str, TinyCheckpoint], layout: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The GPU is played by the host; the CPU rank's sums, hops and helper links meet it in shared memory."""

    def mixed(folder: Path, stack: ExitStack, *, recorded: bool) -> RankGroup:
        def make(plan: ShardPlan) -> list[ShmExchange]:
            folder.mkdir()
            return stack.enter_context(exchanges(folder, plan.world_size, routes=routes_of(plan, 1)))

        def on_top(host: HostExchange) -> HierarchicalExchange:
            return HierarchicalExchange(host, num_gpu_ranks=1, groups={}, links={}, staging=PlainStaging())

        directory = checkpoints["qwen3"].directory
        return RankGroup(
            directory, LAYOUTS[layout], dtype=dtype, num_gpu_ranks=1, recorded=recorded, make_exchanges=make,
            on_top=on_top,
        )  # fmt: skip

    with ExitStack() as stack, caplog.at_level("INFO"):
        eager = told(mixed(tmp_path / "eager", stack, recorded=False))
        assert not recordings(caplog)
        group = mixed(tmp_path / "recorded", stack, recorded=True)
        assert "steps=recorded" in group.reports[1].kernels
        recorded = told(group)
    said = [message for message in recordings(caplog) if "rows recorded" in message]
    assert len(said) >= 2
    assert all("in 1 pieces" in message for message in said)
    assert all(map(torch.equal, recorded, eager))


def test_a_decoder_that_needs_torch_says_so_and_goes_on(
    checkpoints: dict[str, TinyCheckpoint], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No decoder does; here torch takes over an operator."""
    monkeypatch.setattr(NativeOps, "add_rms_norm", lambda _, *given: PLAIN_OPS.add_rms_norm(*given))
    with caplog.at_level("INFO"):
        recorded = told(RankGroup(checkpoints["qwen3"].directory, ONE))
    assert [message for message in recordings(caplog) if "operator by operator: torch computes" in message]
    assert not [message for message in recordings(caplog) if "recorded:" in message]
    eager = told(RankGroup(checkpoints["qwen3"].directory, ONE, recorded=False))
    assert all(map(torch.equal, recorded, eager))


def test_what_a_rank_says_of_its_steps(checkpoints: dict[str, TinyCheckpoint]) -> None:
    directory = checkpoints["qwen3"].directory
    said = {
        "steps=recorded": RankGroup(directory, ONE, dtype="bfloat16", enforce_eager=True),
        "steps=operator by operator (recording is turned off)": RankGroup(directory, ONE, recorded=False),
        "steps=operator by operator (no native kernels)": RankGroup(directory, ONE, native=False),
    }
    said |= {"steps=recorded in pieces (sums and links between ranks break them)": RankGroup(directory, UNEVEN)}
    for kernel, group in said.items():
        assert kernel in group.reports[0].kernels
