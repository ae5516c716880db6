"""`python -m tools.images`: what is saved, and what it says when it cannot."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.image_archives import BASE_LAYERS, Image, file, write_saved
from tools.images.__main__ import main, save, write_sums
from tools.images.archive import read_archive
from tools.images.builders import Buildah, ImageError
from tools.images.catalogue import named_images
from tools.images.sbom import read_sbom
from tools.images.sizes import BASE_LABEL

GATEWAY = named_images()["gateway"]


class PlayedBuildah(Buildah):
    """Images that change when they are told to; saving one takes two writes, of which the second may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = "1"
        self.saved = 0
        self.fails = False

    def image_id(self, reference: str) -> str:
        return self.identity

    def layers(self, reference: str) -> int:
        assert reference == "base"
        return BASE_LAYERS

    def configuration(self, reference: str) -> dict[str, Any]:
        return {"Labels": {BASE_LABEL: "base"}}

    def save(self, reference: str, archive: Path) -> None:
        archive.write_text("half", encoding="utf-8")
        if self.fails:
            raise ImageError("no space left")
        write_saved(archive, Image().with_files({"opt/hetero/identity": file(self.identity)}).layers)
        self.saved += 1


def digest(archive: Path) -> str:
    return read_archive(archive).digest


def test_an_archive_is_written_again_only_when_the_image_is_another(tmp_path: Path) -> None:
    builder = PlayedBuildah()
    archive = save(builder, GATEWAY, tmp_path / "new", created=0)
    assert save(builder, GATEWAY, tmp_path / "new", created=0) == archive == tmp_path / "new/gateway.tar"
    assert builder.saved == 1
    before = digest(archive)
    builder.identity = "2"
    save(builder, GATEWAY, tmp_path / "new", created=0)
    assert builder.saved == 2
    assert digest(archive) != before
    assert sorted(path.name for path in archive.parent.iterdir()) == ["gateway.cdx.json", "gateway.id", "gateway.tar"]


def test_beside_an_archive_lies_the_bill_of_materials_of_just_that_image(tmp_path: Path) -> None:
    archive = save(PlayedBuildah(), GATEWAY, tmp_path, created=0)
    sbom = read_sbom((tmp_path / "gateway.cdx.json").read_text(encoding="utf-8"))
    assert (sbom.digest, sbom.base_layers) == (digest(archive), BASE_LAYERS)


def test_sums_name_every_archive_and_every_bill_of_materials_and_fail_for_others(tmp_path: Path) -> None:
    archive = save(PlayedBuildah(), GATEWAY, tmp_path, created=0)
    write_sums(tmp_path)
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "gateway.cdx.json: OK\ngateway.tar: OK\n"
    archive.write_bytes(archive.read_bytes().replace(b"home = /usr/bin", b"home = /tmp/bin"))
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "gateway.cdx.json: OK\ngateway.tar: FAILED\n")


def test_an_audit_names_what_is_wrong_and_what_was_not_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    save(PlayedBuildah(), GATEWAY, tmp_path, created=0)
    environment = {"SAVE": str(tmp_path), "IMAGES": "gateway"}
    assert main(["audit"], environment) == 1, "the small image is not of the gateway's lock"
    said = capsys.readouterr()
    assert "gateway: thing 1.0 is there, and not in the lock\n" in said.err
    assert "gateway: grpcio is locked, and missing\n" in said.err
    assert "gateway: advisories were NOT looked at for 1 entries:\n    all " in said.out
    assert "no advisory is known" not in said.out


def test_an_audit_of_nothing_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit"], {}) == 1
    assert "SAVE: say in which folder" in capsys.readouterr().err
    assert main(["audit"], {"SAVE": str(tmp_path)}) == 1
    assert "operator.tar is no archive" in capsys.readouterr().err


def test_locks_that_fit_pass_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locks", "--check"], {}) == 0
    assert capsys.readouterr().err == ""


def test_an_archive_that_could_not_be_written_is_none(tmp_path: Path) -> None:
    builder = PlayedBuildah()
    archive = save(builder, GATEWAY, tmp_path, created=0)
    before = digest(archive)
    builder.identity, builder.fails = "2", True
    with pytest.raises(ImageError, match="no space left"):
        save(builder, GATEWAY, tmp_path, created=0)
    assert digest(archive) == before
    assert not (tmp_path / "gateway.saved").exists()
    builder.fails = False
    save(builder, GATEWAY, tmp_path, created=0)
    assert digest(archive) != before


def test_a_wrong_variable_ends_it_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes"], {"BUILDER": "nerdctl"}) == 1
    assert capsys.readouterr().err == "python -m tools.images: BUILDER: 'nerdctl' is none of docker, podman, buildah\n"
