"""The router's process: real SMG, started as `python -m hetero_gateway route`, before gateways."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from smg.router_args import COMMON_POLICY_CHOICES, RouterArgs
from smg.smg_rs import get_available_tool_call_parsers

from hetero_api.contract import EXIT_USAGE
from hetero_api.spec_router import RoutingPolicy
from hetero_gateway.engine.text.answer_formats import FORMATS
from hetero_gateway.server.config import read_model
from hetero_gateway.smg import PARSERS, POLICIES, Engine, RouterConfig, read_keys, router_settings
from tests.support.kube.ports import free_port
from tests.support.router_process import route
from tests.unit.server.router_setup import RouterBench
from tests.unit.server.server_setup import write_manifest, write_model
from tests.unit.server.smg_setup import START_S
from tests.unit.server.test_smg import CALL, CHAT, FUNCTIONS, NAME, TEMPLATE

pytestmark = pytest.mark.unit

KEY = "a-key-of-tenant-one"


async def until_it_answers(client: Any, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(START_S):
        while True:
            if process.returncode is not None:
                told = await asyncio.to_thread(log.read_text, "utf-8", "replace")
                raise RuntimeError(f"the router ended: {told[-4000:]}")
            try:
                await client.completions.create(model=NAME, prompt="a", max_tokens=1)
                return
            except (openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
                await asyncio.sleep(0.1)


async def test_callers_with_a_key_reach_the_gateways_and_nobody_reaches_the_control_plane(tmp_path: Path) -> None:
    (write_model(tmp_path, max_position_embeddings=65_536) / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    manifest = write_manifest(tmp_path / "g.yaml", model={"uri": "hf://org/model", "maxModelLen": 4096})
    keys, log, port = tmp_path / "keys", tmp_path / "router.log", free_port()
    keys.write_text(f"# tenants\none:{KEY}\n")
    listen = ("--port", str(port), "--metrics-port", str(free_port()))
    async with RouterBench(read_model(manifest, tmp_path)) as bench:
        rank, _ = await bench.join()
        rank.say(bench.model.tokenizer.encode(CALL))
        door = ("--gateway", bench.addresses.router)
        async with route(*listen, *door, "--keys", str(keys), log=log) as process:
            command_line = Path(f"/proc/{process.pid}/cmdline")
            assert KEY not in await asyncio.to_thread(command_line.read_text)
            url = f"http://127.0.0.1:{port}"
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="another", max_retries=0) as stranger,
                httpx.AsyncClient(base_url=url, trust_env=False) as http,
            ):
                await until_it_answers(client, process, log)
                # The parser of calls is that of the template's family.
                answer: Any = await client.chat.completions.create(model=NAME, messages=CHAT, tools=FUNCTIONS)
                (call,) = answer.choices[0].message.tool_calls
                assert json.loads(call.function.arguments) == {"city": "Bern"}
                with pytest.raises(openai.AuthenticationError):
                    await stranger.chat.completions.create(model=NAME, messages=CHAT)
                for key in (KEY, ""):
                    shown = {"Authorization": f"Bearer {key}"} if key else {}
                    told = await http.post("/workers", json={"url": "grpc://127.0.0.1:9"}, headers=shown)
                    assert told.status_code in (401, 403)
            process.terminate()
            async with asyncio.timeout(START_S):
                await process.wait()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("one:short\n", "line 1: must be TENANT:KEY"),
        (f"\nno key here {KEY}\n", "line 2: must be TENANT:KEY"),
        (f"one:{KEY}\ntwo:{KEY}\n", "line 2: the key stands there twice"),
        ("# nobody\n", "has no key"),
    ],
)
def test_a_keys_file_that_is_wrong_is_refused_without_its_keys(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem) as refused:
        read_keys(path)
    assert KEY not in str(refused.value)


async def test_a_wrong_command_line_ends_the_process_in_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for arguments, problem in (
        (("--gateway", "nowhere"), "'nowhere' is no HOST:PORT"),
        (("--gateway", "127.0.0.1:9", "--keys", str(tmp_path / "none")), "--keys:"),
    ):
        async with route(*arguments, log=log) as process:
            assert await process.wait() == EXIT_USAGE
        assert problem in log.read_text()


def test_each_family_has_a_parser_that_smg_knows() -> None:
    assert set(FORMATS) - set(PARSERS) == {"GptOss"}  # SMG reads it by itself
    assert set(PARSERS.values()) <= set(get_available_tool_call_parsers())


def test_the_gateways_blocks_and_the_files_of_tls_are_passed_on() -> None:
    config = RouterConfig.from_command_line(["--gateway", "a:1", "--gateway", "[::1]:2", "--tls-dir", "/t"])
    settings = router_settings(config, Engine(block_size=4, chat_template=""), [])
    assert settings["worker_urls"] == ["grpc://a:1", "grpc://[::1]:2"]
    assert (settings["block_size"], settings["tool_call_parser"], settings["policy"]) == (4, None, "cache_aware")
    assert (settings["server_cert_path"], settings["server_key_path"]) == ("/t/tls.crt", "/t/tls.key")


def test_gateways_are_found_by_their_pods_labels_at_the_port_that_is_named() -> None:
    labels = "heteroinference.io/name=x,heteroinference.io/role=gateway"
    arguments = ["--gateway", "x-engines.models.svc:50054", "--pods", f"models/{labels}", "--drain-s", "7"]
    config = RouterConfig.from_command_line([*arguments, "--policy", "LeastLoad"])
    settings = router_settings(config, Engine(block_size=4, chat_template=""), [])
    assert "worker_urls" not in settings
    assert (settings["service_discovery_namespace"], settings["service_discovery_port"]) == ("models", 50054)
    assert settings["selector"] == {"heteroinference.io/name": "x", "heteroinference.io/role": "gateway"}
    assert (settings["policy"], settings["shutdown_grace_period_secs"]) == ("least_load", 7)
    RouterArgs(**settings)  # SMG knows all of them


@pytest.mark.parametrize("text", ["", "models", "models/", "/a=b", "models/a", "models/a=", "models/a=b,", "models/=b"])
def test_pods_that_are_named_wrongly_are_refused_in_words(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        RouterConfig.from_command_line(["--gateway", "a:1", "--pods", text])
    assert ended.value.code == EXIT_USAGE
    assert f"{text!r} is no NAMESPACE/LABEL=VALUE,LABEL=VALUE" in capsys.readouterr().err


def test_smg_knows_every_policy() -> None:
    assert set(POLICIES) == set(RoutingPolicy)
    assert set(POLICIES.values()) <= set(COMMON_POLICY_CHOICES)
