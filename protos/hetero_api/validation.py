"""Checks of a valid spec that its types and rules do not make.

`check_transition` is the Python twin of the CRD's rules about `oldSelf`. `find_unserved` names what every gateway of
this version would refuse at start, whatever the model is: the operator asks it before it ends a working group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hetero_api.spec import SHARE_KINDS, HeteroInferenceSpec, PlacementMode
from hetero_api.spec_model import DType
from hetero_api.spec_types import SpecModel, TransitionRule

NOT_YET: Final = "this version does not support it yet"


def find_unserved(spec: HeteroInferenceSpec) -> list[str]:
    """Return every problem, `path: message` each, for which a gateway would refuse to start with this spec."""
    return [*_unsupported(spec), *_share_problems(spec)]


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


def _unsupported(spec: HeteroInferenceSpec) -> list[str]:
    problems = []
    if spec.model.dtype == DType.FLOAT16:
        problems.append(f"spec.model.dtype: float16: {NOT_YET}; use bfloat16, float32 or auto")
    fields = {
        "spec.gateway.tlsSecretName": spec.gateway.tls_secret_name,
        "spec.gateway.authTokenSecretRef": spec.gateway.auth_token_secret_ref,
    }
    problems += [f"{path}: {NOT_YET}; leave it out" for path, value in fields.items() if value is not None]
    return problems


def _share_problems(spec: HeteroInferenceSpec) -> list[str]:
    shares = spec.placement.shares
    given = {kind: weights for kind in SHARE_KINDS if (weights := getattr(shares, kind))}
    if spec.placement.mode != PlacementMode.LAYER:
        return _idle_ranks(given, spec.world_size) if len(given) == len(SHARE_KINDS) else []
    if shares.layer_problem:
        return [shares.layer_problem]
    return _idle_ranks(given, spec.world_size)


def _idle_ranks(given: Mapping[str, Sequence[float]], world_size: int) -> list[str]:
    """Return the problem of ranks whose weights are all 0; `given` leaves nothing that they could get otherwise."""
    idle = [rank for rank in range(world_size) if given and not any(weights[rank] for weights in given.values())]
    fields = ", ".join(f"spec.placement.shares.{kind}" for kind in given)
    return [f"{fields}: rank {rank} would own nothing of the model; give it a share or fewer ranks" for rank in idle]
