"""What was told last: the operator's memory of transitions and of restarts."""

from __future__ import annotations

from pydantic import ValidationError

from hetero_api.status import Condition, HeteroInferenceStatus
from hetero_operator.reconcile.model import Object


def stored_status(resource: Object) -> HeteroInferenceStatus:
    """The status as it was told last; empty when there is none that makes sense, e.g. that of another version."""
    try:
        return HeteroInferenceStatus.model_validate(resource.get("status") or {})
    except ValidationError:
        return HeteroInferenceStatus()


def stored_conditions(status: HeteroInferenceStatus) -> dict[str, Condition]:
    """Conditions by type."""
    return {item.type: item for item in status.conditions}
