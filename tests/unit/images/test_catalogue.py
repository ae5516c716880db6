"""`make images` tags what the chart pulls and what the operator renders."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hetero_api.contract import VERSION
from hetero_operator.config import OperatorConfig
from tools.images.base import unread
from tools.images.builders import BuildSettings, ImageError
from tools.images.catalogue import FILE_TIME, VALUES, named_images, source_revision, source_time, whole_name
from tools.images.settings import CPU_IMAGES, Settings
from tools.images.trial import USER, restrict


def references(environment: dict[str, str]) -> list[str]:
    return [named.reference for named in Settings.from_environment(environment).images]


def test_names_are_those_of_the_chart() -> None:
    values = yaml.safe_load(VALUES.read_text(encoding="utf-8"))["images"]
    assert {named.reference for named in named_images().values()} == {
        whole_name(f"{values['registry']}/{values[key]['repository']}:{VERSION}")
        for key in ("operator", "gateway", "router", "cpuWorker", "gpuWorker")
    }


def test_names_are_those_that_the_operator_has_by_itself() -> None:
    options = OperatorConfig.from_command_line([], {}).render
    own = {name: whole_name(image) for name, image in zip(
        ("gateway", "router", "worker-cpu", "worker-gpu"),
        (options.gateway_image, options.router_image, options.cpu_worker_image, options.gpu_worker_image), strict=True,
    )}  # fmt: skip
    assert own == {name: named.reference for name, named in named_images().items() if name in own}


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("heteroinference/operator", "docker.io/heteroinference/operator"),
        ("python", "docker.io/library/python"),
        ("registry.example/ai/operator", "registry.example/ai/operator"),
        ("registry:5000/operator", "registry:5000/operator"),
        ("localhost/operator", "localhost/operator"),
    ],
)
def test_a_name_without_a_registry_is_docker_hubs_as_kubernetes_reads_it(name: str, whole: str) -> None:
    assert whole_name(name) == whole


def test_the_cpu_images_are_built_unless_others_are_named() -> None:
    assert [named.name for named in Settings.from_environment({}).images] == list(CPU_IMAGES)
    chosen = {"IMAGES": "worker-gpu gateway", "REGISTRY": "registry.example/ai", "TAG": "7"}
    assert references(chosen) == ["registry.example/ai/worker-gpu:7", "registry.example/ai/gateway:7"]


def test_an_image_that_is_none_is_named() -> None:
    with pytest.raises(
        ImageError, match="IMAGES: 'worker' is none of operator, gateway, router, worker-cpu, worker-gpu"
    ):
        Settings.from_environment({"IMAGES": "worker"})


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    empty = dict.fromkeys(("BASE_IMAGE", "WHEELS", "CA_BUNDLE", "IMAGE_BUILD_OPTIONS", "BUILDER", "SAVE"), "")
    assert Settings.from_environment(empty).build == BuildSettings()


def test_options_are_read_as_a_shell_reads_them() -> None:
    settings = Settings.from_environment({"IMAGE_BUILD_OPTIONS": "--isolation oci --label 'a=b c'"})
    assert settings.build.options == ("--isolation", "oci", "--label", "a=b c")


def test_sources_that_are_no_checkout_have_no_revision(tmp_path: Path) -> None:
    assert source_revision(tmp_path) == "unknown"
    assert source_time({}, tmp_path) == FILE_TIME


def test_the_time_of_the_images_is_the_commits_unless_it_is_given() -> None:
    assert source_time({"SOURCE_DATE_EPOCH": "1234"}) == 1234
    assert source_time({}) > FILE_TIME


def test_a_local_base_keeps_licences_and_loses_manuals(tmp_path: Path) -> None:
    names = ["usr/share/doc/a/copyright", "usr/share/doc/a/README", "usr/share/man/man1", "var/lib/apt/lists/x"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert {str(path.relative_to(tmp_path)) for path in unread(tmp_path)} == set(names[1:])


def test_a_trial_is_as_restricted_as_a_pod() -> None:
    spec = {"process": {"rlimits": [], "capabilities": {"bounding": ["CAP_KILL"]}, "terminal": True}, "mounts": []}
    settings = {"Env": ["PATH=/opt/hetero/bin"]}
    restricted = restrict(spec, root="/r", settings=settings, command=["hetero", "--version"])
    process = restricted["process"]
    assert restricted["root"] == {"path": "/r", "readonly": True}
    assert (process["user"], process["capabilities"]) == ({"uid": USER, "gid": USER}, {})
    assert (process["noNewPrivileges"], process["terminal"]) == (True, False)
    assert (process["args"], process["env"], process["cwd"]) == (["hetero", "--version"], settings["Env"], "/")
