"""Where a client's key comes from, and the command that makes keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetero_api.api_keys import Role, digest_of, read_keys
from hetero_api.contract import ENV_API_KEY, ENV_API_KEY_FILE
from hetero_api.spec import GatewaySpec
from hetero_client.access import Access
from hetero_client.cli.main import app
from hetero_client.errors import CredentialsError, LocalSpecError
from hetero_client.launcher.commands import DoorFiles

pytestmark = pytest.mark.unit


def test_arguments_come_before_files_and_files_before_the_environment(tmp_path: Path) -> None:
    file, other = tmp_path / "key", tmp_path / "other"
    file.write_text("from-file\n")
    other.write_text("from-other-file")
    env = {ENV_API_KEY: "from-env", ENV_API_KEY_FILE: str(other)}
    assert Access.find(api_key="given", api_key_file=file, environment=env).api_key == "given"
    assert Access.find(api_key_file=file, environment=env).api_key == "from-file"
    assert Access.find(environment=env).api_key == "from-env"
    assert Access.find(environment={ENV_API_KEY_FILE: str(other)}).api_key == "from-other-file"
    assert Access.find(environment={}) == Access()
    assert Access().metadata == ()


@pytest.mark.parametrize("key", ["", "two words", "ü", "x" * 513, "a\nb"])
def test_what_cannot_be_a_key_is_refused_by_name(tmp_path: Path, key: str) -> None:
    file = tmp_path / "key"
    file.write_text(key)
    with pytest.raises(CredentialsError, match=str(file)):
        Access.find(api_key_file=file, environment={})


def test_a_key_is_in_no_text() -> None:
    assert "secret" not in repr(Access("secret"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=f"{ENV_API_KEY_FILE}: .*none cannot be read"):
        Access.find(environment={ENV_API_KEY_FILE: str(tmp_path / "none")})


def test_the_command_makes_a_key_that_its_entry_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(app, ["key", "team-a", "--role", "user", "--role", "admin", "--tokens-per-minute", "600"])
    assert made.exit_code == 0, made.output
    key = (tmp_path / "team-a.key").read_text().strip()
    assert (tmp_path / "team-a.key").stat().st_mode & 0o777 == 0o600
    assert key not in made.output
    (tmp_path / "keys.yaml").write_text(made.stdout)
    (entry,) = read_keys(tmp_path / "keys.yaml")
    assert entry.digests == (digest_of(key),)
    assert entry.roles == [Role.USER, Role.ADMIN]
    assert entry.limits.tokens_per_minute == 600

    again = CliRunner().invoke(app, ["key", "team-a"])
    assert again.exit_code == 2
    assert "team-a.key cannot be written: File exists" in again.output
    assert (tmp_path / "team-a.key").read_text().strip() == key


def test_the_command_names_a_wrong_limit_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "k"
    made = CliRunner().invoke(app, ["key", "a", "--tokens-per-minute", "0", "--out", str(out)])
    assert made.exit_code == 2
    assert "limits.tokensPerMinute: must be at least 1" in made.output
    assert not out.exists()


def test_a_local_group_needs_a_file_for_a_secret(tmp_path: Path) -> None:
    gateway = GatewaySpec.model_validate({"auth": {"keysSecretRef": {"name": "clients"}}})
    with pytest.raises(LocalSpecError, match=r"spec.gateway.auth.keysSecretRef: .* --keys FILE"):
        DoorFiles().check(gateway)
    keys = tmp_path / "keys.yaml"
    keys.write_text("[]")
    files = DoorFiles(keys=keys)
    files.check(gateway)
    assert files.arguments == ("--keys", str(keys))
    assert DoorFiles(keys=keys, page=False).arguments == ("--keys", str(keys), "--no-page")
