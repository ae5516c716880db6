"""Who takes part, with whom, and what is said of those who cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.entrants import ALL, LINK, OURS, PEERS, Entrant, Setting, chosen, groups
from bench.home import BenchHome
from bench.peers.environments import (
    ENVIRONMENTS,
    OWN,
    STAMP,
    PeerError,
    interpreter,
    missing,
    pinned_version,
    wanted_dependencies,
)
from bench.peers.formats import FORMATS, HUGGING_FACE
from tests.unit.bench.bench_setup import CONFIG, Absent

pytestmark = pytest.mark.unit


def setting(root: Path = Path("nowhere")) -> Setting:
    return Setting(BenchHome(root), "model", root / "model", CONFIG, 2)


def entrant(name: str, gigabytes: float) -> Entrant:
    return Absent(name, 16, gigabytes * 1e9, 0.0)


def names(made: list[list[Entrant]]) -> list[list[str]]:
    return [[each.name for each in group] for group in made]


def test_who_fits_is_together_and_the_link_is_in_every_group() -> None:
    entrants = [entrant("a", 3), entrant("b", 4), entrant(LINK, 1), entrant("c", 5), entrant("d", 1)]
    assert names(groups(entrants, setting(), 8.1e9)) == [[LINK, "a", "b"], [LINK, "c", "d"]]


def test_one_that_is_too_large_gets_a_group_with_the_link() -> None:
    entrants = [entrant("a", 3), entrant(LINK, 1), entrant("large", 50), entrant("b", 3)]
    assert names(groups(entrants, setting(), 8.1e9)) == [[LINK, "a"], [LINK, "large"], [LINK, "b"]]


def test_the_link_may_be_left_out_or_be_alone() -> None:
    assert names(groups([entrant("a", 3), entrant("b", 6)], setting(), 8e9)) == [["a"], ["b"]]
    assert names(groups([entrant(LINK, 3)], setting(), 8e9)) == [[LINK]]
    assert groups([], setting(), 8e9) == []


def test_memory_grows_with_weights_and_with_the_cache() -> None:
    ours = OURS[0]
    kept = 16_384 * 2 * 2 * 2 * 16 * 4
    assert ours.memory_bytes(setting()) == ours.fixed_bytes + ours.bytes_per_weight * CONFIG.num_parameters + kept


def test_names_are_chosen_by_a_part_of_them_in_any_case() -> None:
    found = [each.name for each in chosen(["Q8_0", "hetero int4"])]
    assert found == ["hetero int4", "hetero int4 2x1", "llama.cpp Q8_0"]
    assert chosen([]) == list(ALL)
    with pytest.raises(ValueError, match="nobody's name contains 'lama2'"):
        chosen(["lama2"])


def test_no_two_have_one_name_and_all_are_made_of_what_there_is() -> None:
    assert len({each.name for each in ALL}) == len(ALL)
    assert all(peer.environment in {OWN, *ENVIRONMENTS} for peer in PEERS)
    assert all(peer.format in {HUGGING_FACE, *FORMATS} for peer in PEERS)
    assert all(format_.source in {HUGGING_FACE, *FORMATS} for format_ in FORMATS.values())


def test_a_peer_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    link = next(peer for peer in PEERS if peer.name == LINK)
    with pytest.raises(PeerError, match=r"bench\.peers\.install --only llama\.cpp"):
        link.open(setting(tmp_path))


def test_an_environment_of_other_versions_counts_as_missing(tmp_path: Path) -> None:
    stamp = tmp_path / "environments" / "vllm" / STAMP
    stamp.parent.mkdir(parents=True)
    stamp.write_text("{}")
    assert "vllm" in missing(BenchHome(tmp_path), "vllm")
    assert missing(BenchHome(tmp_path), OWN) == ""


def test_dependencies_leave_out_extras_and_what_is_unwanted() -> None:
    requirements = [
        "torch==2.13.0",
        "torchvision; platform_machine == 'x86_64'",
        "numpy>=2",
        'ray; extra == "ray"',
        "torchao",
    ]
    assert wanted_dependencies(requirements, ("torch", "torchvision")) == ["numpy>=2", "torchao"]


def test_versions_come_from_the_projects_constraints(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torchao==1\ntorch==2.5.0\n")
    assert pinned_version("torch", constraints) == "torch==2.5.0"
    with pytest.raises(PeerError, match="does not pin jax"):
        pinned_version("jax", constraints)


def test_the_folder_is_named_by_the_environment_or_lies_below_the_home() -> None:
    assert BenchHome.from_environment({"HETERO_BENCH_HOME": "/a"}).root == Path("/a")
    assert BenchHome.from_environment({"HETERO_HOME": "/b"}).root == Path("/b/bench")


def test_ours_has_the_running_interpreter_and_peers_their_own() -> None:
    assert interpreter(BenchHome(Path("/x")), OWN) == Path(sys.executable)
    assert interpreter(BenchHome(Path("/x")), "vllm") == Path("/x/environments/vllm/bin/python")
