"""The compute library: how it is built, which one is refused, and that Python's view of it is the header's."""

from __future__ import annotations

import shutil
import timeit
from pathlib import Path

import pytest
import torch

from hetero_worker.native import build as building
from hetero_worker.native.build import (
    COMPUTE_FOLDER,
    COMPUTE_LIBRARY,
    BuildError,
    build_compute,
    compute_sources,
    exchange_sources,
    source_digest,
)
from hetero_worker.native.compute_library import ComputeLibrary, ffi, load_compute
from hetero_worker.native.team import NativeTeam
from tests.support.native_compute import add_of, compute_library

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


def test_the_processor_is_asked_for_its_instructions_once(tmp_path: Path) -> None:
    """Not whenever operations run: a virtual machine stops for each question. So the smallest takes no longer before
    an instruction set is chosen than after.
    """
    library = ComputeLibrary(ffi.dlopen(shutil.copy(COMPUTE_LIBRARY, tmp_path)))  # in which none is chosen
    team, x = NativeTeam(library, 1), torch.ones(1, 1)
    op = add_of(x, x)

    def best_s() -> float:
        return min(timeit.repeat(lambda: team.run_one(op), number=20, repeat=500))

    before_s = best_s()
    library.use(library.isa)
    assert before_s < 2 * best_s()


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
@pytest.mark.parametrize("compiler", ["gcc", "gcc-11", "clang", "aarch64-linux-gnu-gcc"])
def test_it_builds_without_a_warning(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    monkeypatch.setenv("CC", compiler)
    # gcc keeps vectors that no register holds in memory: kernels of them were ten times slower with AVX2. GCC 11 widens
    # 16-bit numbers one by one in the set for any x86-64.
    of_gcc = () if compiler in ("clang", "gcc-11") else ("-Wvector-operation-performance",)
    build_compute(tmp_path / COMPUTE_LIBRARY.name, flags=("-Werror", *of_gcc))


@pytest.mark.extended
def test_sets_that_the_compiler_does_not_know_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "old-cc"
    refuse = 'case "$*" in *-mavx512bf16*|*+dotprod*) echo "no such option" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{refuse}\nexec {building.find_compiler()[0]} "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    library = ComputeLibrary(ffi.dlopen(str(build_compute(tmp_path / COMPUTE_LIBRARY.name, flags=("-O1",)))))
    missing = {"amx", "avx512_bf16", "dotprod"}
    assert set(library.isas) == set(compute_library().isas) - missing
    team, x = NativeTeam(library, 1), torch.ones(3, 5)
    team.run_one(add_of(x, x))
    assert torch.equal(x, torch.full((3, 5), 2.0))
    said = capsys.readouterr().err
    assert "there are no kernels for" in said
    assert "old-cc is too old" in said


def test_every_file_counts_for_what_a_library_was_built_from(tmp_path: Path) -> None:
    sources = copied_sources(tmp_path)
    digests = {source_digest(compute_sources(sources))}
    for source in sources.iterdir():
        source.write_text(source.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        digests.add(source_digest(compute_sources(sources)))
    assert len(digests) == len(list(sources.iterdir())) + 1
    flags_home = Path(building.__file__)
    assert flags_home in compute_sources()
    assert flags_home in exchange_sources()
