"""Writes the files that are made from others, or checks that they are up to date.

    python -m tools.generate [--check] protos manifests docs chart picture models planning metrics dashboards \
        reference concepts

protos: `protos/hetero_api/v1/*.proto` → Python stubs beside them.
manifests: `hetero_api/spec.py` and `status.py` → the CustomResourceDefinition in the chart.
docs: the same, with the rules and the table of effects → the reference page.
chart: comments of the chart's values.yaml → its schema and README.
picture: the packages' imports and docstrings → docs/architecture.svg.
models: architectures and the tests' lists of them → docs/models.md.
planning: example models, example hardware and the cost model → docs/planning.md.
metrics: `hetero_api/metrics.py` → docs/metrics.md.
dashboards: `tools/dashboards.py` → the chart's Grafana dashboards.
reference: the command line, the errors and the RPCs → their pages in docs/reference.
concepts: an example's plan, and the ways of requests and resources → docs/pictures.
With --check nothing is written; the exit status is 1 when a file differs, and the files are named.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc_tools

from hetero_api.crd import render_crd
from tools.chart_values import generate_chart
from tools.command_line_page import generate_command_line_page
from tools.concept_pictures import generate_concept_pictures
from tools.dashboards import generate_dashboards
from tools.errors_page import generate_errors_page
from tools.metrics_page import generate_metrics_page
from tools.models_page import generate_models_page
from tools.picture import generate_picture
from tools.planning_page import generate_planning_page
from tools.reference_page import generate_reference
from tools.rpc_page import generate_rpc_page

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
CRD = ROOT / "charts/heteroinference/files/crd.yaml"


def generate_protos(root: Path) -> list[Path]:
    """Write the stubs under `root`/protos; returns what was written, relative to `root`."""
    out = root / "protos"
    out.mkdir(parents=True, exist_ok=True)
    sources = sorted(PROTOS.glob("hetero_api/v1/*.proto"))
    plugins = Path(sys.executable).parent
    includes = Path(grpc_tools.__path__[0]) / "_proto"
    command = [
        sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"-I{includes}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}",
        *map(str, sources),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    suffixes = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    stubs = [source.relative_to(ROOT).with_name(source.stem + s) for source in sources for s in suffixes]
    return [stub for stub in stubs if (root / stub).exists()]


def generate_manifests(root: Path) -> list[Path]:
    """Write the CRD under `root`; returns what was written, relative to `root`."""
    relative = CRD.relative_to(ROOT)
    (root / relative).parent.mkdir(parents=True, exist_ok=True)
    (root / relative).write_text(render_crd(), encoding="utf-8")
    return [relative]


def generate_reference_pages(root: Path) -> list[Path]:
    """Write the pages of command line, errors and RPCs under `root`; returns what was written, relative to `root`."""
    return [*generate_command_line_page(root), *generate_errors_page(root), *generate_rpc_page(root)]


GENERATORS = {
    "protos": generate_protos,
    "manifests": generate_manifests,
    "docs": generate_reference,
    "chart": generate_chart,
    "picture": generate_picture,
    "models": generate_models_page,
    "planning": generate_planning_page,
    "metrics": generate_metrics_page,
    "dashboards": generate_dashboards,
    "reference": generate_reference_pages,
    "concepts": generate_concept_pictures,
}


def stale(kind: str) -> list[Path]:
    """Files of a kind whose committed content is not what would be generated."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        written = GENERATORS[kind](root)
        return [p for p in written if not (ROOT / p).exists() or (ROOT / p).read_bytes() != (root / p).read_bytes()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=GENERATORS)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.check:
        for kind in arguments.kinds:
            print(f"{kind}: wrote {len(GENERATORS[kind](ROOT))} files")
        return 0
    differing = [path for kind in arguments.kinds for path in stale(kind)]
    for path in differing:
        print(f"{path} is not up to date: run make {' '.join(arguments.kinds)}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
