"""The compute library: how it is built, which one is refused, and that Python's view of it is the header's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hetero_worker.native.build import (
    COMPUTE_FOLDER,
    COMPUTE_LIBRARY,
    BuildError,
    build_compute,
    compute_sources,
    source_digest,
)
from hetero_worker.native.compute_library import load_compute

pytestmark = pytest.mark.unit


def copied_sources(folder: Path, *, file: str = "library.c", was: str = "", becomes: str = "") -> Path:
    """The library's sources with one change."""
    copy = folder / "compute"
    shutil.copytree(COMPUTE_FOLDER, copy)
    if was:
        text = (copy / file).read_text(encoding="utf-8")
        assert text.count(was) == 1
        (copy / file).write_text(text.replace(was, becomes), encoding="utf-8")
    return copy


def test_what_was_built_is_taken() -> None:
    loaded = load_compute()
    assert loaded.library is not None, loaded.reason
    assert "generic" in loaded.library.isas
    assert loaded.library.isas[0] != "amx_emulated"  # for tests only
    assert loaded.library.isa == loaded.library.isas[0]


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    library = load_compute().library
    assert library is not None
    with pytest.raises(ValueError, match=f"isa 'sse9': this processor has kernels for {library.isas[0]}"):
        library.use("sse9")
    assert library.isa == library.isas[0]


def test_a_library_that_was_not_built_is_a_reason_with_the_fix(tmp_path: Path) -> None:
    loaded = load_compute(tmp_path / COMPUTE_LIBRARY.name)
    assert loaded.library is None
    assert "were not built" in loaded.reason
    assert "make native" in loaded.reason


def test_a_file_that_is_no_library_is_a_reason(tmp_path: Path) -> None:
    path = tmp_path / COMPUTE_LIBRARY.name
    path.write_bytes(b"no library")
    assert "cannot be loaded" in load_compute(path).reason


def test_a_stale_library_is_refused(tmp_path: Path) -> None:
    built, digest = COMPUTE_LIBRARY.read_bytes(), source_digest(compute_sources()).encode()
    assert built.count(digest) == 1
    stale = tmp_path / COMPUTE_LIBRARY.name
    stale.write_bytes(built.replace(digest, digest[::-1]))
    loaded = load_compute(stale)
    assert loaded.library is None
    assert "built from sources" in loaded.reason
    assert "make native" in loaded.reason


def test_a_source_that_does_not_compile_leaves_the_old_library(tmp_path: Path) -> None:
    target = tmp_path / COMPUTE_LIBRARY.name
    target.write_bytes(b"the old one")
    sources = copied_sources(tmp_path, was="return HC_SOURCE;", becomes="return HC_SOURCE")
    with pytest.raises(BuildError, match=r"library\.c"):
        build_compute(target, folder=sources, flags=("-O0",))
    assert target.read_bytes() == b"the old one"
    assert not list(tmp_path.glob(".build-*"))


@pytest.mark.extended
@pytest.mark.parametrize("compiler", ["gcc", "clang", "aarch64-linux-gnu-gcc"])
def test_it_builds_without_a_warning(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    monkeypatch.setenv("CC", compiler)
    # gcc keeps vectors that no register holds in memory: kernels of them were ten times slower with AVX2.
    of_gcc = () if compiler == "clang" else ("-Wvector-operation-performance",)
    build_compute(tmp_path / COMPUTE_LIBRARY.name, flags=("-Werror", *of_gcc))


def test_every_file_counts_for_what_a_library_was_built_from(tmp_path: Path) -> None:
    sources = copied_sources(tmp_path)
    digests = {source_digest(compute_sources(sources))}
    for source in compute_sources(sources):
        source.write_text(source.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        digests.add(source_digest(compute_sources(sources)))
    assert len(digests) == len(compute_sources()) + 1
