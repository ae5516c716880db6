"""The solver against brute force: all integer plans of every mode, enumerated here in another way."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.rank_memory import ASSUMED_GPU_RUNTIME_BYTES, RUNTIME_BYTES
from hetero_api.sharding import LayerShard, RankShard, ShardPlan, UnitRange
from hetero_api.spec import ExpertDeal, PlacementShares, PlacementSpec, WorkloadSpec
from hetero_api.spec_pools import PoolType
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Bounds, Decision
from hetero_placement.hardware import ExchangeSpeeds, Hardware, RankHardware, Speeds
from hetero_placement.memory_model import MemoryModel
from hetero_placement.shard_plans import deal_layers, deal_within_layers
from hetero_placement.solver import ALL_PARTS, CPU_ONLY, GPU_ONLY, LAYER, MLP_ONLY, TENSOR, solve
from hetero_placement.tensor_search import ExpertLayout
from tests.unit.placement.placement_setup import MIXTRAL, config_of

pytestmark = pytest.mark.unit

CASES = 200
DTYPE = "float32"
Counts = tuple[int, ...]


class Case:
    """A random model, group and workload, small enough to enumerate."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        world = self.random.choice([1, 2, 2, 2, 2, 3, 3])
        self.config = self._config(small=world == 3)
        self.bounds = Bounds(
            max_model_len=256,
            max_num_batched_tokens=self.random.choice([64, 512]),
            max_num_seqs=8,
            enforce_eager=seed % 2 == 0,
        )
        self.workload = WorkloadSpec(
            prompt_tokens=self.random.choice([16, 100, 700]),
            output_tokens=self.random.choice([1, 64]),
            concurrency=self.random.choice([1, 3, 16]),
        )
        # GPUs of a group hang on equal buses: which of them copies for the others is no question of speed then.
        self.bus = 10 ** self.random.uniform(8, 10)
        self.hardware = self._hardware(world)
        self.model = CostModel(self.config, self.hardware.levelled(), dtype=DTYPE)
        self.memory = MemoryModel(self.config, self.hardware.levelled(), self.bounds, dtype=DTYPE)

    def _config(self, *, small: bool) -> ModelConfig:
        choose = self.random.choice
        heads = choose([1, 2] if small else [1, 2, 3, 4])
        shape = {
            "num_hidden_layers": choose([1, 2, 3, 4]),
            "num_key_value_heads": heads,
            "num_attention_heads": heads * choose([1, 2]),
            "head_dim": 64,
            "hidden_size": choose([64, 1024]),
            "intermediate_size": 64 * choose([1, 2, 3] if small else [1, 2, 3, 5, 8]),
            "vocab_size": 64 * choose([1, 2, 3] if small else [1, 2, 4, 7]),
        }
        if self.random.random() < 0.2:
            shape |= MIXTRAL | {"num_local_experts": choose([2, 3, 4]), "num_experts_per_tok": choose([1, 2])}
        return config_of(**shape)

    def _hardware(self, world: int) -> Hardware:
        """Some of it alike; memory plenty, or such that the model fits in some ways only."""
        num_gpus = self.random.randint(0, min(2, world))
        alike = self.random.random() < 0.3
        tight = self.random.random() < 0.5
        ranks = [self._rank(PoolType.GPU if rank < num_gpus else PoolType.CPU, rank, tight) for rank in range(world)]
        if alike:
            ranks = [
                replace(ranks[0 if rank < num_gpus else num_gpus], pool=made.pool[:3])
                for rank, made in enumerate(ranks)
            ]
        slow = 10 ** self.random.uniform(-7, -4)
        host = ExchangeSpeeds.of_rates(slow, self.random.choice([None, 1e9]))
        return Hardware(tuple(ranks), host, ExchangeSpeeds.of_rates(slow / 4))

    def _rank(self, kind: PoolType, rank: int, tight: bool) -> RankHardware:
        uniform = self.random.uniform
        bandwidth = 10 ** uniform(8.7, 9.5)
        flops = {DTYPE: bandwidth * uniform(1, 40)} if self.random.random() < 0.8 else {}
        bus = self.bus if kind == PoolType.GPU else 0.0
        speeds = Speeds(bandwidth, flops, to_device_bandwidth=bus, from_device_bandwidth=bus, device_latency_s=1e-6)
        weights = self.config.num_parameters * 4
        runtime = ASSUMED_GPU_RUNTIME_BYTES if kind == PoolType.GPU else RUNTIME_BYTES
        graphs = 48 << 20 if kind == PoolType.GPU and not self.bounds.enforce_eager else 0
        memory = runtime + graphs + (20 << 20) + int(weights * uniform(0.2, 1.8)) if tight else 10**12
        return RankHardware(kind, "host", memory, speeds, f"{kind.value}{rank}")

    def solve(self, *, exhaustive: int = 20_000, experts: ExpertDeal = ExpertDeal.AUTO) -> Decision:
        placement = PlacementSpec(workload=self.workload, experts=experts)
        return solve(
            self.config, self.hardware, dtype=DTYPE, placement=placement, bounds=self.bounds, exhaustive=exhaustive
        )

    def seconds(self, plan: ShardPlan) -> float:
        return self.model.predict(plan, self.workload, self.bounds).workload_s

    def fits(self, plan: ShardPlan) -> bool:
        return not self.memory.problem(plan)


def all_deals(units: int, parts: int) -> Iterator[Counts]:
    """By where the bars stand between units."""
    for bars in combinations(range(units + parts - 1), parts - 1):
        edges = (-1, *bars, units + parts - 1)
        yield tuple(edges[i + 1] - edges[i] - 1 for i in range(parts))


def ranges(counts: Sequence[int], size: int = 1) -> list[UnitRange]:
    return [UnitRange(sum(counts[:i]) * size, sum(counts[: i + 1]) * size) for i in range(len(counts))]


def tensor_plans(case: Case, deal: ExpertDeal) -> Iterator[ShardPlan]:
    """Every way to split all layers alike."""
    config, world = case.config, len(case.hardware.ranks)
    sparse = config.experts is not None
    in_slices = deal == ExpertDeal.SLICES and config.expert_columns > 64
    wide_units = config.num_experts if sparse and not in_slices else config.intermediate_size // 64
    for heads, wide, rows in product(
        all_deals(config.num_kv_heads, world), all_deals(wide_units, world), all_deals(config.vocab_size // 64, world)
    ):
        nothing = [UnitRange(0, 0)] * world
        columns = nothing if sparse else ranges(wide, 64)
        experts = ranges(wide) if sparse else nothing
        slices = nothing
        if in_slices:
            slices = [part if part.size else UnitRange(0, 0) for part in ranges(wide, 64)]
            experts = [UnitRange(0, config.num_experts if part.size else 0) for part in slices]
        layers = map(LayerShard, ranges(heads), columns, experts, slices)
        parts = zip(layers, ranges(rows, 64), strict=True)
        yield ShardPlan(tuple(RankShard((layer,) * config.num_layers, v, v) for layer, v in parts))


def layer_plans(case: Case) -> Iterator[ShardPlan]:
    """Every way to deal whole layers in a row."""
    config, world = case.config, len(case.hardware.ranks)
    sparse = config.experts is not None
    full = (config.num_kv_heads, 0 if sparse else config.intermediate_size, config.num_experts)

    def on(owner: int, total: int) -> list[UnitRange]:
        return ranges([total * (rank == owner) for rank in range(world)])

    for counts in all_deals(config.num_layers, world):
        owners = [rank for rank, count in enumerate(counts) for _ in range(count)]
        layers = [[LayerShard(*parts) for parts in zip(*(on(o, n) for n in full), strict=True)] for o in owners]
        first, last = on(owners[0], config.vocab_size), on(owners[-1], config.vocab_size)
        yield ShardPlan(tuple(RankShard(tuple(layer[r] for layer in layers), first[r], last[r]) for r in range(world)))


def mode_of(case: Case, plan: ShardPlan) -> str | None:
    """Which option a plan that splits all layers belongs to; None for one that no option covers."""
    num_gpus, world = case.hardware.num_gpu_ranks, len(case.hardware.ranks)
    holders = set(plan.attention_owners(0))
    busy = set(plan.layer_owners(0)) | set(plan.head_owners())
    gpus, cpus = set(range(num_gpus)), set(range(num_gpus, world))
    if not busy & gpus:
        if num_gpus:
            return CPU_ONLY
        # A CPU rank that has rows only would be neither idle nor of use to a layer.
        return TENSOR if set(plan.layer_owners(0)) == cpus else CPU_ONLY
    if not holders & gpus:
        return None
    if not busy & cpus:
        return GPU_ONLY
    return ALL_PARTS if (holders | set(plan.head_owners())) & cpus else MLP_ONLY


def best_by_mode(case: Case, deal: ExpertDeal) -> dict[str, float]:
    """Least seconds of every option that has a plan that fits."""
    best: dict[str, float] = {}
    for plan in tensor_plans(case, deal):
        mode = mode_of(case, plan)
        if mode is not None and case.fits(plan):
            best[mode] = min(best.get(mode, float("inf")), case.seconds(plan))
    if len(case.hardware.ranks) > 1:
        times = [case.seconds(plan) for plan in layer_plans(case) if case.fits(plan)]
        best |= {LAYER: min(times)} if times else {}
    return best


def found_by_mode(decision: Decision) -> dict[str, float]:
    layouts = tuple(f", {layout.value}" for layout in ExpertLayout)
    return {
        CPU_ONLY if option.name.startswith(CPU_ONLY) else _without(option.name, layouts): option.prediction.workload_s
        for option in decision.options
        if option.plan is not None and option.prediction is not None
    }


def _without(name: str, endings: Sequence[str]) -> str:
    return next((name.removesuffix(ending) for ending in endings if name.endswith(ending)), name)


@pytest.mark.parametrize("block", range(20))
def test_every_option_is_as_fast_as_the_best_of_all_integer_plans(block: int) -> None:
    """Of models of experts, once for whole ones and once for slices."""
    for seed in range(block * CASES // 20, (block + 1) * CASES // 20):
        case = Case(seed)
        deal = ExpertDeal.SLICES if seed % 2 else ExpertDeal.WHOLE
        expected = best_by_mode(case, deal)
        if not expected:
            with pytest.raises(PlanError):
                case.solve(experts=deal)
            continue
        decision = case.solve(experts=deal)
        assert found_by_mode(decision) == pytest.approx(expected, rel=1e-6), seed
        assert case.fits(decision.plan), seed
        assert decision.chosen.prediction is not None
        assert decision.chosen.prediction.workload_s == pytest.approx(min(expected.values()), rel=1e-5), seed
        assert case.seconds(decision.plan) == pytest.approx(decision.chosen.prediction.workload_s), seed


@pytest.mark.parametrize("block", range(4))
def test_going_step_by_step_finds_what_looking_at_all_deals_finds(block: int) -> None:
    """What larger models get; nothing is lost, and next to nothing slower."""
    slower = []
    for seed in range(block * CASES // 4, (block + 1) * CASES // 4):
        case = Case(seed)
        try:
            exact = found_by_mode(case.solve())
        except PlanError:
            continue
        found = found_by_mode(case.solve(exhaustive=0))
        assert found.keys() == exact.keys(), seed
        ratios = [found[name] / exact[name] for name in exact]
        assert max(ratios) < 1.03, seed
        slower += [ratio for ratio in ratios if ratio > 1 + 1e-6]
    assert len(slower) <= 2


@pytest.mark.parametrize("seed", range(CASES))
def test_the_plan_is_never_slower_than_gpu_only_layer_and_even_split(seed: int) -> None:
    case = Case(seed)
    try:
        chosen = case.solve().chosen
    except PlanError:
        return
    world, num_gpus = len(case.hardware.ranks), case.hardware.num_gpu_ranks
    simple = [deal_within_layers(case.config, cores=[1] * world, shares=PlacementShares())]
    simple.append(deal_layers(case.config, cores=[1] * world, shares=PlacementShares()))
    if num_gpus:
        weights = [float(rank < num_gpus) for rank in range(world)]
        shares = PlacementShares(attention=weights, mlp=weights, vocabulary=weights)
        simple.append(deal_within_layers(case.config, cores=[1] * world, shares=shares))
    assert chosen.prediction is not None
    for plan in simple:
        if case.fits(plan):
            assert chosen.prediction.workload_s <= case.seconds(plan) * (1 + 1e-5)
