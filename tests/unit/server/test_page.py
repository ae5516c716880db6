"""The page at the HTTP door's root: its files, their policy, who may see the group, and that it can be off."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_api.contract import ENV_GROUP_TOKEN_FILE
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.server.access.files import AccessFiles
from hetero_gateway.server.config import GatewayConfig
from hetero_gateway.server.gateway import Gateway
from hetero_gateway.server.openai import page
from hetero_gateway.server.openai.page import STATUS_PATH, status_object
from tests.unit.server.server_setup import TOKEN, GatewayBench, served_model
from tests.unit.server.test_keys import ENTRIES, write_keys

pytestmark = pytest.mark.unit

FILES = sorted(Path(page.__file__).with_name("static").iterdir())
CONTENTS = [file.read_bytes() for file in FILES]
PATHS = ["/" if file.name == "index.html" else f"/page/{file.name}" for file in FILES]


async def ask(bench: GatewayBench, path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as client:
        return await client.get(path, headers=headers)


@pytest.mark.parametrize(("path", "content"), [*zip(PATHS, CONTENTS, strict=True)], ids=PATHS)
async def test_a_file_comes_whole_under_a_strict_policy_and_once(
    bench: GatewayBench, path: str, content: bytes
) -> None:
    answer = await ask(bench, path)
    assert answer.status_code == 200
    assert answer.content == content
    policy = dict(each.split(maxsplit=1) for each in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = await ask(bench, path, **{"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_names_no_other_place_keeps_nothing_and_writes_no_markup(file: Path) -> None:
    text = file.read_text()
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|localStorage|sessionStorage", text
    )
    assert not re.findall(r"indexedDB|document\.cookie| style=| on[a-z]+=", text)


def test_a_file_that_another_one_names_is_there() -> None:
    named = {name for file in FILES for name in re.findall(r'(?:page/|from "\./)([a-z]+\.[a-z]+)"', file.read_text())}
    assert named == {file.name for file in FILES} - {"index.html"}


async def test_the_status_is_what_the_admin_rpcs_say(ready: GatewayBench) -> None:
    answer = await ask(ready, STATUS_PATH)
    seen, topology = answer.json(), await ready.admin().GetTopology(admin_pb2.GetTopologyRequest())
    stats = await ready.admin().GetStats(admin_pb2.GetStatsRequest())
    assert answer.headers["cache-control"] == "no-store"
    assert (seen["topology"]["name"], seen["topology"]["state"]) == ("g", "GROUP_STATE_READY")
    assert (seen["topology"]["epoch"], seen["topology"]["num_blocks"]) == (str(topology.epoch), topology.num_blocks)
    assert seen["stats"]["free_blocks"] == stats.free_blocks
    (rank,) = seen["topology"]["ranks"]
    assert rank["joined"] is True
    assert rank["shard"]["head_rows"] == {"begin": 0, "end": 258}
    layers = topology.ranks[0].shard.layers
    heads = {"begin": 0, "end": layers[0].kv_heads.end}
    assert [(run["begin"], run["end"], run["kv_heads"]) for run in rank["runs"]] == [(0, len(layers), heads)]


def test_layers_in_a_row_with_equal_parts_are_one_run() -> None:
    def layer(end: int) -> ranks_pb2.LayerShard:
        return ranks_pb2.LayerShard(kv_heads=ranks_pb2.UnitRange(begin=0, end=end))

    shard = ranks_pb2.RankShard(layers=[layer(2), layer(2), layer(0), layer(2)])
    ranks = [admin_pb2.RankStatus(shard=shard), admin_pb2.RankStatus()]
    shown = status_object(admin_pb2.GetTopologyResponse(ranks=ranks), admin_pb2.GetStatsResponse(), now_s=5.0)
    first, second = shown["topology"]["ranks"]
    assert [(run["begin"], run["end"], run["kv_heads"]["end"]) for run in first["runs"]] == [
        (0, 2, 2),
        (2, 3, 0),
        (3, 4, 2),
    ]
    assert second["runs"] == []


@pytest.mark.parametrize(
    ("key", "status"), [("", 401), ("another", 401), ("m-key", 403), ("a-key", 403), ("r-key", 200)]
)
async def test_with_keys_the_files_are_open_and_the_status_is_the_administrators(
    tmp_path: Path, key: str, status: int
) -> None:
    files = AccessFiles.load(keys_file=write_keys(tmp_path / "keys.yaml", ENTRIES))
    async with GatewayBench(served_model(tmp_path), files=files) as bench:
        shown = {"Authorization": f"Bearer {key}"} if key else {}
        for path in PATHS:
            assert (await ask(bench, path, **shown)).status_code == 200
        assert (await ask(bench, STATUS_PATH, **shown)).status_code == status


async def test_without_keys_the_status_is_open_though_the_admin_port_has_a_token(tmp_path: Path) -> None:
    async with GatewayBench(served_model(tmp_path), admin_token="secret") as bench:
        assert (await ask(bench, STATUS_PATH)).status_code == 200


async def test_the_resource_turns_the_page_off(tmp_path: Path) -> None:
    async with GatewayBench(served_model(tmp_path, gateway={"http": {"page": False}})) as bench:
        for path in (*PATHS, STATUS_PATH):
            assert (await ask(bench, path)).status_code == 404
        assert (await ask(bench, "/v1/models")).status_code == 200


async def test_the_option_turns_the_page_off(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")

    def config(*more: str) -> GatewayConfig:
        arguments = ["--manifest", "g.yaml", "--model", "m", *more]
        return GatewayConfig.from_command_line(arguments, {ENV_GROUP_TOKEN_FILE: str(tmp_path / "token")})

    assert (config().page, config("--no-page").page) == (True, False)

    class Bench(GatewayBench):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.gateway = Gateway(self.model, token=TOKEN, with_page=False)

    async with Bench(served_model(tmp_path)) as bench:
        assert (await ask(bench, "/")).status_code == 404
