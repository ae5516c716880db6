"""An MLP of experts equals its definition on every rank's share of it, whatever the router chooses."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from hetero_api.errors import ModelError, PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.rank_memory import EXPERT_ROWS
from hetero_api.sharding import ranges_of_counts
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.layers.blocks import mlp_norm
from hetero_worker.layers.fused_ops import PLAIN_OPS
from hetero_worker.layers.linear_kernels import PlainKernel
from hetero_worker.layers.moe import ExpertMlp
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.native.op_queue import OpQueue
from tests.support.native_compute import op_queue_of

pytestmark = pytest.mark.unit

HIDDEN, WIDTH, NUM_EXPERTS, PER_TOKEN = 24, 10, 6, 2
BLOCK = "model.layers.0.mlp"
FIELDS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "hidden_size": HIDDEN, "intermediate_size": 40,
    "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 64, "mlp_only_layers": [1],
    "num_experts": NUM_EXPERTS, "num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": WIDTH,
}  # fmt: skip
CONFIG = ModelConfig.from_hf(FIELDS)
UNEVEN = ((6,), (1, 5), (0, 2, 4), (3, 0, 1, 2))


class Experts:
    """Weights of one layer, in a checkpoint, and what they ought to compute."""

    def __init__(self, directory: Path, router: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.norm = 1 + 0.3 * torch.randn(HIDDEN)
        self.router = router
        self.gate, self.up = torch.randn(2, NUM_EXPERTS, WIDTH, HIDDEN) / 4
        self.down = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) / 2
        self._directory = directory
        tensors = {"model.layers.0.post_attention_layernorm.weight": self.norm, f"{BLOCK}.gate.weight": router}
        for i in range(NUM_EXPERTS):
            for name, weight in {"gate_proj": self.gate, "up_proj": self.up, "down_proj": self.down}.items():
                tensors[f"{BLOCK}.experts.{i}.{name}.weight"] = weight[i].clone()
        save_file(tensors, directory / "model.safetensors")

    def shard(self, experts: Collection[int], op_queue: OpQueue | None = None) -> ExpertMlp:
        """With native kernels if there is a queue."""
        ops = PLAIN_OPS if op_queue is None else NativeOps(op_queue)
        mlp = ExpertMlp(CONFIG, 0, experts, norm=mlp_norm(CONFIG, 0, ops), ops=ops)
        with Checkpoint(self._directory) as checkpoint:
            kernel = PlainKernel() if op_queue is None else NativeLinear(op_queue)
            mlp.load(checkpoint, dtype=torch.float32, kernel=kernel)
        return mlp

    def partials(self, hidden: torch.Tensor, counts: tuple[int, ...]) -> list[torch.Tensor]:
        """What ranks with so many experts each compute; ranks without any take no part."""
        return [self.shard(held)(hidden) for held in dealt(range(NUM_EXPERTS), counts)]

    def expected(self, hidden: torch.Tensor) -> torch.Tensor:
        """Token by token; of experts that tie, the lower number."""
        rows = [
            sum((share * self._expert(i, x) for i, share in chosen.items()), start=torch.zeros(HIDDEN))
            for x, chosen in self._routed(hidden)
        ]
        return torch.stack(rows).float()

    def choices(self, hidden: torch.Tensor) -> list[int]:
        """Experts that the tokens choose, all in one list."""
        return [i for _, chosen in self._routed(hidden) for i in chosen]

    def _routed(self, hidden: torch.Tensor) -> Iterator[tuple[torch.Tensor, dict[int, torch.Tensor]]]:
        """Each token's normed state, and the shares of the experts that it chooses."""
        for x in F.rms_norm(hidden.double(), [HIDDEN], self.norm.double(), CONFIG.rms_norm_eps):
            shares = (self.router.double() @ x).softmax(0)
            chosen = sorted(range(NUM_EXPERTS), key=lambda i: (-shares[i].float(), i))[:PER_TOKEN]
            yield x, {i: shares[i] for i in chosen}

    def _expert(self, i: int, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.gate[i].double(), self.up[i].double(), self.down[i].double()
        result: torch.Tensor = down @ (F.silu(gate @ x) * (up @ x))
        return result


def dealt(order: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """The experts of each rank that has any, where ranks take so many each from the front of an order."""
    return [list(order[part.begin : part.end]) for part in ranges_of_counts(counts) if part.size]


def hidden_states(tokens: int, *, seed: int = 3) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def experts(tmp_path: Path) -> Experts:
    return Experts(tmp_path, torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("counts", UNEVEN, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_the_ranks_partials_add_up(experts: Experts, counts: tuple[int, ...], tokens: int) -> None:
    hidden = hidden_states(tokens)
    partials = experts.partials(hidden, counts)
    assert torch.allclose(sum(partials, start=torch.zeros_like(hidden)), experts.expected(hidden), atol=1e-5)


@pytest.mark.parametrize("counts", UNEVEN, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_partials_add_up_whichever_experts_the_ranks_hold(
    experts: Experts, counts: tuple[int, ...], seed: int
) -> None:
    order = random.Random(seed).sample(range(NUM_EXPERTS), NUM_EXPERTS)
    hidden = hidden_states(19)
    partials = [experts.shard(held)(hidden) for held in dealt(order, counts)]
    assert torch.allclose(sum(partials, start=torch.zeros_like(hidden)), experts.expected(hidden), atol=1e-5)


@pytest.mark.parametrize("counts", UNEVEN, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_native_kernels_compute_all_experts_together(experts: Experts, counts: tuple[int, ...], tokens: int) -> None:
    """And count the tokens of the rank's own experts."""
    hidden, op_queue, total = hidden_states(tokens), op_queue_of(), torch.zeros(tokens, HIDDEN)
    for held in dealt(range(NUM_EXPERTS), counts):
        native, plain = experts.shard(held, op_queue), experts.shard(held)
        total += native(hidden)
        plain(hidden)
        assert native.take_counts() == plain.take_counts()
    assert not tokens or torch.allclose(total, experts.expected(hidden), atol=1e-5)


def test_experts_that_are_taken_over_compute_what_loaded_ones_do(experts: Experts, tmp_path: Path) -> None:
    """To the bit; those that stay are not read again."""
    hidden, wanted = hidden_states(23), [5, 1, 3]
    mlp, loaded = experts.shard([0, 1, 2]), experts.shard(wanted)
    before, kept = mlp(hidden), mlp._experts[1]
    with Checkpoint(tmp_path) as checkpoint:
        read = mlp.read(wanted, checkpoint, dtype=torch.float32, kernel=PlainKernel())
    assert torch.equal(mlp(hidden), before), "reading changes nothing"
    assert read[1] is kept
    mlp.hold(read)
    assert mlp.numbers == (1, 3, 5)
    assert torch.equal(mlp(hidden), loaded(hidden))
    assert torch.allclose(mlp(hidden) + experts.shard([0, 2, 4])(hidden), experts.expected(hidden), atol=1e-5)


def test_each_rank_counts_the_tokens_of_its_own_experts(experts: Experts) -> None:
    hidden = hidden_states(50)
    shards = [experts.shard([4, 0]), experts.shard([1, 2, 3, 5])]
    for part in (hidden, hidden[:20], hidden[:0]):
        for mlp in shards:
            mlp(part)
    counts = [mlp.take_counts() for mlp in shards]
    every = experts.choices(hidden) + experts.choices(hidden[:20])
    assert counts[0] == [every.count(i) if i in (4, 0) else 0 for i in range(NUM_EXPERTS)]
    assert counts[1] == [every.count(i) if i not in (4, 0) else 0 for i in range(NUM_EXPERTS)]
    assert sum(map(sum, counts)) == 70 * PER_TOKEN
    assert [sum(mlp.take_counts()) for mlp in shards] == [0, 0], "counted anew"


def test_no_tokens_make_an_empty_partial(experts: Experts) -> None:
    assert experts.shard(range(2, 5))(hidden_states(0)).shape == (0, HIDDEN)


def test_a_rank_whose_experts_no_token_wants_adds_nothing(tmp_path: Path) -> None:
    router = torch.full((NUM_EXPERTS, HIDDEN), -1.0)
    router[2:4] = 1.0
    experts = Experts(tmp_path, router)
    hidden = hidden_states(9).abs()
    nothing, everything, none_either = experts.partials(hidden, (2, 2, 2))
    assert not nothing.any()
    assert not none_either.any()
    assert torch.allclose(everything, experts.expected(hidden), atol=1e-5)


@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_experts_that_tie_are_chosen_by_number_on_every_rank(tmp_path: Path, counts: tuple[int, ...]) -> None:
    """All rows of the router are alike: experts 0 and 1 get every token, on whatever ranks they are."""
    router = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)).expand(NUM_EXPERTS, -1).contiguous()
    experts = Experts(tmp_path, router)
    hidden = hidden_states(21)
    partials = experts.partials(hidden, counts)
    assert torch.allclose(sum(partials, start=torch.zeros_like(hidden)), experts.expected(hidden), atol=1e-5)


def test_near_ties_are_decided_alike_however_rows_are_added_up(tmp_path: Path) -> None:
    """One token alone and many together take other kernels, as two ranks may: in float32 they would disagree."""
    row = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    router = row.expand(NUM_EXPERTS, -1) * (1 + 1e-7 * torch.randn(NUM_EXPERTS, 1))
    mlp = Experts(tmp_path, router.contiguous()).shard(range(3))
    hidden = hidden_states(500)
    together, _ = mlp._router(hidden)
    alone = torch.cat([mlp._router(hidden[i : i + 1])[0] for i in range(len(hidden))])
    assert torch.equal(together, alone)
    assert len(set(map(tuple, together.tolist()))) > 1


def test_a_crowded_expert_takes_its_tokens_in_bounded_parts(tmp_path: Path) -> None:
    router = torch.full((NUM_EXPERTS, HIDDEN), -1.0)
    router[:2] = 1.0
    experts = Experts(tmp_path, router)
    mlp, hidden = experts.shard(range(6)), hidden_states(2 * EXPERT_ROWS + 30).abs()
    seen: list[int] = []

    def recorded(expert: Any) -> Any:
        def compute(rows: torch.Tensor) -> torch.Tensor:
            seen.append(len(rows))
            result: torch.Tensor = expert(rows)
            return result

        return compute

    mlp._experts = {number: recorded(expert) for number, expert in mlp._experts.items()}
    assert torch.allclose(mlp(hidden), experts.expected(hidden), atol=1e-5)
    assert seen == [EXPERT_ROWS, EXPERT_ROWS, 30] * 2


def test_weights_are_counted_as_they_are_held(experts: Experts) -> None:
    """Three own experts, the norm, and the whole router."""
    mlp = experts.shard(range(1, 4))
    assert mlp.weight_bytes(torch.float32) == 4 * (3 * 3 * WIDTH * HIDDEN + HIDDEN + NUM_EXPERTS * HIDDEN)


def test_experts_of_a_dense_layer_cannot_be_owned() -> None:
    with pytest.raises(PlanError, match="deals experts of layer 1, which is dense"):
        ExpertMlp(CONFIG, 1, [0], norm=mlp_norm(CONFIG, 1))


def test_an_expert_of_another_width_is_named(experts: Experts, tmp_path: Path) -> None:
    wider = ModelConfig.from_hf(FIELDS | {"moe_intermediate_size": WIDTH + 1})
    mlp = ExpertMlp(wider, 0, [4, 5], norm=mlp_norm(wider, 0))
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(ModelError, match=r"experts\.4\.gate_proj\.weight has shape \[10, 24\], config\.json says \[11"),
    ):
        mlp.load(checkpoint, dtype=torch.float32, kernel=PlainKernel())
