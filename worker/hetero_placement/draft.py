"""Where the draft model lies: whole on one rank, or every layer split over all ranks.

It computes behind a step's draws, while ranks do nothing else, one token after another. Whole on rank 0 it needs no
exchange. Ranks that split it read it together, and meet twice a layer; so that pays where a layer takes longer to read
than a meeting. On a CPU rank it takes no memory of a GPU. A prediction head lies on rank 0, whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.spec import DraftRanks, PlacementShares, WorkloadSpec
from hetero_api.spec_pools import PoolType
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Bounds, DraftPlace
from hetero_placement.hardware import Hardware
from hetero_placement.shard_plans import deal_within_layers, largest_remainder, whole_on


def draft_places(
    draft: ModelConfig, hardware: Hardware, *, dtype: str, bounds: Bounds, workload: WorkloadSpec
) -> tuple[DraftPlace, ...]:
    """Return the places that the resource allows, the fastest first; of those that are as fast the simplest.

    Raises PlanError where there is none.
    """
    if draft.follows_states:
        asked = {str(DraftRanks.AUTO): whole_on(draft, 0, len(hardware.ranks))}
    else:
        asked = {
            str(name): plan for name, plan in _plans(draft, hardware) if bounds.draft_ranks in (name, DraftRanks.AUTO)
        }
    if not asked:
        raise PlanError(
            f"spec.engine.speculative.draft.ranks: {bounds.draft_ranks}, but the draft model has {draft.num_kv_heads} "
            f"KV heads for {len(hardware.ranks)} ranks; take Auto, GPU or CPU"
        )
    batch = min(workload.concurrency, bounds.max_num_seqs)

    def place(name: str, plan: ShardPlan) -> DraftPlace:
        seconds = draft_token_s(
            draft, hardware, plan, dtype=dtype, bounds=bounds, batch=batch, context=workload.decode_context
        )
        return DraftPlace(name, plan, seconds)

    # One rank is both the first of its kind and all of them.
    names = {plan: name for name, plan in reversed(asked.items())}
    places = [place(name, plan) for name, plan in asked.items() if names[plan] == name]
    return tuple(sorted(places, key=lambda each: float(f"{each.token_s:.3g}")))


def draft_token_s(
    draft: ModelConfig, hardware: Hardware, plan: ShardPlan, *, dtype: str, bounds: Bounds, batch: int, context: float
) -> float:
    """Predict the seconds of drafting a token for each of `batch` sequences that attend to `context` tokens.

    What ranks measured is of the served model's parts, and the gateway has no turn between two tokens.
    """
    ranks = tuple(replace(rank, speeds=replace(rank.speeds, costs=(), turnaround_s=0.0)) for rank in hardware.ranks)
    if plan.owners == (0,):
        alone = replace(ranks[0], speeds=ranks[0].speeds.alone)
        hardware, plan = Hardware((alone,)), ShardPlan(plan.ranks[:1], plan.expert_orders)
    else:
        hardware = replace(hardware, ranks=ranks)
    return CostModel.within(bounds, draft, hardware, dtype=dtype).decode_step_s(plan, batch=batch, context=context)


def _plans(draft: ModelConfig, hardware: Hardware) -> Iterator[tuple[DraftRanks, ShardPlan]]:
    world = len(hardware.ranks)
    for name, kind in ((DraftRanks.GPU, PoolType.GPU), (DraftRanks.CPU, PoolType.CPU)):
        if ranks := hardware.ranks_of(kind):
            yield name, whole_on(draft, ranks[0], world)
    if world <= draft.num_kv_heads:
        speeds = [int(rank.speeds.memory_bandwidth) for rank in hardware.ranks]
        heads = [1.0 + more for more in largest_remainder(draft.num_kv_heads - world, speeds)]
        yield DraftRanks.ALL, deal_within_layers(draft, cores=speeds, shares=PlacementShares(attention=heads))
