"""What this machine has for a local group: the one place where the launcher looks at it."""

from __future__ import annotations

import os

from hetero_api.host.gpus import visible_gpus
from hetero_api.host.memory import total_memory_bytes
from hetero_api.host.topology import CpuTopology
from hetero_api.spec import HeteroInference
from hetero_client.launcher.local_plan import LocalPlan, plan_locally


def plan_here(resource: HeteroInference, *, dp_local_rank: int = 0) -> LocalPlan:
    """The processes that a manifest becomes on this machine. Raises LocalSpecError with every problem."""
    topology = CpuTopology.of_this_process()
    return plan_locally(
        resource,
        cores=topology.cores,
        nodes=topology.numa,
        memory_bytes=total_memory_bytes(),
        gpus=visible_gpus(os.environ),
        dp_local_rank=dp_local_rank,
    )
