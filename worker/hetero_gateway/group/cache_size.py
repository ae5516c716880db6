"""Size of a group's KV cache: as many blocks as the rank with the least room for its heads can hold.

Ranks without heads have no cache and no say. The same arithmetic serves the first cache of an epoch, which is the
resource's, and every reset, which an administrator asks for. Unless a number of blocks is asked for, no more are made
than all sequences at full length could fill. Snapshots of sequences' states, if the model keeps any, are as many as all
ranks have room for. Each error names the numbers and the fields that it follows from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hetero_api.spec import SpeculationKind
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.group.errors import CacheSizeError, InvalidCommand
from hetero_gateway.group.settings import ExpectedPlace, GroupSettings

MAX_BLOCKS: Final = 1 << 31
_FEWEST_SNAPSHOTS: Final = 2
"""One for the states behind a proposed token, and one for a prompt's."""


def layout_of(cache: ranks_pb2.AllocateCache, settings: GroupSettings) -> admin_pb2.CacheLayout.ValueType:
    """Return a cache's layout: contiguous if a block holds the longest sequence."""
    contiguous = cache.block_size >= settings.max_model_len
    return admin_pb2.CACHE_LAYOUT_CONTIGUOUS if contiguous else admin_pb2.CACHE_LAYOUT_PAGED


def first_cache(settings: GroupSettings, loaded: Sequence[ranks_pb2.Loaded]) -> ranks_pb2.AllocateCache:
    """Return the resource's own cache, from what the ranks reported, in rank order. Raises CacheSizeError."""
    cache = _cache_of(_choose_num_blocks(settings, loaded, settings.block_size), settings.block_size, loaded)
    _check_proposals(settings, loaded, cache)
    return cache


def asked_cache(
    request: admin_pb2.ResetCacheRequest, settings: GroupSettings, loaded: Sequence[ranks_pb2.Loaded]
) -> ranks_pb2.AllocateCache:
    """Return the cache that a reset asks for. Raises InvalidCommand, naming the field."""
    block_size = _asked_block_size(request, settings)
    try:
        if not request.num_blocks:
            num_blocks = _choose_num_blocks(settings, loaded, block_size)
            return _cache_of(num_blocks, block_size, loaded)
    except CacheSizeError as error:
        field = "block_size" if request.block_size else "layout"
        raise InvalidCommand(field, f"asks for blocks of {block_size} tokens; {error}") from error
    _check_asked(request.num_blocks, block_size, settings, loaded)
    return _cache_of(request.num_blocks + 1, block_size, loaded)


def _cache_of(num_blocks: int, block_size: int, loaded: Sequence[ranks_pb2.Loaded]) -> ranks_pb2.AllocateCache:
    """Return the cache with as many snapshots of states as all ranks have room for, at most one a block."""
    room = [rank.snapshot_budget_bytes // rank.snapshot_bytes for rank in loaded if rank.snapshot_bytes]
    num_snapshots = min([num_blocks - 1, *room]) if room else 0
    return ranks_pb2.AllocateCache(num_blocks=num_blocks, block_size=block_size, num_snapshots=num_snapshots)


def _check_proposals(
    settings: GroupSettings, loaded: Sequence[ranks_pb2.Loaded], cache: ranks_pb2.AllocateCache
) -> None:
    """Raise CacheSizeError where tokens are to be proposed, and no rank could go back behind a wrong one."""
    kind = settings.spec.engine.speculative.kind
    if settings.config.delta is None or kind in (SpeculationKind.NONE, SpeculationKind.AUTO):
        return
    if cache.num_snapshots < _FEWEST_SNAPSHOTS:
        size = max(report.snapshot_bytes for report in loaded)
        raise CacheSizeError(
            f"spec.engine.speculative.kind: {kind} needs room for {_FEWEST_SNAPSHOTS} snapshots of a sequence's "
            f"states, of {size} bytes on a rank, and there is room for {cache.num_snapshots}; lower "
            "spec.model.maxModelLen or spec.engine.maxNumSeqs, or use Auto or None"
        )


def _asked_block_size(request: admin_pb2.ResetCacheRequest, settings: GroupSettings) -> int:
    match request.layout:
        case admin_pb2.CACHE_LAYOUT_CONTIGUOUS:
            if request.block_size:
                raise InvalidCommand("block_size", "must be 0 for CONTIGUOUS: a block is as long as a sequence may be")
            return settings.max_model_len
        case admin_pb2.CACHE_LAYOUT_UNSPECIFIED if not request.block_size:
            return settings.block_size
        case admin_pb2.CACHE_LAYOUT_PAGED | admin_pb2.CACHE_LAYOUT_UNSPECIFIED:
            if request.block_size > settings.max_model_len:
                raise InvalidCommand(
                    "block_size",
                    f"must be at most spec.model.maxModelLen {settings.max_model_len}, not {request.block_size}",
                )
            return request.block_size or settings.spec.engine.block_size
        case _:
            raise InvalidCommand("layout", f"{request.layout} is no CacheLayout; use PAGED or CONTIGUOUS")


def _check_asked(asked: int, block_size: int, settings: GroupSettings, loaded: Sequence[ranks_pb2.Loaded]) -> None:
    num_blocks, needed = asked + 1, blocks_of_longest(settings, block_size)
    if asked < needed:
        raise InvalidCommand(
            "num_blocks",
            f"must be at least {needed}, not {asked}: one sequence of spec.model.maxModelLen {settings.max_model_len} "
            f"tokens takes {needed} blocks of {block_size}",
        )
    if num_blocks > MAX_BLOCKS:
        raise InvalidCommand("num_blocks", f"must be less than {MAX_BLOCKS}, not {asked}")
    for place, report in zip(settings.places, loaded, strict=True):
        budget, block_bytes = _budget(settings, report), report.kv_bytes_per_token * block_size
        if num_blocks * block_bytes > budget:
            raise InvalidCommand(
                "num_blocks",
                f"{asked} blocks and the null block need {num_blocks * block_bytes} bytes = {num_blocks} * "
                f"{report.kv_bytes_per_token} bytes a token * {block_size}; {place} has {budget} bytes "
                f"({_budget_field(settings, place)}), room for {max(0, budget // block_bytes - 1)} blocks",
            )


def blocks_of_longest(settings: GroupSettings, block_size: int) -> int:
    """Return how many blocks one sequence of full length takes."""
    return -(-settings.max_model_len // block_size)


def _choose_num_blocks(settings: GroupSettings, loaded: Sequence[ranks_pb2.Loaded], block_size: int) -> int:
    num_blocks = settings.spec.engine.max_num_seqs * blocks_of_longest(settings, block_size) + 1
    for place, report in zip(settings.places, loaded, strict=True):
        if report.kv_bytes_per_token:
            num_blocks = min(num_blocks, _blocks_of(settings, place, report, block_size))
    return num_blocks


def _blocks_of(settings: GroupSettings, place: ExpectedPlace, report: ranks_pb2.Loaded, block_size: int) -> int:
    _check_explicit_size(settings, place, report)
    budget, block_bytes = _budget(settings, report), report.kv_bytes_per_token * block_size
    num_blocks, needed = budget // block_bytes, blocks_of_longest(settings, block_size) + 1
    if num_blocks < needed:
        field, room = _budget_field(settings, place), max(0, num_blocks - 1) * block_size
        size_field = "spec.engine.blockSize " if block_size == settings.spec.engine.block_size else ""
        raise CacheSizeError(
            f"{field}: {place} can hold {num_blocks} KV blocks = {budget} bytes / ({report.kv_bytes_per_token} bytes a "
            f"token * {size_field}{block_size}); one sequence of spec.model.maxModelLen "
            f"{settings.max_model_len} tokens needs {needed} (one of them the null block) = {needed * block_bytes} "
            f"bytes; raise {field} or lower spec.model.maxModelLen to at most {room}"
        )
    return num_blocks


def _check_explicit_size(settings: GroupSettings, place: ExpectedPlace, report: ranks_pb2.Loaded) -> None:
    asked, left = settings.spec.engine.kv_cache_memory_bytes, report.kv_budget_bytes
    if asked is not None and asked > left:
        raise CacheSizeError(
            f"spec.engine.kvCacheMemoryBytes: {asked} bytes are asked for, {place} has {left} bytes left for its KV "
            f"cache; lower it or raise {_memory_field(place)}"
        )


def _budget(settings: GroupSettings, report: ranks_pb2.Loaded) -> int:
    given = settings.spec.engine.kv_cache_memory_bytes
    return report.kv_budget_bytes if given is None else given


def _budget_field(settings: GroupSettings, place: ExpectedPlace) -> str:
    is_given = settings.spec.engine.kv_cache_memory_bytes is not None
    return "spec.engine.kvCacheMemoryBytes" if is_given else _memory_field(place)


def _memory_field(place: ExpectedPlace) -> str:
    if place.is_gpu:
        return "spec.engine.gpuMemoryUtilization"
    return f"spec.pools[{place.pool_index}].cpu.memoryPerRank"
