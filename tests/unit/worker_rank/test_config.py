from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hetero_api.contract import ENV_GROUP_TOKEN_FILE, ENV_LOG_LEVEL, EXIT_USAGE
from hetero_api.host.topology import NumaPolicy
from hetero_worker.process.config import RankConfig

pytestmark = pytest.mark.unit

ARGUMENTS = {
    "--gateway": "127.0.0.1:50053",
    "--model": "/models/m",
    "--pool": "cpu",
    "--ordinal": "1",
    "--local-rank": "0",
    "--pod-name": "demo-cpu-1",
    "--cores": "0,2-3",
    "--communication-cores": "1,4",
    "--num-threads": "3",
    "--numa-policy": "Required",
    "--memory-bytes": "1024",
}


def read(
    folder: Path, changes: Mapping[str, str | None] | None = None, *, token: bytes = b"s3cret\n", level: str = "debug"
) -> RankConfig:
    path = folder / "token"
    path.write_bytes(token)
    options: dict[str, str | None] = {**ARGUMENTS, **(changes or {})}
    arguments = [part for name, value in options.items() if value is not None for part in (name, value)]
    return RankConfig.from_command_line(arguments, {ENV_GROUP_TOKEN_FILE: str(path), ENV_LOG_LEVEL: level})


def test_command_line_and_environment_become_one_frozen_config(tmp_path: Path) -> None:
    config = read(tmp_path)

    assert config == RankConfig(
        gateway="127.0.0.1:50053",
        model_dir=Path("/models/m"),
        pool="cpu",
        ordinal=1,
        local_rank=0,
        pod_name="demo-cpu-1",
        cuda_device=None,
        cores=(0, 2, 3),
        communication_cores=(1, 4),
        num_threads=3,
        numa_policy=NumaPolicy.REQUIRED,
        memory_bytes=1024,
        store_host="127.0.0.1",
        connect_timeout_s=120.0,
        abort_timeout_s=5.0,
        reconnect_timeout_s=0.0,
        measurements_file=None,
        packed_weights_dir=None,
        inside_tls_dir=None,
        heartbeat_file=None,
        token="s3cret",
        log_level="DEBUG",
    )


def test_packed_weights_are_kept_where_it_is_told(tmp_path: Path) -> None:
    assert read(tmp_path, {"--packed-weights-dir": "/kept"}).packed_weights_dir == Path("/kept")


def test_certificates_are_read_where_it_is_told(tmp_path: Path) -> None:
    assert read(tmp_path, {"--inside-tls-dir": "/inside"}).inside_tls_dir == Path("/inside")


def test_empty_core_list_means_not_bound(tmp_path: Path) -> None:
    config = read(tmp_path, {"--cores": "", "--communication-cores": ""})
    assert (config.cores, config.communication_cores) == ((), ())


@pytest.mark.parametrize(("text", "index"), [("cpu", None), ("cuda:0", 0), ("cuda:17", 17)])
def test_a_rank_computes_on_host_cores_or_on_the_device_that_it_is_told(
    tmp_path: Path, text: str, index: int | None
) -> None:
    assert read(tmp_path, {"--device": text}).cuda_device == index


def test_token_is_not_shown(tmp_path: Path) -> None:
    assert "s3cret" not in repr(read(tmp_path))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--gateway", "nowhere"),
        ("--gateway", "host:0"),
        ("--gateway", None),
        ("--ordinal", "-1"),
        ("--num-threads", "0"),
        ("--cores", "3-1"),
        ("--device", "cuda"),
        ("--device", "cuda:-1"),
        ("--device", "gpu:0"),
        ("--device", ""),
        ("--numa-policy", "Maybe"),
        ("--memory-bytes", "1Gi"),
        ("--connect-timeout-s", "0"),
        ("--abort-timeout-s", "inf"),
        ("--surprise", "1"),
    ],
)
def test_bad_option_is_one_line_that_names_it(
    option: str, value: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read(tmp_path, {option: value})

    message = capsys.readouterr().err
    assert caught.value.code == EXIT_USAGE
    assert message.count("\n") == 1
    assert option in message


@pytest.mark.parametrize("token", [b"", b"  \n", b"two words", b"caf\xc3\xa9"])
def test_file_without_a_token_is_a_usage_error(
    token: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read(tmp_path, token=token)

    assert caught.value.code == EXIT_USAGE
    assert ENV_GROUP_TOKEN_FILE in capsys.readouterr().err


def test_unset_token_variable_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [part for pair in ARGUMENTS.items() for part in pair]

    with pytest.raises(SystemExit) as caught:
        RankConfig.from_command_line(arguments, {})

    assert caught.value.code == EXIT_USAGE
    assert ENV_GROUP_TOKEN_FILE in capsys.readouterr().err


def test_unknown_log_level_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(tmp_path, level="chatty")

    assert ENV_LOG_LEVEL in capsys.readouterr().err
