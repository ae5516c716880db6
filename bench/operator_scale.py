"""Measures the operator at scale: many HeteroInference resources, a real API server, this machine.

    python -m bench.operator_scale [--resources 1000] [--rate 10] [--controllers]

1. create   resources are created at a steady rate; for each the time from the API server's answer to its creation to
            the server's answer to the last of its owned objects, both from the server's audit log
2. idle     a minute without any change: the operator's CPU time and writes
3. resync   the operator is started anew beside what exists: time until every resource was reconciled, and its writes

Without --controllers no controller manager runs, so nothing but the operator works on the objects (and on the machine's
cores, beside the API server and etcd); with it StatefulSets and Deployments get their pods as well.
Writes a table to stdout, JSON and a plot to bench/results.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import psutil

from hetero_api.contract import API_VERSION, GROUP, KIND, PLURAL
from tests.support.kube.binaries import find_binaries
from tests.support.kube.client import Client
from tests.support.kube.control_plane import ControlPlane, Options
from tests.support.kube.flags import CONTROLLERS
from tests.support.operator_process import OperatorProcess

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench/results"
CRD: Final = ROOT / "charts/heteroinference/files/crd.yaml"
USER: Final = "scale-operator"
NAMESPACES: Final = 10
IDLE_S: Final = 60.0
SETTLE_TIMEOUT_S: Final = 600.0
QUIET_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; times in seconds."""

    resources: int
    rate_asked: float
    rate_reached: float
    controllers: bool
    objects_per_resource: int
    create_p50_s: float
    create_p99_s: float
    create_max_s: float
    writes_per_resource: float
    create_cpu_share: float
    peak_rss_mb: float
    idle_cpu_share: float
    idle_writes: int
    resync_s: float
    resync_cpu_s: float
    resync_writes: int


@dataclass(frozen=True, slots=True)
class Created:
    """Latencies in order of creation, and the numbers of objects and writes."""

    latencies_s: tuple[float, ...]
    objects: tuple[int, ...]
    writes: int


def manifest(index: int, namespace: str) -> dict[str, Any]:
    """One resource of two CPU ranks, none of which could ever start: its model is an empty claim."""
    cpu = {"coresPerRank": 1, "memoryPerRank": "2Gi"}
    return {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": KIND,
        "metadata": {"name": name_of(index), "namespace": namespace},
        "spec": {
            "model": {"uri": "pvc://models/tiny"},
            "pools": [{"name": "cpu", "type": "CPU", "ranks": 2, "cpu": cpu}],
        },
    }


def name_of(index: int) -> str:
    return f"s{index:05d}"


def create_all(client: Client, count: int, rate: float) -> float:
    """Create them at `rate` a second; the rate that was reached."""
    begin = time.monotonic()
    for index in range(count):
        time.sleep(max(0.0, begin + index / rate - time.monotonic()))
        client.create(manifest(index, f"scale-{index % NAMESPACES}"))
    return count / (time.monotonic() - begin)


def events(log: Path, since: int) -> Iterator[dict[str, Any]]:
    """Audit events of finished calls after an offset."""
    with log.open("rb") as lines:
        lines.seek(since)
        for line in lines:
            event = json.loads(line)
            if event["stage"] == "ResponseComplete":
                yield event


def created(log: Path, since: int) -> Created:
    """What the audit log tells of the creation."""
    asked: dict[str, float] = {}
    done: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    writes = 0
    for event in events(log, since):
        target = event.get("objectRef", {})
        ours = event["user"]["username"] == USER
        answered = datetime.fromisoformat(event["stageTimestamp"]).timestamp()
        code = event.get("responseStatus", {}).get("code", 0)
        if target.get("resource") == PLURAL and event["verb"] == "create":
            asked[event["objectRef"].get("name") or _name_in(event)] = answered
        writes += ours and event["verb"] in ("create", "patch", "update", "delete") and target["resource"] != "leases"
        if ours and code == 201 and target["resource"] not in ("events", "leases"):
            done[target["name"][:6]].setdefault((target["resource"], target["name"]), answered)
    latencies = tuple(max(done[name].values()) - asked[name] for name in sorted(asked) if done[name])
    return Created(latencies, tuple(len(done[name]) for name in sorted(asked)), writes)


def _name_in(event: dict[str, Any]) -> str:
    return str(event["requestURI"].rpartition("/")[2])


def writes_since(plane: ControlPlane, mark: int) -> int:
    return len([call for call in plane.cluster.audit.writes_of(USER, since=mark) if call.resource != "leases"])


def wait_quiet(plane: ControlPlane) -> int:
    """Wait until the operator has written nothing for QUIET_S; the audit mark then."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while time.monotonic() < deadline:
        mark = plane.cluster.audit.mark()
        time.sleep(QUIET_S)
        if not writes_since(plane, mark):
            return plane.cluster.audit.mark()
    raise TimeoutError(f"the operator still writes after {SETTLE_TIMEOUT_S:.0f} s")


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def peak_rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def measure(plane: ControlPlane, folder: Path, count: int, rate: float, controllers: bool) -> tuple[Figures, Created]:
    """Run the three parts."""
    kubeconfig = plane.cluster.kubeconfig(plane.cluster.user(USER, groups=["system:masters"]))
    client = plane.cluster.client()
    for index in range(NAMESPACES):
        client.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"scale-{index}"}})
    with OperatorProcess(kubeconfig, folder / "operator-1") as operator:
        operator.wait_leading()
        log = plane.cluster.folder / "audit.log"
        mark, cpu, begin = plane.cluster.audit.mark(), cpu_seconds(operator.pid), time.monotonic()
        reached = create_all(client, count, rate)
        print(f"created {count} at {reached:.1f}/s; waiting until the operator is quiet", flush=True)
        busy = (cpu_seconds(operator.pid) - cpu) / (time.monotonic() - begin)
        quiet = wait_quiet(plane)
        seen = created(log, mark)
        cpu = cpu_seconds(operator.pid)
        time.sleep(IDLE_S)
        idle_cpu = (cpu_seconds(operator.pid) - cpu) / IDLE_S
        idle_writes = writes_since(plane, quiet)
        peak = peak_rss_mb(operator.pid)
    resync_s, resync_cpu_s, resync_writes = resync(plane, kubeconfig, folder, count)
    figures = Figures(
        resources=count, rate_asked=rate, rate_reached=reached, controllers=controllers,
        objects_per_resource=statistics.mode(seen.objects), create_p50_s=statistics.median(seen.latencies_s),
        create_p99_s=percentile(seen.latencies_s, 0.99), create_max_s=max(seen.latencies_s),
        writes_per_resource=seen.writes / count, create_cpu_share=busy, peak_rss_mb=peak, idle_cpu_share=idle_cpu,
        idle_writes=idle_writes, resync_s=resync_s, resync_cpu_s=resync_cpu_s, resync_writes=resync_writes,
    )  # fmt: skip
    if set(seen.objects) != {figures.objects_per_resource} or len(seen.latencies_s) != count:
        raise RuntimeError(f"not every resource has all its objects: {sorted(set(seen.objects))} of them were seen")
    return figures, seen


def resync(plane: ControlPlane, kubeconfig: Path, folder: Path, count: int) -> tuple[float, float, int]:
    """Seconds from a new operator's start to `count` finished reconciles, its CPU seconds, its writes."""
    mark, begin = plane.cluster.audit.mark(), time.monotonic()
    with OperatorProcess(kubeconfig, folder / "operator-2") as operator:
        deadline = begin + SETTLE_TIMEOUT_S
        while reconciled(operator) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{reconciled(operator):.0f} of {count} reconciled")
            time.sleep(0.2)
        elapsed, cpu = time.monotonic() - begin, cpu_seconds(operator.pid)
        time.sleep(QUIET_S)
        return elapsed, cpu, writes_since(plane, mark)


def reconciled(operator: OperatorProcess) -> float:
    """Resources that it has looked at since it began; 0 while it does not answer."""
    return operator.metric("hetero_operator_resources_reconciled") if operator.ready() else 0.0


def table(figures: Figures) -> str:
    """Figures beside their targets."""
    rows = [
        ("resources, rate reached", f"{figures.resources} at {figures.rate_reached:.1f}/s", ""),
        ("owned objects a resource", str(figures.objects_per_resource), ""),
        ("p50 create to all owned objects", f"{figures.create_p50_s:.2f} s", ""),
        ("p99 create to all owned objects", f"{figures.create_p99_s:.2f} s", "<= 5 s"),
        ("longest", f"{figures.create_max_s:.2f} s", ""),
        ("writes a resource, status and Events included", f"{figures.writes_per_resource:.1f}", ""),
        ("operator CPU while creating", f"{figures.create_cpu_share:.0%} of a core", ""),
        ("peak memory", f"{figures.peak_rss_mb:.0f} MB", "<= 400 MB"),
        ("idle CPU, a minute", f"{figures.idle_cpu_share:.1%} of a core", "<= 2 %"),
        ("idle writes, a minute", str(figures.idle_writes), "0"),
        ("full resync after a restart", f"{figures.resync_s:.1f} s, {figures.resync_cpu_s:.1f} s CPU", "<= 60 s"),
        ("writes of the resync", str(figures.resync_writes), "0"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def plot(seen: Created, figures: Figures, path: Path) -> None:
    """Latency over the course of creation, and its distribution."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    canvas, (course, spread) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    course.plot(seen.latencies_s, ".", markersize=3, color="tab:blue")
    course.set(xlabel="resources created before", ylabel="create → all owned objects, s", ylim=(0, None))
    spread.ecdf(seen.latencies_s, color="tab:blue")
    spread.axvline(figures.create_p99_s, color="tab:red", linewidth=1, label=f"p99 {figures.create_p99_s:.2f} s")
    spread.set(xlabel="create → all owned objects, s", ylabel="share of resources", xlim=(0, None))
    spread.legend(loc="lower right")
    for axes in (course, spread):
        axes.grid(alpha=0.3)
    canvas.suptitle(
        f"{figures.resources} HeteroInference resources at {figures.rate_reached:.1f}/s, "
        f"{figures.objects_per_resource} objects each, {psutil.cpu_count()} cores"
    )
    canvas.savefig(path)
    pyplot.close(canvas)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resources", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=10.0, help="resources created a second")
    parser.add_argument("--controllers", action="store_true", help="run the controller manager too")
    arguments = parser.parse_args()
    options = Options(
        controllers=CONTROLLERS if arguments.controllers else (),
        crds=[CRD],
        api_server_arguments=["--service-cluster-ip-range=10.0.0.0/16"],
    )
    with (
        tempfile.TemporaryDirectory(prefix="hetero-scale-") as folder,
        ControlPlane(Path(folder) / "plane", find_binaries(), options) as plane,
    ):
        figures, seen = measure(plane, Path(folder), arguments.resources, arguments.rate, arguments.controllers)
    print(table(figures))
    stem = RESULTS / f"operator-scale-{datetime.now():%Y-%m-%d-%H%M}"
    RESULTS.mkdir(exist_ok=True)
    record = {"figures": asdict(figures), "cores": psutil.cpu_count(), "latencies_s": seen.latencies_s}
    stem.with_suffix(".json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    plot(seen, figures, stem.with_suffix(".svg"))
    print(f"wrote {stem.relative_to(ROOT)}.json and .svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
