"""A real Prometheus as a process: it scrapes what a test names, five times a second, and evaluates rules."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from tests.support.kube.polling import poll
from tests.support.kube.ports import free_port
from tests.support.kube.tools import find_prometheus

INTERVAL = "200ms"
READY_TIMEOUT_S = 20.0
Sample = Mapping[str, Any]
Targets = Mapping[str, tuple[str, Mapping[str, str]]]


class Prometheus:
    """Scrapes `targets`: by job, "host:port" and labels. Starts when entered, is stopped when left."""

    def __init__(self, folder: Path, targets: Targets, rules: Sequence[Mapping[str, Any]] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        scrapes = [
            {"job_name": job, "static_configs": [{"targets": [address], "labels": dict(labels)}]}
            for job, (address, labels) in targets.items()
        ]
        config = {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "scrape_configs": scrapes,
            "rule_files": ["rules.yaml"],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": list(rules)}]}))
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", trust_env=False, timeout=10)

    def query(self, expression: str) -> list[Sample]:
        """The samples of an expression now. Fails, with Prometheus' words, where it cannot be evaluated."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        found: list[Sample] = answer["data"]["result"]
        return found

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {sample["metric"]["alertname"] for sample in self.query('ALERTS{alertstate="firing"}')}

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> Self:
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    find_prometheus(),
                    f"--config.file={self._folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        poll(self.is_ready, describe=(self._folder / "log").read_text, timeout_s=READY_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(READY_TIMEOUT_S)
