"""The gateway's process: it reads its inputs, listens, serves and ends.

The first SIGTERM or SIGINT drains: new requests are refused, those in flight have the drain timeout to finish; the
second ends at once. Either way the exit status is 0. It is EXIT_USAGE when command line, resource or a port is wrong,
EXIT_PERMANENT when the model's files are, EXIT_FAILURE when the gateway itself breaks. The last lines on stderr name
the problems that a person can mend, one a line.

The order matters: reading a tokenizer takes several times the memory that it has afterwards. So the model is read
first, and the servers are imported late, into the memory that reading has given back.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from hetero_api.contract import EXIT_FAILURE, EXIT_PERMANENT, EXIT_USAGE
from hetero_api.errors import HeteroError, ManifestError, ModelError, ModelReadError, PlanError
from hetero_api.host.memory import release_freed_memory
from hetero_gateway.group.errors import UnsupportedSpecError
from hetero_gateway.server.config import PROGRAM, GatewayConfig, read_model
from hetero_gateway.server.errors import BindError, TlsError


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the process, and return its exit status."""
    config = GatewayConfig.from_command_line(arguments, environment)
    _configure_logging(config)
    try:
        model = read_model(config.manifest, config.model_dir, config.draft_dir, config.adapter_dirs)
        config.check_access(model.resource.spec.gateway)
        release_freed_memory()
        from hetero_gateway.server.serving import live

        return live(config, model)
    except ManifestError as error:
        return _tell([f"{error.source or config.manifest}: {problem}" for problem in error.problems], EXIT_USAGE)
    except UnsupportedSpecError as error:
        return _tell([f"{config.manifest}: {problem}" for problem in error.problems], EXIT_USAGE)
    except PlanError as error:
        return _tell([f"{config.manifest}: {error}"], EXIT_USAGE)
    except (BindError, TlsError) as error:
        return _tell([str(error)], EXIT_USAGE)
    except ModelError as error:
        return _tell([str(error)], EXIT_FAILURE if isinstance(error, ModelReadError) else EXIT_PERMANENT)
    except (HeteroError, OSError) as error:
        return _tell([str(error)], EXIT_FAILURE)


def _tell(problems: Sequence[str], exit_status: int) -> int:
    for problem in problems:
        sys.stderr.write(f"{PROGRAM}: {problem}\n")
    return exit_status


def _configure_logging(config: GatewayConfig) -> None:
    logging.basicConfig(
        level=config.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s gateway %(name)s: %(message)s"
    )


def run() -> None:
    """Run `main` with this process's arguments and environment, and exit."""
    sys.exit(main(sys.argv[1:], os.environ))
