"""Which builder is taken, and the command lines that each is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.images.builders import Buildah, Builder, BuildSettings, BuildTask, Docker, ImageError, find_builder

TASK = BuildTask(
    dockerfile=Path("/src/Dockerfile.cpu"),
    target="worker",
    reference="docker.io/a/worker-cpu:1",
    context=Path("/src"),
    build_arguments={"VERSION": "1"},
)


class PlayedDocker(Docker):
    """One that works, or has a problem."""

    def __init__(self, program: str, problem: str) -> None:
        super().__init__(program)
        self._problem = problem

    def problem(self) -> str:
        return self._problem


def played(**problems: str) -> list[Builder]:
    return [PlayedDocker(name, problem) for name, problem in problems.items()]


def test_the_first_that_works_is_taken() -> None:
    assert find_builder(None, played(docker="silent", podman="", buildah="")).program == "podman"


def test_a_chosen_one_is_taken_and_no_other() -> None:
    assert find_builder("buildah", played(docker="", buildah="")).program == "buildah"
    with pytest.raises(ImageError, match=r"^no builder of images works here: silent$"):
        find_builder("docker", played(docker="silent", buildah=""))


def test_where_none_works_each_says_why() -> None:
    with pytest.raises(ImageError, match="works here: docker: no daemon; podman is not installed"):
        find_builder(None, played(docker="docker: no daemon", podman="podman is not installed"))


def test_a_builder_that_is_none_is_named() -> None:
    with pytest.raises(ImageError, match="BUILDER: 'nerdctl' is none of docker, podman"):
        find_builder("nerdctl", played(docker="", podman=""))


def test_one_whose_daemon_is_silent_says_what_it_said(tmp_path: Path) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho Cannot connect to the daemon >&2\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    assert Docker(str(program)).problem() == f"{program} info: Cannot connect to the daemon"
    assert Docker(str(tmp_path / "nowhere")).problem() == f"{tmp_path / 'nowhere'} is not installed"


def test_by_default_a_build_is_given_nothing_from_this_machine() -> None:
    expected = [
        "docker", "build", "--build-arg", "VERSION=1", "--file", "/src/Dockerfile.cpu", "--target", "worker",
        "--tag", "docker.io/a/worker-cpu:1", "/src",
    ]  # fmt: skip
    assert Docker("docker").build_command(TASK, BuildSettings()) == expected


@pytest.mark.parametrize("builder", [Docker("docker"), Docker("podman"), Buildah()], ids=lambda it: it.program)
def test_wheels_certificates_and_options_are_passed_on(builder: Builder, tmp_path: Path) -> None:
    certificates = tmp_path / "ca.crt"
    certificates.touch()
    settings = BuildSettings(wheels=tmp_path, ca_bundle=certificates, base_image="a/b:1", options=("--network", "host"))
    command = " ".join(builder.build_command(TASK, settings))
    assert f"--build-context wheels={tmp_path}" in command
    assert f"--secret id=ca-bundle,src={certificates}" in command
    assert "--build-arg BASE_IMAGE=a/b:1 " in command
    assert "--network host" in command


def test_what_is_not_there_is_named_by_its_variable(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"WHEELS: there is no .*/nowhere"):
        Docker("docker").build_command(TASK, BuildSettings(wheels=tmp_path / "nowhere"))


@pytest.mark.parametrize(("builder", "never"), [(Docker("podman"), "--pull=never"), (Buildah(), "--pull-never")])
def test_a_base_of_this_machine_is_looked_for_in_no_registry(builder: Builder, never: str) -> None:
    assert never in builder.build_command(TASK, BuildSettings(base_image="localhost/base:1"))
    assert never not in builder.build_command(TASK, BuildSettings(base_image="docker.io/library/base:1"))


def test_layers_are_counted_by_docker_after_a_pull_and_by_buildah_as_its_manifest_has_them() -> None:
    """As many as are in front of an image's own, where it was built on it."""

    class PulledDocker(Docker):
        """A base that is here once it was pulled."""

        pulled = False

        def read(self, *arguments: str, timeout_s: float | None = None) -> str:
            self.pulled = self.pulled or arguments[0] == "pull"
            if not self.pulled:
                raise ImageError("no such image")
            return json.dumps(["sha256:1", "sha256:2", "sha256:3"])

    class ListingBuildah(Buildah):
        """A base of two layers."""

        def read(self, *arguments: str, timeout_s: float | None = None) -> str:
            return json.dumps({"Manifest": json.dumps({"layers": [{"size": 1}, {"size": 2}]})})

    assert PulledDocker("docker").layers("base") == 3
    assert ListingBuildah().layers("base") == 2
