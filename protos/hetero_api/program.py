"""Start-up of the gateway's and a rank's process: how usage errors end, and what the environment says.

Importing this costs nothing but argparse and logging: a rank reads its configuration before anything heavy is loaded.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from hetero_api.contract import ENV_ADMIN_TOKEN_FILE, ENV_GROUP_TOKEN_FILE, ENV_LOG_LEVEL, EXIT_USAGE


class ProgramParser(argparse.ArgumentParser):
    """Ends the process with EXIT_USAGE and one line on stderr when the command line is wrong."""

    def error(self, message: str) -> NoReturn:
        """Exit with the code of usage errors, after one line that says what is wrong."""
        sys.stderr.write(f"{self.prog}: {message}\n")
        sys.exit(EXIT_USAGE)


def read_group_token(environment: Mapping[str, str]) -> str:
    """Return the group's token, from the file that the environment names. Raises ValueError."""
    token = read_token(environment, ENV_GROUP_TOKEN_FILE)
    if token is None:
        raise ValueError(f"{ENV_GROUP_TOKEN_FILE} is not set; it names the file with the group's token")
    return token


def read_admin_token(environment: Mapping[str, str]) -> str | None:
    """Return the token that callers of Admin must show; None when none is asked for. Raises ValueError."""
    return read_token(environment, ENV_ADMIN_TOKEN_FILE)


def read_token(environment: Mapping[str, str], variable: str) -> str | None:
    """Return the token in the file that a variable names; None when it is not set. Raises ValueError."""
    path = environment.get(variable)
    if not path:
        return None
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{variable}: {path} cannot be read: {error}") from error
    if not token or not token.isprintable() or " " in token:
        raise ValueError(f"{variable}: {path} holds no token of printable ASCII characters")
    return token


def read_log_level(environment: Mapping[str, str]) -> str:
    """Return the logging level's name. Raises ValueError."""
    level = environment.get(ENV_LOG_LEVEL, "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"{ENV_LOG_LEVEL}: {level!r} is no logging level such as INFO or DEBUG")
    return level
