"""The command line that the operator renders, and its mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetero_api.contract import ENV_POD_IP, ENV_POD_NAME, EXIT_USAGE
from hetero_api.host.cores import CoreGrant
from hetero_api.spec import NumaPolicy
from hetero_worker.config import RankConfig
from hetero_worker.pod.app import rank_command
from hetero_worker.pod.config import PodConfig

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


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ([], POD, "--gateway"),
        (RENDERED, {ENV_POD_NAME: "x-cpu"}, "POD_NAME: 'x-cpu' does not end with -N"),
        (RENDERED, {}, "POD_NAME: ''"),
        ([*RENDERED, "--health-port", "70000"], POD, "--health-port: '70000' is no port number"),
        ([*RENDERED, "--ranks-per-pod", "0"], POD, "--ranks-per-pod"),
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
    program, *arguments = rank_command(config, 1, CoreGrant((4, 5, 6), 3), memory_bytes=1 << 30, folder=tmp_path)
    assert (program, arguments[:2]) == (sys.executable, ["-m", "hetero_worker"])
    rank = RankConfig.from_command_line(arguments[2:], {"HETERO_GROUP_TOKEN_FILE": str(token)})
    assert (rank.pool, rank.ordinal, rank.local_rank, rank.pod_name) == ("cpu", 12, 1, "x-cpu-12")
    assert (rank.cores, rank.num_threads, rank.numa_policy) == ((4, 5, 6), 3, NumaPolicy.REQUIRED)
    assert (rank.memory_bytes, rank.store_host) == (1 << 30, "10.0.0.9")
    assert rank.measurements_file == tmp_path / "1.measured"
    assert rank.reconnect_timeout_s == rank.connect_timeout_s == 24 * 3600
