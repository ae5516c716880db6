"""What every Dockerfile of the project keeps to."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib

import pytest

from tests.support.dockerfiles import Dockerfile, read_dockerfile
from tools.images.catalogue import IMAGES, ROOT, Image, named_images

FILES = sorted({image.dockerfile for image in IMAGES})
LABELS = ("title", "description", "licenses", "version", "revision", "base.name")
each_file = pytest.mark.parametrize("file", FILES)
each_image = pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.key)


def dockerfile(name: str) -> Dockerfile:
    return read_dockerfile(ROOT / name)


def of(image: Image) -> Dockerfile:
    return dockerfile(image.dockerfile)


def name_of(image: Image) -> str:
    return next(name for name, named in named_images().items() if named.image == image)


@each_image
def test_every_image_has_its_target(image: Image) -> None:
    assert image.target in of(image).stages


@each_file
def test_the_base_can_be_chosen_and_its_default_is_pinned(file: str) -> None:
    default = dockerfile(file).arguments["BASE_IMAGE"]
    assert re.fullmatch(r"[a-z.]+/[a-z/]+:[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}", default)


@each_file
def test_stages_are_built_on_the_base_on_one_another_or_on_nothing(file: str) -> None:
    read = dockerfile(file)
    assert {stage.parent for stage in read.stages.values()} <= {"${BASE_IMAGE}", "scratch", *read.stages}


@each_file
def test_nothing_is_latest_and_nothing_comes_by_add(file: str) -> None:
    everything = [line for stage in dockerfile(file).stages.values() for line in stage.instructions]
    assert not [line for line in everything if line.word == "ADD" or ":latest" in line.text]


@each_image
def test_a_container_runs_as_a_user_that_is_a_number_and_not_root(image: Image) -> None:
    users = [line.text for line in of(image).instructions(image.target) if line.word == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[0])


@each_image
def test_labels_say_what_it_is(image: Image) -> None:
    labels = " ".join(line.text for line in of(image).stages[image.target].instructions if line.word == "LABEL")
    assert [label for label in LABELS if f"org.opencontainers.image.{label}=" not in labels] == []


@each_image
def test_the_program_is_process_1_without_a_shell_between(image: Image) -> None:
    """So that it gets the kubelet's SIGTERM."""
    first = next(line for line in of(image).instructions(image.target) if line.word in ("ENTRYPOINT", "CMD"))
    assert json.loads(first.text)[:2] == ["python", "-m"]


@each_image
def test_what_changes_with_every_commit_comes_last(image: Image) -> None:
    """Or each commit would make all layers anew."""
    words = [line.word for line in of(image).stages[image.target].instructions]
    assert words[words.index("ARG") :] == ["ARG", "ARG", "ARG", "LABEL"]


@each_image
def test_packages_are_a_layer_below_the_program(image: Image) -> None:
    copies = [line.text for line in of(image).stages[image.target].instructions if line.word == "COPY"]
    compiled = [["kernels"]] if image.key == "gpuWorker" else []
    assert [re.findall(r"--from=(?:\w+-)?(dependencies|program|kernels) ", copy) for copy in copies] == [
        ["dependencies"],
        ["program"],
        *compiled,
    ]


def test_the_gpu_image_has_its_kernels_where_triton_is_told_to_look() -> None:
    read = dockerfile("Dockerfile.gpu")
    (run,) = [line.text for line in read.instructions("kernels") if "backends.cuda.ahead" in line.text]
    manager = (ROOT / "worker/hetero_worker/backends/cuda/shipped.py").read_text(
        encoding="utf-8"
    )  # its import is Triton's
    (folder,) = re.findall(r'Path\(sys\.prefix\) / "([^"]+)"', manager)
    assert f"--into /opt/hetero/{folder} " in run
    variables = " ".join(line.text for line in read.instructions("worker") if line.word == "ENV")
    (name,) = re.findall(r"TRITON_CACHE_MANAGER=hetero_worker\.backends\.cuda\.shipped:(\w+)", variables)
    assert f"class {name}(FileCacheManager)" in manager
    assert "PATH=/opt/hetero/bin:" in variables


@each_image
def test_packages_are_installed_without_the_sources(image: Image) -> None:
    read, name = of(image), name_of(image)
    (stage,) = [copied for copied in _copied_stages(read, image.target) if copied.endswith("-dependencies")]
    sources = [line.text for line in read.instructions(stage) if line.word == "COPY"]
    assert sources == [f"locks/{name}.txt /build/", "tools/images/packages.py /build/"]


@each_image
def test_packages_are_those_of_the_images_own_lock_and_of_its_torch(image: Image) -> None:
    read, name = of(image), name_of(image)
    (stage,) = [copied for copied in _copied_stages(read, image.target) if copied.endswith("-dependencies")]
    (run,) = [line.text for line in read.stages[stage].instructions if line.word == "RUN"]
    torch = f" --torch {image.torch}" if image.torch else ""
    assert run.endswith(f"packages.py dependencies /build/{name}.txt{torch}")


@each_image
def test_no_compiler_is_installed_in_what_is_shipped_but_the_one_that_triton_runs(image: Image) -> None:
    installed = [line.text for line in of(image).instructions(image.target) if "apt-get install" in line.text]
    found = [name for text in installed for name in re.findall(r"\b(gcc|g\+\+|clang|build-essential|make|pip)\b", text)]
    assert found == (["gcc"] if image.key == "gpuWorker" else [])


@each_file
def test_apt_installs_no_more_than_named_and_leaves_no_lists(file: str) -> None:
    runs = [line.text for stage in dockerfile(file).stages.values() for line in stage.instructions]
    installs = [text for text in runs if "apt-get install" in text]
    assert installs
    for text in installs:
        assert "--no-install-recommends" in text
        assert "rm -rf /var/lib/apt/lists/*" in text


@each_file
def test_whoever_asks_pip_is_given_certificates_and_wheels_that_do_not_stay(file: str) -> None:
    runs = [line.text for stage in dockerfile(file).stages.values() for line in stage.instructions]
    asking = [text for text in runs if "packages.py " in text and "python3 /build" in text]
    assert asking
    for text in asking:
        assert "--mount=type=secret,id=ca-bundle" in text
        assert "--mount=type=bind,from=wheels,target=/wheels" in text


@each_file
def test_what_is_copied_is_sent_to_the_build_and_no_shared_library_is(file: str) -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    stages = dockerfile(file).stages.values()
    copies = [line.text.split()[:-1] for stage in stages for line in stage.instructions if line.word == "COPY"]
    paths = {path for paths in copies if not paths[0].startswith("--from") for path in paths}
    copied = {"locks" if path.startswith("locks/") else path for path in paths}
    assert copied <= sent
    assert any(fnmatch.fnmatch("worker/hetero_worker/distributed/x.so", line) for line in lines)


@each_file
def test_the_program_is_built_of_all_folders_that_a_wheel_has(file: str) -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    folders = {path.split("/")[0] for path in (*wheel["packages"], *wheel["force-include"])}
    lines = [line for stage in dockerfile(file).stages.values() for line in stage.instructions]
    copied = {path for line in lines if line.word == "COPY" for path in line.text.split()[:-1]}
    assert folders <= copied


def _copied_stages(read: Dockerfile, target: str) -> list[str]:
    text = " ".join(line.text for line in read.stages[target].instructions if line.word == "COPY")
    return re.findall(r"--from=([\w-]+)", text)
