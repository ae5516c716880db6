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


FILES = (("config.json", b"c"), ("model.safetensors", b"w"))


def weights(*files: tuple[str, bytes], revision: str = "") -> dict[str, Any]:
    """What Hello says of the files that weights are read from."""
    return {
        "files": [ranks_pb2.FileDigest(name=name, digest=digest) for name, digest in files],
        "model_revision": revision,
    }


DIFFERENT = {
    "other weights": (weights(FILES[0], ("model.safetensors", b"v")), "model.safetensors differs"),
    "a file less": (weights(FILES[0]), "model.safetensors differs"),
    "another format": (weights(("m.gguf", b"w")), "config.json, m.gguf, model.safetensors differ"),
    "many files": (weights(*((f"{n}.safetensors", b"w") for n in range(3))), "0.safetensors, 1.safetensors, 2.s"),
    "another commit": (weights(*FILES, revision="b"), "revision b is not a"),
}


@pytest.mark.parametrize("case", DIFFERENT)
async def test_a_rank_with_other_weights_is_refused_and_both_ranks_and_the_file_are_named(case: str) -> None:
    others, words = DIFFERENT[case]
    async with GroupBench() as bench:
        first, second = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 1)
        first.join(**weights(*FILES, revision="a"))
        second.join(**others)
        closing = await second.expect_end()
        assert closing.end is LinkEnd.REFUSED
        assert f"the weights of rank 1 (pod-1) are not those of rank 0 (pod-0): {words}" in closing.reason
        assert closing.reason in bench.topology.reason
        ScriptedRank(bench.group, 1, instance="mended").join(**weights(*FILES, revision="a"))
        assert (await first.expect("form_group")).rank == 0


@pytest.mark.parametrize(
    "known", [weights(*FILES, revision="a"), weights(*FILES), weights()], ids=["all", "no revision", "none"]
)
async def test_ranks_with_the_same_weights_form_a_group_and_so_do_those_that_cannot_tell(known: dict[str, Any]) -> None:
    async with GroupBench() as bench:
        first, second = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 1)
        first.join(**weights(*FILES, revision="a"))
        second.join(**known)
        assert (await second.expect("form_group")).rank == 1


async def test_a_rank_whose_weights_changed_between_two_epochs_is_refused() -> None:
    async with GroupBench() as bench:
        first, second = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 1)
        for rank in (first, second):
            rank.join(**weights(*FILES))
        for rank in (first, second):
            await rank.expect("form_group")
        second.say(1, failure=ranks_pb2.Failure(message="out of luck"))
        for rank in (first, second):
            await rank.expect("abort")
        first.join(**weights(*FILES))
        second.join(**weights(FILES[0], ("model.safetensors", b"v")))
        assert "rank 0 (pod-0): model.safetensors differs" in (await second.expect_end()).reason


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
