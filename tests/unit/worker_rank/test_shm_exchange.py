"""The memory that ranks share: whose it is, and when there is none."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hetero_worker.distributed.shm_segment import SegmentLayout, ShmSegment, unlink
from hetero_worker.errors import ExchangeError
from tests.support.shm_threads import PAGE

pytestmark = pytest.mark.unit


def test_segment_is_the_owners_alone_and_zeroed(tmp_path: Path) -> None:
    segment = ShmSegment.create("segment", SegmentLayout(2, PAGE), folder=tmp_path)
    mode = stat.S_IMODE(os.stat(segment.path).st_mode)
    unlink("segment", folder=tmp_path)
    unlink("segment", folder=tmp_path)

    assert mode == 0o600
    assert not any(segment.memory[:])
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_an_error_that_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match="cannot reserve"):
        ShmSegment.create("segment", SegmentLayout(2, 1 << 60), folder=tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_existing_segment_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "segment").write_bytes(b"someone's")

    with pytest.raises(ExchangeError, match="File exists"):
        ShmSegment.create("segment", SegmentLayout(2, PAGE), folder=tmp_path)

    assert (tmp_path / "segment").read_bytes() == b"someone's"


def test_segment_of_another_size_is_refused(tmp_path: Path) -> None:
    ShmSegment.create("segment", SegmentLayout(2, PAGE), folder=tmp_path)

    with pytest.raises(ExchangeError, match="not rank 0's segment"):
        ShmSegment.attach("segment", SegmentLayout(3, PAGE), rank=1, folder=tmp_path)


def test_link_in_the_segments_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "segment").symlink_to(tmp_path / "other")

    with pytest.raises(ExchangeError, match="cannot open"):
        ShmSegment.attach("segment", SegmentLayout(2, PAGE), rank=1, folder=tmp_path)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 300])
def test_segment_name_cannot_leave_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match="plain file name"):
        ShmSegment.create(name, SegmentLayout(2, PAGE), folder=tmp_path)
