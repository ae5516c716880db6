"""`hetero doctor`, `hetero top` and `hetero bench`: what a machine lacks, what a group does, how fast it answers."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_api.contract import EXIT_FAILURE
from hetero_client.cli import options
from hetero_client.cli.console import output, print_error, print_json, table_of
from hetero_client.errors import ClientError, DeadlineError, UnavailableError

if TYPE_CHECKING:
    from hetero_client.admin import AdminClient
    from hetero_client.cli.live.history import History, Look
    from hetero_client.doctor.findings import Finding
    from hetero_client.load.doors import Door
    from hetero_client.load.figures import LoadFigures
    from hetero_client.load.run import LoadPlan


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the cluster of the kubeconfig in place of this machine.")
    ] = False,
    context: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --cluster: the kubeconfig's context. Default: its current.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show what this machine, or a cluster, lacks for serving, what that costs, and the fix.

    \b
    hetero doctor
    hetero doctor --json | jq -r '.findings[] | select(.grade != "OK").fix'
    hetero doctor --cluster --context production

    WARN: serving works, and costs more than it need. FAIL: something is missing; the exit code is 1 then.
    """
    from hetero_client.doctor.findings import findings_view, has_failed

    if context is not None and not cluster:
        raise typer.BadParameter("--context: goes with --cluster")
    findings = _of_cluster(context) if cluster else _of_machine()
    if as_json:
        print_json({"checked": "cluster" if cluster else "machine", "findings": [asdict(each) for each in findings]})
    else:
        output().print(findings_view(findings), soft_wrap=True)
    if has_failed(findings):
        raise typer.Exit(EXIT_FAILURE)


def _of_machine() -> list[Finding]:
    from hetero_client.doctor.machine import read_machine
    from hetero_client.doctor.machine_checks import check_machine
    from hetero_client.doctor.software import check_software, read_software

    try:
        machine = read_machine(os.environ)
    except OSError as error:
        raise ClientError(f"this machine cannot be read: {error}") from error
    return [*check_software(read_software(os.environ)), *check_machine(machine)]


def _of_cluster(context: str | None) -> list[Finding]:
    from hetero_client.doctor.cluster import kubectl, read_cluster
    from hetero_client.doctor.cluster_checks import check_cluster

    return check_cluster(read_cluster(kubectl(context)))


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=60, metavar="SECONDS", help="Time between two looks.")
    ] = 1.0,
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
) -> None:
    """Watch a group: its ranks, what each holds, times of steps, the exchange, cache, queue, epochs and healing.

    \b
    hetero top
    hetero top --interval 5
    hetero top --once

    Ctrl-C ends it. Times are of the last seconds; with --once, of the epoch so far.
    """
    from hetero_client.cli.live.history import History
    from hetero_client.cli.live.picture import frame

    history = History()
    with options.admin_client(admin_address, group) as admin:
        history.add(_look(admin))
        if once:
            console = output()
            console.print(frame(history, width=console.width))
            return
        with suppress(KeyboardInterrupt):
            _watch(admin, history, interval_s=interval)


def _look(admin: AdminClient) -> Look:
    from hetero_client.cli.live.history import Look

    topology, stats = admin.topology(wait_for_ready=True), admin.stats()
    return Look(time.monotonic(), time.strftime("%H:%M:%S"), topology, stats)


def _watch(admin: AdminClient, history: History, *, interval_s: float) -> None:
    """Show the picture again and again; below one another where the output is no terminal."""
    from rich.live import Live

    from hetero_client.cli.live.picture import frame

    console = output()
    with ExitStack() as stack:
        live = Live(console=console, screen=True, auto_refresh=False)
        if console.is_terminal:
            stack.enter_context(live)
        while True:
            picture = frame(history, width=console.width)
            if console.is_terminal:
                live.update(picture, refresh=True)
            else:
                console.print(picture)
            time.sleep(interval_s)
            try:
                history.add(_look(admin))
            except (UnavailableError, DeadlineError) as error:
                history.note_silence(time.strftime("%H:%M:%S"), at_s=time.monotonic(), problem=str(error))


class DoorKind(StrEnum):
    """Doors of a server that a load can take."""

    GRPC = "grpc"
    HTTP = "http"


def bench(
    requests: Annotated[int, typer.Option("--requests", min=1, metavar="N", help="Requests to send.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, max=512, metavar="N", help="Requests at a time.")] = 8,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="N", help="Requests a second, at random times, in place of --concurrency."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each answer.")] = 64,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of prompts and times. Default: another one each time, so that no prompt is cached."),
    ] = None,
    door: Annotated[DoorKind, typer.Option(help="Door to send them through.")] = DoorKind.GRPC,
    as_json: options.JsonOption = False,
    address: options.AddressOption = None,
    group: options.GroupOption = None,
    api_key_file: options.ApiKeyFileOption = None,
    ca: options.CaOption = None,
    tls: options.TlsOption = None,
) -> None:
    """Load a running server and measure it: time to first token, time between tokens, throughput.

    \b
    hetero bench
    hetero bench --concurrency 32 --requests 256 --prompt-tokens 512 --output-tokens 128
    hetero bench --rate 4 --door http --json | jq .time_to_first_token_s.p99

    Prompts are random tokens, answers are greedy and of full length. One request goes before, uncounted. The exit code
    is 1 if a request failed.
    """
    from hetero_client.load.figures import figures_of
    from hetero_client.load.run import LoadPlan, run_load

    seed = random.randrange(2**31) if seed is None else seed
    plan = LoadPlan(requests, concurrency, prompt_tokens, output_tokens, rate, seed)
    opened = _open_door(door, address, group, api_key_file=api_key_file, ca=ca, tls=tls)
    try:
        for _ in opened.stream(plan.prompt(-1), output_tokens=output_tokens):
            pass
        figures = figures_of(plan, run_load(opened, plan))
    finally:
        opened.close()
    if as_json:
        print_json({**asdict(plan), **asdict(figures)})
    else:
        _show_load(plan, figures)
    if figures.failed:
        raise typer.Exit(EXIT_FAILURE)


def _open_door(
    kind: DoorKind,
    address: str | None,
    group: str | None,
    *,
    api_key_file: Path | None,
    ca: Path | None,
    tls: bool | None,
) -> Door:
    from hetero_client.access import Access
    from hetero_client.load.doors import GrpcDoor, HttpDoor

    if kind is DoorKind.GRPC:
        return GrpcDoor(options.inference_client(address, group, api_key_file=api_key_file, ca=ca, tls=tls))
    access = Access.find(api_key_file=api_key_file, ca_file=ca, tls=tls)
    return HttpDoor(address or options.local_group(group).http, access=access)


def _show_load(plan: LoadPlan, figures: LoadFigures) -> None:
    table = table_of("ms", "mean", "p50", "p90", "p99", right=("mean", "p50", "p90", "p99"))
    for name, spread in (
        ("time to first token", figures.time_to_first_token_s),
        ("time between tokens", figures.inter_token_latency_s),
        ("per output token of a request", figures.time_per_output_token_s),
        ("whole request", figures.request_latency_s),
    ):
        values = ("-",) * 4 if spread is None else (f"{1e3 * value:,.2f}" for value in asdict(spread).values())
        table.add_row(name, *values)
    console = output()
    console.print(_load_line(plan, figures), highlight=False)
    console.print(table)
    if figures.failed:
        print_error(f"{figures.failed} requests failed; the first: {figures.error}")


def _load_line(plan: LoadPlan, figures: LoadFigures) -> str:
    pace = f"{plan.rate:g} a second" if plan.rate else f"{plan.concurrency} at a time"
    return (
        f"{figures.requests} requests in {figures.duration_s:.1f} s, {pace}, prompts of {plan.prompt_tokens} tokens: "
        f"{figures.output_tokens_per_s:,.1f} output tokens/s, {figures.total_tokens_per_s:,.1f} with prompts, "
        f"{figures.requests_per_s:.2f} requests/s"
    )
