"""The images that `make images` built: they run as a restricted pod runs them, hold what they need and no more.

No cluster is needed for it. IMAGES, REGISTRY, TAG and BUILDER are as `make images` takes them, and HETERO_E2E_IMAGES is
its SAVE. The base image is BASE_IMAGE, or the one that an image was built on.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tools.images.archive import read_archive, rewrite
from tools.images.audit import image_problems
from tools.images.builders import Builder, BuildTask, find_builder
from tools.images.catalogue import NamedImage
from tools.images.locks import LOCKS, read_lock
from tools.images.sbom import read_sbom
from tools.images.settings import Settings
from tools.images.sizes import BASE_LABEL, growth_problems, measure, read_record
from tools.images.trial import Finished, run_in_image

SETTINGS = Settings.from_environment(os.environ)
NAMES = [named.name for named in SETTINGS.images]
WORKERS = [name for name in NAMES if name.startswith("worker")]
PROGRAMS = {
    "operator": ("hetero_operator",),
    "gateway": ("hetero_gateway", "hetero_client.model_delivery"),
    "router": ("hetero_gateway route", "smg.launch_router"),
    "worker-cpu": ("hetero_worker.pod", "hetero_client.model_delivery"),
    "worker-gpu": ("hetero_worker.pod", "hetero_client.model_delivery"),
}


@pytest.fixture(scope="module")
def builder() -> Builder:
    if os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names a cluster whose nodes pull images that were built elsewhere")
    return find_builder(SETTINGS.builder)


def image(name: str) -> NamedImage:
    return next(named for named in SETTINGS.images if named.name == name)


def answer(builder: Builder, name: str, *command: str) -> Finished:
    return run_in_image(builder, image(name).reference, command)


def told(builder: Builder, name: str, program: str) -> str:
    """What a Python program in the image prints."""
    done = answer(builder, name, "python", "-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", NAMES)
def test_an_image_adds_no_tenth_more_to_its_base_than_was_recorded(builder: Builder, name: str) -> None:
    size = measure(builder, image(name).reference)
    assert growth_problems({name: size}, read_record()) == []


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_what_its_lock_and_its_bill_of_materials_say(builder: Builder, name: str) -> None:
    folder = Path(os.environ["HETERO_E2E_IMAGES"])
    lock = read_lock((LOCKS / f"{name}.txt").read_text(encoding="utf-8"))
    sbom = read_sbom((folder / f"{name}.cdx.json").read_text(encoding="utf-8"))
    assert image_problems(read_archive(folder / f"{name}.tar"), lock, sbom) == []
    assert len(sbom.packages) > len({entry.name for entry in lock}) // 2


SMALL = """\
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS small
RUN mkdir -p /opt/small/folder && cd /opt/small \\
    && for name in $(seq 1 40 | shuf); do echo "$name" > "file-$name"; done \\
    && ln file-3 first && ln file-3 also && ln -s file-7 folder/link \\
    && python3 -c "import compileall; compileall.compile_dir('/opt/small')"
LABEL a=b
"""


def test_an_image_that_is_built_twice_has_the_same_digest_both_times(builder: Builder, tmp_path: Path) -> None:
    """Its files are made in another order each time, at another time."""
    base = SETTINGS.build.base_image or builder.configuration(image(NAMES[0]).reference)["Labels"][BASE_LABEL]
    (tmp_path / "Dockerfile").write_text(SMALL, encoding="utf-8")
    settings = replace(SETTINGS.build, base_image=base, wheels=None, options=(*SETTINGS.build.options, "--no-cache"))
    digests, own = [], []
    for number in range(2):
        reference, saved, target = (
            f"localhost/hetero-small:{number}",
            tmp_path / "saved.tar",
            tmp_path / f"{number}.tar",
        )
        builder.build(BuildTask(tmp_path / "Dockerfile", "small", reference, tmp_path, {}), settings)
        try:
            builder.save(reference, saved)
            own.append(builder.image_id(reference))
        finally:
            builder.read("rmi", reference)
        digests.append(rewrite(saved, target, reference=reference, base_layers=builder.layers(base), created=0))
        assert "opt/small/also" in read_archive(target).files
        saved.unlink()
    assert digests[0] == digests[1]
    assert own[0] != own[1], "the builder's own images differ"


@pytest.mark.parametrize("name", NAMES)
def test_every_program_of_an_image_starts_on_a_read_only_root(builder: Builder, name: str) -> None:
    for program in PROGRAMS[name]:
        done = answer(builder, name, "python", "-m", *program.split(), "--help")
        assert (done.returncode, done.stdout[:6]) == (0, "usage:"), done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_client_is_in_every_image(builder: Builder, name: str) -> None:
    done = answer(builder, name, "hetero", "--version")
    assert done.stdout.startswith("hetero "), done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_container_is_not_roots_and_is_told_so_by_a_number(builder: Builder, name: str) -> None:
    user, _, group = str(builder.configuration(image(name).reference)["User"]).partition(":")
    assert int(user) > 0
    assert int(group) > 0


@pytest.mark.parametrize("name", NAMES)
def test_labels_say_what_an_image_is_and_what_it_was_built_of(builder: Builder, name: str) -> None:
    labels = builder.configuration(image(name).reference)["Labels"]
    said = {label.removeprefix("org.opencontainers.image."): value for label, value in labels.items()}
    assert {"title", "description", "licenses", "version", "revision", "base.name"} <= set(said)
    assert said["version"] == image(name).reference.rpartition(":")[2]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_tmp_can_be_written(builder: Builder, name: str) -> None:
    program = "import os; print([f for f in ('/', '/opt/hetero', '/tmp', '/var/tmp') if os.access(f, os.W_OK)])"
    assert told(builder, name, program) == "['/tmp']"


@pytest.mark.parametrize("name", NAMES)
def test_an_image_holds_neither_pip_nor_a_compiler_that_nothing_runs(builder: Builder, name: str) -> None:
    program = "import shutil; print([p for p in ('gcc', 'clang', 'make') if shutil.which(p)])"
    assert told(builder, name, program) == ("['gcc']" if name == "worker-gpu" else "[]")
    assert told(builder, name, "import importlib.util; print(importlib.util.find_spec('pip'))") == "None"


@pytest.mark.parametrize("name", NAMES)
def test_what_computes_is_in_the_workers_images_alone(builder: Builder, name: str) -> None:
    program = "import importlib.util as u; print([m for m in ('torch', 'numpy', 'transformers') if u.find_spec(m)])"
    assert told(builder, name, program) == ("['torch', 'numpy']" if name.startswith("worker") else "[]")


@pytest.mark.parametrize("name", NAMES)
def test_sources_have_their_byte_code(builder: Builder, name: str) -> None:
    """All but a few templates of other packages, which are no valid Python."""
    program = (
        "import sysconfig, pathlib, importlib.util as u\n"
        "sources = list(pathlib.Path(sysconfig.get_path('purelib')).rglob('*.py'))\n"
        "bare = [s for s in sources if not pathlib.Path(u.cache_from_source(s)).exists()]\n"
        "print(len(sources), len(bare), [str(s) for s in bare if 'hetero_' in str(s)])"
    )
    sources, bare, own = told(builder, name, program).split(maxsplit=2)
    assert int(sources) > 500
    assert int(bare) < 10
    assert own == "[]"


def test_a_rank_finds_torch_and_the_native_exchange(builder: Builder) -> None:
    program = (
        "import torch, hetero_worker.process.state_machine\n"
        "from hetero_worker.distributed.native_exchange import load\n"
        "print(torch.ones(2, 2).mm(torch.ones(2, 2)).sum().item(), load())"
    )
    for name in WORKERS:
        assert told(builder, name, program).startswith("8.0 Loaded(library=<")


@pytest.mark.parametrize("name", [name for name in NAMES if name == "worker-gpu"])
def test_a_gpu_rank_can_build_what_launches_its_kernels(builder: Builder, name: str) -> None:
    program = (
        "import pathlib, subprocess, sysconfig, triton\n"
        "source = pathlib.Path('/tmp/launcher.c')\n"
        "source.write_text('#include <Python.h>\\nint launch(void) { return 0; }')\n"
        "headers = sysconfig.get_paths()['include']\n"
        "command = ['gcc', '-shared', '-fPIC', '-I', headers, str(source), '-o', '/tmp/launcher.so']\n"
        "print(subprocess.run(command, check=True).returncode)"
    )
    assert told(builder, name, program) == "0"
