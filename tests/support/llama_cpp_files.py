"""Vocabularies and chat templates of llama.cpp, with the tokens that its own tests expect.

They come in the source archive of llama-cpp-python, so wherever pip works they are there: fetched once (77 MB),
checked, and kept below the user's cache folder.

    python -m tests.support.llama_cpp_files
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from tests.support.pinned_archives import unpacked

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SEPARATOR = "\n__ggml_vocab_test__\n"
_WITHIN = "/vendor/llama.cpp/models/"


def llama_cpp_models() -> Path:
    """Return the folder of `ggml-vocab-*.gguf` with their `.inp` and `.out`, and `templates`. Fetch it where needed."""
    options = ("--no-binary", "llama-cpp-python")
    return unpacked("llama-cpp-python", VERSION, SHA256, _unpack, options=options)


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
