"""Views of `hetero plan`: tables of the options, their speeds and memory, and of what each rank gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich import box
from rich.table import Table

from hetero_api.sharding import LayerShard, RankShard
from hetero_api.spec_pools import PoolType
from hetero_client.cli.console import table_of
from hetero_placement.decision import Decision, Option
from hetero_placement.hardware import Hardware
from hetero_placement.memory_model import MemoryModel
from hetero_placement.sweep import LoadRates, ProposedRate

GB: Final = 1e9
_MEMORY_COLUMNS: Final = (
    "attention", "dense MLP", "shared experts", "experts", "vocabulary", "other", "KV cache", "step", "needs", "has",
)  # fmt: skip


def options_table(decision: Decision, hardware: Hardware) -> Table:
    """Return a table with a row for each option, the chosen one marked."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    kinds = [kind for kind in (PoolType.GPU, PoolType.CPU) if any(rank.kind == kind for rank in hardware.ranks)]
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


def loads_table(decision: Decision, rates: LoadRates) -> Table:
    """Return a table with the predicted tokens/s of each option at several loads, the best of each load in bold."""
    names = [load.name for load in rates.loads]
    table = table_of("tokens/s", *names, right=names)
    best = [rates.best(load) for load in rates.loads]
    for option, each in rates.rates:
        cells = [
            f"[bold]{_rate(rate)}[/bold]" if option is fastest else _rate(rate)
            for rate, fastest in zip(each, best, strict=True)
        ]
        table.add_row(f"{option.name}{', chosen' if option is decision.chosen else ''}", *cells)
    return table


def memory_table(decision: Decision, hardware: Hardware, memory: MemoryModel) -> Table:
    """Return a table of each option's memory in GB, by part of the model and rank; ranks that are alike share a row."""
    table = table_of("GB", "ranks", *_MEMORY_COLUMNS, right=_MEMORY_COLUMNS)
    for option in decision.options:
        if option.plan is not None:
            for number, cells in enumerate(_memory_rows(option, hardware, memory)):
                table.add_row("" if number else option.name, *cells)
    return table


def _memory_rows(option: Option, hardware: Hardware, memory: MemoryModel) -> Iterator[list[str]]:
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, shard in enumerate(option.made.ranks):
        if not shard.is_empty:
            sizes = (*_sizes(memory, number, shard).values(), hardware.ranks[number].memory_bytes)
            key = (hardware.ranks[number].pool, *(f"{size / GB:.2f}" for size in sizes))
            alike.setdefault(key, []).append(number)
    for (pool, *sizes_of), ranks in alike.items():
        yield [f"{pool} {', '.join(map(str, ranks))}", *sizes_of]


def _sizes(memory: MemoryModel, rank: int, shard: RankShard) -> dict[str, int]:
    """Return the bytes of a rank's memory by part; the last is all of it."""
    need = memory.need(rank, shard)
    parts = asdict(memory.weight_parts(rank, shard))
    return {**parts, "cache": need.cache, "step": need.without_cache - need.weights, "total": need.total}


def ranks_table(decision: Decision, hardware: Hardware, memory: MemoryModel) -> Table:
    """Return a table with a row for each rank of the chosen plan."""
    numbers = ("layers", "KV heads", "MLP", "vocab rows", "weights GB", "needs GB", "has GB")
    table = table_of("rank", "pool", *numbers, right=("rank", *numbers))
    for number, (shard, rank) in enumerate(zip(decision.plan.ranks, hardware.ranks, strict=True)):
        need = memory.need(number, shard)
        table.add_row(
            str(number),
            rank.pool,
            str(sum(not layer.is_empty for layer in shard.layers)),
            str(max(layer.kv_heads.size for layer in shard.layers)),
            _mlp(shard),
            _vocabulary(shard),
            f"{need.weights / GB:.2f}",
            f"{need.total / GB:.2f}",
            f"{rank.memory_bytes / GB:.2f}",
        )
    return table


def cache_line(decision: Decision, memory: MemoryModel, *, block_size: int) -> str:
    """Return a line with the capacity of the chosen plan's KV cache."""
    blocks = memory.kv_blocks(decision.plan) - 1
    return f"KV cache: at least {blocks} blocks of {block_size} tokens"


def streaming_lines(decision: Decision) -> Iterator[str]:
    """Yield a line for each option that streams experts: from how many tokens on, and what that brings."""
    for option in decision.options:
        if option.streaming is not None:
            yield f"{option.name}: {option.note}"


def proposals_line(rate: ProposedRate, *, acceptance: float) -> str:
    """Return a line with the predicted gain of proposals from one source."""
    begin = f"Proposals by {rate.source}, right with a chance of {acceptance:g}"
    if not rate.length:
        return f"{begin}: none, any would be slower"
    gain = rate.tokens_per_s / rate.plain_tokens_per_s
    return f"{begin}: {rate.length} a step, {_rate(rate.tokens_per_s)} decode tok/s, {gain:.2f} times as fast"


def decision_json(
    decision: Decision, hardware: Hardware, memory: MemoryModel, rates: LoadRates, proposed: Sequence[ProposedRate] = ()
) -> dict[str, Any]:
    """Return the whole decision as JSON data, in seconds, bytes and tokens."""
    by_load = {
        option.name: dict(zip((load.name for load in rates.loads), each, strict=True)) for option, each in rates.rates
    }
    return {
        "kvBlocks": memory.kv_blocks(decision.plan) - 1,
        "chosen": decision.chosen.name,
        "reason": decision.reason,
        "verdict": rates.verdict,
        "proposals": [
            {"source": each.source, "tokensAStep": each.length, "decodeTokensPerSecond": each.tokens_per_s}
            for each in proposed
        ],
        "options": [
            _option_json(option, is_chosen=option is decision.chosen)
            | ({"tokensPerSecond": by_load[option.name]} if option.name in by_load else {})
            | {"memoryBytes": _memory_json(option, memory)}
            for option in decision.options
        ],
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
    data: dict[str, Any] = {
        "name": option.name,
        "mode": str(option.mode) if option.mode is not None else None,
        "chosen": is_chosen,
        "whyNot": option.why_not or None,
        "weightShares": list(option.weight_shares) or None,
    }
    if option.streaming is not None:
        data["streaming"] = {
            "minTokens": option.streaming.min_rows,
            "fullTokens": option.streaming.full_rows,
            "bufferBytes": option.streaming.buffer_bytes,
            "chunkSeconds": option.streaming.chunk_s,
            "residentChunkSeconds": option.streaming.resident_chunk_s,
        }
    if option.prediction is not None:
        data |= {"decodeTokensPerSecond": option.prediction.decode_tokens_per_s}
        if option.plan is not None:
            data |= {
                "prefillTokensPerSecond": option.prediction.prefill_tokens_per_s,
                "workloadSeconds": option.prediction.workload_s,
            }
    return data


def _memory_json(option: Option, memory: MemoryModel) -> list[dict[str, int]]:
    """Return each rank's memory by part, in rank order; {} for a rank without a part, [] for an option without plan."""
    if option.plan is None:
        return []
    return [{} if shard.is_empty else _sizes(memory, rank, shard) for rank, shard in enumerate(option.made.ranks)]


def _layer_json(layer: LayerShard) -> dict[str, list[int]]:
    return {
        "kvHeads": list(layer.kv_heads),
        "mlpColumns": list(layer.mlp_columns),
        "experts": list(layer.experts),
        "expertColumns": list(layer.expert_columns),
    }


def _figures(option: Option) -> list[str]:
    if option.prediction is None:
        return ["no fit", "", ""] if option.mode is not None else ["", "", ""]
    decode = _rate(option.prediction.decode_tokens_per_s)
    if option.plan is None:
        return [decode, "", ""]
    return [decode, _rate(option.prediction.prefill_tokens_per_s), f"{option.prediction.workload_s:.3g}"]


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"


def _shares(option: Option, hardware: Hardware, kinds: Sequence[PoolType]) -> list[str]:
    if not option.weight_shares:
        return [""] * len(kinds)
    return [
        f"{sum(s for s, rank in zip(option.weight_shares, hardware.ranks, strict=True) if rank.kind == kind):.0%}"
        for kind in kinds
    ]


def _mlp(shard: RankShard) -> str:
    """Return the largest number of columns in a layer, or of experts, or both where layers differ."""
    columns = max(layer.mlp_columns.size for layer in shard.layers)
    experts = max(layer.experts.size for layer in shard.layers)
    sliced = max(layer.expert_columns.size for layer in shard.layers)
    parts = [f"{columns} columns"] if columns or not experts else []
    slices = f", {sliced} columns of each" if sliced else ""
    return ", ".join(parts + ([f"{experts} experts{slices}"] if experts else []))


def _vocabulary(shard: RankShard) -> str:
    if shard.embedding_rows.size == shard.head_rows.size:
        return str(shard.head_rows.size)
    return f"{shard.embedding_rows.size} in, {shard.head_rows.size} out"
