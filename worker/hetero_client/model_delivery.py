"""Program of init containers: brings a model or an adapter of the Hub to a pod.

    python -m hetero_client.model_delivery --uri hf://ORG/NAME [--revision R] --cache DIR --into DIR
        [--tokenizer-only | --adapter]

Files are fetched into the cache once, however many pods share it: a lock makes the others wait. A transfer that breaks
off is resumed, also by the next process if this one is killed. Whole files are not fetched again, and if the Hub cannot
be reached, a complete cache is enough. Every file's checksum is verified (`model_store/hub.py`). `--into` then gets
links to the files, their config last: a folder with that is complete.

Exit status: EXIT_USAGE for a wrong command line, EXIT_PERMANENT if the Hub has no such model or refuses it,
EXIT_FAILURE if trying again can help, 128 + N if signal N stopped it. The last line on stderr says why.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hetero_api.contract import ENV_HUB_TOKEN_FILE, EXIT_FAILURE, EXIT_OK
from hetero_api.host.file_lock import FileLock
from hetero_api.host.stop_signals import end_on_stop_signals
from hetero_api.model_config import CONFIG_FILE
from hetero_api.model_directory import ADAPTER_CONFIG
from hetero_api.program import ProgramParser, read_token
from hetero_client.errors import DamagedFileError, ModelStoreError
from hetero_client.model_store.hub import (
    ADAPTER_PATTERNS,
    PATTERNS,
    TOKENIZER_PATTERNS,
    download_resumably,
    served_files,
    verify_snapshot,
)
from hetero_client.model_store.store import ModelKey, check_adapter_directory, check_model_directory

PROGRAM: Final = "hetero_client.model_delivery"
_HUB_SETTINGS: Final = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_USELESS_AFTER_S: Final = 3600.0
"""Age from which a partial file of the Hub's library is a killed process's."""
_ABANDONED_AFTER_S: Final = 7 * 24 * 3600.0
"""Age from which a partial file of ours is of a commit that nobody wants any more."""
_FETCHES: Final = 2
"""A damaged file is fetched once more; one that is damaged again is damaged at its source."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A model, and the folders to bring it to."""

    key: ModelKey
    cache: Path
    into: Path
    tokenizer_only: bool
    is_adapter: bool
    token: str | None = field(repr=False)

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Delivery:
        """Read the command line; exit with EXIT_USAGE and one line on stderr if it is wrong."""
        parser = _parser()
        options = parser.parse_args(arguments)
        try:
            key = ModelKey.parse(options.uri, revision=options.revision)
            token = read_token(environment, ENV_HUB_TOKEN_FILE)
        except (ModelStoreError, ValueError) as error:
            parser.error(str(error))
        into, cache = options.into.absolute(), options.cache.absolute()
        return cls(key, cache, into, options.tokenizer_only, options.adapter, token)

    @property
    def patterns(self) -> Sequence[str]:
        """Patterns of the files to fetch."""
        return ADAPTER_PATTERNS if self.is_adapter else TOKENIZER_PATTERNS if self.tokenizer_only else PATTERNS

    @property
    def lock(self) -> FileLock:
        """Lock to hold while the cache's entry for this model changes."""
        return FileLock(self.cache / "locks" / f"{self._folder}.lock")

    @property
    def partials(self) -> Path:
        """Folder of large files while they are fetched."""
        return self.cache / "partial" / self._folder

    def manifest(self, commit: str) -> Path:
        """Return the file with the checksums of a commit's files."""
        return self.cache / "checksums" / self._folder / f"{commit}.json"

    @property
    def _folder(self) -> str:
        return self.key.name.replace("/", "--")


def deliver(delivery: Delivery) -> Path:
    """Fetch what the cache lacks, make the links, return the snapshot. Raises ModelStoreError or OSError."""
    with delivery.lock.held(waiting=lambda: _log(f"another pod is fetching {delivery.key.uri}; waiting")):
        snapshot = _fetch(delivery)
    if delivery.is_adapter:
        check_adapter_directory(snapshot)
        _lay_out({name: (snapshot / name).resolve() for name in ADAPTER_PATTERNS}, delivery.into)
        return snapshot
    files = served_files(delivery.key, snapshot)
    if delivery.key.variant is None:
        check_model_directory(snapshot, weights=not delivery.tokenizer_only)
    _lay_out(files, delivery.into)
    if delivery.key.variant is not None:  # the cache may hold other variants beside it
        check_model_directory(delivery.into)
    return snapshot


def _fetch(delivery: Delivery) -> Path:
    _remove_abandoned(delivery)
    for attempt in range(1, _FETCHES + 1):
        snapshot = download_resumably(
            delivery.key, cache_dir=delivery.cache / "hub", partials=delivery.partials, token=delivery.token,
            patterns=delivery.patterns, report=_log,
        )  # fmt: skip
        try:
            verify_snapshot(snapshot, delivery.manifest(snapshot.name))
            return snapshot
        except DamagedFileError as error:
            if attempt == _FETCHES:
                raise DamagedFileError(
                    f"{error}, {_FETCHES} times in a row; look for what changes it on its way from the Hub (a proxy, a "
                    f"mirror), for a bad disk below {delivery.cache}, or name another spec.model.revision"
                ) from error
            _log(f"{error}; fetching it again")
    raise AssertionError("the loop returns or raises")


def _remove_abandoned(delivery: Delivery) -> None:
    """Remove old partial files, ours and those of the Hub's library, which no other process takes up."""
    for folder, pattern, after_s in (
        (delivery.cache / "hub", "*/blobs/*.*.incomplete", _USELESS_AFTER_S),
        (delivery.partials, "*", _ABANDONED_AFTER_S),
    ):
        for partial in folder.glob(pattern):
            with suppress(FileNotFoundError):
                if partial.stat().st_mtime < time.time() - after_s:
                    partial.unlink()


def _lay_out(files: Mapping[str, Path], into: Path) -> None:
    """Make links in `into` to files, by their names there, and remove all other links."""
    into.mkdir(parents=True, exist_ok=True)
    for stale in [path for path in into.rglob("*") if path.is_symlink() and str(path.relative_to(into)) not in files]:
        stale.unlink()
    for name, target in sorted(files.items(), key=lambda item: item[0] in (CONFIG_FILE, ADAPTER_CONFIG)):
        link = into / name
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary = link.with_name(f".{link.name}.link")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, link)


def _parser() -> argparse.ArgumentParser:
    parser = ProgramParser(
        prog=PROGRAM, description="Brings a model or an adapter of the Hub to a pod.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--uri", required=True, metavar="hf://ORG/NAME[:VARIANT]", help="the model")
    add("--revision", metavar="REVISION", help="branch, tag or commit; default: main")
    add("--cache", required=True, type=Path, metavar="DIR", help="folder that keeps fetched models")
    add("--into", required=True, type=Path, metavar="DIR", help="folder that gets links to the model's files")
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--tokenizer-only", action="store_true", help="leave the weights out: all that a gateway needs")
    scope.add_argument("--adapter", action="store_true", help="bring a LoRA adapter, as PEFT saves it")
    return parser


def _log(line: str) -> None:
    sys.stderr.write(f"{PROGRAM}: {line}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the process; return its exit status."""
    delivery = Delivery.from_command_line(arguments, environment)
    # The Hub's library reads these when it is imported, later. A pod can write to the cache only.
    for name, value in {**_HUB_SETTINGS, "HF_HOME": str(delivery.cache / "home")}.items():
        os.environ.setdefault(name, value)
    try:
        snapshot = deliver(delivery)
    except ModelStoreError as error:
        _log(str(error))
        return error.exit_code
    except OSError as error:
        _log(f"{error.filename or delivery.cache}: {error.strerror or error}")
        return EXIT_FAILURE
    _log(f"{delivery.key.uri} at commit {snapshot.name} is in {delivery.into}")
    return EXIT_OK


def _end(number: int) -> int:
    """End on a stop signal. There is nothing to clean up: the next process continues where this one was."""
    os.write(sys.stderr.fileno(), f"{PROGRAM}: {signal.Signals(number).name}: ending\n".encode())
    return 128 + number


def run() -> None:
    """Run the program with this process's arguments and environment."""
    end_on_stop_signals(_end)
    sys.exit(main(sys.argv[1:], os.environ))


if __name__ == "__main__":
    run()
