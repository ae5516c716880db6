"""What may not change once a resource exists: the Python twin of the CRD's rules about `oldSelf`."""

from __future__ import annotations

from hetero_api.rules import TransitionRule
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_types import SpecModel


def check_transition(old: HeteroInferenceSpec, new: HeteroInferenceSpec) -> list[str]:
    """Problems of a change from one valid spec to another, each `path: message`; none: the change is allowed."""
    problems = _problems("spec", old, new)
    before = {pool.name: pool for pool in old.pools}
    for index, pool in enumerate(new.pools):
        if pool.name in before:
            problems += _problems(f"spec.pools[{index}]", before[pool.name], pool)
    return problems


def _problems(path: str, old: SpecModel, new: SpecModel) -> list[str]:
    rules: tuple[TransitionRule, ...] = new.transitions
    broken = [problem for rule in rules if (problem := rule.problem(old, new)) is not None]
    return [f"{path}.{below}: {message}" for below, message in broken]
