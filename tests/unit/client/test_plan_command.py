"""`hetero plan`: with assumed hardware, and with probes that a stand-in plays."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetero_api.contract import EXIT_USAGE
from hetero_api.host.topology import NumaPolicy
from hetero_api.manifest import parse_resource
from hetero_api.spec import HeteroInference
from hetero_api.spec_pools import PoolType
from hetero_client.cli import main
from hetero_client.cli.plan_probe import ProbeTask, measure_here
from hetero_client.errors import ProcessDiedError, StartTimeoutError
from hetero_client.launcher.local_plan import HOST_CORES, LocalPlan, RankProcess

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 16384,
}  # fmt: skip
ANSWER = """
import json, sys
rank = int(sys.argv[sys.argv.index("--rank") + 1])
device = {"kind": "DEVICE_KIND_CPU", "memoryBytes": "4000", "speeds": {"memoryBandwidth": 1e9 * (rank + 1)}}
print("something else")
print(json.dumps({"device": device, "formed": {"hostTimes": [{"bytes": "4096", "seconds": 1e-5}]}}))
"""


def plan(tmp_path: Path, *arguments: str, manifest: str = "gpu-cpu-auto.yaml") -> tuple[int, str, str]:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    assumed = str(EXAMPLES / "hardware/rtx4090.yaml")
    command = ["plan", str(EXAMPLES / manifest), "--assume", assumed, "--model-config", str(config), *arguments]
    result = CliRunner().invoke(main.app, command)
    return result.exit_code, result.stdout, result.stderr


PROPOSALS = re.compile(r"right with a chance of [\d.]+: (\d+) a step, ([\d,]+) decode tok/s, ([\d.]+) times as fast")


def test_a_chance_of_proposals_that_are_right_is_predicted_too(tmp_path: Path) -> None:
    gains = []
    for chance in (0.7, 0.9):
        code, text, _ = plan(tmp_path, "--acceptance", str(chance))
        assert code == 0
        found = PROPOSALS.search(" ".join(text.split()))
        assert found is not None
        length, speed, gain = int(found[1]), float(found[2].replace(",", "")), float(found[3])
        # No more than all that such proposals bring, and beside the speed that the chosen way has without.
        assert 1 < gain < sum(chance**i for i in range(length + 1))
        (chosen,) = [line for line in text.splitlines() if line.strip().startswith("*")]
        plain = float(re.findall(r"[\d,]+(?= )", chosen.partition("split")[2])[0].replace(",", ""))
        assert speed / plain == pytest.approx(gain, abs=0.01)
        gains.append(gain)
    assert gains[0] < gains[1]
    assert "a chance of 0.05: none, any would be slower" in " ".join(plan(tmp_path, "--acceptance", "0.05")[1].split())
    assert "right with a chance" not in plan(tmp_path)[1]


def test_all_options_a_reason_and_the_ranks_are_shown(tmp_path: Path) -> None:
    code, text, _ = plan(tmp_path)
    assert code == 0
    for name in ("GPU only", "Layer split", "Tensor, CPU ranks on MLP only", "CPU ranks only", "Weight streaming"):
        assert name in text
    assert "would give" in text
    (chosen,) = [line for line in text.splitlines() if line.strip().startswith("*")]
    assert "100%" in chosen
    assert "prompts of 1024 and outputs of 256 tokens, 8 at a time, bfloat16" in text
    assert "KV cache: at least " in text


def test_json_is_one_object_with_the_whole_plan(tmp_path: Path) -> None:
    code, text, _ = plan(tmp_path, "--json")
    told = json.loads(text)
    assert code == 0
    assert [option["name"] for option in told["options"] if option["chosen"]] == [told["chosen"]]
    assert sum(rank["weightShare"] for rank in told["ranks"]) == pytest.approx(1)
    heads = [rank["layers"][0]["kvHeads"] for rank in told["ranks"]]
    assert heads[-1][1] == CONFIG["num_key_value_heads"]
    assert told["ranks"][0]["kind"] == "GPU"
    assert told["kvBlocks"] >= 16384 // 16
    assert all(sum(rank["neededBytes"].values()) <= rank["memoryBytes"] for rank in told["ranks"])
    assert [rank["neededBytes"]["graphs"] > 0 for rank in told["ranks"]] == [True, True, False, False]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"plan{suffix}"
    code, _, notes = plan(tmp_path, "--plot", str(picture))
    assert code == 0
    assert f"drawn: {picture}" in notes.replace("\n", "")
    head = picture.read_bytes()[:400]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in head


def test_without_matplotlib_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, problem = plan(tmp_path, "--plot", str(tmp_path / "plan.png"))
    assert code != 0
    assert "pip install 'heteroinference[plot]'" in problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plot", "plan.pdf"), "must end in .png or .svg"),
        (("--model", "somewhere"), "give one of --model and --model-config"),
        (("--assume", "missing.yaml"), "missing.yaml: cannot be read"),
    ],
)
def test_options_that_cannot_be_meant_are_usage_errors(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, problem = plan(tmp_path, *arguments)
    assert code == EXIT_USAGE
    assert message in problem


def test_a_config_alone_does_not_do_for_measuring(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main.app, ["plan", str(EXAMPLES / "smollm2-cpu.yaml"), "--model-config", str(tmp_path / "config.json")]
    )
    assert result.exit_code == EXIT_USAGE
    assert "needs --assume" in result.stderr


def test_a_model_that_is_too_large_ends_with_the_arithmetic(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    text = (EXAMPLES / "gpu-cpu-auto.yaml").read_text(encoding="utf-8")
    manifest.write_text(text.replace("memoryPerRank: 64Gi", "memoryPerRank: 256Mi"), encoding="utf-8")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG | {"hidden_size": 9216, "intermediate_size": 160_000}), encoding="utf-8")
    assumed = str(EXAMPLES / "hardware/rtx4090.yaml")
    result = CliRunner().invoke(main.app, ["plan", str(manifest), "--assume", assumed, "--model-config", str(config)])
    assert result.exit_code != 0
    assert "no placement can be had" in result.stderr
    assert "spec.model.maxModelLen 16384" in result.stderr


def resource() -> HeteroInference:
    body: dict[str, Any] = {
        "apiVersion": "heteroinference.io/v1alpha1", "kind": "HeteroInference", "metadata": {"name": "g"},
        "spec": {
            "model": {"uri": "hf://org/model"},
            "pools": [{"name": "cpu", "type": "CPU", "ranks": 2, "cpu": {"coresPerRank": 3}}],
        },
    }  # fmt: skip
    return parse_resource(body)


def task(tmp_path: Path, program: str) -> ProbeTask:
    ranks = tuple(
        RankProcess(
            name=f"cpu-{i}", pool="cpu", ordinal=i, local_rank=0, device=HOST_CORES, cores=(i,), num_threads=1,
            numa_policy=NumaPolicy.NONE, memory_bytes=4000,
        )
        for i in range(2)
    )  # fmt: skip
    return ProbeTask(LocalPlan(ranks, ()), tmp_path, "float32", program=(sys.executable, "-c", program))


def test_each_rank_has_a_probe_and_its_answer_becomes_hardware(tmp_path: Path) -> None:
    hardware = measure_here(task(tmp_path, ANSWER), resource().spec)
    assert [rank.speeds.memory_bandwidth for rank in hardware.ranks] == [1e9, 2e9]
    assert {(rank.kind, rank.pool, rank.cores, rank.memory_bytes) for rank in hardware.ranks} == {
        (PoolType.CPU, "cpu", 3, 4000)
    }
    assert hardware.host_exchange.points == ((4096, 1e-5),)


def test_a_probe_gets_what_the_rank_would_get(tmp_path: Path) -> None:
    wanted = replace(task(tmp_path, ""), quantization="int4", quantization_group_size=64)
    argv = wanted.argv(1, meet=tmp_path / "meet")
    assert argv[3:] == (
        "--model", str(tmp_path), "--device", "cpu", "--cores", "1", "--num-threads", "1", "--numa-policy", "None",
        "--memory-bytes", "4000", "--dtype", "float32", "--quantization", "int4", "--quantization-group-size", "64",
        "--group", "2", "--rank", "1", "--num-gpu-ranks", "0",
        "--meet", str(tmp_path / "meet"),
    )  # fmt: skip


def test_a_probe_that_fails_is_told_with_its_last_lines_and_the_others_end(tmp_path: Path) -> None:
    program = """
import sys, time
if sys.argv[sys.argv.index("--rank") + 1] == "1":
    sys.exit("cannot bind to core 1")
time.sleep(600)
"""
    with pytest.raises(ProcessDiedError, match=r"probe of cpu-1 ended with exit code 1") as caught:
        measure_here(task(tmp_path, program), resource().spec)
    assert caught.value.log_tail == ("cannot bind to core 1",)


def test_probes_that_hang_are_given_up(tmp_path: Path) -> None:
    with pytest.raises(StartTimeoutError, match=r"probes of cpu-0, cpu-1 did not end within 0.2 s"):
        measure_here(task(tmp_path, "import time; time.sleep(600)"), resource().spec, timeout_s=0.2)


@pytest.mark.parametrize("program", ["", "print('hello')", "print('[1]')", "print('{\"device\": {}}')"])
def test_a_probe_that_tells_nothing_is_an_error(tmp_path: Path, program: str) -> None:
    with pytest.raises(ProcessDiedError, match="gave no answer"):
        measure_here(task(tmp_path, program), resource().spec)
