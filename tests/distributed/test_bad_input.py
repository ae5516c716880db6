"""What a user who got something wrong reads: one message that names the field or file, an exit code, no stack trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from hetero_api.contract import EXIT_PERMANENT, EXIT_USAGE
from hetero_client import HeteroClient, SamplingParams
from hetero_client.errors import DeadlineError, DuplicateRequestError, InvalidRequestError, NotConnectedError
from tests.support.local_group import LocalGroupProcess, write_manifest
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def truncated(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def corrupt(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def broken_config(model: Path) -> None:
    (model / "config.json").write_text("{")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def run_up(manifest: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """`hetero up`, which is expected to fail by itself."""
    return subprocess.run(
        [sys.executable, "-m", "hetero_client", "up", str(manifest), "--port", "0"],
        env={**os.environ, "HETERO_HOME": str(home), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (no_weights, "model.safetensors"),
        (truncated, "model.safetensors"),
        (corrupt, "model.safetensors"),
        (no_tokenizer, "tokenizer.json"),
        (no_config, "config.json"),
        (broken_config, "config.json"),
    ],
)
def test_a_damaged_model_is_named_and_ends_the_start(
    pristine: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in pristine.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    damage(model)
    manifest = write_manifest(tmp_path, model=model, ranks=2, max_model_len=None)
    result = run_up(manifest.path, tmp_path / "home")
    told = result.stdout + result.stderr
    assert result.returncode in (EXIT_PERMANENT, EXIT_USAGE), told
    assert said in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("type: CPU", "type: CPU\n    colour: red", "spec.pools[0].colour: unknown field"),
        ("ranks: 2", "ranks: 0", "spec.pools[0].ranks: must be at least 1, not 0"),
        ("ranks: 2", "ranks: 24", "spec.pools"),
        ("mode: Tensor", "mode: GpuOnly", "spec.placement.mode: GpuOnly needs a pool of type GPU"),
    ],
)
def test_a_wrong_manifest_names_the_field(pristine: Path, tmp_path: Path, old: str, new: str, said: str) -> None:
    # 8 KV heads, 5 runs of MLP columns and 5 of vocabulary rows: not every one of 24 ranks would own something.
    manifest = write_manifest(tmp_path, model=pristine, ranks=2, max_model_len=None)
    text = manifest.path.read_text()
    assert old in text
    manifest.path.write_text(text.replace(old, new, 1).replace("memoryPerRank: 2Gi", "memoryPerRank: 512Mi"))
    result = run_up(manifest.path, tmp_path / "home")
    told = result.stdout + result.stderr
    assert result.returncode == EXIT_USAGE, told
    assert said in told
    assert "Traceback" not in told


def test_a_path_that_is_no_model_is_named(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, model=tmp_path / "absent")
    result = run_up(manifest.path, tmp_path / "home")
    assert result.returncode != 0
    assert "absent" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_wrong_requests_end_with_their_status_and_the_field(pristine: Path, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, model=pristine, ranks=1, max_model_len=None)
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group, group.client() as client:
        wrong: list[tuple[list[int] | str, SamplingParams, str]] = [
            ([1] * 512, SamplingParams(), "prompt"),
            ("", SamplingParams(), "text"),
            ([], SamplingParams(), "token_ids"),
            ([320], SamplingParams(), "token_ids"),
            ([1], SamplingParams(temperature=-1), "sampling.temperature"),
            ([1], SamplingParams(top_p=0), "sampling.top_p"),
            ([1], SamplingParams(min_p=2), "sampling.min_p"),
            ([1], SamplingParams(max_tokens=0), "sampling.max_tokens"),
            ([1], SamplingParams(stop=("",)), "sampling.stop"),
            ([1], SamplingParams(stop_token_ids=(99_999,)), "sampling.stop_token_ids"),
        ]
        for prompt, sampling, field in wrong:
            with pytest.raises(InvalidRequestError) as caught:
                client.generate_text(prompt, sampling=sampling)
            assert [v.field for v in caught.value.violations if v.field.startswith(field)], caught.value
        with pytest.raises(DeadlineError):
            client.generate_text([1], timeout_s=0.0)
        _check_duplicate(client)
        _check_unknown_method(group.record.inference)
        # After all that, the server serves.
        assert client.generate_text([1], sampling=SamplingParams(max_tokens=4, ignore_eos=True)).token_ids
    with HeteroClient("127.0.0.1:1") as client, pytest.raises(NotConnectedError):
        client.server_info(timeout_s=5)


def _check_duplicate(client: HeteroClient) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    with client.generate([1], sampling=endless, request_id="twin") as stream:
        next(stream)
        with pytest.raises(DuplicateRequestError, match="twin"):
            client.generate_text([1], request_id="twin")


def _check_unknown_method(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        guess: Any = channel.unary_unary("/hetero.v1.Inference/Guess")
        with pytest.raises(grpc.RpcError) as caught:
            guess(b"", timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
