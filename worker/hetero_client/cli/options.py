"""Options that several commands share, and the values that they stand for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hetero_client.admin import AdminClient
    from hetero_client.launcher.run_directory import GroupRecord
    from hetero_client.messages import Constraint, SamplingParams

_SAMPLING = "Sampling"
_FORM = "Form of the answer (one of them)"
_WHERE = "Request and server"

ManifestArgument = Annotated[Path, typer.Argument(metavar="FILE", help="HeteroInference manifest (YAML).")]
PortOption = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="Port to listen on; 0 lets the system choose. Default: spec.gateway.service.port."
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
RemeasureOption = Annotated[
    bool,
    typer.Option(
        "--remeasure",
        help="Measure machine and kernels again. By default undisturbed measurements of the last day are reused for "
        "the same manifest, model and cores.",
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The gateway. Default: the local group.", rich_help_panel=_WHERE),
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
GroupOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the local group, when several run.", rich_help_panel=_WHERE),
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Deadline of the request.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="System message of the conversation.")]

MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", "-n", min=1, help="Most tokens to generate.", rich_help_panel=_SAMPLING)
]
TemperatureOption = Annotated[float | None, typer.Option(help="0 is greedy. Default: 1.", rich_help_panel=_SAMPLING)]
TopKOption = Annotated[
    int | None, typer.Option(min=0, help="Sample from the K likeliest tokens; 0: from all.", rich_help_panel=_SAMPLING)
]
TopPOption = Annotated[
    float | None,
    typer.Option(help="Sample from the smallest set of tokens with this probability.", rich_help_panel=_SAMPLING),
]
MinPOption = Annotated[
    float | None,
    typer.Option(help="Sample from tokens at least this likely, relative to the likeliest.", rich_help_panel=_SAMPLING),
]
SeedOption = Annotated[
    int | None,
    typer.Option(min=0, help="Seed; the same seed gives the same tokens. Default: random.", rich_help_panel=_SAMPLING),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Text that ends the completion; repeatable.", rich_help_panel=_SAMPLING),
]
PresencePenaltyOption = Annotated[
    float | None,
    typer.Option(help="Above 0: generated tokens become less likely.", rich_help_panel=_SAMPLING),
]
FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option(help="Above 0: tokens become less likely each time they are generated.", rich_help_panel=_SAMPLING),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(help="Above 1: tokens of prompt and completion become less likely.", rich_help_panel=_SAMPLING),
]
MinTokensOption = Annotated[
    int | None, typer.Option(min=0, help="Fewest tokens to generate.", rich_help_panel=_SAMPLING)
]
CompletionsOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Number of completions, which share the prompt's cache.", rich_help_panel=_SAMPLING
    ),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="N", help="With --json: log-probabilities of each token and the N likeliest.",
        rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
JsonSchemaOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON of this schema; - reads standard input.", rich_help_panel=_FORM),
]
RegexOption = Annotated[
    str | None, typer.Option(help="Text that this expression matches as a whole.", rich_help_panel=_FORM)
]
GrammarOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text of this grammar, in Lark's notation.", rich_help_panel=_FORM),
]
ChoiceOption = Annotated[
    list[str] | None,
    typer.Option("--choice", metavar="TEXT", help="One of these texts; repeatable.", rich_help_panel=_FORM),
]
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
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue past the end-of-sequence token.", rich_help_panel=_SAMPLING)
]


def sampling_params(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: list[str] | None,
    ignore_eos: bool = False,
    **others: Any,
) -> SamplingParams:
    """Return the parameters; absent options are left to the server. `others` are fields of SamplingParams."""
    from hetero_client.messages import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos or None,
        **others,
    )


def constraint(
    *, json_schema: Path | None, regex: str | None, grammar: Path | None, choice: list[str] | None
) -> Constraint | None:
    """Return the constraint. Raises BadParameter for more than one, or a file that cannot be read."""
    from hetero_client.messages import Choice, Grammar, JsonSchema, Regex

    asked: list[Constraint] = []
    if json_schema is not None:
        asked.append(JsonSchema(_read_text(json_schema)))
    if regex is not None:
        asked.append(Regex(regex))
    if grammar is not None:
        asked.append(Grammar(_read_text(grammar)))
    if choice:
        asked.append(Choice(tuple(choice)))
    if len(asked) > 1:
        raise typer.BadParameter("give one of --json-schema, --regex, --grammar and --choice")
    return asked[0] if asked else None


def _read_text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error


def local_group(name: str | None) -> GroupRecord:
    """Return the running local group of that name, or the only one. Raises NoGroupError."""
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.run_directory import find_group

    return find_group(HeteroHome.from_environment(), name)


def inference_address(address: str | None, group: str | None) -> str:
    """Return the address of the gateway. Raises NoGroupError."""
    return address or local_group(group).inference


def admin_client(admin_address: str | None, group: str | None) -> AdminClient:
    """Return a client of the gateway's Admin service. Raises NoGroupError."""
    from hetero_client.admin import AdminClient

    # A local group's gateway is on loopback and requires no token.
    token = admin_token(os.environ) if admin_address else None
    return AdminClient(admin_address or local_group(group).admin, token=token)


def admin_token(environment: Mapping[str, str]) -> str | None:
    """Return the token in the file that HETERO_ADMIN_TOKEN_FILE names. Raises BadParameter."""
    from hetero_api.program import read_admin_token

    try:
        return read_admin_token(environment)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
