"""Vocabularies and chat templates of llama.cpp, with the tokens that its own tests expect.

They come in the source archive of llama-cpp-python, so wherever pip works they are there: fetched once (77 MB),
checked, and kept below the user's cache folder.

    python -m tests.support.llama_cpp_files
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from hetero_api.host.file_lock import FileLock

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SEPARATOR = "\n__ggml_vocab_test__\n"
_WITHIN = "/vendor/llama.cpp/models/"


def llama_cpp_models() -> Path:
    """Return the folder of `ggml-vocab-*.gguf` with their `.inp` and `.out`, and `templates`. Fetch it where needed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero" / "llama.cpp"
    target = cache / VERSION
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock").held(waiting=lambda: None):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _unpack(_fetched(Path(work)), Path(work) / "models")
                (Path(work) / "models").rename(target)
    return target


def _fetched(folder: Path) -> Path:
    requirement = f"llama-cpp-python=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True, stdin=subprocess.DEVNULL, timeout=600)
    (archive,) = folder.glob("*.tar.gz")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{archive.name} has sha256 {found}, expected {SHA256}")
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as file:
        for member in file:
            name = Path(member.name.partition(_WITHIN)[2])
            is_wanted = name.match("ggml-vocab-*") or name.match("templates/*.jinja")
            source = file.extractfile(member) if is_wanted else None
            if source is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(source.read())


def expected_tokens(models: Path, name: str) -> list[tuple[str, list[int]]]:
    """Return texts, and the tokens of each, of a vocabulary's test."""
    vocabulary = models / f"ggml-vocab-{name}.gguf"
    texts = vocabulary.with_suffix(".gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = vocabulary.with_suffix(".gguf.out").read_text().split("\n")
    if len(lines) == len(texts) + 1 and not lines[-1]:  # the last text is not followed by a separator
        lines.pop()
    return [(text, [int(number) for number in line.split()]) for text, line in zip(texts, lines, strict=True)]


if __name__ == "__main__":
    print(llama_cpp_models())
