"""The audit names every way in which an image is not what its lock, its packages and its bill of materials say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.support.image_archives import (
    BASE_LAYERS,
    LOCK,
    REFERENCE,
    SITE,
    Build,
    Entry,
    Image,
    file,
    package,
    write_saved,
)
from tools.images.archive import ImageContent, read_archive, rewrite
from tools.images.audit import ask_for_advisories, image_problems, read_advisories
from tools.images.builders import ImageError
from tools.images.contents import contents_of
from tools.images.locks import environment, read_lock
from tools.images.sbom import make_sbom, read_sbom

PINS = {"thing": "1.0", "numpy": "2.4.6"}


def content(folder: Path, image: Image, build: Build | None = None) -> ImageContent:
    target = folder / "image.tar"
    saved = write_saved(folder / "saved.tar", image.layers, build)
    rewrite(saved, target, reference=REFERENCE, base_layers=BASE_LAYERS, created=0)
    return read_archive(target)


def sbom_of(image: ImageContent) -> str:
    return make_sbom(
        image, name="gateway", repository="registry.example/ai/gateway", base_layers=BASE_LAYERS, created=0
    )


def audited(folder: Path, image: Image, *, listed: Image | None = None, lock: str = LOCK) -> list[str]:
    """Problems of an image against the bill of materials of `listed`; by default its own, so as if whoever changed the
    image had made that again, too."""
    there = content(folder, image)
    sbom = sbom_of(there if listed is None else content(folder, listed))
    return image_problems(there, read_lock(lock), read_sbom(sbom))


def document(folder: Path, image: Image | None = None, build: Build | None = None) -> dict[str, Any]:
    return dict(json.loads(sbom_of(content(folder, image or Image(), build))))


def test_an_image_that_is_as_it_was_built_has_no_problem(tmp_path: Path) -> None:
    assert audited(tmp_path, Image()) == []


def test_the_bill_of_materials_is_valid_cyclonedx(tmp_path: Path) -> None:
    text = sbom_of(content(tmp_path, Image()))
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    with pytest.raises(ImageError, match=r"is no CycloneDX 1\.6"):
        read_sbom(text.replace('"library"', '"books"'))


def test_the_bill_of_materials_names_the_digest_all_packages_and_all_other_files(tmp_path: Path) -> None:
    told = document(tmp_path)
    assert told["metadata"]["component"]["purl"].startswith("pkg:oci/gateway@sha256:")
    assert sorted(part["purl"] for part in told["components"] if part["type"] == "library") == [
        "pkg:deb/debian/libc6@2.36-9?arch=amd64&distro=debian-12",
        "pkg:pypi/heteroinference@0.1.0",
        "pkg:pypi/numpy@2.4.6",
        "pkg:pypi/thing@1.0",
    ]
    licences = {part["name"]: part.get("licenses") for part in told["components"]}
    assert licences["thing"] == [{"license": {"id": "MIT"}}]
    assert licences["numpy"] == [{"license": {"name": "BSD License"}}]
    files = [part["name"] for part in told["components"] if part["type"] == "file"]
    assert files == ["/opt/hetero/bin/python", "/opt/hetero/pyvenv.cfg"]
    (root,) = [it for it in told["dependencies"] if it["ref"] == told["metadata"]["component"]["bom-ref"]]
    assert {part["bom-ref"] for part in told["components"]} == set(root["dependsOn"])


def test_the_same_image_has_the_same_bill_of_materials(tmp_path: Path) -> None:
    image = replace(Image(), base={})
    texts = {sbom_of(content(tmp_path, image, build)) for build in (Build(), Build(time=5, seed=3, user="x"))}
    assert len(texts) == 1


def test_files_go_with_the_package_that_they_belong_to(tmp_path: Path) -> None:
    contents = contents_of(content(tmp_path, Image()), base_layers=BASE_LAYERS)
    files = {package.name: set(package.files) for package in contents.packages}
    assert files["libc6"] == {"usr/lib/late.so"}, "its other file is the base's"
    assert {f"{SITE}/thing/__pycache__/it.cpython-311.pyc", "opt/hetero/bin/thing"} <= files["thing"]
    assert (contents.python, contents.machine, contents.distribution) == ("3.11", "x86_64", "debian-12")


def test_a_file_that_was_changed_is_named_by_its_packages_record(tmp_path: Path) -> None:
    changed = Image().with_files({f"{SITE}/thing/it.py": file("import os\n")})
    assert audited(tmp_path, changed) == [f"/{SITE}/thing/it.py of thing 1.0 is not what its RECORD says"]


def test_byte_code_that_was_changed_is_found_by_the_bill_of_materials(tmp_path: Path) -> None:
    changed = Image().with_files({f"{SITE}/thing/__pycache__/it.cpython-311.pyc": file("evil code")})
    digest, files = audited(tmp_path, changed, listed=Image())
    assert "in the bill of materials" in digest
    assert files.startswith("the files of pkg:pypi/thing@1.0#")
    assert files.endswith(" are not those of the bill of materials")


def test_a_file_that_is_missing_is_named_unless_it_is_one_that_never_runs(tmp_path: Path) -> None:
    path = f"{SITE}/thing/it.py"
    assert audited(tmp_path, Image().without(path)) == [f"/{path} of thing 1.0 is missing"]
    assert f"{SITE}/numpy/tests/test_it.py" not in Image().environment


@pytest.mark.parametrize("path", [f"{SITE}/thing/more.py", f"{SITE}/sitecustomize.py", "etc/cron.d/job", "bin/sh"])
def test_an_extra_file_is_found(tmp_path: Path, path: str) -> None:
    problems = audited(tmp_path, Image().with_files({path: file("1")}), listed=Image())
    assert problems[1:] == [f"/{path} is there, and not in the bill of materials"]
    assert problems[0].startswith("its digest is sha256:")


def test_byte_code_without_a_source_is_an_extra_file(tmp_path: Path) -> None:
    path = f"{SITE}/thing/__pycache__/other.cpython-311.pyc"
    problems = audited(tmp_path, Image().with_files({path: file("1")}), listed=Image())
    assert problems[1:] == [f"/{path} is there, and not in the bill of materials"]


def test_a_file_of_no_package_that_was_changed_is_found(tmp_path: Path) -> None:
    changed = Image().with_files({"opt/hetero/bin/python": Entry(symlink="/tmp/python3")})
    problems = audited(tmp_path, changed, listed=Image())
    assert problems[1:] == ["/opt/hetero/bin/python, of no package, is not what the bill of materials says"]


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    without = Image().without(*package("thing", "1.0", {"thing/it.py": "", "../../../bin/thing": ""}))
    problems = audited(tmp_path, without)
    assert problems == ["thing is locked, and missing"]
    against = audited(tmp_path, without, listed=Image())
    assert f"pkg:pypi/thing@1.0#{SITE} is in the bill of materials, and missing" in against


def test_a_package_that_nobody_locked_is_named(tmp_path: Path) -> None:
    more = Image().with_files(package("stowaway", "3.0", {"stowaway.py": "1\n"}))
    assert audited(tmp_path, more) == ["stowaway 3.0 is there, and not in the lock"]
    against = audited(tmp_path, more, listed=Image())
    assert f"pkg:pypi/stowaway@3.0#{SITE} is there, and not in the bill of materials" in against


def test_copies_that_a_package_ships_are_its_files_and_in_the_bill_of_materials(tmp_path: Path) -> None:
    """setuptools does so; nobody locks them. The copy's own RECORD is not right any more, as they are trimmed."""
    copy = package("inner", "2.0", {"inner.py": "1\n"}, trimmed={"../bin/inner": "gone\n"})
    inside = {path.removeprefix(f"{SITE}/"): (entry.content or b"").decode() for path, entry in copy.items()}
    shipped = {f"thing/_vendor/{path}": text for path, text in inside.items()}
    thing = package("thing", "1.0", {"thing/it.py": "1\n", "../../../bin/thing": "#!\n", **shipped}, licence="MIT")
    image = Image().with_files(thing)
    assert audited(tmp_path, image) == []
    packages = {it.name: it for it in contents_of(content(tmp_path, image), base_layers=BASE_LAYERS).packages}
    assert (packages["inner"].own, packages["inner"].files) == (False, {})
    assert f"{SITE}/thing/_vendor/inner.py" in packages["thing"].files
    assert "pkg:pypi/inner@2.0" in [part["purl"] for part in document(tmp_path, image)["components"] if "purl" in part]
    changed = image.with_files({f"{SITE}/thing/_vendor/inner.py": file("2\n")})
    assert audited(tmp_path, changed) == [f"/{SITE}/thing/_vendor/inner.py of thing 1.0 is not what its RECORD says"]


def test_another_version_than_the_locked_one_is_named(tmp_path: Path) -> None:
    lock = LOCK.replace("thing==1.0", "thing==1.1")
    assert audited(tmp_path, Image(), lock=lock) == ["thing is 1.0, and 1.1 in the lock"]


def test_an_image_without_the_project_is_none_of_its(tmp_path: Path) -> None:
    assert audited(tmp_path, replace(Image(), program={})) == ["heteroinference is missing"]


def test_a_package_without_a_record_is_named(tmp_path: Path) -> None:
    image = Image().without(f"{SITE}/thing-1.0.dist-info/RECORD")
    assert "there is no RECORD of thing 1.0" in audited(tmp_path, image)


def test_advisories_that_were_found_and_packages_that_were_not_asked_about_are_told_apart() -> None:
    advisory = {"id": "PYSEC-1", "fix_versions": ["1.1"], "aliases": [], "description": ""}
    answer = {"dependencies": [
        {"name": "thing", "version": "1.0", "vulns": [advisory]},
        {"name": "numpy", "skip_reason": "not found on PyPI"},
    ]}  # fmt: skip
    told = read_advisories(json.dumps(answer), "", PINS)
    assert told.found == ("thing 1.0: PYSEC-1, mended in 1.1",)
    assert told.unchecked == ("numpy 2.4.6: not found on PyPI",)


def test_a_package_that_the_answer_leaves_out_counts_as_not_asked_about() -> None:
    answer = {"dependencies": [{"name": "thing", "version": "1.0", "vulns": []}]}
    told = read_advisories(json.dumps(answer), "", PINS)
    assert (told.found, told.unchecked) == ((), ("numpy 2.4.6: pip-audit did not name it",))


def test_where_no_answer_came_nothing_was_looked_at() -> None:
    told = read_advisories("", "Traceback\nConnectionError: no route to host\n", PINS)
    assert told.unchecked == ("all 2 packages: ConnectionError: no route to host",)


def test_without_a_network_pip_audit_gives_no_all_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by a real run of it, through a proxy that is not there."""
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    told = ask_for_advisories(read_lock(LOCK), environment("3.11", "x86_64"))
    assert told.found == ()
    assert told.unchecked
    assert "2 packages" in told.unchecked[0]
