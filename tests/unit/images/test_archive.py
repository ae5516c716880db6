"""Two builds of the same give the same bytes, and of something else give others."""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.image_archives import BASE_LAYERS, REFERENCE, SITE, Build, Entry, Image, Layer, file, write_saved
from tools.images.archive import read_archive, rewrite
from tools.images.builders import ImageError
from tools.images.catalogue import FILE_TIME

CREATED = 1_750_000_000
BUILDS = (
    Build(),
    Build(time=1_800_000_000, seed=1, user="somebody", hostname="builder-2"),
    Build(time=1, seed=2, packed=True),
)


def rewritten(folder: Path, image: Image, build: Build, *, created: int = CREATED, reference: str = REFERENCE) -> Path:
    folder.mkdir(exist_ok=True)
    # The base comes from a registry: it is what it is, in all builds.
    saved = write_saved(folder / "saved.tar", image.layers, build)
    target = folder / "image.tar"
    rewrite(saved, target, reference=reference, base_layers=BASE_LAYERS, created=created)
    return target


def digest(folder: Path, image: Image, build: Build | None = None) -> str:
    return read_archive(rewritten(folder, image, build or Build())).digest


def names(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        return archive.getnames()


def test_the_same_image_built_at_other_times_in_another_order_has_the_same_digest(tmp_path: Path) -> None:
    # Builds differ in their base, too, as it is made by hand here: it is left out.
    image = replace(Image(), base={})
    archives = [rewritten(tmp_path / str(number), image, build) for number, build in enumerate(BUILDS)]
    assert len({read_archive(archive).digest for archive in archives}) == 1
    assert len({archive.read_bytes() for archive in archives}) == 1
    saved = [(tmp_path / str(number) / "saved.tar").read_bytes() for number in range(len(BUILDS))]
    assert len(set(saved)) == len(BUILDS)


@pytest.mark.parametrize(
    "change",
    [
        {f"{SITE}/thing/it.py": file("2\n")},
        {f"{SITE}/thing/it.py": file("1\n", mode=0o755)},
        {"opt/hetero/bin/python": Entry(symlink="/usr/bin/python3.12")},
        {"opt/hetero/new": Entry(mode=0o755)},
    ],
)
def test_any_change_of_a_file_gives_another_digest(tmp_path: Path, change: Layer) -> None:
    assert digest(tmp_path / "a", Image()) != digest(tmp_path / "b", Image().with_files(change))


def test_layers_of_the_base_stay_as_a_registry_has_them(tmp_path: Path) -> None:
    archive = rewritten(tmp_path, Image(), BUILDS[2])
    with tarfile.open(tmp_path / "saved.tar") as saved:
        (config,) = [json.load(saved.extractfile(it)) for it in saved if it.name == "config.json"]  # type: ignore[arg-type]
    before, after = config["rootfs"]["diff_ids"], read_archive(archive).config["rootfs"]["diff_ids"]
    assert before[:BASE_LAYERS] == after[:BASE_LAYERS]
    assert before[BASE_LAYERS:] != after[BASE_LAYERS:]


def test_every_part_is_named_by_its_content_and_has_the_same_time(tmp_path: Path) -> None:
    with tarfile.open(rewritten(tmp_path, Image(), Build())) as archive:
        blobs = [member for member in archive if member.name.startswith("blobs/sha256/")]
        assert {member.mtime for member in archive} == {FILE_TIME}
        assert len(blobs) == 5, "three layers, configuration and manifest"
        for member in blobs:
            assert hashlib.sha256(archive.extractfile(member).read()).hexdigest() == Path(member.name).name  # type: ignore[union-attr]


def test_the_image_says_the_sources_time_and_nothing_of_the_builder(tmp_path: Path) -> None:
    config = read_archive(rewritten(tmp_path, Image(), Build(seed=7), created=0)).config
    assert config["created"] == "1970-01-01T00:00:00Z"
    assert {entry["created"] for entry in config["history"]} == {"1970-01-01T00:00:00Z"}
    assert {entry["created_by"] for entry in config["history"]} == {"/bin/sh -c #(nop) COPY dir"}
    assert config["config"] == {"Entrypoint": ["python"], "Labels": {"a": "b"}}
    assert "container" not in config


def test_the_name_of_an_image_is_no_part_of_its_digest(tmp_path: Path) -> None:
    one = rewritten(tmp_path / "1", Image(), Build())
    other = rewritten(tmp_path / "2", Image(), Build(), reference="localhost/other:2")
    assert read_archive(one).digest == read_archive(other).digest
    with tarfile.open(other) as archive:
        (for_docker,) = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        (described,) = json.load(archive.extractfile("index.json"))["manifests"]  # type: ignore[arg-type]
    assert for_docker["RepoTags"] == [described["annotations"]["io.containerd.image.name"]] == ["localhost/other:2"]


def test_a_file_with_several_names_keeps_them_whichever_a_builder_wrote_first(tmp_path: Path) -> None:
    layers = (
        {"a": file("one file"), "b": Entry(hardlink="a"), "c": Entry(hardlink="a")},
        {"c": file("one file"), "a": Entry(hardlink="c"), "b": Entry(hardlink="c")},
    )
    digests = set()
    for number, layer in enumerate(layers):
        image = read_archive(rewritten(tmp_path / str(number), Image({}, layer, {}), Build()))
        assert {image.files[name].sha256 for name in "abc"} == {hashlib.sha256(b"one file").hexdigest()}
        digests.add(image.digest)
    assert len(digests) == 1


def test_what_a_later_layer_takes_away_is_gone(tmp_path: Path) -> None:
    environment = {"a/one": file("1"), "a/two": file("2"), "b/three": file("3"), "b/four": file("4")}
    program = {"a/.wh.one": file(""), "b/.wh..wh..opq": file(""), "b/five": file("5")}
    image = read_archive(rewritten(tmp_path, Image({}, environment, program), Build()))
    assert sorted(image.files) == ["a/two", "b/five"]
    assert image.files["b/five"].layer == 2


def test_a_part_that_was_changed_afterwards_is_named(tmp_path: Path) -> None:
    archive = rewritten(tmp_path, Image(), Build())
    content = archive.read_bytes()
    assert read_archive(archive).problems == ()
    archive.write_bytes(content.replace(b"home = /usr/bin", b"home = /tmp/bin"))
    (problem,) = read_archive(archive).problems
    assert problem.endswith(" has another content")


def test_an_archive_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"nothing")
    with pytest.raises(ImageError, match=r"a\.tar is no archive of an image as `make images SAVE=…` writes it"):
        read_archive(tmp_path / "a.tar")
    with pytest.raises(ImageError, match=r"saved\.tar is no archive of an image"):
        read_archive(write_saved(tmp_path / "saved.tar", Image().layers))
