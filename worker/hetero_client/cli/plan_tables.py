"""Tables of `hetero plan`: what was considered, and who gets what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from hetero_api.sharding import LayerShard, RankShard
from hetero_placement.decision import Decision, Option
from hetero_placement.hardware import DeviceKind, Hardware
from hetero_placement.memory_model import MemoryModel

GB = 1e9


def options_table(decision: Decision, hardware: Hardware) -> Table:
    """A row an option, the chosen one marked."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    kinds = [kind for kind in (DeviceKind.GPU, DeviceKind.CPU) if any(rank.kind is kind for rank in hardware.ranks)]
    table.add_column("")
    table.add_column("placement", no_wrap=True)
    for name in ("decode tok/s", "prefill tok/s", "workload s", *(f"on {kind.value}" for kind in kinds)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why not")
    for option in decision.options:
        style = "bold" if option is decision.chosen else None
        mark = "*" if option is decision.chosen else ""
        table.add_row(
            mark, option.name, *_figures(option), *_shares(option, hardware, kinds), option.why_not, style=style
        )
    return table


def ranks_table(decision: Decision, hardware: Hardware, memory: MemoryModel) -> Table:
    """A row a rank of the chosen plan."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("rank", "pool", "layers", "KV heads", "MLP", "vocab rows", "weights GB", "needs GB", "has GB")
    for name in columns:
        table.add_column(name, justify="left" if name == "pool" else "right")
    for number, (shard, rank) in enumerate(zip(decision.plan.ranks, hardware.ranks, strict=True)):
        need = memory.need(number, shard)
        table.add_row(
            str(number),
            rank.pool,
            str(sum(not layer.is_empty for layer in shard.layers)),
            _most(shard, lambda layer: layer.kv_heads.size),
            _mlp(shard),
            _vocabulary(shard),
            f"{need.weights / GB:.2f}",
            f"{need.total / GB:.2f}",
            f"{rank.memory_bytes / GB:.2f}",
        )
    return table


def cache_line(decision: Decision, memory: MemoryModel, *, block_size: int) -> str:
    """How much the KV cache of the chosen plan can hold, in a line."""
    blocks = memory.kv_blocks(decision.plan) - 1
    return f"KV cache: at least {blocks} blocks of {block_size} tokens"


def decision_json(decision: Decision, hardware: Hardware, memory: MemoryModel) -> dict[str, Any]:
    """All of it for a program; seconds, bytes and tokens."""
    return {
        "kvBlocks": memory.kv_blocks(decision.plan) - 1,
        "chosen": decision.chosen.name,
        "reason": decision.reason,
        "options": [_option_json(option, is_chosen=option is decision.chosen) for option in decision.options],
        "ranks": [
            {
                "rank": number,
                "pool": hardware.ranks[number].pool,
                "kind": hardware.ranks[number].kind.value,
                "weightShare": decision.chosen.weight_shares[number],
                "memoryBytes": hardware.ranks[number].memory_bytes,
                "neededBytes": asdict(memory.need(number, shard)),
                "layers": [_layer_json(layer) for layer in shard.layers],
                "embeddingRows": list(shard.embedding_rows),
                "headRows": list(shard.head_rows),
            }
            for number, shard in enumerate(decision.plan.ranks)
        ],
    }


def _option_json(option: Option, *, is_chosen: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": option.name,
        "mode": str(option.mode) if option.mode is not None else None,
        "chosen": is_chosen,
        "whyNot": option.why_not or None,
        "weightShares": list(option.weight_shares) or None,
    }
    if option.prediction is not None:
        told |= {"decodeTokensPerSecond": option.prediction.decode_tokens_per_s}
        if option.plan is not None:
            told |= {
                "prefillTokensPerSecond": option.prediction.prefill_tokens_per_s,
                "workloadSeconds": option.prediction.workload_s,
            }
    return told


def _layer_json(layer: LayerShard) -> dict[str, list[int]]:
    return {"kvHeads": list(layer.kv_heads), "mlpColumns": list(layer.mlp_columns), "experts": list(layer.experts)}


def _figures(option: Option) -> list[str]:
    if option.prediction is None:
        return ["no fit", "", ""] if option.mode is not None else ["", "", ""]
    decode = _rate(option.prediction.decode_tokens_per_s)
    if option.plan is None:
        return [decode, "", ""]
    return [decode, _rate(option.prediction.prefill_tokens_per_s), f"{option.prediction.workload_s:.3g}"]


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"


def _shares(option: Option, hardware: Hardware, kinds: Sequence[DeviceKind]) -> list[str]:
    if not option.weight_shares:
        return [""] * len(kinds)
    return [
        f"{sum(s for s, rank in zip(option.weight_shares, hardware.ranks, strict=True) if rank.kind is kind):.0%}"
        for kind in kinds
    ]


def _most(shard: RankShard, units: Callable[[LayerShard], int]) -> str:
    return str(max(map(units, shard.layers)))


def _mlp(shard: RankShard) -> str:
    """Of a layer: columns, or experts, or both where layers differ."""
    columns = max(layer.mlp_columns.size for layer in shard.layers)
    experts = max(layer.experts.size for layer in shard.layers)
    parts = [f"{columns} columns"] if columns or not experts else []
    return ", ".join(parts + ([f"{experts} experts"] if experts else []))


def _vocabulary(shard: RankShard) -> str:
    if shard.embedding_rows.size == shard.head_rows.size:
        return str(shard.head_rows.size)
    return f"{shard.embedding_rows.size} in, {shard.head_rows.size} out"
