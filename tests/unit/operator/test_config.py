"""Settings: by argument or variable, checked, and told by the name they were given by."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_operator.config import SETTINGS, OperatorConfig
from hetero_operator.errors import ConfigError
from hetero_operator.reconcile.model import Policy


def test_defaults_make_a_whole_configuration() -> None:
    config = OperatorConfig.from_command_line([], {})
    assert (config.host, config.metrics_port, config.health_port) == ("127.0.0.1", 8080, 8081)
    assert config.namespaces == ()
    assert (config.lease.name, config.lease.namespace) == ("heteroinference-operator", "default")
    assert config.lease.retry_s < config.lease.renew_s < config.lease.duration_s
    assert config.render.cpu_worker_image.startswith("heteroinference/worker-cpu:")


def test_two_processes_of_one_host_never_share_a_made_up_identity() -> None:
    identities = {OperatorConfig.from_command_line([], {}).lease.identity for _ in range(5)}
    assert len(identities) == 5


def test_variables_are_read_and_arguments_win() -> None:
    environment = {"HETERO_OPERATOR_METRICS_PORT": "9000", "HETERO_OPERATOR_NAMESPACES": "a, b,a"}
    config = OperatorConfig.from_command_line(["--metrics-port", "9001"], environment)
    assert (config.metrics_port, config.namespaces) == (9001, ("a", "b"))


def test_the_operators_own_namespace_is_where_the_lease_is() -> None:
    config = OperatorConfig.from_command_line([], {"HETERO_OPERATOR_OWN_NAMESPACE": "system"})
    assert (config.lease.namespace, config.render.operator_namespace) == ("system", "system")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metrics_port", "x"),
        ("metrics_port", "70000"),
        ("health_port", "-1"),
        ("namespaces", "Upper"),
        ("namespaces", "a,,b"),
        ("gateway_image", ""),
        ("gateway_image", " spaced "),
        ("cluster_domain", "no domain"),
        ("run_as_user", "-1"),
        ("inside_tls", "yes"),
        ("namespace_users", "5"),
        ("namespace_users", "0-5"),
        ("namespace_users", "9-5"),
        ("namespace_users", "1-2147483648"),
        ("api_server_ports", "443,https"),
        ("api_server_ports", "0"),
        ("cluster_dns", "kube-system"),
        ("cluster_dns", "10.0.0.10"),
        ("cluster_dns", "10.0.0.0/33"),
        ("allowed_host_paths", "models"),
        ("allowed_host_paths", "/srv,/srv/../etc"),
        ("allowed_host_paths", "/it's"),
        ("allowed_images", "registry.example/team ,a b"),
        ("allowed_secrets", "[a-z]"),
        ("allowed_secrets", "a,,b"),
        ("resync_seconds", "nan"),
        ("resync_seconds", "1"),
        ("workers", "0"),
        ("workers", "2.5"),
        ("log_level", "LOUD"),
        ("kubeconfig", "/does/not/exist"),
        ("lease_name", "Not A Name"),
        ("own_namespace", "-x"),
    ],
)
def test_what_is_wrong_is_told_by_the_name_it_was_given_by(name: str, value: str) -> None:
    variable, argument = f"HETERO_OPERATOR_{name.upper()}", f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"^{variable}: "):
        OperatorConfig.from_command_line([], {variable: value})
    with pytest.raises(ConfigError, match=f"^{argument}: "):
        OperatorConfig.from_command_line([f"{argument}={value}"], {})


def test_lists_of_a_policy_are_separated_by_commas() -> None:
    environment = {
        "HETERO_OPERATOR_ALLOWED_HOST_PATHS": "/srv/models, /dev/shm,/srv/models",
        "HETERO_OPERATOR_ALLOWED_IMAGES": "registry.example:5000/team/*",
        "HETERO_OPERATOR_ALLOWED_SECRETS": "",
        "HETERO_OPERATOR_NAMESPACE_USERS": "1000000000-1999999999",
        "HETERO_OPERATOR_CLUSTER_DNS": "dns/app.example/role=resolver,fd00::10/128",
        "HETERO_OPERATOR_API_SERVER_PORTS": "443,8443",
    }
    policy = OperatorConfig.from_command_line([], environment).policy
    assert policy.allowed_host_paths == ("/srv/models", "/dev/shm")
    assert policy.allowed_images == ("registry.example:5000/team/*",)
    assert (policy.allowed_secrets, policy.allowed_schedulers) == ((), ("*",))
    assert policy.namespace_users == (1_000_000_000, 1_999_999_999)
    assert policy.cluster_dns == ("dns/app.example/role=resolver", "fd00::10/128")
    assert policy.api_server_ports == (443, 8443)


@pytest.mark.parametrize(("own", "any_address"), [("10.1.2.3", "0.0.0.0"), ("fd00:10:244::7", "::"), (None, "0.0.0.0")])
def test_pods_listen_on_addresses_of_the_operators_own_family(own: str | None, any_address: str) -> None:
    environment = {} if own is None else {"HETERO_OPERATOR_HOST": own}
    assert OperatorConfig.from_command_line([], environment).render.any_address == any_address


def test_the_policy_without_settings_is_the_default_one() -> None:
    assert OperatorConfig.from_command_line([], {}).policy == Policy()


def test_times_of_the_lease_must_rise() -> None:
    with pytest.raises(ConfigError, match="HETERO_OPERATOR_LEASE_RENEW_SECONDS"):
        OperatorConfig.from_command_line(["--lease-renew-seconds", "20"], {})


def test_unknown_arguments_end_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        OperatorConfig.from_command_line(["--metrics-prot", "1"], {})
    assert ending.value.code == 2
    assert "--metrics-prot" in capsys.readouterr().err


def test_every_setting_has_a_sentence_and_a_default_that_is_valid() -> None:
    for setting in SETTINGS:
        assert setting.help
        setting.parse(setting.default)


def test_a_kubeconfig_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("{}", encoding="utf-8")
    assert OperatorConfig.from_command_line(["--kubeconfig", str(path)], {}).kubeconfig == path
