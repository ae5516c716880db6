"""Files of llama.cpp's source tree, e.g. chat templates that models are shipped with.

They come out of llama-cpp-python's source archive, which pip fetches once, into `$HETERO_LLAMA_CPP_SOURCES` or the
user's cache. The archive's checksum is pinned.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from hetero_api.host.file_lock import FileLock

VERSION: Final = "0.3.36"
SHA256: Final = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
ENV_FOLDER: Final = "HETERO_LLAMA_CPP_SOURCES"
_ARCHIVE: Final = f"llama_cpp_python-{VERSION}.tar.gz"
_TREE: Final = f"llama_cpp_python-{VERSION}/vendor/llama.cpp"
_FETCH_S: Final = 600


def source_folder(path: str) -> Path:
    """Return a copy of a folder of the source tree, e.g. `models/templates`.

    Seconds the first time, and a minute more if the archive has to be fetched.
    """
    cache = Path(os.environ.get(ENV_FOLDER) or Path("~/.cache/hetero-tests/llama.cpp").expanduser())
    cache.mkdir(parents=True, exist_ok=True)
    folder, lock = cache / VERSION / path, FileLock(cache / "lock")
    lock.acquire()
    try:
        if not folder.is_dir():
            _unpack(_archive(cache), path, folder)
    finally:
        lock.release()
    return folder


def _archive(cache: Path) -> Path:
    archive = cache / _ARCHIVE
    if not archive.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*command, "--dest", str(cache), f"llama-cpp-python=={VERSION}"], check=True, timeout=_FETCH_S)
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{archive}: sha256 {found}, and {SHA256} was expected")
    return archive


def _unpack(archive: Path, path: str, folder: Path) -> None:
    """Write the folder's own files, the folder's name last."""
    new = folder.with_name(f".{folder.name}.new")
    new.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tree:
        for member in tree:
            inside, _, name = member.name.rpartition("/")
            content = tree.extractfile(member) if member.isfile() and inside == f"{_TREE}/{path}" else None
            if content is not None:
                (new / name).write_bytes(content.read())
    new.rename(folder)
