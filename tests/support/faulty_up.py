"""`hetero up` whose ranks throw in the middle of a step when they are told to.

    python -m tests.support.faulty_up up FILE --port 0     the launcher
    python -m tests.support.faulty_up rank ...             a rank, with hetero_worker's own options

PYTHONPATH has to name the repository. HETERO_TEST_FAULT names a file; the rank whose name (--pod-name) is written to it
removes it and throws.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    import torch

VARIABLE = "HETERO_TEST_FAULT"


def up(manifest: Path) -> int:
    from hetero_api.errors import HeteroError
    from hetero_client.cli.main import report
    from hetero_client.cli.serving import prepare, serve_until_stopped
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.commands import Programs
    from tests.support.measured_up import SharedMeasurements

    home = HeteroHome.from_environment()
    try:
        config = prepare(manifest, port=0, http_port=None, model=None, home=home, with_forkserver=False)
        measurements = SharedMeasurements.for_group(home, config.name, config.resource, plan=config.plan)
        programs = Programs(rank=(sys.executable, "-m", "tests.support.faulty_up", "rank"))
        serve_until_stopped(replace(config, measurements=measurements, programs=programs), home=home)
    except HeteroError as error:
        return report(error)
    return 0


def be_a_rank(arguments: list[str]) -> int:
    # Early, before the process is bound to cores, which these tests do not ask for.
    from hetero_worker.models.decoder import Decoder
    from hetero_worker.process.rank import main

    name = arguments[arguments.index("--pod-name") + 1]
    fault = Path(os.environ[VARIABLE])
    genuine = Decoder.logits

    def logits(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        """Between two of the step's exchanges: the peers wait for this rank."""
        if fault.exists() and fault.read_text(encoding="utf-8") == name:
            fault.unlink()
            raise RuntimeError("as the test says")
        return genuine(self, hidden)

    with mock.patch.object(Decoder, "logits", logits):
        return main(arguments, os.environ)


if __name__ == "__main__":
    sys.exit(up(Path(sys.argv[2])) if sys.argv[1] == "up" else be_a_rank(sys.argv[2:]))
