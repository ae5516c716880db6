"""The native exchange: how it is built, which one is refused, and that its sums are torch's to the last bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from hetero_worker.distributed.exchange import sum_in_order
from hetero_worker.distributed.native_exchange import ffi, load
from hetero_worker.native import build as building
from hetero_worker.native.build import EXCHANGE_SOURCE, BuildError, build_compute, build_exchange, find_compiler
from hetero_worker.native.loading import address_of
from tests.support.shm_threads import native_library

pytestmark = pytest.mark.unit

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
AS_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SIZES = (0, 1, 7, 64, 1023, 1024, 1025, 5001)


def native_sum(terms: list[torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(terms[0])
    addresses = ffi.new("uintptr_t[]", [term.data_ptr() for term in terms])
    native_library().hx_sum(DTYPES[out.dtype], out.data_ptr(), address_of(addresses), len(terms), out.numel())
    return out


def assert_same_bits(is_: torch.Tensor, must: torch.Tensor) -> None:
    """Every NaN is as good as another: torch's own differ between its vectors and what is left over."""
    assert torch.equal(is_.isnan(), must.isnan())
    numbers = ~must.isnan()
    bits = AS_BITS[must.dtype]
    assert torch.equal(is_.view(bits)[numbers], must.view(bits)[numbers])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_terms", [1, 2, 3, 5])
def test_sums_are_those_of_sum_in_order(dtype: torch.dtype, num_terms: int) -> None:
    values = torch.Generator().manual_seed(num_terms)
    for size in SIZES:
        scales = 10.0 ** torch.randint(-9, 5, (size,), generator=values)
        terms = [(torch.randn(size, generator=values) * scales).to(dtype) for _ in range(num_terms)]
        must = torch.empty_like(terms[0])
        sum_in_order(terms, must)
        assert_same_bits(native_sum(terms), must)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_terms", [2, 3])
def test_sums_of_random_bits_are_too(dtype: torch.dtype, num_terms: int) -> None:
    """Subnormal numbers, infinities, NaNs, and sums that overflow or are ties."""
    values = torch.Generator().manual_seed(7)
    width = torch.finfo(dtype).bits
    span = -(2 ** (width - 1)), 2 ** (width - 1)
    bits = [torch.randint(*span, (65536,), generator=values).to(AS_BITS[dtype]) for _ in range(num_terms)]
    terms = [each.view(dtype) for each in bits]
    must = torch.empty_like(terms[0])
    sum_in_order(terms, must)
    assert_same_bits(native_sum(terms), must)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("addend", [0.0, 1.0, 2.0**-24, -(2.0**-14), 2.0**15])
def test_every_half_is_widened_and_narrowed_as_torch_does(dtype: torch.dtype, addend: float) -> None:
    every = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    terms = [every, torch.full_like(every, addend)]
    must = torch.empty_like(every)
    sum_in_order(terms, must)
    assert_same_bits(native_sum(terms), must)


def test_a_library_that_was_not_built_is_a_reason_with_the_fix(tmp_path: Path) -> None:
    loaded = load(tmp_path / "libhetero_exchange.so")

    assert loaded.library is None
    assert "was not built" in loaded.reason
    assert "make native" in loaded.reason


def test_a_file_that_is_no_library_is_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "libhetero_exchange.so"
    path.write_bytes(b"no library")

    assert "cannot be loaded" in load(path).reason


def test_a_stale_library_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "native_exchange.c"
    source.write_text(EXCHANGE_SOURCE.read_text() + "\n")

    loaded = load(build_exchange(tmp_path / "libhetero_exchange.so", source=source))

    assert loaded.library is None
    assert "built from sources" in loaded.reason
    assert "make native" in loaded.reason


def test_what_was_just_built_is_taken(tmp_path: Path) -> None:
    assert load(build_exchange(tmp_path / "libhetero_exchange.so")).library is not None
    assert [path.name for path in tmp_path.iterdir()] == ["libhetero_exchange.so"]


def test_without_a_compiler_the_build_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    assert building.main() == 1
    assert "there is none of cc, gcc, clang" in capsys.readouterr().err


def test_a_chosen_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")

    with pytest.raises(BuildError, match="CC=no-such-compiler -m64 is no program"):
        find_compiler()


def test_a_source_that_does_not_compile_leaves_the_old_library(tmp_path: Path) -> None:
    target, source = tmp_path / "libhetero_exchange.so", tmp_path / "native_exchange.c"
    target.write_bytes(b"the old one")
    source.write_text("int broken(void) { return }\n")

    with pytest.raises(BuildError, match=r"exchange\.c:1"):
        build_exchange(target, source=source)
    assert target.read_bytes() == b"the old one"


def test_a_folder_that_takes_no_library_is_named(tmp_path: Path) -> None:
    for build in (build_exchange, build_compute):
        with pytest.raises(BuildError, match=r"absent takes no new file: .*No such file"):
            build(tmp_path / "absent" / "library.so")


@pytest.mark.parametrize("compiler", ["gcc", "clang", "aarch64-linux-gnu-gcc"])
def test_it_builds_without_a_warning(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    monkeypatch.setitem(os.environ, "CC", compiler)

    build_exchange(tmp_path / "libhetero_exchange.so", flags=("-Wconversion", "-Werror"))
