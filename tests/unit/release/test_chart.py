"""The packed chart: the same bytes each time, with the images that it was released with."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml

from hetero_api.contract import VERSION
from tests.support.helm import CHART
from tools.release.chart import NAME, pack_chart, values_for, write_layout
from tools.release.sources import ReleaseError

pytestmark = pytest.mark.unit

VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")
DIGESTS = {"operator": f"sha256:{'a' * 64}", "cpuWorker": f"sha256:{'b' * 64}"}


def test_the_same_files_are_the_same_bytes_and_all_of_them(tmp_path: Path) -> None:
    copy = shutil.copytree(CHART, tmp_path / "copy", copy_function=shutil.copyfile)
    packed: list[Path] = []
    for source in (CHART, copy):
        folder = tmp_path / f"out-{len(packed)}"
        folder.mkdir()
        packed.append(pack_chart(source, folder, values=VALUES, created=7))
    assert packed[0].name == f"{NAME}-{VERSION}.tgz"
    assert packed[0].read_bytes() == packed[1].read_bytes()
    with tarfile.open(packed[0]) as read:
        names = read.getnames()
    assert names == sorted(f"{NAME}/{path.relative_to(CHART)}" for path in CHART.rglob("*") if path.is_file())


def test_values_name_the_registry_and_the_images_that_are_known_by_digest() -> None:
    changed = values_for(VALUES, "registry.example.com/ai", DIGESTS)
    images = yaml.safe_load(changed)["images"]
    assert images["registry"] == "registry.example.com/ai"
    assert {key: images[key]["digest"] for key in DIGESTS} == DIGESTS
    assert images["gateway"] == yaml.safe_load(VALUES)["images"]["gateway"]
    assert values_for(changed, "registry.example.com/ai", DIGESTS) == changed
    assert len(changed.splitlines()) == len(VALUES.splitlines()), "comments stay"


def test_values_without_a_place_for_a_digest_are_named() -> None:
    with pytest.raises(ReleaseError, match=r"images\.registry and images\.\*\.digest are not where"):
        values_for(VALUES.replace("    digest:", "    digests:"), "registry.example.com", DIGESTS)


def test_a_layout_is_what_its_digests_say(tmp_path: Path) -> None:
    packed = pack_chart(CHART, tmp_path, values=VALUES, created=7)
    layout = tmp_path / "layout"
    digest = write_layout(packed, layout, created=7)
    blobs = {path.name: path.read_bytes() for path in (layout / "blobs/sha256").iterdir()}
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in blobs.items())
    manifest = json.loads(blobs[digest.removeprefix("sha256:")])
    about = json.loads(blobs[manifest["config"]["digest"].removeprefix("sha256:")])
    assert (about["name"], about["version"]) == (NAME, VERSION)
    assert blobs[manifest["layers"][0]["digest"].removeprefix("sha256:")] == packed.read_bytes()
    assert manifest["annotations"]["org.opencontainers.image.created"] == "1970-01-01T00:00:07Z"
