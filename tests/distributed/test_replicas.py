"""`hetero up --replicas 2 --router`: real SMG before two real groups, as a user starts and calls it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import openai
import psutil
import pytest

from hetero_api.contract import EXIT_USAGE
from hetero_api.v1 import admin_pb2, admin_pb2_grpc
from hetero_client.home import HeteroHome
from hetero_client.launcher.run_directory import RunDirectory
from tests.support.local_group import REPOSITORY, write_manifest
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

KEY = "the-key-of-tenant-one"
START_S = 120.0
STOP_S = 30.0
AGAIN_S = 5.0
"""Longest time without an answer after the router was killed."""
STREAMS = 8
STREAM_TOKENS = 3000
STREAM_S = 60.0


@dataclass(frozen=True, slots=True)
class Replicas:
    process: subprocess.Popen[bytes]
    address: str
    home: HeteroHome

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0)

    def served(self) -> list[int]:
        """Prompt tokens that each group has computed."""
        return [stats.prompt_tokens for stats in self._stats()]

    def running(self) -> list[int]:
        """Requests that each group works on."""
        return [stats.running_requests for stats in self._stats()]

    def _stats(self) -> Iterator[admin_pb2.GetStatsResponse]:
        for name in ("test", "test.1"):
            record = RunDirectory.for_group(self.home, name).read_record()
            assert record is not None
            with grpc.insecure_channel(record.admin, options=[("grpc.enable_http_proxy", 0)]) as channel:
                yield admin_pb2_grpc.AdminStub(channel).GetStats(admin_pb2.GetStatsRequest(), timeout=START_S)

    def router(self) -> psutil.Process:
        """SMG's process, which goes by a title of its own."""
        children = psutil.Process(self.process.pid).children()
        (found,) = [each for each in children if each.cmdline()[0].startswith("smg::router")]
        return found


def up(manifest: Path, home: Path, log: Path, *options: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "hetero_client", "up", str(manifest), "--port", "0", *options],
            cwd=REPOSITORY,
            env={**os.environ, "HETERO_HOME": str(home), "NO_COLOR": "1", "NO_PROXY": "*"},
            stdout=file,
            stderr=file,
        )


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("replicas")
    model = save_tiny_model(folder / "model", "llama", max_position_embeddings=4096)
    manifest = write_manifest(folder, model=model, ranks=1, max_model_len=None)
    keys, log = folder / "keys", folder / "up.log"
    keys.write_text(f"one:{KEY}\n")
    process = up(manifest.path, folder / "home", log, "--replicas", "2", "--router", "--router-keys", str(keys))
    try:
        deadline_s = time.monotonic() + START_S
        while not (found := re.search(r"router: (http://\S+)/v1", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        yield Replicas(process, found[1], HeteroHome(folder / "home"))
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()


def answer(client: openai.OpenAI, prompt: str, *, within_s: float) -> str:
    """The answer of a router that may not have found its groups yet."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            return client.completions.create(model="test", prompt=prompt, max_tokens=4).choices[0].text
        except (openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
            if time.monotonic() > deadline_s:
                raise
        time.sleep(0.1)


def test_both_groups_answer_callers_who_have_a_key(replicas: Replicas) -> None:
    with replicas.client() as client, replicas.client("a-key-that-is-not-known") as stranger:
        deadline_s = time.monotonic() + START_S
        number = 0
        while min(replicas.served() if number else [0]) == 0:
            assert time.monotonic() < deadline_s
            number += 1
            answer(client, f"{number} stories about rivers", within_s=START_S)
        with pytest.raises(openai.AuthenticationError):
            answer(stranger, "hello", within_s=0)


class OpenStream:
    """A stream that a thread reads to its end. `error` is what ended it; None: it came to an end of its own."""

    def __init__(self, client: openai.OpenAI, number: int) -> None:
        self.began = threading.Event()
        self.error: Exception | None = None
        self.finish_reason: str | None = None
        self._client, self._prompt = client, f"{number} tales of a river"
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            asked = self._client.completions.create(
                model="test", prompt=self._prompt, max_tokens=STREAM_TOKENS, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            for chunk in asked:
                self.began.set()
                self.finish_reason = chunk.choices[0].finish_reason if chunk.choices else self.finish_reason
        except (openai.APIError, httpx.TransportError) as error:
            self.error = error

    def end(self) -> None:
        """Wait for its end."""
        self._thread.join(STREAM_S)
        assert not self._thread.is_alive()


def test_a_router_that_was_killed_ends_its_streams_in_errors_and_serves_again_within_seconds(
    replicas: Replicas,
) -> None:
    with replicas.client() as client:
        answer(client, "before", within_s=START_S)
        router = replicas.router()
        time.sleep(max(0.0, 6.0 - (time.time() - router.create_time())))  # sooner, it would be an error
        streams = [OpenStream(client, number) for number in range(STREAMS)]
        assert all(stream.began.wait(STREAM_S) for stream in streams)
        began_s = time.monotonic()
        router.kill()
        router.wait(AGAIN_S)
        for stream in streams:
            stream.end()
        assert [stream.error is not None for stream in streams] == [True] * STREAMS
        assert [stream.finish_reason for stream in streams] == [None] * STREAMS
        assert answer(client, "after", within_s=START_S)
        assert time.monotonic() - began_s < AGAIN_S
        assert replicas.router().pid != router.pid
    # Nobody reads those streams any more, so gateways end them, too.
    deadline_s = time.monotonic() + AGAIN_S
    while any(replicas.running()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_options_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, model=tmp_path).path
    for options, problem in (
        (("--replicas", "2"), "--replicas: several groups need --router"),
        (("--router", "--keys", "k"), "--router-keys: is required with --keys"),
        (("--router", "--router-keys", str(tmp_path / "none")), "--router-keys:"),
    ):
        log = tmp_path / "log"
        assert up(manifest, tmp_path / "home", log, *options).wait(STOP_S) == EXIT_USAGE, log.read_text()
        assert problem in log.read_text()
