"""What the images of a running cluster hold, and what they do not."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import SYSTEM
from tests.e2e.served import Served
from tests.e2e.site import Site

FIND_TORCH = """
import importlib.util, sys
held = [name for name in ("torch", "numpy", "transformers") if importlib.util.find_spec(name)]
sys.exit(f"holds {held}" if held else 0)
"""


@pytest.mark.parametrize("program", ["operator", "gateway"])
def test_images_that_compute_nothing_hold_no_torch(site: Site, operator: str, served: Served, program: str) -> None:
    pod, namespace = (
        (site.client.list_all("Pod", SYSTEM, labels="app.kubernetes.io/component=operator")[0], SYSTEM)
        if program == "operator"
        else (served.gateway(), served.namespace)
    )
    name = pod["metadata"]["name"]
    site.kubectl("exec", f"--namespace={namespace}", name, "--", "python", "-c", FIND_TORCH)
