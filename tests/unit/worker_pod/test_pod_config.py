"""The command line that the operator renders, and its mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetero_api.contract import ENV_POD_IP, ENV_POD_NAME, EXIT_USAGE
from hetero_api.host.cores import CoreGrant
from hetero_api.host.topology import NumaPolicy
from hetero_worker.pod.config import PodConfig
from hetero_worker.pod.ranks import policy_in_force, rank_arguments, rank_commands
from hetero_worker.process.config import RankConfig

pytestmark = pytest.mark.unit

RENDERED = [
    "--gateway", "x-gateway.ns.svc.cluster.local:50053", "--model", "/var/lib/hetero/model", "--pool", "cpu",
    "--ranks-per-pod", "2", "--threads-per-rank", "4", "--numa-policy", "Required",
    "--memory-bytes-per-rank", "1073741824", "--health-port", "8080",
]  # fmt: skip
POD = {ENV_POD_NAME: "x-cpu-12", ENV_POD_IP: "10.0.0.9"}


def test_the_ordinal_is_the_number_that_ends_the_pods_name() -> None:
    config = PodConfig.from_command_line(RENDERED, POD)
    assert (config.pod_name, config.ordinal, config.pod_ip) == ("x-cpu-12", 12, "10.0.0.9")
    assert (config.ranks_per_pod, config.threads_per_rank, config.numa_policy) == (2, 4, NumaPolicy.REQUIRED)


def test_a_container_of_the_one_pod_is_given_its_ordinal() -> None:
    together = {**POD, ENV_POD_NAME: "x-ranks-0"}
    configs = [PodConfig.from_command_line([*RENDERED, "--ordinal", number], together) for number in ("0", "5")]
    assert [(config.pod_name, config.ordinal) for config in configs] == [("x-ranks-0", 0), ("x-ranks-0", 5)]


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ([], POD, "--gateway"),
        (RENDERED, {ENV_POD_NAME: "x-cpu"}, "POD_NAME: 'x-cpu' does not end with -N"),
        (RENDERED, {}, "POD_NAME: ''"),
        ([*RENDERED, "--health-port", "70000"], POD, "--health-port: '70000' is no port number"),
        ([*RENDERED, "--ordinal", "first"], POD, "--ordinal: 'first' is no whole number"),
        ([*RENDERED, "--ranks-per-pod", "0"], POD, "--ranks-per-pod"),
        ([*RENDERED, "--cuda-devices", "0"], POD, "[0] is not a device of its own for each of 2 ranks"),
        ([*RENDERED, "--cuda-devices", "1,1"], POD, "[1, 1] is not a device of its own for each of 2 ranks"),
        ([*RENDERED, "--cuda-devices", "0,"], POD, "--cuda-devices: '' is no whole number"),
        ([*RENDERED, "--numa-policy", "Maybe"], POD, "'Maybe' is none of Required, BestEffort, None"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_usage(
    arguments: list[str], environment: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        PodConfig.from_command_line(arguments, environment)
    told = capsys.readouterr().err
    assert caught.value.code == EXIT_USAGE
    assert words in told
    assert told.count("\n") == 1


def test_a_rank_is_given_its_place_cores_and_patience(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    config = PodConfig.from_command_line(RENDERED, POD)
    grant = CoreGrant((4, 5, 6), 3, communication=(7, 23))
    _, command = rank_commands(config, [grant, grant], folder=tmp_path)
    assert command.forked_argv is not None
    assert command.argv == (sys.executable, "-m", "hetero_worker", *command.forked_argv)
    rank = RankConfig.from_command_line(command.forked_argv, {"HETERO_GROUP_TOKEN_FILE": str(token)})
    assert (rank.pool, rank.ordinal, rank.local_rank, rank.pod_name) == ("cpu", 12, 1, "x-cpu-12")
    assert (rank.cores, rank.num_threads, rank.numa_policy) == ((4, 5, 6), 3, NumaPolicy.REQUIRED)
    assert rank.communication_cores == (7, 23)
    assert (rank.memory_bytes, rank.store_host) == (1 << 30, "10.0.0.9")
    assert rank.measurements_file == tmp_path / "1.measured"
    assert rank.reconnect_timeout_s == rank.connect_timeout_s == 24 * 3600


def test_a_rank_is_given_the_certificates_of_its_pod(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    for arguments, folder in (([], None), (["--inside-tls-dir", "/inside"], Path("/inside"))):
        config = PodConfig.from_command_line([*RENDERED, *arguments], POD)
        given = rank_arguments(config, 0, CoreGrant((), 4), memory_bytes=1, folder=tmp_path)
        rank = RankConfig.from_command_line(given, {"HETERO_GROUP_TOKEN_FILE": str(token)})
        assert rank.inside_tls_dir == folder


@pytest.mark.parametrize(("devices", "given"), [(["--cuda-devices", "0,6"], (0, 6)), ([], (None, None))])
def test_a_rank_is_given_the_device_of_its_local_rank(
    devices: list[str], given: tuple[int | None, int | None], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    config = PodConfig.from_command_line([*RENDERED, *devices], POD)
    for local_rank, device in enumerate(given):
        arguments = rank_arguments(config, local_rank, CoreGrant((), 4), memory_bytes=1, folder=tmp_path)
        rank = RankConfig.from_command_line(arguments, {"HETERO_GROUP_TOKEN_FILE": str(token)})
        assert (rank.local_rank, rank.cuda_device) == (local_rank, device)


@pytest.mark.parametrize(
    ("devices", "num_cpus", "policy"),
    [
        (["--cuda-devices", "0,1"], 8, NumaPolicy.BEST_EFFORT),
        (["--cuda-devices", "0,1"], 9, NumaPolicy.NONE),
        ([], 8, NumaPolicy.NONE),
    ],
)
def test_gpu_ranks_are_bound_where_no_other_pod_uses_their_cpus(
    devices: list[str], num_cpus: int, policy: NumaPolicy
) -> None:
    config = PodConfig.from_command_line([*RENDERED, "--numa-policy", "None", *devices], POD)
    assert policy_in_force(config, num_cpus=num_cpus) is policy
