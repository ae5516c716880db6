"""`hetero up`, `hetero serve`, `hetero run` and `hetero validate`: commands that take a manifest, or make one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hetero_api.contract import EXIT_USAGE
from hetero_client.cli import options
from hetero_client.cli.console import errors, output, print_data, print_error, print_json, print_note, print_warning
from hetero_client.messages import Prompt, SamplingParams

if TYPE_CHECKING:
    from hetero_api.host.stop_signals import StopSignals
    from hetero_client.admin import GroupTopology
    from hetero_client.cli.asking import AnswerFigures
    from hetero_client.client import GenerateStream
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.commands import DoorFiles
    from hetero_client.launcher.local_group import LocalGroup, LocalGroupConfig, StartTimes
    from hetero_client.launcher.made_manifest import MadeManifest


ANSWER_END_S: Final = 2.0
"""Longest wait for an answer whose stream was closed: a reader of standard output that stopped reading blocks it."""


class Quantization(StrEnum):
    """Formats of spec.model.quantization."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


def up(
    file: options.ManifestArgument,
    port: options.PortOption = None,
    http_port: options.HttpPortOption = None,
    model: options.ModelOption = None,
    forkserver: Annotated[
        bool,
        typer.Option(
            help="Fork ranks, and those that replace lost ones, from a process that has loaded their libraries: they "
            "start sooner and share that memory."
        ),
    ] = True,
    keys: options.KeysOption = None,
    tls_dir: options.TlsFolderOption = None,
    client_ca_dir: options.ClientCaFolderOption = None,
    page: options.PageOption = True,
    remeasure: options.RemeasureOption = False,
    router_port: options.RouterPortOption = None,
    dp_local_rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Start the manifest's group beside N others on this machine, on devices and cores after theirs, under "
            "the name NAME.N.",
        ),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            metavar="N",
            help="Groups to start, with --router, each as --dp-local-rank. With --dp-local-rank: groups that share the "
            "machine's memory.",
        ),
    ] = 1,
    router: Annotated[
        bool,
        typer.Option(
            "--router",
            help="Start a router (SMG) before the groups; the HTTP port is its own. Needs the extra "
            "heteroinference[router].",
        ),
    ] = False,
    router_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lines TENANT:KEY of keys that callers show to the router. Default: none."),
    ] = None,
) -> None:
    """Run a manifest on this machine until Ctrl-C: a gateway and its ranks, as processes.

    \b
    hetero up examples/smollm2-cpu.yaml
    hetero up examples/smollm2-cpu.yaml --model smollm2-135m-instruct
    hetero up examples/smollm2-cpu.yaml --port 0 --dp-local-rank 1
    hetero up examples/smollm2-cpu-1rank.yaml --replicas 2 --router

    Then, in another terminal: hetero chat, hetero generate, hetero topology, hetero ps.
    Ctrl-C once ready stops everything and exits 0; before that it exits 130. Once the group is ready, a process that
    dies or hangs is restarted, and requests continue where they were. When processes die more often than
    spec.recovery.maxRestarts within windowSeconds, or before the group is ready, all are stopped, the last lines of
    the log are shown, and the exit code is 1 (3 if trying again cannot help).
    """
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.commands import DoorFiles

    home = HeteroHome.from_environment()
    door = DoorFiles(keys=keys, tls=tls_dir, client_ca=client_ca_dir, page=page)
    _check_router(router, replicas=replicas, keys=router_keys, door=door, router_port=router_port, rank=dp_local_rank)
    if router:
        given = {"--model": model, "--keys": keys, "--tls-dir": tls_dir}
        group_options = [text for option, value in given.items() if value for text in (option, str(value))]
        group_options += ["--forkserver" if forkserver else "--no-forkserver", *(["--remeasure"] if remeasure else [])]
        group_options += [] if page else ["--no-page"]
        serve_replicas(
            file, replicas, port=port, http_port=http_port, home=home, keys=router_keys, door=door,
            group_options=group_options,
        )  # fmt: skip
        return
    config = prepare(
        file, port=port, http_port=http_port, model=model, home=home, with_forkserver=forkserver,
        remeasure=remeasure, dp_local_rank=dp_local_rank or 0, num_groups=replicas, router_port=router_port,
        door=door,
    )  # fmt: skip
    serve_until_stopped(config, home=home)


def _check_router(
    router: bool, *, replicas: int, keys: Path | None, door: DoorFiles, router_port: int | None, rank: int | None
) -> None:
    """Raise LocalSpecError for options that do not go together."""
    from hetero_client.errors import LocalSpecError

    problems = []
    if not router:
        if replicas > 1 and rank is None:
            problems.append("--replicas: several groups need --router, or --dp-local-rank N for one of them")
        if rank is not None and 1 < replicas <= rank:
            problems.append(f"--dp-local-rank: is one of 0 to {replicas - 1} with --replicas {replicas}")
        problems += ["--router-keys: is of no use without --router"] if keys is not None else []
    else:
        problems += ["--router-port: with --router each group has its own; leave it out"] if router_port else []
        problems += ["--dp-local-rank: with --router give --replicas instead"] if rank is not None else []
        if door.keys is not None and keys is None:
            problems.append("--router-keys: is required with --keys, or the router lets in who has no key")
        if door.client_ca is not None:
            problems.append("--client-ca-dir: the router asks for no certificates; leave it out, or --router")
    if problems:
        raise LocalSpecError(problems)


def serve_replicas(
    file: Path,
    replicas: int,
    *,
    port: int | None,
    http_port: int | None,
    home: HeteroHome,
    keys: Path | None,
    door: DoorFiles,
    group_options: Sequence[str],
) -> None:
    """Run groups of a manifest and a router before them until a stop signal."""
    from hetero_api.host.stop_signals import StopSignals
    from hetero_api.manifest import load_manifest
    from hetero_client.launcher.replicas import LocalReplicas, ReplicasConfig

    resource = load_manifest(file)
    door.check(resource.spec.gateway)
    http_port = http_port if http_port is not None else 0 if port == 0 else resource.spec.gateway.service.http_port
    home.runs.mkdir(parents=True, exist_ok=True)
    config = ReplicasConfig(
        manifest=file.absolute(), num_replicas=replicas, http_port=http_port, keys=keys, tls_dir=door.tls,
        router_log=home.runs / f"{resource.metadata.name}.router.log", group_options=group_options,
    )  # fmt: skip
    config.check()
    with StopSignals() as signals:
        LocalReplicas(config, signals=signals, report=print_note).run()


def serve(
    model: Annotated[
        str, typer.Argument(help="An alias, hf://ORG/NAME, a model's directory or a GGUF file. Fetched if need be.")
    ],
    port: options.PortOption = None,
    http_port: options.HttpPortOption = None,
    quantization: Annotated[
        Quantization, typer.Option(help="Format that the weights get as they are loaded.")
    ] = Quantization.NONE,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=16, metavar="TOKENS", help="Longest prompt plus completion. Default: the model's own, at most 8192."
        ),
    ] = None,
    keys: options.KeysOption = None,
    tls_dir: options.TlsFolderOption = None,
    page: options.PageOption = True,
    remeasure: options.RemeasureOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the manifest to standard output and end.")] = False,
) -> None:
    """Serve a model on all of this machine until Ctrl-C, without a manifest: it is made, shown and kept.

    \b
    hetero serve smollm2-135m-instruct
    hetero serve hf://Qwen/Qwen3-0.6B --quantization int8
    hetero serve /data/qwen3-Q4_K_M.gguf --dry-run > qwen3.yaml

    Then, in another terminal: hetero chat, hetero generate, hetero topology. For anything that the options do not
    say, edit the manifest and start it with hetero up.
    """
    from hetero_client.home import HeteroHome

    home = HeteroHome.from_environment()
    manifest = _made_manifest(model, home, quantization=quantization, max_model_len=max_model_len)
    if dry_run:
        print_data(manifest.text.rstrip())
        return
    up(
        _kept(manifest, home), port=port, http_port=http_port, keys=keys, tls_dir=tls_dir, page=page,
        remeasure=remeasure,
    )  # fmt: skip


@options.takes_sampling(*options.CHAT_SAMPLING)
def run(
    source: options.SourceArgument,
    prompt: Annotated[str, typer.Argument(help="A user's message to the model.")],
    system: options.SystemOption = None,
    port: options.PortOption = 0,
    model: options.ModelOption = None,
    remeasure: options.RemeasureOption = False,
    as_json: options.JsonOption = False,
    *,
    sampling: SamplingParams,
) -> None:
    """Run a manifest or a model for one answer: start, stream the answer, print the figures, stop.

    \b
    hetero run smollm2-135m-instruct "Why is the sky blue?"
    hetero run examples/smollm2-cpu.yaml "Why is the sky blue?" -n 64 --temperature 0
    hetero run examples/smollm2-cpu.yaml --model /data/smollm2 "Why is the sky blue?"

    With --json the answer and the figures are one JSON object.
    """
    from hetero_client.cli.asking import conversation
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.made_manifest import MANIFEST_SUFFIXES

    home = HeteroHome.from_environment()
    is_file = source.endswith(MANIFEST_SUFFIXES)
    file = Path(source) if is_file else _kept(_made_manifest(source, home), home)
    config = prepare(file, port=port, http_port=None, model=model, home=home, with_forkserver=True, remeasure=remeasure)
    answer_once(config, conversation(prompt, system=system), sampling=sampling, home=home, as_json=as_json)


def _made_manifest(
    model: str, home: HeteroHome, *, quantization: str = Quantization.NONE, max_model_len: int | None = None
) -> MadeManifest:
    """Return a manifest of a model, which is fetched if it is not here."""
    from hetero_client.cli.model_commands import FetchDisplay
    from hetero_client.launcher.made_manifest import MadeManifest

    with FetchDisplay(errors()) as display:
        return MadeManifest.of_model(
            model, home=home, report=display.report, quantization=quantization, max_model_len=max_model_len
        )


def _kept(manifest: MadeManifest, home: HeteroHome) -> Path:
    """Keep a manifest and show it; return its path."""
    path = manifest.keep(home)
    print_note(f"{manifest.text.rstrip()}\nkept as {path}; start it again with: hetero up {path}")
    return path


def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Manifests to check.")],
    local: Annotated[bool, typer.Option("--local", help="Also check that this machine can run them.")] = False,
    was: Annotated[
        Path | None,
        typer.Option(metavar="OLD", help="Also check that the existing resource in OLD may be changed to this one."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Check manifests without starting anything. Every problem is one line that names its field.

    \b
    hetero validate examples/*.yaml
    hetero validate my-model.yaml --local
    hetero validate my-model.yaml --was deployed.yaml
    """
    wrong = False
    for path in files:
        problems, warnings = _problems(path, local=local, was=was)
        wrong = wrong or bool(problems)
        if as_json:
            print_json({"file": str(path), "valid": not problems, "problems": problems, "warnings": warnings})
            continue
        for warning in warnings:
            print_warning(f"{path}: {warning}")
        for problem in problems:
            print_error(f"{path}: {problem}")
        if not problems:
            print_data(f"{path}: valid")
    if wrong:
        raise typer.Exit(EXIT_USAGE)


def prepare(
    file: Path,
    *,
    port: int | None,
    http_port: int | None,
    model: str | None,
    home: HeteroHome,
    with_forkserver: bool,
    remeasure: bool = False,
    dp_local_rank: int = 0,
    num_groups: int = 1,
    router_port: int | None = None,
    door: DoorFiles | None = None,
) -> LocalGroupConfig:
    """Return what is decided before the first process, and print warnings. Raises HeteroError."""
    from hetero_api.manifest import load_manifest
    from hetero_client.cli.model_commands import FetchDisplay
    from hetero_client.launcher.commands import DoorFiles
    from hetero_client.launcher.local_group import LocalGroupConfig
    from hetero_client.launcher.local_plan import plan_here
    from hetero_client.launcher.run_directory import MeasurementStore, running_groups
    from hetero_client.model_store.resolve import resolve_adapters, resolve_draft, resolve_model, resolve_named_model
    from hetero_client.model_store.store import ModelStore

    resource = load_manifest(file)
    door = door or DoorFiles()
    door.check(resource.spec.gateway)
    running = [group.share for group in running_groups(home)]
    plan = plan_here(resource, dp_local_rank=dp_local_rank, num_groups=num_groups, running=running)
    for warning in plan.warnings:
        print_warning(warning)
    models = ModelStore(home)
    with FetchDisplay(errors()) as display:
        if model is not None:
            resolved = resolve_named_model(model, models)
        else:
            resolved = resolve_model(resource.spec.model, models, report=display.report)
        draft = resolve_draft(resource.spec.engine.speculative, models, report=display.report)
        adapters = resolve_adapters(resource.spec.engine.adapters, models, report=display.report)
    print_note(f"model {resolved.uri}: {resolved.origin}\n  in {resolved.directory}")
    if draft is not None:
        print_note(f"draft model {draft.uri}: {draft.origin}\n  in {draft.directory}")
    service = resource.spec.gateway.service
    config = LocalGroupConfig(
        resource=resource,
        manifest=file.absolute(),
        model_dir=resolved.directory,
        plan=plan,
        port=service.port if port is None else port,
        http_port=http_port if http_port is not None else 0 if port == 0 else service.http_port,
        with_forkserver=with_forkserver,
        dp_local_rank=dp_local_rank,
        router_port=router_port,
        door=door,
        draft_dir=None if draft is None else draft.directory,
        adapter_dirs=adapters,
    )
    store = MeasurementStore.for_group(home, config.name, resource, model_dir=config.model_dir, plan=plan)
    if remeasure:
        store.discard()
    return replace(config, measurements=store, packed_weights=home.packed)


def serve_until_stopped(config: LocalGroupConfig, *, home: HeteroHome) -> None:
    """Run the group until a stop signal."""
    with _started(config, home) as (group, _, _):
        print_note(f"logs in {home.runs / config.name}; Ctrl-C stops")
        group.watch()
        print_note("stopping")


def answer_once(
    config: LocalGroupConfig, prompt: Prompt, *, sampling: SamplingParams, home: HeteroHome, as_json: bool
) -> None:
    """Run the group for one answer. Raises StartInterruptedError if a signal stopped it."""
    from hetero_client.errors import StartInterruptedError

    with _started(config, home) as (group, times, signals):
        answer = _ask(group, prompt, sampling=sampling, quiet=as_json)
        if answer is None:
            raise StartInterruptedError(signals.first or signal.SIGINT)
        _show_figures(answer, times, as_json=as_json)


@contextmanager
def _started(config: LocalGroupConfig, home: HeteroHome) -> Iterator[tuple[LocalGroup, StartTimes, StopSignals]]:
    """Run the group within the block; yield it once it is ready."""
    from hetero_api.host.stop_signals import StopSignals
    from hetero_client.launcher.local_group import LocalGroup
    from hetero_client.launcher.run_directory import RunDirectory

    run = RunDirectory.for_group(home, config.name)
    with StopSignals() as signals, LocalGroup(config, run=run, signals=signals, report=print_note) as group:
        topology, times = _start(group, config)
        _show_ready(group, topology, times, config=config)
        yield group, times, signals


def _start(group: LocalGroup, config: LocalGroupConfig) -> tuple[GroupTopology, StartTimes]:
    from hetero_client.cli.tables import StartDisplay

    names = ("gateway", *(rank.name for rank in config.plan.ranks))
    with StartDisplay(errors(), names) as display:
        group.start()
        display.gateway_listens(group.record.inference)
        return group.wait_ready(display.show)


def _show_ready(group: LocalGroup, topology: GroupTopology, times: StartTimes, *, config: LocalGroupConfig) -> None:
    from hetero_client.cli.tables import placement_view

    console = errors()
    console.print(placement_view(topology, width=console.width))
    capacity = topology.num_blocks * topology.block_size
    console.print(
        f"epoch {topology.epoch} · exchange {topology.exchange or 'none'} · KV cache {capacity} tokens"
        f" · started in {times.ready_s - times.started_s:.1f} s",
        style="dim", highlight=False,
    )  # fmt: skip
    if (measured_at := group.keep_measurements()) is not None:
        when = time.strftime("%d %b %H:%M", time.localtime(measured_at))
        console.print(f"measurements of {when}; --remeasure repeats them", style="dim", highlight=False)
    scheme = "https" if config.door.tls is not None else "http"
    console.print(f"OpenAI API: {scheme}://{group.record.http}/v1", style="dim", highlight=False)
    if config.door.page and config.resource.spec.gateway.http.page:
        console.print(f"page: {scheme}://{group.record.http}/", style="dim", highlight=False)
    if group.record.router:
        console.print(f"for a router: grpc://{group.record.router}", style="dim", highlight=False)
    console.print(f"ready: {group.record.inference}", style="bold green", highlight=False)


class _Answer(threading.Thread):
    """Thread that streams one answer while the launcher watches its processes."""

    def __init__(self, stream: GenerateStream, *, quiet: bool) -> None:
        super().__init__(name="answer")
        self.figures: AnswerFigures | None = None
        self.error: Exception | None = None
        self._stream = stream
        self._quiet = quiet
        self._sent_at_s = time.monotonic()

    def run(self) -> None:
        """Stream the answer."""
        from hetero_client.cli.asking import show_answer

        try:
            self.figures = show_answer(self._stream, sent_at_s=self._sent_at_s, quiet=self._quiet)
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            self.error = error


def _ask(group: LocalGroup, prompt: Prompt, *, sampling: SamplingParams, quiet: bool) -> AnswerFigures | None:
    """Stream the answer and return its figures; None if a signal stopped it."""
    from hetero_client.client import HeteroClient

    with HeteroClient(group.record.inference) as client:
        stream = client.generate(prompt, sampling=sampling)
        answer = _Answer(stream, quiet=quiet)
        answer.start()
        try:
            group.watch(until=lambda: not answer.is_alive())
            stopped = answer.is_alive()
        finally:
            stream.close()
            answer.join(ANSWER_END_S)
    if answer.error is not None and not stopped:
        group.check_alive()
        raise answer.error
    return None if stopped else answer.figures


def _show_figures(answer: AnswerFigures, times: StartTimes, *, as_json: bool) -> None:
    load_s = answer.first_token_at_s - times.loading_s
    start_s = answer.first_token_at_s - times.started_s
    if as_json:
        data = asdict(answer)
        del data["first_token_at_s"]
        print_json({**data, "load_to_first_token_s": load_s, "start_to_first_token_s": start_s})
        return
    output().print(
        f"{answer.line()} · load to first token {load_s:.1f} s · start to first token {start_s:.1f} s",
        style="dim", highlight=False, soft_wrap=True,
    )  # fmt: skip


def _problems(path: Path, *, local: bool, was: Path | None) -> tuple[list[str], list[str]]:
    """Return the problems and warnings of one manifest; what this machine lacks is a problem only if `local`."""
    from hetero_api.errors import ManifestError
    from hetero_api.manifest import check_transition, load_manifest
    from hetero_client.errors import LocalSpecError
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.local_plan import plan_here
    from hetero_client.model_store.resolve import memory_warnings
    from hetero_client.model_store.store import ModelStore

    try:
        resource = load_manifest(path)
        forbidden = [] if was is None else check_transition(load_manifest(was).spec, resource.spec)
    except ManifestError as error:
        return list(error.problems), []
    if forbidden:
        return forbidden, []
    warnings = memory_warnings(resource.spec, ModelStore(HeteroHome.from_environment()))
    problems: list[str] = []
    found: list[str] = []
    try:
        found += plan_here(resource).warnings
    except LocalSpecError as error:
        (problems if local else found).extend(error.problems)
    return problems, [*warnings, *(text if local else f"on this machine: {text}" for text in found)]
