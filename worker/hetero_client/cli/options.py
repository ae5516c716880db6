"""Options that several commands share, and what they mean together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hetero_client.launcher.run_directory import GroupRecord
    from hetero_client.messages import SamplingParams

_SAMPLING = "Sampling"
_WHERE = "Where to ask"

ManifestArgument = Annotated[Path, typer.Argument(metavar="FILE", help="HeteroInference manifest (YAML).")]
PortOption = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="Port to listen on; 0 lets the system choose. Default: spec.gateway.service.port."
    ),
]
ModelDirOption = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR", help="Serve this model directory in place of spec.model.uri."),
]
AddressOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The gateway. Default: the local group.", rich_help_panel=_WHERE),
]
GroupOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which local group, when several run.", rich_help_panel=_WHERE),
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
    int | None, typer.Option(min=0, help="Only the K likeliest; 0 means all.", rich_help_panel=_SAMPLING)
]
TopPOption = Annotated[
    float | None, typer.Option(help="Smallest set that reaches this probability.", rich_help_panel=_SAMPLING)
]
MinPOption = Annotated[
    float | None, typer.Option(help="Only tokens this likely beside the likeliest.", rich_help_panel=_SAMPLING)
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Same seed, same tokens. Default: drawn.", rich_help_panel=_SAMPLING)
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Text that ends the completion; repeatable.", rich_help_panel=_SAMPLING),
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.", rich_help_panel=_SAMPLING)
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
    ignore_eos: bool,
) -> SamplingParams:
    """What the sampling options say; absent ones are left to the server."""
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
    )


def local_group(name: str | None) -> GroupRecord:
    """The running local group that is meant. Raises NoGroupError."""
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.run_directory import find_group

    return find_group(HeteroHome.from_environment(), name)


def inference_address(address: str | None, group: str | None) -> str:
    """Where to ask. Raises NoGroupError."""
    return address or local_group(group).inference


def admin_token(environment: Mapping[str, str]) -> str | None:
    """The token that HETERO_ADMIN_TOKEN_FILE names, for the Admin service of a cluster's gateway."""
    from hetero_api.program import read_admin_token

    try:
        return read_admin_token(environment)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
