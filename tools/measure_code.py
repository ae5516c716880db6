"""Measures the product's code, and fails where a limit of pyproject.toml's [tool.measure_code] is broken.

    python tools/measure_code.py            # a table: figure, limit, and each place that breaks a limit
    python tools/measure_code.py --rooms    # code lines and modules of each room (folder), too

Code lines are lines with a token of code: no blanks, comments or docstrings. Tests, tools and generated stubs do not
count. It reads files as text and imports nothing of the product.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

ROOTS: Final = ("protos", "operator", "worker")
"""Folders of the product; their folders are its packages."""
_NO_CODE: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
_ODD_DOCSTRING: Final = re.compile(r"(What|Of|Whether it|The same)\b")
_INCLUDE: Final = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_RUFF: Final = ("D100", "D101", "D102", "D103", "D104", "D401", "D419")
"""Public docstrings that are missing or empty, and functions' that do not begin with a verb in the imperative."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True)
class Module:
    """One Python file of the product."""

    name: str
    """Dotted, as it is imported."""
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """The file's syntax tree."""
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def room(self) -> str:
        """Package that the file lies in."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @cached_property
    def code_lines(self) -> int:
        """Lines with a token of code."""
        documentation: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.path.read_text(encoding="utf-8")).readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines - documentation)

    def imports(self, known: Collection[str]) -> set[str]:
        """Return the names of `known` modules that this one imports anywhere."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= submodules.intersection(known) or {node.module}
        return found.intersection(known) - {self.name}


@dataclass(frozen=True)
class Figure:
    """One measured figure, its limit, and the places that count against it."""

    name: str
    value: float
    limit: float
    places: tuple[str, ...] = ()

    @property
    def is_met(self) -> bool:
        """True if the figure is within its limit."""
        return self.value <= self.limit


def modules_of(repo: Path) -> list[Module]:
    """Return all modules of the product, in the order of their names."""
    found = []
    for root in (repo / name for name in ROOTS):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if "_pb2" in path.name or any(part.startswith(".") for part in parts):
                continue
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path))
    return sorted(found, key=lambda module: module.name)


def measure(repo: Path, limits: Mapping[str, Any]) -> list[Figure]:
    """Return every figure of the checkout `repo`; `limits` as in [tool.measure_code]."""
    modules = modules_of(repo)
    circles = [*_import_circles(modules), *_include_circles(repo)]
    lone = list(_lone_protocols(modules))
    odd = list(_odd_docstrings(modules))
    crowded = list(_crowded_rooms(modules, limits["room-modules"], limits["rooms"]))
    docstrings = list(_docstring_errors(repo))
    return [
        Figure("code lines", sum(module.code_lines for module in modules), limits["code-lines"]),
        Figure("modules", len(modules), limits["modules"]),
        Figure("import circles", len(circles), 0, tuple(circles)),
        Figure("protocols with one implementer", len(lone), limits["lone-protocols"], tuple(lone)),
        Figure("public docstrings that ruff finds missing or not imperative", len(docstrings), 0, tuple(docstrings)),
        Figure("docstrings that begin with What, Of, Whether it, The same", len(odd), 0, tuple(odd)),
        Figure("lines of a function, 90 % quantile", _function_lines(modules), limits["function-lines"]),
        Figure("rooms with too many modules and no reason", len(crowded), 0, tuple(crowded)),
    ]


def _import_circles(modules: Sequence[Module]) -> Iterator[str]:
    known = {module.name: module for module in modules}
    yield from _circles({module.name: module.imports(known) for module in modules})


def _include_circles(repo: Path) -> Iterator[str]:
    files = [path for root in ROOTS for path in (repo / root).rglob("*.[ch]")]
    yield from _circles(
        {
            str(path.relative_to(repo)): {
                str((path.parent / name).resolve().relative_to(repo.resolve()))
                for name in _INCLUDE.findall(path.read_text(encoding="utf-8"))
                if (path.parent / name).exists()
            }
            for path in files
        }
    )


def _circles(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield circles of the graph until taking one edge out of each leaves none."""
    rest = {name: set(others) for name, others in graph.items()}
    while True:
        try:
            TopologicalSorter(rest).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1]
            yield " -> ".join(circle)
            # graphlib names a circle against the edges: each name is a dependency of the one after it.
            rest[circle[1]].discard(circle[0])
        else:
            return


def _lone_protocols(modules: Sequence[Module]) -> Iterator[str]:
    """Yield protocols that one class has all members of. Those that are only called are left out: functions do that."""
    classes = [(module, node) for module in modules for node in module.tree.body if isinstance(node, ast.ClassDef)]
    by_name: dict[str, list[ast.ClassDef]] = {}
    for _, node in classes:
        by_name.setdefault(node.name, []).append(node)
    members = {node: _members(node, by_name, frozenset()) for _, node in classes}
    protocols = [(module, node) for module, node in classes if "Protocol" in _base_names(node)]
    concrete = [node for node in members if "Protocol" not in _base_names(node)]
    for module, protocol in protocols:
        wanted = members[protocol]
        implementers = [node.name for node in concrete if wanted <= members[node]]
        if wanted - {"__call__"} and len(implementers) == 1:
            yield f"{module.name}.{protocol.name}: {implementers[0]}"


def _members(node: ast.ClassDef, by_name: Mapping[str, list[ast.ClassDef]], seen: frozenset[ast.ClassDef]) -> set[str]:
    """Return public methods and attributes of a class and of the product's classes that it inherits from."""
    own: set[str] = set()
    for name in _base_names(node):
        for base in by_name.get(name, ()):
            if base is not node and base not in seen:
                own |= _members(base, by_name, seen | {node})
    for part in ast.walk(node):
        if isinstance(part, Function):
            own.add(part.name)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            own.add(part.attr)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            own.add(part.id)
    return {member for member in own if not member.startswith("_") or member == "__call__"}


def _base_names(node: ast.ClassDef) -> set[str]:
    expressions = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    names = {expression.id for expression in expressions if isinstance(expression, ast.Name)}
    return names | {expression.attr for expression in expressions if isinstance(expression, ast.Attribute)}


def _odd_docstrings(modules: Sequence[Module]) -> Iterator[str]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, Documented) and _ODD_DOCSTRING.match(ast.get_docstring(node) or ""):
                yield f"{module.path}:{getattr(node, 'lineno', 1)}"


def _crowded_rooms(modules: Sequence[Module], most: int, reasons: Mapping[str, str]) -> Iterator[str]:
    for room, members in sorted(_rooms(modules).items()):
        count = sum(module.path.name != "__init__.py" for module in members)
        if count > most and not reasons.get(room):
            yield f"{room}: {count}"
        if count <= most and room in reasons:
            yield f"{room}: {count}; the reason in pyproject.toml can go"


def _rooms(modules: Iterable[Module]) -> dict[str, list[Module]]:
    rooms: dict[str, list[Module]] = {}
    for module in modules:
        rooms.setdefault(module.room, []).append(module)
    return rooms


def _function_lines(modules: Sequence[Module]) -> int:
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, Function)
    )
    return lengths[len(lengths) * 9 // 10] if lengths else 0


def _docstring_errors(repo: Path) -> Iterator[str]:
    command = [
        *(sys.executable, "-m", "ruff", "check", "--isolated", "--quiet", "--exit-zero", "--output-format", "concise"),
        *("--select", ",".join(_RUFF), "--config", 'lint.pydocstyle.convention="google"', "--ignore", "D105,D107"),
        *("--extend-exclude", "*_pb2*", *ROOTS),
    ]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ruff failed: {done.stderr.strip()}")
    yield from done.stdout.splitlines()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; return 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rooms", action="store_true", help="print code lines and modules of each room, too")
    parser.add_argument("--repo", type=Path, default=Path(__file__).resolve().parent.parent, help="the checkout")
    parser.add_argument("--places", type=int, default=10, help="places to print of each broken limit")
    options = parser.parse_args(arguments)
    limits = tomllib.loads((options.repo / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["measure_code"]
    if options.rooms:
        for room, members in sorted(_rooms(modules_of(options.repo)).items()):
            print(f"{room:45} {len(members):4} modules {sum(module.code_lines for module in members):6} lines")
    figures = measure(options.repo, limits)
    for figure in figures:
        print(f"{'ok ' if figure.is_met else 'OVER'} {figure.name}: {figure.value:g} (limit {figure.limit:g})")
        if not figure.is_met:
            print("".join(f"     {place}\n" for place in figure.places[: options.places]), end="")
    return 0 if all(figure.is_met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
