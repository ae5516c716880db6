"""Writes docs/reference/command-line.md: every command of `hetero`, its arguments and options, from the program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperArgument

from hetero_client.cli.main import app

PAGE: Final = Path("docs/reference/command-line.md")
_INTRO: Final = """\
<!-- Generated from the program by `make docs`. Do not edit. -->
# Command line

`hetero COMMAND --help` shows the same. Data goes to standard output, everything else to standard error. Exit codes: 0
done, 1 an error while running, 2 a wrong command line, manifest or request, 3 trying again cannot help, 128 + N
stopped by signal N.

"""
_EXAMPLES: Final = "\b"


def generate_command_line_page(root: Path) -> list[Path]:
    """Write the page under `root`; return what was written, relative to `root`."""
    (root / PAGE).parent.mkdir(parents=True, exist_ok=True)
    page: Any = typer.main.get_command(app)
    (root / PAGE).write_text(_INTRO + "\n".join(_sections(page, "hetero")) + "\n", encoding="utf-8")
    return [PAGE]


def _sections(group: Any, name: str) -> Iterator[str]:
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _sections(command, f"{name} {word}")
        else:
            yield from _section(command, f"{name} {word}")


def _section(command: Any, name: str) -> Iterator[str]:
    usage = " ".join([name, "[OPTIONS]", *map(_name, _arguments(command))])
    yield f"## {name}\n"
    yield from _help(command.help or "")
    yield f"```text\n{usage}\n```\n"
    rows = [*map(_argument, _arguments(command)), *map(_option, _options(command))]
    if rows:
        yield "| | Default | Meaning |\n|---|---|---|"
        yield from (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
        yield ""


def _help(text: str) -> Iterator[str]:
    """Yield the paragraphs of a command's help; examples become a block."""
    for paragraph in text.replace("\f", "").split("\n\n"):
        if paragraph.startswith(_EXAMPLES):
            lines = paragraph.removeprefix(_EXAMPLES).strip("\n")
            yield f"```text\n{lines}\n```\n"
        elif paragraph.strip():
            yield _marked(" ".join(paragraph.split())) + "\n"


def _marked(text: str) -> str:
    """Return a sentence of a help text as Markdown: angle brackets and stars stand for themselves."""
    return re.sub(r"(?<![`\w])(<[^>`]+>|\*)", r"`\1`", text)


def _arguments(command: Any) -> list[Any]:
    return [each for each in command.params if isinstance(each, TyperArgument)]


def _options(command: Any) -> list[Any]:
    return [each for each in command.params if not isinstance(each, TyperArgument) and not each.hidden]


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _argument(argument: Any) -> tuple[str, str, str]:
    return f"`{_name(argument)}`", "**required**" if argument.required else "", _marked(argument.help or "")


def _value(option: Any) -> str:
    """Return the choices of an option, or the kind of its value."""
    words = str(option.display_type(None)).strip("<>")
    return {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}.get(words.removesuffix(" range"), words)


def _option(option: Any) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if not option.is_flag:
        value = option.metavar or _value(option)
        names += f" `{value}`"
    shown = "" if option.default in (None, False, ()) or callable(option.default) else str(option.default)
    if option.is_flag and option.default is True:
        shown = option.opts[0]
    default = "**required**" if option.required else f"`{shown}`" if shown else ""
    return names, default, _marked(option.help or "")
