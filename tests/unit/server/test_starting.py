"""The command line, the files read at start, ports, and the state file: every mistake in one line."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_api.contract import ENV_GROUP_TOKEN_FILE, ENV_LOG_LEVEL, EXIT_PERMANENT, EXIT_USAGE
from hetero_api.errors import ManifestError
from hetero_api.manifest import load_manifest
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_gateway.engine.config import SpeculationConfig
from hetero_gateway.group.adapters.registry import AdapterRegistry
from hetero_gateway.group.errors import InvalidCommand, UnsupportedSpecError
from hetero_gateway.group.orders import load_order
from hetero_gateway.group.settings import _model_problems, speculation_of
from hetero_gateway.server.app import main
from hetero_gateway.server.config import GatewayConfig, read_model
from hetero_gateway.server.errors import BindError
from hetero_gateway.server.gateway import Gateway, Ports
from hetero_gateway.server.serving import write_state
from tests.unit.server.server_setup import TOKEN, served_model, write_manifest, write_model

pytestmark = pytest.mark.unit

MINIMAL = ["--manifest", "g.yaml", "--model", "model"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return {ENV_GROUP_TOKEN_FILE: str(path)}


def test_the_command_line_has_the_contracts_defaults(environment: dict[str, str]) -> None:
    config = GatewayConfig.from_command_line(MINIMAL, environment)
    assert (config.host, config.inference_port, config.admin_port, config.ranks_port) == (
        "127.0.0.1", None, 50052, 50053,
    )  # fmt: skip
    assert (config.metrics_port, config.state_file, config.token, config.log_level) == (None, None, TOKEN, "INFO")
    assert TOKEN not in repr(config)


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ([], {}, "--manifest, --model"),
        ([*MINIMAL, "--admin-port", "x"], {}, "--admin-port: 'x' is no port number between 0 and 65535"),
        ([*MINIMAL, "--ranks-port", "65536"], {}, "--ranks-port: '65536' is no port number"),
        ([*MINIMAL, "--inference-port", "-1"], {}, "--inference-port"),
        ([*MINIMAL, "--nonsense"], {}, "--nonsense"),
        (MINIMAL, {ENV_GROUP_TOKEN_FILE: ""}, f"{ENV_GROUP_TOKEN_FILE} is not set"),
        (MINIMAL, {ENV_GROUP_TOKEN_FILE: "/no/such"}, "/no/such cannot be read"),
        (MINIMAL, {ENV_GROUP_TOKEN_FILE: "/dev/null"}, "holds no token"),
        (MINIMAL, {ENV_LOG_LEVEL: "LOUD"}, f"{ENV_LOG_LEVEL}: 'LOUD'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_usage(
    arguments: list[str],
    changes: dict[str, str],
    words: str,
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments, environment | changes)
    assert caught.value.code == EXIT_USAGE
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert told.startswith("hetero_gateway: ")


def test_a_router_needs_the_package_of_its_messages(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GatewayConfig.from_command_line([*MINIMAL, "--router-port", "0"], environment).router_port == 0
    monkeypatch.setattr("hetero_gateway.server.config.ROUTER_PACKAGE", "no_such_package")
    with pytest.raises(SystemExit):
        main([*MINIMAL, "--router-port", "0"], environment)
    assert "--router-port needs the package no_such_package: install heteroinference[router]" in capsys.readouterr().err


def nothing(_: Path) -> None:
    """The files are as they should be."""


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replace(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


POOL = {"name": "cpu", "type": "CPU"}
MODEL = {"uri": "hf://org/model"}
NOTHING_FOR_THE_SECOND = {kind: [1, 0] for kind in ("attention", "mlp", "vocabulary")}
TWO_RANKS = {"pools": [POOL | {"ranks": 2}], "placement": {"shares": NOTHING_FOR_THE_SECOND}}


@pytest.mark.parametrize(
    ("damage", "spec", "status", "words"),
    [
        (remove("g.yaml"), {}, EXIT_USAGE, "g.yaml: cannot be read"),
        (nothing, {"pools": [POOL | {"ranks": 0}]}, EXIT_USAGE, "spec.pools[0].ranks: must be at least 1, not 0"),
        (nothing, {"pools": [POOL | {"rnaks": 1}]}, EXIT_USAGE, "did you mean ranks?"),
        (nothing, TWO_RANKS, EXIT_USAGE, "spec.placement.shares.attention, "),
        (nothing, {"model": MODEL | {"dtype": "float16"}}, EXIT_USAGE, "float16: CPU ranks do not compute in float16"),
        (remove("config.json"), {}, EXIT_PERMANENT, "config.json: no such file"),
        (replace("config.json", "{"), {}, EXIT_PERMANENT, "config.json: cannot be read as JSON"),
        (remove("tokenizer.json"), {}, EXIT_PERMANENT, "tokenizer.json: no such file"),
        (replace("tokenizer.json", "{}"), {}, EXIT_PERMANENT, "tokenizer.json: is no tokenizer"),
    ],
)
def test_what_is_wrong_with_the_files_is_told_in_a_line(
    damage: Callable[[Path], None],
    spec: dict[str, Any],
    status: int,
    words: str,
    tmp_path: Path,
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_model(tmp_path)
    manifest = write_manifest(tmp_path / "g.yaml", **spec)
    damage(tmp_path)
    assert main(["--manifest", str(manifest), "--model", str(tmp_path)], environment) == status
    told = capsys.readouterr().err.splitlines()
    assert words in told[-1]
    assert "Traceback" not in "".join(told)


def test_every_problem_of_the_manifest_has_its_line(
    tmp_path: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path)
    manifest = write_manifest(tmp_path / "g.yaml", suspend=True, model=MODEL | {"dtype": "float16"})
    assert main(["--manifest", str(manifest), "--model", str(tmp_path)], environment) == EXIT_USAGE
    told = capsys.readouterr().err.splitlines()
    assert ["spec.model.dtype" in told[-2], "spec.suspend" in told[-1]] == [True, True]


@pytest.mark.parametrize("option", ["inference", "admin", "ranks"])
def test_a_port_that_is_taken_is_named_with_its_option(
    option: str, tmp_path: Path, environment: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = write_manifest(tmp_path / "g.yaml")
    write_model(tmp_path)
    ports = {"inference": "0", "admin": "0", "ranks": "0"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports[option] = str(taken.getsockname()[1])
        options = [part for name, port in ports.items() for part in (f"--{name}-port", port)]
        state = tmp_path / "state.json"
        arguments = ["--manifest", str(manifest), "--model", str(tmp_path), "--state-file", str(state), *options]
        assert main(arguments, environment) == EXIT_USAGE
    last = capfd.readouterr().err.splitlines()[-1]
    assert f"--{option}-port: cannot listen on 127.0.0.1:{ports[option]} (Address already in use)" in last
    assert not state.exists()


IMPORTED = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("module", "later"),
    [
        # A model is read before these take memory: its tokenizer needs several times what is left of it.
        ("hetero_gateway.server.app", ["grpc", "uvicorn", "llguidance", "hetero_gateway.server.gateway"]),
        ("hetero_gateway.server.serving", ["llguidance"]),
    ],
)
def test_what_serves_is_imported_when_it_is_needed(module: str, later: list[str]) -> None:
    command = [sys.executable, "-c", IMPORTED, module, "tokenizers", *later]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["tokenizers"]


async def test_two_gateways_do_not_share_a_port(tmp_path: Path) -> None:
    first, second = (Gateway(served_model(tmp_path), token=TOKEN) for _ in range(2))
    try:
        addresses = await first.listen(Ports("127.0.0.1", 0, 0, 0, 0))
        port = int(addresses.inference.rpartition(":")[2])
        with pytest.raises(BindError, match=f"--inference-port: cannot listen on 127.0.0.1:{port}"):
            await second.listen(Ports("127.0.0.1", port, 0, 0, 0))
    finally:
        await first.close("over")
        await second.close("over")


async def test_every_port_is_open_to_both_families_where_pods_have_addresses_of_ipv6(tmp_path: Path) -> None:
    gateway: Any = Gateway(served_model(tmp_path), token=TOKEN)
    try:
        addresses = await gateway.listen(Ports("::", inference=0, admin=0, ranks=0, http=0, metrics=0))
        opened = [int(text.rpartition(":")[2]) for text in dataclasses.astuple(addresses) if text]
        for port in (*opened, gateway._probe_server.port):
            for own in ("::1", "127.0.0.1"):
                socket.create_connection((own, port), timeout=10).close()
    finally:
        await gateway.close("the test is over")


def test_the_state_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")
    state = {"pid": 1, "name": "g", "inference": "h:1", "admin": "h:2", "ranks": "h:3", "http": "h:4"}
    write_state(path, state)
    assert json.loads(path.read_text()) == state
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="No such file"):
        write_state(tmp_path / "gone" / "state.json", state)


DRAFTING = {"speculative": {"kind": "Draft", "draft": {"uri": "file:///small"}}}


def test_a_draft_model_of_the_same_tokenizer_is_taken(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    manifest = write_manifest(tmp_path / "g.yaml", engine=DRAFTING)
    model = read_model(manifest, write_model(tmp_path), write_model(tmp_path / "small", num_hidden_layers=2))
    assert model.group_settings.draft is not None
    assert model.group_settings.draft.num_layers == 2
    assert model.engine_config.speculation == SpeculationConfig(max_tokens=8, drafts=True)
    assert model.group_settings.dtype == "float32"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (None, "was started without a draft model; see --draft"),
        ({"max_position_embeddings": 16}, "has 16 positions, and sequences have up to"),
        ({"token": "<end>"}, "has another tokenizer: token '<end>' is 256 there, and absent here"),
    ],
)
def test_a_draft_model_that_does_not_suit_is_refused(
    tmp_path: Path, change: dict[str, Any] | None, problem: str
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    shape = dict(change or {})
    token = shape.pop("token", None)
    write_model(small, **shape)
    if token is not None:
        path = small / "tokenizer.json"
        path.write_text(path.read_text().replace("<eos>", token))
    manifest = write_manifest(tmp_path / "g.yaml", engine=DRAFTING)
    with pytest.raises(UnsupportedSpecError) as refused:
        read_model(manifest, write_model(tmp_path), None if change is None else small)
    (told,) = refused.value.problems
    assert told.startswith("spec.engine.speculative.draft: ")
    assert problem in told


def test_a_draft_model_for_all_ranks_has_a_head_for_each(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    write_model(small, num_key_value_heads=1)
    speculative = {"kind": "Draft", "draft": {"uri": "file:///small", "ranks": "All"}}
    pools = [{"name": "cpu", "type": "CPU", "ranks": 2}]
    manifest = write_manifest(tmp_path / "g.yaml", pools=pools, engine={"speculative": speculative})
    with pytest.raises(UnsupportedSpecError) as refused:
        read_model(manifest, write_model(tmp_path), small)
    (told,) = refused.value.problems
    assert told.startswith("spec.engine.speculative.draft.ranks: All, but it has 1 KV heads for 2 ranks")


ADAPTERS = {
    "adapters": {
        "maxLoaded": 3,
        "roots": ["/adapters"],
        "load": [
            {"name": "one", "uri": "hf://org/one"},
            {"name": "own", "directory": "/adapters/own"},
            {"name": "two", "uri": "file:///two"},
        ],
    }
}


def test_adapters_lie_where_the_command_line_says_and_need_no_root(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "g.yaml", engine=ADAPTERS)
    spec = read_model(
        manifest, write_model(tmp_path), adapter_dirs=[Path("/brought/0"), Path("/brought/1")]
    ).group_settings.spec.engine.adapters
    registry = AdapterRegistry(spec, taken=())
    assert {each.name: (each.directory, each.root) for each in registry} == {
        "one": ("/brought/0", "/brought/0"), "own": ("/adapters/own", "/adapters"), "two": ("/brought/1", "/brought/1"),
    }  # fmt: skip
    assert [each.number for each in registry.loaded] == [1, 2, 3]
    # One that was unloaded can be loaded from there again, and nothing else can.
    registry.remove("two")
    assert registry.new("again", "/brought/1").root == "/brought/1"
    with pytest.raises(InvalidCommand, match="must lie in one of"):
        registry.new("other", "/brought/2")


def test_adapters_that_were_not_brought_are_told(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "g.yaml", engine=ADAPTERS)
    with pytest.raises(UnsupportedSpecError, match=r"spec\.engine\.adapters\.load: names 2 adapters by uri.*with 1"):
        read_model(manifest, write_model(tmp_path), adapter_dirs=[Path("/brought/0")])


def test_a_model_that_keeps_states_of_sequences_takes_a_draft_model(tmp_path: Path) -> None:
    for kind in ("Draft", "Auto"):
        engine = {"speculative": {**DRAFTING["speculative"], "kind": kind}}
        spec = load_manifest(write_manifest(tmp_path / "g.yaml", engine=engine)).spec
        config = dataclasses.replace(ModelConfig.from_directory(write_model(tmp_path)), delta=object())  # type: ignore[arg-type]
        chosen = speculation_of(spec.engine.speculative, config)
        assert chosen is not None
        assert chosen.drafts
        assert [each for each in _model_problems(spec, config) if "speculative" in each] == []


HEADED = {
    "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "moe_intermediate_size": 20, "num_nextn_predict_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "draft", "drafted"),
    [
        ("MTP", False, SpeculationConfig(max_tokens=8, drafts=True, has_head=True)),
        ("Auto", False, SpeculationConfig(max_tokens=8, only_if_faster=True, drafts=True, has_head=True)),
        ("Auto", True, SpeculationConfig(max_tokens=8, only_if_faster=True, drafts=True)),
        ("NGram", False, SpeculationConfig(max_tokens=8)),
        ("None", False, None),
    ],
)
def test_the_model_s_own_head_drafts_for_mtp_and_for_auto_without_a_draft_model(
    tmp_path: Path, kind: str, draft: bool, drafted: SpeculationConfig | None
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    speculative = {"kind": kind, **({"draft": {"uri": "file:///small"}} if draft else {})}
    manifest = write_manifest(tmp_path / "g.yaml", engine={"speculative": speculative})
    model = read_model(manifest, write_model(tmp_path, **HEADED), write_model(small) if draft else None)
    assert model.engine_config.speculation == drafted
    settings = model.group_settings
    has_head = drafted is not None and drafted.has_head
    whole = ShardPlan.whole(settings.config)
    order = load_order(settings, whole, draft_plan=None if settings.draft is None else whole)
    assert (order.has_prediction_head, order.HasField("draft_plan")) == (has_head, draft)
    assert (settings.draft == settings.config.prediction_head) == has_head


@pytest.mark.parametrize("shape", [{}, {**HEADED, "num_nextn_predict_layers": 0}, {**HEADED, "weights": True}])
def test_mtp_without_a_head_is_refused(tmp_path: Path, shape: dict[str, Any]) -> None:
    """No field, no heads, or none in the files; Auto takes n-grams."""
    weights = dict(shape)
    if weights.pop("weights", False):
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "a.safetensors"}}')
    directory = write_model(tmp_path, **weights)
    with pytest.raises(UnsupportedSpecError) as refused:
        read_model(write_manifest(tmp_path / "g.yaml", engine={"speculative": {"kind": "MTP"}}), directory)
    (told,) = refused.value.problems
    assert told.startswith("spec.engine.speculative.kind: MTP, but these files have no multi-token-prediction head")
    auto = read_model(write_manifest(tmp_path / "g.yaml", engine={"speculative": {"kind": "Auto"}}), directory)
    assert auto.engine_config.speculation == SpeculationConfig(max_tokens=8, only_if_faster=True)
    assert auto.group_settings.draft is None


@pytest.mark.parametrize(
    ("speculative", "problem"),
    [
        ({"kind": "Draft"}, "is what kind Draft proposes with"),
        ({"kind": "NGram", "draft": {"uri": "hf://a/b"}}, "is for the kinds Draft and Auto"),
        ({"kind": "MTP", "draft": {"uri": "hf://a/b"}}, "is for the kinds Draft and Auto"),
        ({"kind": "Draft", "draft": {"uri": "b"}}, "must start with one of hf://"),
    ],
)
def test_a_draft_model_goes_with_its_kinds(tmp_path: Path, speculative: dict[str, Any], problem: str) -> None:
    with pytest.raises(ManifestError) as refused:
        load_manifest(write_manifest(tmp_path / "g.yaml", engine={"speculative": speculative}))
    assert any(problem in each and "speculative.draft" in each for each in refused.value.problems)
