"""`hetero key`: makes a key of the front door, and its entry in a keys file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hetero_client.cli.console import print_data, print_note
from hetero_client.errors import CredentialsError


def key(
    name: Annotated[str, typer.Argument(help="Name of the principal that the key is for.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write the key to. Default: NAME.key.")
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option("--role", help="What it may do: user, metrics or admin; repeatable. Default: user."),
    ] = None,
    requests_per_second: Annotated[float | None, typer.Option(metavar="N", help="Most calls a second.")] = None,
    concurrent_completions: Annotated[int | None, typer.Option(metavar="N", help="Most completions at a time.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens of prompts and answers a minute.")
    ] = None,
    min_priority: Annotated[
        int | None, typer.Option(metavar="N", help="Lowest priority number of its requests; lower numbers go first.")
    ] = None,
) -> None:
    """Make a key: write it to a file of its own, and print its entry for a keys file.

    \b
    hetero key team-a >> keys.yaml
    hetero key team-b --tokens-per-minute 60000 --out team-b.key >> keys.yaml
    hetero key prometheus --role metrics >> keys.yaml
    kubectl create secret generic front-door-keys --from-file keys.yaml

    The entry holds a hash of the key. The key itself is in the file and nowhere else.
    """
    from pydantic import ValidationError

    from hetero_api.api_keys import KeyEntry, dump_entry, hash_of, new_key
    from hetero_api.errors import ManifestError
    from hetero_api.manifest import describe_problems

    secret = new_key()
    limits = {
        "requestsPerSecond": requests_per_second,
        "concurrentCompletions": concurrent_completions,
        "tokensPerMinute": tokens_per_minute,
        "minPriority": min_priority,
    }
    fields = {"name": name, "hashes": [hash_of(secret)], "roles": role or None, "limits": limits}
    try:
        entry = KeyEntry.model_validate(fields)
    except ValidationError as error:
        raise ManifestError(describe_problems(error, KeyEntry)) from error
    path = out or Path(f"{name}.key")
    _write(path, secret)
    print_data(dump_entry(entry).rstrip())
    print_note(f"the key is in {path}; give it to {name}, for --api-key-file or $HETERO_API_KEY")


def _write(path: Path, secret: str) -> None:
    """Write a key to a new file that only its owner can read. Raises CredentialsError."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{secret}\n")
    except OSError as error:
        raise CredentialsError(f"{path} cannot be written: {error.strerror}; choose another with --out FILE") from error
