"""Prefixes that one group's cache cannot hold: a router that knows the caches finds them much more often."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import openai
import pytest

from hetero_api.v1 import admin_pb2, admin_pb2_grpc
from hetero_client.admin import AdminClient
from hetero_client.home import HeteroHome
from hetero_client.launcher.run_directory import GroupRecord, RunDirectory
from hetero_client.messages import CacheLayout
from tests.support.kube.ports import free_port
from tests.support.local_group import REPOSITORY, write_manifest
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

START_S = 120.0
BLOCK = 16
BLOCKS = 125
"""Of a group's cache."""
PREFIX_BLOCKS = 15
PREFIXES = 15
"""Together 1.8 times one group's cache."""
REQUESTS = 300
AT_ONCE = 4
SEED = 20261127


@dataclass(frozen=True, slots=True)
class Groups:
    doors: list[int]
    records: list[GroupRecord]

    def empty_caches(self) -> None:
        for record in self.records:
            with AdminClient(record.admin) as admin:
                admin.reset_cache(layout=CacheLayout.PAGED, block_size=BLOCK, num_blocks=BLOCKS)

    def counts(self) -> list[tuple[int, int]]:
        """Prompt tokens of each group: found in its cache, and computed."""
        found = []
        for record in self.records:
            with grpc.insecure_channel(record.admin, options=[("grpc.enable_http_proxy", 0)]) as channel:
                stats = admin_pb2_grpc.AdminStub(channel).GetStats(admin_pb2.GetStatsRequest(), timeout=START_S)
                found.append((stats.cached_tokens, stats.prompt_tokens))
        return found


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    folder = tmp_path_factory.mktemp("groups")
    model = save_tiny_model(folder / "model", "llama")
    manifest = write_manifest(folder, model=model, ranks=1, max_model_len=512, engine={"blockSize": BLOCK})
    home, doors, processes = HeteroHome(folder / "home"), [free_port(), free_port()], []
    try:
        for number, door in enumerate(doors):
            options = ["--port", "0", "--http-port", "0", "--router-port", str(door), "--dp-local-rank", str(number)]
            processes.append(start("hetero_client", "up", str(manifest.path), *options, home=home, log=folder / "log"))
        yield Groups(doors, [wait_ready(home, name) for name in ("test", "test.1")])
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(START_S)


def start(module: str, *arguments: str, home: HeteroHome, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            env={"PATH": "/usr/bin:/bin", "HETERO_HOME": str(home.root), "NO_COLOR": "1", "NO_PROXY": "*"},
            stdout=file,
            stderr=file,
        )


def wait_ready(home: HeteroHome, name: str) -> GroupRecord:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        record = RunDirectory.for_group(home, name).read_record()
        if record is not None and record.phase == "ready":
            return record
        time.sleep(0.1)
    raise AssertionError(f"{name} is not ready")


@contextmanager
def router(groups: Groups, policy: str, folder: Path) -> Iterator[openai.OpenAI]:
    port, metrics_port = free_port(), free_port()
    gateways = [text for door in groups.doors for text in ("--gateway", f"127.0.0.1:{door}")]
    options = ["--port", str(port), "--metrics-port", str(metrics_port), "--policy", policy]
    log = folder / f"{policy}.log"
    process = start("hetero_gateway", "route", *options, *gateways, home=HeteroHome(folder), log=log)
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            wait_for_both(client, groups, log)
            yield client
    finally:
        process.terminate()
        process.wait(START_S)


def wait_for_both(client: openai.OpenAI, groups: Groups, log: Path) -> None:
    """Until the router sends requests to both groups."""
    before, deadline_s, number = groups.counts(), time.monotonic() + START_S, 0
    while any(now == then for now, then in zip(groups.counts(), before, strict=True)):
        assert time.monotonic() < deadline_s, log.read_text()
        number += 1
        try:
            client.completions.create(model="test", prompt=f"{number} is a number that is new", max_tokens=1)
        except openai.APIError:
            time.sleep(0.2)


def hit_rate(groups: Groups, client: openai.OpenAI) -> float:
    """Share of the prompts' tokens that groups have found in their caches."""
    draws = random.Random(SEED)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    prefixes = ["".join(draws.choices(alphabet, k=PREFIX_BLOCKS * BLOCK)) for _ in range(PREFIXES)]
    prompts = [draws.choice(prefixes) + f" {number:03}" for number in range(REQUESTS)]
    groups.empty_caches()
    before = groups.counts()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda prompt: client.completions.create(model="test", prompt=prompt, max_tokens=1), prompts))
    cached, computed = (
        sum(now[which] - then[which] for now, then in zip(groups.counts(), before, strict=True)) for which in (0, 1)
    )
    return cached / (cached + computed)


def test_a_router_that_knows_the_caches_hits_more_often_than_one_that_takes_turns(
    groups: Groups, tmp_path: Path
) -> None:
    rates = {}
    for policy in ("RoundRobin", "CacheAware"):
        with router(groups, policy, tmp_path) as client:
            rates[policy] = hit_rate(groups, client)
    print(f"hit rates: {rates}")
    assert rates["CacheAware"] >= 1.5 * rates["RoundRobin"], rates
