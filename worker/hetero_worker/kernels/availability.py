"""Whether Triton's kernels can be had on a device. Asked before they are chosen: what needs them has another way."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def triton_problem(device: torch.device) -> str | None:
    """Why not; None if they can. It runs one: up to some seconds at first, for a driver and a compiler are needed."""
    if device.type != "cuda":
        return f"no kernels for {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    from hetero_worker.kernels.trial import run_one

    try:
        run_one(device)
    except (RuntimeError, OSError, ImportError) as error:
        return f"triton does not work here: {error}"
    return None
