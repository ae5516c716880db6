"""`hetero up` with keys and TLS: a real group that answers those alone who show a key, over encrypted connections."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from typer.testing import CliRunner

from hetero_client import Access, HeteroClient, SamplingParams
from hetero_client.cli.main import app
from hetero_client.errors import AccessError, NotConnectedError
from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory
from tests.support.local_group import REPOSITORY, LocalGroupProcess, write_manifest
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.distributed


def certificates(folder: Path) -> tuple[Path, trustme.CA]:
    """A folder with the server's certificate for `--tls-dir`, and its authority, which is in ca.crt beside it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    tls = folder / "tls"
    tls.mkdir()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tls / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(tls / "tls.crt")
    return tls, authority


def test_up_takes_keys_and_certificates_in_place_of_secrets(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save_tiny_model(tmp_path / "model", "llama")
    folder, _ = certificates(tmp_path)
    made = CliRunner().invoke(app, ["key", "alice", "--out", str(tmp_path / "alice.key")])
    (tmp_path / "keys.yaml").write_text(made.stdout)

    options = ["--keys", str(tmp_path / "keys.yaml"), "--tls-dir", str(folder)]
    manifest = write_manifest(tmp_path, model=model, ranks=1, max_model_len=128)
    with LocalGroupProcess(manifest, home=tmp_path / "home", options=options) as group:
        address = group.record.inference
        access = Access.find(api_key_file=tmp_path / "alice.key", ca_file=tmp_path / "ca.crt")
        with HeteroClient(address, access=access) as client:
            assert client.generate_text("hello", sampling=SamplingParams(max_tokens=2)).usage.completion_tokens
        stranger = Access.find(ca_file=tmp_path / "ca.crt", environment={})
        with HeteroClient(address, access=stranger) as client, pytest.raises(AccessError, match="must be 'Bearer KEY'"):
            client.model_info()
        with HeteroClient(address, access=Access()) as client, pytest.raises(NotConnectedError):
            client.model_info()
        with group.admin() as admin, pytest.raises(AccessError):
            admin.topology()
        # The command shows the run's token, which its owner alone can read.
        command = [sys.executable, "-m", "hetero_client", "topology"]
        environment = {**os.environ, "HETERO_HOME": str(tmp_path / "home")}
        shown = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
        assert "ready" in shown.stdout
    assert "OpenAI API: https://" in group.output
    assert "page: https://" in group.output


def test_chat_shows_a_certificate_where_up_asks_for_one(tmp_path: Path) -> None:
    tls, authority = certificates(tmp_path)
    (tmp_path / "client-ca").mkdir()
    authority.cert_pem.write_to_path(tmp_path / "client-ca/ca.crt")
    mine = authority.issue_cert("alice.example")
    mine.private_key_pem.write_to_path(tmp_path / "alice.key")
    mine.cert_chain_pems[0].write_to_path(tmp_path / "alice.crt")
    options = ["--tls-dir", str(tls), "--client-ca-dir", str(tmp_path / "client-ca")]
    model = demo_directory(HeteroHome.from_environment())
    manifest = write_manifest(tmp_path, model=model, ranks=1, max_model_len=128)
    with LocalGroupProcess(manifest, home=tmp_path / "home", options=options) as group:
        command = [
            sys.executable, "-m", "hetero_client", "chat", "--address", group.record.inference,
            "--ca", str(tmp_path / "ca.crt"), "--max-tokens", "4",
        ]  # fmt: skip
        shown = {"HETERO_CLIENT_CERT_FILE": tmp_path / "alice.crt", "HETERO_CLIENT_KEY_FILE": tmp_path / "alice.key"}
        for certificate, exit_code in ((shown, 0), ({}, 1)):
            environment = {**os.environ, **{name: str(path) for name, path in certificate.items()}}
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environment, input="Hello\n", capture_output=True, text=True, check=False
            )
            assert done.returncode == exit_code, done.stderr
            assert bool(done.stdout.strip()) == (exit_code == 0)
