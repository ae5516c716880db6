"""What the commands write with. Data: standard output. Progress, warnings, errors: standard error.

Colour follows the terminal and NO_COLOR. Text of a model goes to a terminal without control characters, so
that it cannot drive it.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final, TextIO

from rich.console import Console

PLAIN_WIDTH: Final = 160
_CONTROLS: Final = {code: None for code in [*range(32), 127, *range(128, 160)] if chr(code) not in "\n\t"}


def output() -> Console:
    """Standard output; wide where it is no terminal, so that tables keep their columns."""
    return _console(sys.stdout)


def errors() -> Console:
    """Standard error."""
    return _console(sys.stderr)


def print_error(message: str, *, prefix: str = "hetero: ") -> None:
    errors().print(f"{prefix}{message}", style="red", markup=False, highlight=False, soft_wrap=True)


def print_warning(message: str) -> None:
    errors().print(f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_note(message: str) -> None:
    errors().print(message, style="dim", markup=False, highlight=False, soft_wrap=True)


def print_data(line: str) -> None:
    """One line of output, unstyled."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def print_json(data: Any) -> None:
    """One JSON value on one line."""
    print_data(json.dumps(data, ensure_ascii=False, default=str))


def write_model_text(text: str) -> None:
    """Text of a model, as it comes."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH)
