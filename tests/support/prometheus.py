"""A real Prometheus as a process: it scrapes what a test names, five times a second, and evaluates rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.kube.ports import free_port
from tests.support.kube.tools import find_prometheus
from tests.support.served_program import ServedProgram

INTERVAL = "200ms"
Sample = Mapping[str, Any]
Targets = Mapping[str, tuple[str, Mapping[str, str]]]


class Prometheus(ServedProgram):
    """Scrapes `targets`: by job, "host:port" and labels. Starts when entered, is stopped when left."""

    def __init__(self, folder: Path, targets: Targets, rules: Sequence[Mapping[str, Any]] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._port = free_port()
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
        http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", trust_env=False, timeout=10)
        super().__init__(log=folder / "log", http=http, ready_path="/-/ready")

    def query(self, expression: str) -> list[Sample]:
        """The samples of an expression now. Fails, with Prometheus' words, where it cannot be evaluated."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        found: list[Sample] = answer["data"]["result"]
        return found

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {sample["metric"]["alertname"] for sample in self.query('ALERTS{alertstate="firing"}')}

    def _command(self) -> Sequence[str]:
        return [
            str(find_prometheus()),
            f"--config.file={self._folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=warn",
        ]
