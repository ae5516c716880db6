"""What ranks know of one another by a segment: who is there, and whether its memory is really shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_worker.distributed.shm_exchange import ShmExchange
from hetero_worker.distributed.shm_segment import SegmentLayout, ShmSegment
from hetero_worker.errors import ExchangeError
from tests.support.shm_threads import PAGE, native_library, segments

pytestmark = pytest.mark.unit


def test_a_rank_is_there_until_it_leaves(tmp_path: Path) -> None:
    first, second, third = segments(tmp_path, SegmentLayout(3, PAGE))

    assert first.absent((1, 2)) == ()
    second.leave()
    assert first.absent((1, 2)) == third.absent((0, 1)) == (1,)
    for segment in (first, third):
        segment.leave()


def test_a_rank_that_has_left_may_still_ask_who_is_there(tmp_path: Path) -> None:
    """One thread may leave while another is about to ask."""
    first, second = segments(tmp_path, SegmentLayout(2, PAGE))
    first.leave()
    assert first.absent((1,)) == ()
    second.leave()
    assert first.absent((1,)) == (1,)
    descriptor = Path(f"/proc/self/fd/{first.fd}")
    assert descriptor.exists()
    del first
    assert not descriptor.exists()


def test_two_mappings_cannot_be_the_same_rank(tmp_path: Path) -> None:
    layout = SegmentLayout(2, PAGE)
    first = ShmSegment.create("segment", layout, folder=tmp_path)
    second = ShmSegment.attach("segment", layout, rank=1, folder=tmp_path)

    with pytest.raises(ExchangeError, match="rank 1's place in the shared segment is taken"):
        ShmSegment.attach("segment", layout, rank=1, folder=tmp_path)
    for segment in (first, second):
        segment.leave()


def test_marks_tell_shared_memory_from_memory_of_the_same_name(tmp_path: Path) -> None:
    layout = SegmentLayout(2, PAGE)
    first, second = segments(tmp_path, layout)
    (tmp_path / "elsewhere").mkdir()
    other_first, other_second = segments(tmp_path / "elsewhere", layout)
    first.mark(5)
    second.mark(5)
    other_second.mark(5)

    assert first.unmarked(5) == second.unmarked(5) == ()
    assert other_second.unmarked(5) == (0,)
    assert first.unmarked(6) == (0, 1)
    for segment in (first, second, other_first, other_second):
        segment.leave()


def test_ranks_beyond_what_a_mask_holds_are_refused(tmp_path: Path) -> None:
    segment = ShmSegment.create("segment", SegmentLayout(65, PAGE), folder=tmp_path)

    with pytest.raises(ExchangeError, match="64 at most, not 65"):
        ShmExchange(segment, timeout_s=1.0, library=native_library())
    segment.leave()
