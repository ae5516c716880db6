"""Cuts a step into micro-batches, so that the stages of a pipeline compute at the same time.

Stage k computes micro-batch i while stage k+1 computes i-1. More micro-batches overlap better, but a stage reads all
its weights for each of them. Let reading the weights take as long as computing `BALANCE_ROWS` rows. A micro-batch of r
rows then costs a stage BALANCE_ROWS + r units of time, and n rows in m micro-batches on s stages cost

    (m + s - 1) · (BALANCE_ROWS + n/m)  =  m · BALANCE_ROWS + (s - 1) · n/m + terms independent of m,

which is least at m = √((s - 1) · n / BALANCE_ROWS). So 512 rows on 2 stages are cut in 4. A batch of 64 decoding
sequences, where reading the weights is most of the work, is not cut at all. The number follows from the plan alone, so
it is the same on every rank. Rows keep their order: a sequence's earlier rows are in the cache before its later ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hetero_worker.attention.base import AttentionBatch, DecodeRows, PrefillSpan

BALANCE_ROWS: Final = 32
"""Rows whose computation takes as long as reading the weights: measured 13 to 25 on one core (float32, SmolLM2).

The value errs on the large side, because the formula leaves out a micro-batch's messages and Python's share.
"""
_SNAP: Final = 4
"""A cut moves to the end of a sequence that is within 1/4 of a micro-batch."""

CountParts = Callable[[int, int], int]
"""Number of micro-batches by a step's rows and a pipeline's stages; the same on every rank."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows [begin, end) of a step; rows of `attention` are counted from `begin`."""

    begin: int
    end: int
    attention: AttentionBatch


def best_number(num_rows: int, num_stages: int) -> int:
    """Return the best number of micro-batches, by the module's formula."""
    return min(num_rows, math.isqrt((num_stages - 1) * num_rows // BALANCE_ROWS)) or 1


def micro_batches(attention: AttentionBatch, number: int) -> list[MicroBatch]:
    """Cut the step's rows into `number` pieces of about equal size, in order; at most one per row."""
    num_rows = len(attention.slot_mapping)
    number = min(number, num_rows)
    if number == 1:
        return [MicroBatch(0, num_rows, attention)]
    cuts = [0, *_cuts(num_rows, number, _sequence_ends(attention)), num_rows]
    return [MicroBatch(begin, end, _part(attention, begin, end)) for begin, end in pairwise(cuts)]


def _cuts(num_rows: int, number: int, ends: Sequence[int]) -> Iterator[int]:
    """Yield even cuts, moved to the end of a sequence if one is near."""
    reach = num_rows // number // _SNAP
    for i in range(1, number):
        even = num_rows * i // number
        nearest = min(ends, key=lambda end: abs(end - even))
        yield nearest if abs(nearest - even) <= reach else even


def _sequence_ends(attention: AttentionBatch) -> list[int]:
    return [*range(1, attention.decode.num_rows + 1), *(span.end for span in attention.prefills)]


def _part(attention: AttentionBatch, begin: int, end: int) -> AttentionBatch:
    decode = attention.decode
    rows = slice(begin, min(end, decode.num_rows))
    spans = (_cut_span(span, begin, end) for span in attention.prefills if span.begin < end and begin < span.end)
    saves = None if decode.saves is None else decode.saves[rows]
    decoding = DecodeRows(decode.lengths[rows], decode.block_tables[rows], decode.slots[rows], saves)
    return AttentionBatch(attention.slot_mapping[begin:end], decoding, tuple(spans))


def _cut_span(span: PrefillSpan, begin: int, end: int) -> PrefillSpan:
    """Return the part of the span in rows [begin, end); earlier rows count as computed."""
    first, last = max(span.begin, begin), min(span.end, end)
    computed = span.num_computed + first - span.begin
    return PrefillSpan(
        first - begin,
        last - begin,
        computed,
        span.block_ids,
        span.slot,
        span.states_from if first == span.begin else None,
        tuple(save for save in span.saves if computed < save.num_tokens <= computed + last - first),
    )
