"""How a pod gets a model of the Hub, from a stand-in for the Hub, by the program that init containers run."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gguf import GGUFWriter

from hetero_api.contract import ENV_HUB_TOKEN_FILE, EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT, EXIT_USAGE
from hetero_client.model_store.store import check_model_directory
from tests.support.local_group import alive, wait_for
from tests.support.stand_in_hub import COMMIT, StandInHub

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

NAME = "org/tiny"
MIB = 1024 * 1024
WEIGHT_BYTES = 3 * MIB
LARGE_BYTES = 48 * MIB
STALL_BYTES = 35 * MIB
"""Where a transfer of a large file stops. The Hub's library hands on pieces of 10 MiB."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


def safetensors(weight_bytes: int = WEIGHT_BYTES) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [weight_bytes // 4], "data_offsets": [0, weight_bytes]}})
    return struct.pack("<Q", len(header)) + header.encode() + os.urandom(weight_bytes)


@pytest.fixture
def hub() -> StandInHub:
    return StandInHub(
        NAME,
        {
            "config.json": json.dumps(CONFIG).encode(),
            "generation_config.json": b"{}",
            "tokenizer.json": b'{"a": 1}',
            "tokenizer_config.json": b"{}",
            "chat_template.jinja": b"{{ messages }}",
            "model.safetensors": safetensors(),
            "pytorch_model.bin": b"pickled",
            "README.md": b"# tiny",
        },
    )


def command(folder: Path, *more: str, into: str = "model") -> list[str]:
    return [
        sys.executable, "-m", "hetero_client.model_delivery", "--uri", f"hf://{NAME}",
        "--cache", str(folder / "cache"), "--into", str(folder / into), *more,
    ]  # fmt: skip


def environment(endpoint: str, **more: str) -> dict[str, str]:
    hidden = {"http_proxy", "https_proxy", "all_proxy", "hf_home", "hf_token"}
    kept = {key: value for key, value in os.environ.items() if key.lower() not in hidden}
    return {**kept, "HF_ENDPOINT": endpoint, **more}


def run(folder: Path, endpoint: str, *more: str, into: str = "model", **env: str) -> tuple[int, str]:
    """Exit status, and the last line on stderr."""
    ended = subprocess.run(
        command(folder, *more, into=into), env=environment(endpoint, **env), capture_output=True, text=True,
        timeout=90, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stderr.splitlines()[-1] if ended.stderr else ""


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_is_fetched_checked_and_laid_out(hub: StandInHub, tmp_path: Path) -> None:
    with hub:
        status, line = run(tmp_path, hub.endpoint)
    assert (status, line) == (
        EXIT_OK, f"hetero_client.model_delivery: hf://{NAME} at commit {COMMIT} is in {tmp_path / 'model'}",
    )  # fmt: skip
    assert files(tmp_path / "model") == set(hub.files) - {"pytorch_model.bin", "README.md"}
    for name in files(tmp_path / "model"):
        assert (tmp_path / "model" / name).read_bytes() == hub.files[name]
        assert (tmp_path / "model" / name).resolve().is_relative_to(tmp_path / "cache")
    assert check_model_directory(tmp_path / "model").num_layers == 1


def test_the_next_pod_of_the_node_fetches_nothing_even_without_the_hub(hub: StandInHub, tmp_path: Path) -> None:
    with hub:
        assert run(tmp_path, hub.endpoint)[0] == EXIT_OK
        fetched = dict(hub.downloads)
        assert run(tmp_path, hub.endpoint, into="second")[0] == EXIT_OK
        assert dict(hub.downloads) == fetched
        gone = hub.endpoint
    status, line = run(tmp_path, gone, into="third")
    assert (status, files(tmp_path / "third")) == (EXIT_OK, files(tmp_path / "model")), line


def test_a_gateway_gets_no_weights(hub: StandInHub, tmp_path: Path) -> None:
    with hub:
        assert run(tmp_path, hub.endpoint, "--tokenizer-only")[0] == EXIT_OK
        assert hub.sent_bytes < WEIGHT_BYTES
        assert files(tmp_path / "model") == {
            "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        }  # fmt: skip
        assert run(tmp_path, hub.endpoint, into="rank")[0] == EXIT_OK
    assert "model.safetensors" in files(tmp_path / "rank")


def test_an_adapter_is_fetched_alone(hub: StandInHub, tmp_path: Path) -> None:
    adapter = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": safetensors()}
    hub.files |= {**adapter, "adapter_model.bin": b"pickled", "checkpoint-1/adapter_config.json": b"{}"}
    with hub:
        status, line = run(tmp_path, hub.endpoint, "--adapter")
        assert status == EXIT_OK, line
        assert files(tmp_path / "model") == set(adapter)
        assert set(hub.downloads) == set(adapter)
        for name, content in adapter.items():
            assert (tmp_path / "model" / name).read_bytes() == content
        del hub.files["adapter_model.safetensors"]
        status, line = run(tmp_path / "other", hub.endpoint, "--adapter")
    assert status == EXIT_PERMANENT
    assert "adapter_model.safetensors: no such file" in line


def gguf_file(tensors: int) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        writer = GGUFWriter(file.name, "llama")
        for number in range(tensors):
            name = "token_embd.weight" if not number else f"blk.0.attn_{number}.weight"
            writer.add_tensor(name, np.zeros((32, 8), dtype=np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Path(file.name).read_bytes()


def test_of_several_variants_a_pod_gets_the_one_that_is_named(hub: StandInHub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    hub.files |= {"tiny-F16.gguf": gguf_file(1), "Q8_0/tiny-Q8_0.gguf": gguf_file(2), "mmproj-F16.gguf": b"images"}
    beside = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    with hub:
        for variant, name in (("q8_0", "Q8_0/tiny-Q8_0.gguf"), ("F16", "tiny-F16.gguf")):
            for scope in ((), ("--tokenizer-only",)):
                into = f"{variant}{len(scope)}"
                status, line = run(tmp_path, hub.endpoint, "--uri", f"hf://{NAME}:{variant}", *scope, into=into)
                assert status == EXIT_OK, line
                assert files(tmp_path / into) == {*beside, Path(name).name}
                assert (tmp_path / into / Path(name).name).read_bytes() == hub.files[name]
        assert hub.downloads["mmproj-F16.gguf"] == 0
        status, line = run(tmp_path, hub.endpoint)
        gone = hub.endpoint
    assert status == EXIT_PERMANENT
    assert "has several models in GGUF: Q8_0/tiny-Q8_0.gguf, tiny-F16.gguf; name one as hf://ORG/NAME:Q4_K_M" in line
    assert run(tmp_path, gone, "--uri", f"hf://{NAME}:F16", into="again")[0] == EXIT_OK
    assert files(tmp_path / "again") == {*beside, "tiny-F16.gguf"}


def test_pods_that_start_together_fetch_once(hub: StandInHub, tmp_path: Path) -> None:
    with hub:
        pods = [
            subprocess.Popen(
                command(tmp_path, into=f"model-{number}"), env=environment(hub.endpoint), stderr=subprocess.PIPE
            )
            for number in range(3)
        ]
        told = [pod.communicate(timeout=90)[1] for pod in pods]
        assert [pod.returncode for pod in pods] == [EXIT_OK] * 3, told
        assert set(hub.downloads.values()) == {1}


def test_a_transfer_that_breaks_off_is_resumed(hub: StandInHub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = safetensors(24 * 2**20)
    hub.cut_short["model.safetensors"] = 22 * 2**20
    with hub:
        status, line = run(tmp_path, hub.endpoint)
        assert status == EXIT_OK, line
        assert (tmp_path / "model" / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
        assert [wanted for wanted in hub.ranges if not wanted.startswith("bytes=0-")]
        assert hub.sent_bytes < 30 * 2**20


@pytest.fixture
def large_hub(hub: StandInHub) -> StandInHub:
    """Weights of a size that is worth taking up, whose first transfer stops in the middle."""
    hub.files["model.safetensors"] = safetensors(LARGE_BYTES)
    hub.stalls["model.safetensors"] = STALL_BYTES
    return hub


def partial_bytes(folder: Path) -> int:
    """What there is of files that are not whole."""
    return sum(path.stat().st_size for path in (folder / "cache" / "partial").glob("*/*"))


@contextmanager
def fetching(folder: Path, endpoint: str, *wrapper: str) -> Iterator[subprocess.Popen[str]]:
    """A pod that has fetched the better part of its weights and gets no more."""
    process = subprocess.Popen(
        [*wrapper, *command(folder)], env=environment(endpoint), stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            wait_for(lambda: partial_bytes(folder) >= 30 * MIB, 60, lambda: f"{partial_bytes(folder)} bytes")
            yield process
        finally:
            process.kill()


def takes_up(hub: StandInHub, folder: Path) -> bool:
    """Whether the next pod gets the model whole, and fetches of the weights only what lacked."""
    again = StandInHub(hub.name, hub.files)
    with again:
        status, line = run(folder, again.endpoint)
    assert status == EXIT_OK, line
    assert (folder / "model" / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert partial_bytes(folder) == 0
    return again.ranges == [f"bytes={30 * MIB}-"] and again.sent_bytes < LARGE_BYTES - 29 * MIB


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_pod_that_is_ended_has_fetched_is_taken_up_by_the_next(
    number: signal.Signals, large_hub: StandInHub, tmp_path: Path
) -> None:
    with large_hub, fetching(tmp_path, large_hub.endpoint) as pod:
        pod.send_signal(number)
        assert pod.wait(20) == (128 + number if number == signal.SIGTERM else -number)
        assert pod.stderr is not None
        told = pod.stderr.read()
    assert "fetching model.safetensors: 50 MB" in told
    assert ("SIGTERM: ending" in told) == (number == signal.SIGTERM)
    assert takes_up(large_hub, tmp_path)


def test_a_pod_that_waits_takes_over_where_the_one_that_fetched_was_killed(
    large_hub: StandInHub, tmp_path: Path
) -> None:
    with large_hub, fetching(tmp_path, large_hub.endpoint) as first:
        waiting = subprocess.Popen(
            command(tmp_path, into="second"), env=environment(large_hub.endpoint), stderr=subprocess.PIPE, text=True
        )
        with waiting:
            assert waiting.stderr is not None
            assert f"another pod is fetching hf://{NAME}; waiting" in waiting.stderr.readline()
            first.kill()
            told = waiting.communicate(timeout=60)[1]
    assert waiting.returncode == EXIT_OK, told
    assert "fetching model.safetensors: 50 MB, of which 31 MB are there" in told
    assert (tmp_path / "second" / "model.safetensors").read_bytes() == large_hub.files["model.safetensors"]
    assert large_hub.ranges == [f"bytes={30 * MIB}-"]


def test_what_was_fetched_before_the_hub_went_away_is_taken_up_by_the_next_start(
    large_hub: StandInHub, tmp_path: Path
) -> None:
    with large_hub, fetching(tmp_path, large_hub.endpoint) as pod:
        large_hub.__exit__(None, None, None)
        told = pod.communicate(timeout=60)[1]
        assert pod.returncode == EXIT_FAILURE
        assert "the Hub cannot be reached" in told.splitlines()[-1]
    assert takes_up(large_hub, tmp_path)


def test_a_container_of_its_own_ends_at_once_when_its_pod_is_deleted(large_hub: StandInHub, tmp_path: Path) -> None:
    """As the first process of its namespace it would not get a signal that it has no handler for."""
    wrapper = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*wrapper, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("a namespace of processes cannot be made here")
    with large_hub, fetching(tmp_path, large_hub.endpoint, *wrapper) as outside:
        (first,) = psutil.Process(outside.pid).children()
        first.send_signal(signal.SIGTERM)
        wait_for(lambda: not alive(first.pid), 20, lambda: "it is still there")


def test_a_partial_file_that_holds_something_else_does_no_harm(large_hub: StandInHub, tmp_path: Path) -> None:
    with large_hub, fetching(tmp_path, large_hub.endpoint) as pod:
        pod.kill()
    (partial,) = (tmp_path / "cache" / "partial").glob("*/*")
    with partial.open("r+b") as file:
        file.write(b"something else")
    again = StandInHub(NAME, large_hub.files)
    with again:
        status, line = run(tmp_path, again.endpoint)
    assert (status, again.downloads["model.safetensors"]) == (EXIT_OK, 2), line
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == large_hub.files["model.safetensors"]


def test_a_pod_that_was_killed_leaves_nothing_half_done_to_the_next(hub: StandInHub, tmp_path: Path) -> None:
    blobs = tmp_path / "cache" / "hub" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    for name, age_s in (("aa.0badf00d.incomplete", 7200), ("bb.0badf00d.incomplete", 0)):
        (blobs / name).write_bytes(b"half")
        os.utime(blobs / name, (time.time() - age_s,) * 2)
    with hub:
        assert run(tmp_path, hub.endpoint)[0] == EXIT_OK
    assert [path.name for path in blobs.glob("*.incomplete")] == ["bb.0badf00d.incomplete"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_what_is_damaged_on_the_way_is_fetched_anew(name: str, hub: StandInHub, tmp_path: Path) -> None:
    hub.damaged.add(name)
    with hub:
        status, line = run(tmp_path, hub.endpoint)
        assert (status, hub.downloads[name]) == (EXIT_OK, 2), line
    assert (tmp_path / "model" / name).read_bytes() == hub.files[name]


def test_what_is_always_damaged_is_told_with_its_file_and_what_to_look_at(hub: StandInHub, tmp_path: Path) -> None:
    hub.always_damaged.add("model.safetensors")
    with hub:
        status, line = run(tmp_path, hub.endpoint)
    assert (status, hub.downloads["model.safetensors"]) == (EXIT_FAILURE, 2)
    for words in ("model.safetensors: was damaged", "2 times in a row", "a proxy", "spec.model.revision"):
        assert words in line
    assert not (tmp_path / "model").exists()


def test_what_is_damaged_on_the_disk_is_fetched_anew(hub: StandInHub, tmp_path: Path) -> None:
    with hub:
        assert run(tmp_path, hub.endpoint)[0] == EXIT_OK
        weights = (tmp_path / "model" / "model.safetensors").resolve()
        weights.chmod(0o644)
        weights.write_bytes(hub.files["model.safetensors"][:-100])
        assert run(tmp_path, hub.endpoint)[0] == EXIT_OK
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_links_to_files_that_the_model_no_longer_has_go(hub: StandInHub, tmp_path: Path) -> None:
    with hub:
        assert run(tmp_path, hub.endpoint)[0] == EXIT_OK
        assert run(tmp_path, hub.endpoint, "--tokenizer-only", into="model")[0] == EXIT_OK
        (tmp_path / "model" / "old.json").symlink_to(tmp_path / "nowhere")
        assert run(tmp_path, hub.endpoint)[0] == EXIT_OK
    assert "old.json" not in files(tmp_path / "model")


def test_a_gated_model_needs_its_token(hub: StandInHub, tmp_path: Path) -> None:
    hub.token = "the-hubs-token"
    token = tmp_path / "token"
    token.write_text("the-hubs-token\n")
    with hub:
        status, line = run(tmp_path, hub.endpoint)
        assert status == EXIT_PERMANENT
        assert "is gated" in line
        assert "spec.model.tokenSecretRef" in line
        assert run(tmp_path, hub.endpoint, **{ENV_HUB_TOKEN_FILE: str(token)})[0] == EXIT_OK


@pytest.mark.parametrize(
    ("more", "env", "status", "words"),
    [
        (("--revision", "no-such-branch"), {}, EXIT_PERMANENT, "has no revision 'no-such-branch'"),
        (("--uri", "hf://org/other"), {}, EXIT_PERMANENT, "no such model on the Hub"),
        (("--uri", "s3://bucket/x"), {}, EXIT_USAGE, "names no Hub model"),
        ((), {ENV_HUB_TOKEN_FILE: "/no/such"}, EXIT_USAGE, f"{ENV_HUB_TOKEN_FILE}: /no/such cannot be read"),
        ((), {"HF_ENDPOINT": "http://127.0.0.1:9"}, EXIT_FAILURE, "the Hub cannot be reached"),
    ],
)
def test_what_is_wrong_is_told_in_the_last_line(
    more: tuple[str, ...], env: dict[str, str], status: int, words: str, hub: StandInHub, tmp_path: Path
) -> None:
    with hub:
        code, line = run(tmp_path, hub.endpoint, *more, **env)
    assert (code, words in line) == (status, True), line


def test_a_model_without_weights_is_told(hub: StandInHub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    with hub:
        code, line = run(tmp_path, hub.endpoint)
    assert code == EXIT_PERMANENT
    assert "no weights" in line


def test_fetching_loads_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys, hetero_client.model_delivery; sys.exit(bool({'torch', 'huggingface_hub'} & sys.modules.keys()))"
    )
    ended: Any = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == 0
