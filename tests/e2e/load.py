"""Streams through the doors of a resource, one after another in each of several threads, until told to stop.

A process of its own, because it runs in the network of a node: there a Service's address leads to its pods, whichever
they are by then. It prints a line of JSON for each request as it ends, and stops after those in flight once its stdin
ends. `Load` is the side of a test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from hetero_client import Delta, HeteroClient, SamplingParams
from tests.e2e.harness.node import Node
from tests.support.kube.polling import poll
from tests.support.prompts import PROMPTS

ROOT: Final = Path(__file__).parents[2]
READ_TIMEOUT_S: Final = 240.0
FLOW_TIMEOUT_S: Final = 240.0
PAUSE_AFTER_ERROR_S: Final = 0.25
THINK_S: Final = 0.5
"""Pause of each stream between two requests: without one, sixteen streams take all that two cores have."""
GRPC, HTTP = "grpc", "http"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got; times are the machine's clock, in seconds."""

    door: str
    prompt: int
    began: float
    first: float = 0.0
    """When its first text came; 0 where none did."""
    ended: float = 0.0
    text: str = ""
    error: str = ""


class Load:
    """`streams` requests at a time of a model while entered, shared by the doors that have an address."""

    def __init__(
        self, node: Node, model: str, *, grpc: str = "", http: str = "", streams: int, max_tokens: int
    ) -> None:
        arguments = [f"--{GRPC}={grpc}", f"--{HTTP}={http}", f"--streams={streams}", f"--max-tokens={max_tokens}"]
        self._command = node.inside(sys.executable, "-m", "tests.e2e.load", model, *arguments)
        self._streams = streams
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name="load")
        self.answers: list[Answer] = []

    def wait_answers(self, more: int) -> None:
        """Until so many more requests have ended."""
        wanted = len(self.answers) + more
        poll(
            lambda: len(self.answers) >= wanted,
            timeout_s=FLOW_TIMEOUT_S,
            describe=lambda: f"{len(self.answers)} of {wanted} requests have ended: {self.answers[-3:]}",
        )

    def finish(self) -> list[Answer]:
        """Let those in flight end; all answers."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(READ_TIMEOUT_S)
        self._reader.join()
        assert self._process.returncode == 0
        return self.answers

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.answers.append(Answer(**json.loads(line)))

    def __enter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._reader.join()
        self._process.__exit__(kind, error, trace)  # closes its pipes


def ask_grpc(client: HeteroClient, prompt: int, max_tokens: int) -> Answer:
    """One request of our own API; the client library takes a broken stream up again."""
    answer = Answer(GRPC, prompt, time.time())
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with client.generate(PROMPTS[prompt], sampling=sampling) as stream:
        for event in stream:
            if isinstance(event, Delta):
                first = answer.first or time.time()
                answer = replace(answer, first=first, text=answer.text + event.text)
    return answer


def ask_http(client: httpx.Client, model: str, prompt: int, max_tokens: int) -> Answer:
    """One request of the OpenAI API, which nobody takes up again."""
    answer = Answer(HTTP, prompt, time.time())
    body = {"model": model, "prompt": PROMPTS[prompt], "max_tokens": max_tokens, "temperature": 0, "stream": True}
    whole = False
    with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
        if response.status_code != 200:
            return replace(answer, error=f"{response.status_code}: {response.read()[:300]!r}")
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                whole = True
            elif line.startswith("data:"):
                event = json.loads(data)
                if "error" in event:
                    return replace(answer, error=data[:300])
                text = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
                answer = replace(answer, first=answer.first or time.time(), text=answer.text + text)
    return answer if whole else replace(answer, error="the stream ended before its end")


def _ask_on(chosen: argparse.Namespace, number: int, stopping: threading.Event, printing: threading.Lock) -> None:
    """One stream: the same prompt again and again, once at least, over a connection of its own."""
    doors = [door for door in (GRPC, HTTP) if getattr(chosen, door)]
    door, prompt = doors[number % len(doors)], number // len(doors) % len(PROMPTS)
    with (
        HeteroClient(chosen.grpc or "127.0.0.1:9") as ours,
        httpx.Client(base_url=f"http://{chosen.http}", trust_env=False, timeout=READ_TIMEOUT_S) as others,
    ):
        while True:
            began = time.time()
            try:
                if door == GRPC:
                    answer = ask_grpc(ours, prompt, chosen.max_tokens)
                else:
                    answer = ask_http(others, chosen.model, prompt, chosen.max_tokens)
            except Exception as error:
                answer = Answer(door, prompt, began, error=f"{type(error).__name__}: {error}")
            with printing:
                print(json.dumps(asdict(replace(answer, ended=time.time()))), flush=True)
            if stopping.wait(PAUSE_AFTER_ERROR_S if answer.error else THINK_S):
                return


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    for door in (GRPC, HTTP):
        parser.add_argument(f"--{door}", default="", metavar="HOST:PORT")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    chosen = parser.parse_args(arguments)
    stopping, printing = threading.Event(), threading.Lock()
    threads = [
        threading.Thread(target=_ask_on, args=(chosen, number, stopping, printing)) for number in range(chosen.streams)
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stopping.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
