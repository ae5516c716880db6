"""Runs Helm as a person does, with its state in a folder of its own; both major versions."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts/heteroinference"
PROMETHEUS = "monitoring.coreos.com/v1"
ADMISSION_POLICY = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"
TIMEOUT_S = 120.0

Values = Mapping[str, Any]
Object = dict[str, Any]


class HelmFailed(Exception):
    """Helm ended with an error; its message is the text that a user would see."""


@dataclass(frozen=True, slots=True)
class Helm:
    """A Helm program with its home in `folder`. `kubeconfig` may be None where no cluster is asked."""

    program: Path
    folder: Path
    kubeconfig: Path | None = None
    major: int = 3

    def run(self, *arguments: str | Path, values: Values | None = None) -> str:
        """What Helm printed. Raises HelmFailed."""
        stated = ("--values", self._written(values)) if values is not None else ()
        command = [str(part) for part in (self.program, *arguments, *stated)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=self._environment()
        )
        if done.returncode != 0:
            raise HelmFailed(f"{' '.join(command[1:])}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def template(
        self,
        values: Values | None = None,
        *,
        release: str = "hetero",
        namespace: str = "hetero-system",
        apis: Sequence[str] = (),
        kube_version: str | None = None,
        chart: Path = CHART,
    ) -> list[Object]:
        """The objects that an installation would make, test hooks too. Raises HelmFailed.

        With a kubeconfig the cluster is asked for its APIs, and Helm validates against them as when it installs.
        """
        more = [f"--api-versions={api}" for api in apis] + ([f"--kube-version={kube_version}"] if kube_version else [])
        if self.kubeconfig is not None:
            # As an upgrade: whether objects exist already is not the question.
            more += ["--is-upgrade", "--validate" if self.major == 3 else "--dry-run=server"]
        text = self.run("template", release, chart, f"--namespace={namespace}", *more, values=values or {})
        return [one for one in yaml.safe_load_all(text) if one]

    def manifest(self, release: str, namespace: str) -> list[Object]:
        """The objects of an installed release, without hooks."""
        text = self.run("get", "manifest", release, f"--namespace={namespace}")
        return [one for one in yaml.safe_load_all(text) if one]

    def status(self, release: str, namespace: str) -> Object:
        """What `helm status` says, decoded."""
        found: Object = json.loads(self.run("status", release, f"--namespace={namespace}", "--output=json"))
        return found

    def _written(self, values: Values) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"values-{len(list(self.folder.glob('values-*')))}.yaml"
        path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
        return path

    def _environment(self) -> dict[str, str]:
        home = {f"HELM_{name}_HOME": str(self.folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
        # "/dev/null": never the kubeconfig of whoever runs the tests.
        kubeconfig = "/dev/null" if self.kubeconfig is None else str(self.kubeconfig)
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), "KUBECONFIG": kubeconfig, **home}


def only(objects: Sequence[Object], kind: str, name: str | None = None) -> Object:
    """The single object of a kind (and name) among others. Fails when it is not single."""
    found = [one for one in objects if one["kind"] == kind and name in (None, one["metadata"]["name"])]
    assert len(found) == 1, f"{kind} {name or ''}: {[one['metadata']['name'] for one in found]}"
    return found[0]


def kinds(objects: Sequence[Object]) -> list[str]:
    """Kinds of all objects, sorted, each as often as it occurs."""
    return sorted(one["kind"] for one in objects)


def pod_environment(container: Object, pod: Mapping[str, str]) -> dict[str, str]:
    """A container's environment as its kubelet would fill it in; `pod` has the fields that it may refer to, by path."""
    return {
        one["name"]: pod[one["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in one else one.get("value", "")
        for one in container["env"]
    }
