"""`python -m tools.images`: what is saved, and what it says when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.images.__main__ import main, save
from tools.images.builders import Buildah, ImageError
from tools.images.catalogue import named_images

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

    def save(self, reference: str, archive: Path) -> None:
        archive.write_text("half", encoding="utf-8")
        if self.fails:
            raise ImageError("no space left")
        archive.write_text(f"all of {self.identity}", encoding="utf-8")
        self.saved += 1


def test_an_archive_is_written_again_only_when_the_image_is_another(tmp_path: Path) -> None:
    builder = PlayedBuildah()
    archive = save(builder, GATEWAY, tmp_path / "new")
    assert save(builder, GATEWAY, tmp_path / "new") == archive == tmp_path / "new/gateway.tar"
    assert builder.saved == 1
    builder.identity = "2"
    save(builder, GATEWAY, tmp_path / "new")
    assert (builder.saved, archive.read_text(encoding="utf-8")) == (2, "all of 2")


def test_an_archive_that_could_not_be_written_is_none(tmp_path: Path) -> None:
    builder = PlayedBuildah()
    archive = save(builder, GATEWAY, tmp_path)
    builder.identity, builder.fails = "2", True
    with pytest.raises(ImageError, match="no space left"):
        save(builder, GATEWAY, tmp_path)
    assert archive.read_text(encoding="utf-8") == "all of 1"
    builder.fails = False
    save(builder, GATEWAY, tmp_path)
    assert archive.read_text(encoding="utf-8") == "all of 2"


def test_a_wrong_variable_ends_it_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes"], {"BUILDER": "nerdctl"}) == 1
    assert capsys.readouterr().err == "python -m tools.images: BUILDER: 'nerdctl' is none of docker, podman, buildah\n"
