"""The `hetero` command: output, messages and exit codes, without any group."""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT, EXIT_USAGE, VERSION
from hetero_api.host.topology import CpuTopology
from hetero_client.cli.console import print_note, print_warning
from hetero_client.cli.main import app
from tests.support.fake_gateway import FakeGateway

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_HOME", str(tmp_path / "home"))


def hetero(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_version() -> None:
    assert hetero("--version").stdout == f"hetero {VERSION}\n"


@pytest.mark.parametrize(
    ("line", "word", "expected", "absent"),
    [
        ("hetero top", 1, "topology", "validate"),
        ("hetero validate --", 2, "--help", "--version"),
        ("hetero do", 1, "doctor", "validate"),
        ("hetero doctor --", 2, "--cluster", "--version"),
    ],
)
def test_the_shell_completes_commands_and_options(line: str, word: int, expected: str, absent: str) -> None:
    asked = {"_HETERO_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(word)}
    offered = CliRunner().invoke(app, [], prog_name="hetero", env=asked).stdout.split()
    assert expected in offered
    assert absent not in offered


@pytest.mark.parametrize(
    "command",
    ["up", "serve", "run", "validate", "doctor", "generate", "chat", "ps", "topology", "top", "bench", "down"],
)
def test_every_command_teaches_with_an_example(command: str) -> None:
    result = hetero(command, "--help")
    assert result.exit_code == EXIT_OK
    assert f"hetero {command}" in result.stdout.split("Options")[0].split("\n", 2)[2]


def test_examples_are_valid() -> None:
    files = sorted(map(str, EXAMPLES.glob("*.yaml")))
    assert len(files) >= 4
    result = hetero("validate", *files)
    assert (result.exit_code, len(result.stdout.splitlines())) == (EXIT_OK, len(files))


def test_every_problem_of_a_manifest_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    text = (EXAMPLES / "smollm2-cpu.yaml").read_text().replace("ranks: 2", "ranks: 0").replace("dtype", "dtypo")
    path.write_text(text)
    for command in ("validate", "up"):
        result = hetero(command, str(path))
        assert result.exit_code == EXIT_USAGE
        lines = result.stderr.splitlines()
        assert len(lines) == 2
        assert any("spec.pools[0].ranks: must be at least 1" in line for line in lines)
        assert any("spec.model.dtypo: unknown field; did you mean dtype?" in line for line in lines)


def test_validate_warns_of_cores_that_this_machine_lacks(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    text = (EXAMPLES / "smollm2-cpu-1rank.yaml").read_text()
    assert text.count("coresPerRank: 2") == 1
    path.write_text(text.replace("coresPerRank: 2", "coresPerRank: 1000"))
    result = hetero("validate", str(path))
    assert result.exit_code == EXIT_OK
    assert "warning: " in result.stderr
    assert "on this machine: spec.pools[0].cpu.coresPerRank: 1 x 1000 = 1000 cores" in result.stderr.replace("\n", " ")


def test_kubectl_finds_the_same_program() -> None:
    programs = {point.name: point.value for point in entry_points(group="console_scripts")}
    assert programs["kubectl-hetero"] == programs["hetero"]


def test_validate_warns_of_what_only_local_makes_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = "spec.pools[0].type: GPU: this machine has no NVIDIA GPU that may be used; use type CPU"
    result, local = (hetero("validate", *more, str(EXAMPLES / "gpu-cpu.yaml")) for more in ((), ("--local",)))
    assert (result.exit_code, local.exit_code) == (EXIT_OK, EXIT_USAGE)
    assert f"on this machine: {said}" in result.stderr
    assert said in local.stderr
    assert "on this machine" not in local.stderr


def test_manifests_are_validated_on_other_systems_where_no_group_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    path = str(EXAMPLES / "smollm2-cpu.yaml")
    result, local = (hetero("validate", *more, path) for more in ((), ("--local",)))
    assert (result.exit_code, local.exit_code) == (EXIT_OK, EXIT_USAGE)
    assert "on this machine: groups run on Linux only, this is Darwin" in result.stderr
    assert f"{path}: groups run on Linux only, this is Darwin" in local.stderr
    assert CpuTopology.of_this_process().cores


@pytest.mark.parametrize(
    ("memory", "quantization", "warns"), [("64Mi", "none", True), ("64Mi", "int4", False), ("128Mi", "none", False)]
)
def test_validate_warns_of_memory_that_weights_do_not_fit(
    tmp_path: Path, memory: str, quantization: str, warns: bool
) -> None:
    """A model of 200 MiB on two ranks."""
    model = tmp_path / "model"
    model.mkdir()
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(200 * 2**20)
    resource = {
        "apiVersion": "heteroinference.io/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {"name": "small"},
        "spec": {
            "model": {"uri": f"file://{model}", "quantization": quantization},
            "pools": [{"name": "cpu", "type": "CPU", "ranks": 2, "cpu": {"memoryPerRank": memory}}],
        },
    }
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps(resource))
    result = hetero("validate", str(path))
    assert result.exit_code == EXIT_OK
    assert ("the weights alone take 200 MiB or more" in result.stderr) == warns


def test_validate_as_json_tells_file_and_problems(tmp_path: Path) -> None:
    result = hetero("validate", "--json", str(tmp_path / "none.yaml"))
    assert result.exit_code == EXIT_USAGE
    data = json.loads(result.stdout)
    assert data["valid"] is False
    assert "No such file" in data["problems"][0]


def test_up_refuses_a_gpu_pool_without_a_gpu_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = hetero("up", str(EXAMPLES / "gpu-cpu.yaml"))
    assert result.exit_code == EXIT_USAGE
    assert "spec.pools[0].type: GPU: this machine has no NVIDIA GPU that may be used; use type CPU" in result.stderr
    assert not (tmp_path / "home" / "run").exists()


def test_up_with_a_directory_that_is_no_model_exits_permanent(tmp_path: Path) -> None:
    result = hetero("up", str(EXAMPLES / "smollm2-cpu-3ranks.yaml"), "--model", str(tmp_path))
    assert result.exit_code == EXIT_PERMANENT
    assert "config.json: no such file" in result.stderr


def test_what_goes_on_is_reported_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", FullDisk())
    print_note("cpu-0 was killed by SIGKILL; it is restarted")
    print_warning("cores are shared")


def test_no_group_is_told_without_a_stack_trace() -> None:
    result = hetero("generate", "hello")
    assert result.exit_code == EXIT_USAGE
    assert result.stderr.startswith("hetero: no local group runs; start one with `hetero up FILE`")
    assert len(result.stderr.splitlines()) == 1
    assert hetero("ps", "--json").stdout == ""


def test_generate_streams_text_and_figures(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        result = hetero("generate", "echo one two", "--figures", "--address", address)
    assert (result.exit_code, result.stdout) == (EXIT_OK, "one two \n")
    assert result.stderr.startswith("prompt 3 tokens (1 cached) · output 2 tokens · first token ")


def test_generate_reads_standard_input(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        assert hetero("generate", "-", "--address", address, stdin="echo piped").stdout == "piped \n"


@pytest.mark.parametrize("arguments", [("-",), ("hello", "--json-schema", "-")])
def test_standard_input_that_is_no_text_is_wrong_usage(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with served(tmp_path) as address:
        result = CliRunner().invoke(app, ["generate", *arguments, "--address", address], input=b"caf\xe9")
    assert result.exit_code == EXIT_USAGE
    assert "standard input cannot be read: 'utf-8' codec" in result.stderr


def test_an_answer_goes_to_a_terminal_that_lacks_some_of_its_characters(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        result = CliRunner(charset="latin-1").invoke(
            app, ["generate", "echo r\u00e9sum\u00e9 \u4f60", "--address", address]
        )
    assert (result.exit_code, result.stdout) == (EXIT_OK, "r\u00e9sum\u00e9 ? \n")


def test_errors_of_files_and_folders_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETERO_HOME", str(tmp_path / "file" / "home"))
    result = hetero("model", "fetch", "smollm2-135m-instruct")
    locks = tmp_path / "file" / "home" / "models" / ".locks"
    assert (result.exit_code, result.stderr) == (EXIT_FAILURE, f"hetero: {locks}: Not a directory\n")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HETERO_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    result = hetero("ps")
    assert (result.exit_code, result.stderr) == (
        EXIT_FAILURE, "hetero: HETERO_HOME: set it to a folder; this user has no home folder\n",
    )  # fmt: skip


def test_generate_as_json_is_an_object_a_line(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        result = hetero("generate", "echo one", "--json", "--request-id", "q", "--address", address)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == ["started", "delta", "finished"]
    assert events[0]["request_id"] == "q"
    assert events[2]["reason"] == "stop"
    assert events[2]["usage"]["completion_tokens"] == 1


def test_generate_sends_what_its_options_say(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    gateway = FakeGateway(f"unix:{tmp_path / 'g.sock'}")
    gateway.start()
    result = hetero(
        "generate", "echo one", "--address", gateway.address, "--json-schema", str(schema), "--completions", "2",
        "--logprobs", "3", "--priority", "-5", "--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--json",
    )  # fmt: skip
    gateway.stop()
    assert result.exit_code == EXIT_OK, result.stderr
    (request,) = gateway.inference.requests
    sampling = request.sampling
    assert (sampling.json_schema, sampling.n, sampling.logprobs, request.priority) == ('{"type": "object"}', 2, 3, -5)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.5)
    deltas = [event for line in result.stdout.splitlines() if (event := json.loads(line))["event"] == "delta"]
    assert [(event["index"], event["logprobs"][0]["top"]) for event in deltas] == [
        (index, [[0, -0.25], [8, -2.0]]) for index in range(2)
    ]


def test_generate_shows_several_completions_one_after_another(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        result = hetero("generate", "echo one two", "--completions", "2", "--address", address)
    assert result.stdout == "--- 0\none two \n--- 1\none two \n"


def test_generate_goes_on_when_its_stream_breaks(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        result = hetero("generate", "break-1 one two three", "--address", address)
        refused = hetero("generate", "loading", "--resume-timeout", "0", "--address", address)
    assert (result.exit_code, result.stdout) == (EXIT_OK, "one two three \n")
    assert (refused.exit_code, refused.stderr) == (EXIT_FAILURE, "hetero: the group is loading\n")


def test_an_answer_has_one_form_at_most(tmp_path: Path) -> None:
    result = hetero("generate", "echo", "--choice", "a", "--regex", "b", "--address", "unix:nowhere")
    assert result.exit_code == EXIT_USAGE
    assert "give one of --json-schema" in result.stderr
    missing = hetero("generate", "echo", "--json-schema", str(tmp_path / "none"), "--address", "unix:nowhere")
    assert (missing.exit_code, "cannot" in missing.stderr) == (EXIT_USAGE, True)


def test_wrong_request_exits_as_wrong_usage_and_a_fault_as_failure(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        wrong = hetero("generate", "invalid", "--address", address)
        fault = hetero("generate", "boom", "--address", address)
    assert (wrong.exit_code, wrong.stderr) == (EXIT_USAGE, "hetero: sampling.temperature: must be >= 0\n")
    assert (fault.exit_code, fault.stderr) == (EXIT_FAILURE, "hetero: a bug\n")


def test_chat_sends_the_whole_conversation_and_skips_failed_turns(tmp_path: Path) -> None:
    gateway = FakeGateway(f"unix:{tmp_path / 'g.sock'}")
    gateway.start()
    lines = "echo first\n\ninvalid\n/nonsense\necho second\n/reset\necho third\n/exit\necho never\n"
    result = hetero("chat", "--system", "Be brief.", "--address", gateway.address, stdin=lines)
    gateway.stop()
    assert result.exit_code == EXIT_OK
    assert result.stdout == "first \nsecond \nthird \n"
    assert "unknown command /nonsense" in result.stderr
    sent = [[m.content for m in request.chat.messages] for request in gateway.inference.requests]
    assert sent == [
        ["Be brief.", "echo first"],
        ["Be brief.", "echo first", "first ", "invalid"],
        ["Be brief.", "echo first", "first ", "echo second"],
        ["Be brief.", "echo third"],
    ]


def test_model_list_names_what_could_be_fetched() -> None:
    assert "smollm2-135m-instruct" in hetero("model", "list").stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from hetero_client.cli.main import app; app(['--help'], standalone_mode=False); "
        "print([m for m in ('grpc', 'torch', 'transformers', 'numpy', 'pydantic') if m in sys.modules])"
    )
    began_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.perf_counter() - began_s < 5  # A second on a quiet machine, and tests are not run on one.


class served:  # noqa: N801  reads as a verb in `with`
    """A fake gateway on a unix socket, for the time of a block."""

    def __init__(self, folder: Path) -> None:
        self._gateway = FakeGateway(f"unix:{folder / 'gateway.sock'}")

    def __enter__(self) -> str:
        self._gateway.start()
        return self._gateway.address

    def __exit__(self, *_: object) -> None:
        self._gateway.stop()
