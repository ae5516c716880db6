"""An image that grows by more than a tenth is named; docs/images.md says what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tools.images.builders import Buildah, Docker, ImageError
from tools.images.catalogue import named_images
from tools.images.sizes import (
    BASE_LABEL,
    PAGE,
    ImageSize,
    describe,
    growth_problems,
    measure,
    read_record,
    with_table,
    write_record,
)

RECORDED = {"gateway": ImageSize(base_mb=130.0, added_mb=100.0)}


def problems_of(added_mb: float, *, base_mb: float = 130.0) -> list[str]:
    return growth_problems({"gateway": ImageSize(base_mb, added_mb)}, RECORDED)


def test_a_tenth_is_allowed_and_more_is_not() -> None:
    assert problems_of(110.0) == []
    (problem,) = problems_of(110.2)
    assert problem.startswith("gateway adds 110 MB to its base, 10% more than the 100 MB that are recorded")


def test_another_base_is_no_growth_and_hides_none() -> None:
    assert problems_of(100.0, base_mb=400.0) == []
    assert problems_of(120.0, base_mb=80.0) != []


def test_an_image_of_which_nothing_is_recorded_is_named() -> None:
    assert growth_problems({"new": ImageSize(1.0, 1.0)}, RECORDED) == [
        "new: no size is recorded; say make record-images"
    ]


def inspected(base: str, *sizes: int) -> dict[str, Any]:
    """What buildah says of an image with these layers."""
    manifest = {"layers": [{"size": size} for size in sizes]}
    return {"Manifest": json.dumps(manifest), "OCIv1": {"config": {"Labels": {BASE_LABEL: base}}}}


def test_what_is_measured_is_what_the_layers_above_the_base_have() -> None:
    class PlayedBuildah(Buildah):
        """A base that was pulled, listed with compressed sizes, and an image on it."""

        def read(self, *arguments: str, timeout_s: float | None = None) -> str:
            images = {
                "base": inspected("", 30, 6),
                "image": inspected("base", 100_000_000, 20_000_000, 5_000_000, 250_000),
            }
            return json.dumps(images[arguments[-1]])

    assert measure(PlayedBuildah(), "image") == ImageSize(base_mb=120.0, added_mb=5.2)


def test_docker_and_podman_tell_whole_sizes_and_the_base_is_taken_off() -> None:
    class PlayedDocker(Docker):
        """An image on a base that is pulled first."""

        pulled: ClassVar[list[str]] = []

        def read(self, *arguments: str, timeout_s: float | None = None) -> str:
            if arguments[0] == "pull":
                self.pulled.append(arguments[-1])
            elif arguments[-1] == "base" and not self.pulled:
                raise ImageError("no such image")
            if "{{json .Config}}" in arguments:
                return json.dumps({"Labels": {BASE_LABEL: "base"}})
            return {"base": "120000000\n", "image": "125200000\n"}[arguments[-1]]

    builder = PlayedDocker("docker")
    assert measure(builder, "image") == ImageSize(base_mb=120.0, added_mb=5.2)
    assert builder.pulled == ["base"]


def test_a_line_tells_what_changed() -> None:
    line = describe("gateway", ImageSize(130.0, 95.0), RECORDED)
    assert line == "gateway         225 MB = base 130 + 95, -5% since recorded"


def test_recording_keeps_the_images_that_are_not_named(tmp_path: Path) -> None:
    record, page = tmp_path / "sizes.json", tmp_path / "images.md"
    page.write_text(with_table(PAGE.read_text(encoding="utf-8"), {}), encoding="utf-8")
    write_record(RECORDED, record, page)
    write_record({"operator": ImageSize(1.0, 2.0)}, record, page)
    assert read_record(record) == {**RECORDED, "operator": ImageSize(1.0, 2.0)}
    assert "| `gateway` | 230 MB | 100 MB |\n| `operator` | 3 MB | 2 MB |\n" in page.read_text(encoding="utf-8")


def test_the_page_says_what_is_recorded_of_all_images() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text, read_record()) == text, "run make record-images"
    assert set(read_record()) <= set(named_images())
    assert {"operator", "gateway", "worker-cpu"} <= set(read_record())


def test_a_page_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"images\.md has no place for the table of sizes"):
        with_table("nothing", RECORDED)
