"""Who may join, and who takes whose place."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_api.group_state import GroupState
from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.roster import LinkEnd
from tests.unit.group.group_setup import GroupBench, ScriptedRank

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "0.0.9"}, "version: the rank runs HeteroInference 0.0.9"),
        ({"model_fingerprint": "e" * 64}, "model: the config.json of rank 'pod-0' (sha256 eeeeeeeeeeee"),
        ({"pool": "gpu"}, "('gpu', 0, 0) is no place of this group"),
        ({"ordinal": 2}, "('cpu', 2, 0) is no place of this group"),
        ({"local_rank": 1}, "('cpu', 0, 1) is no place of this group"),
        ({"instance_id": ""}, "instance_id: is empty"),
    ],
)
async def test_a_rank_that_does_not_fit_is_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    async with GroupBench() as bench:
        rank = ScriptedRank(bench.group, 0)
        rank.join(**changes)
        closing = await rank.expect_end()
        assert closing.end is LinkEnd.REFUSED
        assert words in closing.reason
        assert not bench.topology.ranks[0].joined
        assert words in bench.topology.reason


async def test_a_place_that_is_taken_is_refused_and_its_holder_stays() -> None:
    async with GroupBench() as bench:
        holder, other = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 0, instance="other")
        holder.join()
        other.join()
        assert "is taken by 'pod-0'" in (await other.expect_end()).reason
        ScriptedRank(bench.group, 1).join()
        assert (await holder.expect("form_group")).rank == 0


async def test_a_rank_that_leaves_before_the_group_forms_gives_its_place_up() -> None:
    async with GroupBench() as bench:
        first = ScriptedRank(bench.group, 0)
        first.join()
        first.lose()
        assert bench.group.state is GroupState.NEW
        second = ScriptedRank(bench.group, 0, instance="second")
        second.join()
        assert second.link.closing is None
        assert bench.topology.ranks[0].joined


async def test_the_first_message_must_be_hello() -> None:
    async with GroupBench() as bench:
        rank = ScriptedRank(bench.group, 0)
        rank.say(0, formed=ranks_pb2.Formed())
        closing = await rank.expect_end()
        assert (closing.end, closing.reason) == (LinkEnd.MISBEHAVED, "the first message must be hello, not formed")


async def test_hello_of_an_epoch_is_misbehaviour() -> None:
    async with GroupBench() as bench:
        rank = ScriptedRank(bench.group, 0)
        rank.say(1, hello=ranks_pb2.Hello())
        assert (await rank.expect_end()).end is LinkEnd.MISBEHAVED


async def test_a_second_hello_before_the_group_forms_is_misbehaviour() -> None:
    async with GroupBench() as bench:
        rank = ScriptedRank(bench.group, 0)
        rank.join()
        rank.join()
        assert "is joined already" in (await rank.expect_end()).reason
        assert not bench.topology.ranks[0].joined
