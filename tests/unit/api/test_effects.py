"""The table of effects: whole, and without a line that says nothing."""

from __future__ import annotations

import pytest

from hetero_api.effects import EFFECTS, Effect, effect_of, fields_with, spec_leaves

LEAVES = tuple(spec_leaves())


def test_every_field_of_the_spec_has_an_effect() -> None:
    assert len(LEAVES) > 80
    for path in LEAVES:
        effect_of(path)


def test_every_line_of_the_table_is_about_a_field() -> None:
    for path in EFFECTS:
        assert any(leaf == path or leaf.startswith(f"{path}.") for leaf in LEAVES), path


def test_no_line_repeats_the_one_above_it() -> None:
    for path, effect in EFFECTS.items():
        section = path.rpartition(".")[0]
        assert not section or EFFECTS.get(section) != effect, path


def test_the_longest_prefix_counts() -> None:
    assert effect_of("gateway.maxQueuedRequests") is Effect.GATEWAY
    assert effect_of("gateway.service.port") is Effect.NONE


def test_an_unknown_field_has_no_effect_to_tell() -> None:
    with pytest.raises(KeyError):
        effect_of("model.flavour")


def test_a_part_of_a_spec_holds_the_fields_of_an_effect_and_no_empty_section() -> None:
    spec = {"gateway": {"service": {"port": 1}}, "images": {"gateway": "a", "cpuWorker": "b"}, "suspend": False}
    assert fields_with(spec, frozenset({Effect.RANKS})) == {"images": {"cpuWorker": "b"}}
    assert fields_with(spec, frozenset({Effect.NONE})) == {"gateway": {"service": {"port": 1}}, "suspend": False}


def test_items_of_a_list_are_parted_too() -> None:
    load = [{"name": "a", "uri": "hf://a/b"}, {"name": "c", "directory": "/c"}]
    spec = {"engine": {"adapters": {"load": load}}}
    assert fields_with(spec, frozenset({Effect.RANKS})) == {"engine": {"adapters": {"load": [{"uri": "hf://a/b"}]}}}
    assert fields_with(spec, frozenset(Effect)) == spec
    assert fields_with({"engine": {"adapters": {"load": load[1:]}}}, frozenset({Effect.RANKS})) == {}
