"""Options that several commands share, and the values that they stand for."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hetero_client.messages import Choice, Constraint, Grammar, JsonSchema, Regex, SamplingParams

if TYPE_CHECKING:
    from hetero_client.admin import AdminClient
    from hetero_client.client import HeteroClient
    from hetero_client.launcher.run_directory import GroupRecord

_WHERE = "Request and server"

ManifestArgument = Annotated[Path, typer.Argument(metavar="FILE", help="HeteroInference manifest (YAML).")]
SourceArgument = Annotated[
    str, typer.Argument(metavar="FILE|MODEL", help="HeteroInference manifest (.yaml), or a model as in hetero serve.")
]
PortOption = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="Port to listen on; 0 lets the system choose. Default: spec.gateway.service.port."
    ),
]
RouterPortOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the engine protocol that a router (SMG) speaks; 0 lets the system choose. Needs the extra "
        "heteroinference[router]. Default: none.",
    ),
]

HttpPortOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the OpenAI-compatible endpoint; 0 lets the system choose. Default: 0 with --port 0, else "
        "spec.gateway.service.httpPort.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Model directory, or alias of a fetched model, to use in place of spec.model.uri.",
    ),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="FILE",
        help="Keys file: clients must show a key of it (hetero key makes entries). What is in "
        "spec.gateway.auth.keysSecretRef in a cluster.",
    ),
]
TlsFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        metavar="DIR",
        help="Folder with tls.crt and tls.key: the gateway uses TLS. What is in spec.gateway.tls.secretName in a "
        "cluster.",
    ),
]
ClientCaFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--client-ca-dir",
        metavar="DIR",
        help="Folder with ca.crt: clients must show a certificate of this authority. What is in "
        "spec.gateway.tls.clientCASecretName in a cluster.",
    ),
]
PageOption = Annotated[
    bool,
    typer.Option(
        "--page/--no-page",
        help="Whether the HTTP port has a page at its root, to chat and to watch the group. --no-page overrules "
        "spec.gateway.http.page.",
    ),
]
RemeasureOption = Annotated[
    bool,
    typer.Option(
        "--remeasure",
        help="Measure machine and kernels again. By default undisturbed measurements of the last day are reused for "
        "the same manifest, model and cores.",
    ),
]
AddressOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="The gateway. Default: the local group.", rich_help_panel=_WHERE)
]
AdminAddressOption = Annotated[
    str | None,
    typer.Option(
        "--admin-address",
        metavar="HOST:PORT",
        help="The gateway's Admin port. Default: the local group's.",
        rich_help_panel=_WHERE,
    ),
]
ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="File with the key to show. Default: $HETERO_API_KEY, or the file in $HETERO_API_KEY_FILE.",
        rich_help_panel=_WHERE,
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="Authority that the gateway's certificate must be of, in PEM. Default: the file in $HETERO_CA_FILE.",
        rich_help_panel=_WHERE,
    ),
]
TlsOption = Annotated[
    bool | None,
    typer.Option(
        "--tls/--no-tls",
        help="Whether to use TLS. Default: where an authority is given, or a certificate "
        "($HETERO_CLIENT_CERT_FILE, $HETERO_CLIENT_KEY_FILE).",
        rich_help_panel=_WHERE,
    ),
]
GroupOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of the local group, when several run.", rich_help_panel=_WHERE)
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Deadline of the request.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="System message of the conversation.")]

PriorityOption = Annotated[
    int, typer.Option(min=-100, max=100, help="Requests of a lower number go first.", rich_help_panel=_WHERE)
]
ResumeTimeoutOption = Annotated[
    float,
    typer.Option(
        "--resume-timeout", min=0, metavar="SECONDS", rich_help_panel=_WHERE,
        help="Longest wait for a lost gateway or group, to continue where the answer stopped; 0: do not wait.",
    ),
]  # fmt: skip
_sampling = partial(typer.Option, None, rich_help_panel="Sampling")
_form = partial(typer.Option, None, rich_help_panel="Form of the answer (one of them)")
SAMPLING_OPTIONS: Final[Mapping[str, tuple[Any, Any]]] = {
    "max_tokens": (int, _sampling("--max-tokens", "-n", min=1, help="Most tokens to generate.")),
    "temperature": (float, _sampling(help="0 is greedy. Default: 1.")),
    "top_k": (int, _sampling(min=0, help="Sample from the K likeliest tokens; 0: from all.")),
    "top_p": (float, _sampling(help="Sample from the smallest set of tokens with this probability.")),
    "min_p": (float, _sampling(help="Sample from tokens at least this likely, relative to the likeliest.")),
    "seed": (int, _sampling(min=0, help="Seed; the same seed gives the same tokens. Default: random.")),
    "stop": (list[str], _sampling("--stop", help="Text that ends the completion; repeatable.")),
    "ignore_eos": (bool, _sampling("--ignore-eos", help="Continue past the end-of-sequence token.")),
    "presence_penalty": (float, _sampling(help="Above 0: generated tokens become less likely.")),
    "frequency_penalty": (float, _sampling(help="Above 0: tokens become less likely each time they are generated.")),
    "repetition_penalty": (float, _sampling(help="Above 1: tokens of prompt and completion become less likely.")),
    "min_tokens": (int, _sampling(min=0, help="Fewest tokens to generate.")),
    "n": (
        int,
        _sampling("--completions", min=1, metavar="N", help="Number of completions, which share the prompt's cache."),
    ),
    "logprobs": (
        int,
        _sampling(min=0, metavar="N", help="With --json: log-probabilities of each token and the N likeliest."),
    ),
    "json_schema": (Path, _form(metavar="FILE", help="JSON of this schema; - reads standard input.")),
    "regex": (str, _form(help="Text that this expression matches as a whole.")),
    "grammar": (Path, _form(metavar="FILE", help="Text of this grammar, in Lark's notation.")),
    "choice": (list[str], _form("--choice", metavar="TEXT", help="One of these texts; repeatable.")),
}
"""Type and option of each parameter of sampling, by its field in SamplingParams, and of the forms of a constraint."""
FORMS: Final = ("json_schema", "regex", "grammar", "choice")
CHAT_SAMPLING: Final = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
"""Options of sampling for commands that answer messages."""


def takes_sampling(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these of SAMPLING_OPTIONS, and pass it their values as its argument `sampling`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            sampling = sampling_params({name: given.pop(name) for name in names})
            command(**given, sampling=sampling)

        signature = inspect.signature(command, eval_str=True)
        parameters = [_parameter(name) for name in names]  # first, as the panels of --help come in this order
        parameters += [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for name, parameter in signature.parameters.items()
            if name != "sampling"
        ]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        vars(run)["__signature__"] = signature.replace(parameters=parameters)  # what typer reads
        return run

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    kind, option = SAMPLING_OPTIONS[name]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that options give; absent ones are left to the server. Raises BadParameter."""
    fields = {name: value for name, value in given.items() if name not in FORMS and value is not None}
    if stop := fields.pop("stop", None):
        fields["stop"] = tuple(stop)
    return SamplingParams(**fields, constraint=constraint(**{name: given.get(name) for name in FORMS}))


def constraint(
    *, json_schema: Path | None, regex: str | None, grammar: Path | None, choice: list[str] | None
) -> Constraint | None:
    """Return the constraint. Raises BadParameter for more than one, or a file that cannot be read."""
    asked: list[Constraint] = []
    if json_schema is not None:
        asked.append(JsonSchema(read_text(json_schema)))
    if regex is not None:
        asked.append(Regex(regex))
    if grammar is not None:
        asked.append(Grammar(read_text(grammar)))
    if choice:
        asked.append(Choice(tuple(choice)))
    if len(asked) > 1:
        raise typer.BadParameter("give one of --json-schema, --regex, --grammar and --choice")
    return asked[0] if asked else None


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a file, or of standard input for "-". Raises BadParameter."""
    try:
        if str(path) != "-":
            return path.read_text(encoding="utf-8")
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        name = "standard input" if str(path) == "-" else path
        raise typer.BadParameter(f"{name} cannot be read: {error}") from error


def local_group(name: str | None) -> GroupRecord:
    """Return the running local group of that name, or the only one. Raises NoGroupError."""
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.run_directory import find_group

    return find_group(HeteroHome.from_environment(), name)


def inference_client(
    address: str | None, group: str | None, *, api_key_file: Path | None, ca: Path | None, tls: bool | None
) -> HeteroClient:
    """Return a client of the gateway. Raises NoGroupError or CredentialsError."""
    from hetero_client.access import Access
    from hetero_client.client import HeteroClient

    access = Access.find(api_key_file=api_key_file, ca_file=ca, tls=tls)
    return HeteroClient(address or local_group(group).inference, access=access)


def admin_client(admin_address: str | None, group: str | None) -> AdminClient:
    """Return a client of the gateway's Admin service. Raises NoGroupError or CredentialsError."""
    from hetero_client.access import Access
    from hetero_client.admin import AdminClient

    if admin_address:
        return AdminClient(admin_address, token=admin_token(os.environ), access=Access.find())
    return _local_admin_client(local_group(group))


def _local_admin_client(group: GroupRecord) -> AdminClient:
    """Return a client of a local group's Admin service, whose token is in the run's folder if it asks for one."""
    from hetero_client.admin import AdminClient
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.run_directory import RunDirectory

    run = RunDirectory.for_group(HeteroHome.from_environment(), group.name)
    return AdminClient(group.admin, token=run.read_admin_token())


def admin_token(environment: Mapping[str, str]) -> str | None:
    """Return the token in the file that HETERO_ADMIN_TOKEN_FILE names, else the key to show; None without both.

    Raises BadParameter or CredentialsError.
    """
    from hetero_api.program import read_admin_token
    from hetero_client.access import Access

    try:
        return read_admin_token(environment) or Access.find(environment=environment).api_key or None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
