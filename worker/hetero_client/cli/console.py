"""Output of the commands: data on standard output; progress, warnings and errors on standard error.

Colour follows the terminal and NO_COLOR. A model's text goes to a terminal without control characters, so that it
cannot control the terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from hetero_client.progress import Amount

PLAIN_WIDTH: Final = 160
LINE_EVERY_S: Final = 10.0
"""Seconds between two lines of one long work where there is no terminal."""
_CONTROLS: Final = {code: None for code in [*range(32), 127, *range(128, 160)] if chr(code) not in "\n\t"}


def output() -> Console:
    """Return standard output; wide unless it is a terminal, so that tables keep their columns."""
    return _console(sys.stdout)


def errors() -> Console:
    """Return standard error."""
    return _console(sys.stderr)


def print_error(message: str, *, prefix: str = "hetero: ") -> None:
    """Print an error to standard error."""
    errors().print(f"{prefix}{message}", style="red", highlight=False, soft_wrap=True)


def print_warning(message: str) -> None:
    """Print a warning to standard error."""
    print_note(f"warning: {message}", style="yellow")


def print_note(message: str, *, style: str = "dim") -> None:
    """Print a line of progress to standard error."""
    with suppress(OSError):  # a full disk, or a reader that left, ends no group
        errors().print(message, style=style, highlight=False, soft_wrap=True)


def print_data(line: str) -> None:
    """Print one line of data to standard output, unstyled."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def print_json(data: Any) -> None:
    """Print one JSON value on one line of standard output."""
    print_data(json.dumps(data, ensure_ascii=False, default=str))


def write_model_text(text: str) -> None:
    """Write a piece of a model's text to standard output."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class FollowedWork:
    """A long work from when it was first seen: its amount now, its rate, and when a line of it is due."""

    def __init__(self, amount: Amount, now_s: float) -> None:
        self.now = amount
        self._before = amount.done
        self._begun_s = self._said_s = now_s

    def text(self, now_s: float) -> str:
        """Return the amount in words, with the rate since it was first seen."""
        done, total, unit, seconds = self.now.done, self.now.total, self.now.unit, now_s - self._begun_s
        rate = (done - self._before) / seconds if seconds > 0 else 0.0
        if unit == "B":
            scale, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
            text = f"{done / scale:.1f} of {total / scale:.1f} {name}"
            return f"{text} · {rate / 1e6:.0f} MB/s" if rate > 0 else text
        return f"{done} of {total} {unit}" + (f" · {rate:.0f}/s" if rate > 0 else "")

    def due_line(self, now_s: float) -> str:
        """Return the line to print where there is no terminal; "" for LINE_EVERY_S after the one before."""
        if now_s - self._said_s < LINE_EVERY_S:
            return ""
        self._said_s = now_s
        return f"{self.now.work}: {self.text(now_s)}"


def table_of(*columns: str, right: Collection[str] = ()) -> Table:
    """Return an empty table with these columns, those in `right` aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def _console(stream: TextIO) -> Console:
    # Names and paths are no markup, wherever they stand.
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, markup=False, emoji=False)
