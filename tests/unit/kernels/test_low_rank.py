"""Low-rank products of adapters on a GPU: each row gets its own adapter's, without a word from the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.adapters.low_rank import MAX_ADAPTERS, AdapterRows
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.layers.triton.linear import DeviceLowRank
from hetero_worker.memory.streams import HOST
from hetero_worker.runners.graphs.graph_forward import GraphForward
from tests.support.lora_adapters import save_adapter
from tests.support.low_rank import expected, factors_of
from tests.support.pseudo_gpu import PseudoGpu
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.seeded import seeded
from tests.support.tape import TapeBackend
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.unit

HEIGHTS = (70, 1, 5)
"""Output columns of the parts."""
RANKS = {1: (3, None, 8), 9: (20, 1, None), MAX_ADAPTERS: (16, 16, 17)}
"""Of the parts, by the adapters' numbers."""
MAX_RANK = 20
TOLERANCE = 1e-4
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = [7, 150, 3, 88, 199, 0, 42]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(1, 5, torch.float32), (18, 40, torch.bfloat16), (70, 1100, torch.float32)],
    ids=["one", "few", "many"],
)
def test_rows_get_their_own_adapter_s_product(rows: int, width: int, dtype: torch.dtype) -> None:
    adapter_rows = AdapterRows(MAX_RANK)
    low_rank = DeviceLowRank(HEIGHTS, adapter_rows, device=HOST)
    for number in RANKS:
        low_rank.hold(number, factors_of(HEIGHTS, width, RANKS[number], number), dtype)
    numbers = torch.tensor(([9, 0, 1, MAX_ADAPTERS, 1, 0, 9] * 10)[:rows])
    x, y = randn(rows, width, dtype=dtype), randn(rows, sum(HEIGHTS), seed=1, dtype=dtype)
    got = y.clone()
    low_rank.add(x, got)
    assert torch.equal(got, y), "no row has an adapter"
    adapter_rows.begin(numbers)
    low_rank.add(x, got)
    assert torch.equal(got[numbers == 0], y[numbers == 0])
    for number in set(numbers.tolist()) - {0}:
        own = numbers == number
        wanted = expected(HEIGHTS, x[own], y[own], factors_of(HEIGHTS, width, RANKS[number], number))
        close = 1e-6 if dtype == torch.float32 else 2**-6  # what is interpreted cuts bits off
        torch.testing.assert_close(got[own].double(), wanted, rtol=0, atol=close * float(wanted.abs().max()))
    for row in (0, rows - 1):
        alone = y[row : row + 1].clone()
        adapter_rows.begin(numbers[row : row + 1])
        low_rank.add(x[row : row + 1], alone)
        assert torch.equal(alone[0], got[row]), "a row's bits do not depend on the others, nor on their number"
    low_rank.drop(9)
    adapter_rows.begin(torch.full((rows,), 9))
    got = y.clone()
    low_rank.add(x, got)
    assert torch.equal(got, y), "what was dropped adds nothing"


def test_inputs_apart_from_each_other_are_taken_as_they_are() -> None:
    adapter_rows = AdapterRows(MAX_RANK)
    low_rank, wide = DeviceLowRank(HEIGHTS, adapter_rows, device=HOST), randn(3, 40)
    low_rank.hold(1, factors_of(HEIGHTS, 20, RANKS[1], 1), torch.float32)
    adapter_rows.begin(torch.tensor([1, 0, 1]))
    outcomes = [torch.zeros(3, sum(HEIGHTS)) for _ in range(2)]
    for x, y in zip((wide[:, 3:23], wide[:, 3:23].clone()), outcomes, strict=True):
        low_rank.add(x, y)
    assert torch.equal(*outcomes)


class LaunchTape(TapeBackend):
    """A tape that notes interpreted kernels, too: each is launched again in every replay, on the same tensors."""

    def launch(self, run: Any) -> None:
        tape = self._tape
        if tape is None:
            run()
            return
        tape.stop()
        run()
        tape.note(run)
        tape.start()


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[LaunchTape]:
    """Recorders of played GPU ranks, which compute linear layers with our kernels."""
    from triton.runtime.interpreter import GridExecutor

    made: list[LaunchTape] = []
    launched = GridExecutor.__call__

    def launch(executor: Any, *arguments: Any, **options: Any) -> None:
        def run() -> None:
            launched(executor, *arguments, **options)

        recording = [tape for tape in made if tape._tape is not None]
        recording[0].launch(run) if recording else run()

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    monkeypatch.setattr(PseudoGpu, "_triton_problem", None)
    monkeypatch.setattr(PseudoGpu, "linear", CudaBackend.linear)
    return made


def test_steps_with_adapters_are_replayed_and_others_launch_nothing_for_them(
    tmp_path: Path, tapes: list[LaunchTape]
) -> None:
    """Replays have PEFT's logits, of adapters that came after the recording, too."""
    checkpoint = save_tiny("qwen3", tmp_path / "model", num_hidden_layers=1)
    adapters = {
        1: save_adapter(checkpoint.directory, tmp_path / "all", modules=ALL, rank=8, seed=1),
        2: save_adapter(checkpoint.directory, tmp_path / "some", modules=("q_proj", "down_proj"), rank=5, seed=2),
    }

    def make_graphs(device: torch.device) -> LaunchTape:
        tapes.append(LaunchTape(device))
        return tapes[-1]

    shares = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,))
    group = RankGroup(checkpoint.directory, shares, num_gpu_ranks=1, max_adapters=2, make_graphs=make_graphs)
    builder = PlanBuilder(group)

    def load(number: int) -> None:
        directory = adapters[number].directory
        asked = ranks_pb2.LoadAdapter(number=number, directory=str(directory), root=str(tmp_path))
        (output,) = builder.command(ranks_pb2.GroupCommand(load_adapter=asked)).outputs
        assert output.report is not None
        assert output.report.done, output.report

    def run(*slots: int) -> None:
        for slot in slots:
            builder.schedule(slot)
        done = builder.run()
        for (slot, _), row in zip(done.sampled, done.logits, strict=True):
            source = adapters.get(slot, checkpoint)
            wanted = source.logits(builder.sequences[slot].tokens[:-1])[-1]
            assert (row - wanted).abs().max() <= TOLERANCE, (slot, (row - wanted).abs().max())

    builder.start(0, PROMPT)
    for _ in range(4):
        run(0)
    load(1)
    builder.start(1, PROMPT, adapter=1)
    for _ in range(4):
        run(0, 1)
    load(2)
    builder.start(2, PROMPT[::-1], adapter=2)
    run(0, 1, 2)
    builder.release(0)
    run(1, 2)
    builder.release(1)
    builder.start(0, PROMPT)
    run(2, 0)
    run(2, 0)
    cache = group.runners[0]._model_state.cache
    assert cache is not None
    assert isinstance(cache.forward, GraphForward)
    assert cache.forward._bound is not None
    assert set(cache.forward._bound.graphs) == {(1, False), (2, True)}
    (tape,) = tapes
    assert tape.recorded < tape.replayed
