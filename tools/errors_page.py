"""Writes docs/reference/errors.md: every error that a caller of the client or a program of the project can meet.

Read from the packages' `errors.py`: classes with their docstrings and, of the client, exit codes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

PAGE: Final = Path("docs/reference/errors.md")
ROOT: Final = Path(__file__).resolve().parent.parent
_HOMES: Final = {
    "Client and command line": (
        "worker/hetero_client/errors.py",
        "`from hetero_client import errors`. The exit code is that of the `hetero` command.",
    ),
    "Contract": ("protos/hetero_api/errors.py", "Raised by all programs: manifests, models, plans."),
    "Gateway: doors": ("worker/hetero_gateway/server/errors.py", ""),
    "Gateway: engine": ("worker/hetero_gateway/engine/errors.py", ""),
    "Gateway: group": ("worker/hetero_gateway/group/errors.py", ""),
    "Rank": ("worker/hetero_worker/errors.py", "A rank reports them to the gateway, and `hetero topology` shows them."),
    "Operator": ("operator/hetero_operator/errors.py", ""),
}
_EXIT_CODES: Final = {"EXIT_FAILURE": "1", "EXIT_USAGE": "2", "EXIT_PERMANENT": "3"}
_INTRO: Final = """\
<!-- Generated from the packages' errors.py by `make docs`. Do not edit. -->
# Errors

All errors that the project raises on purpose are of `hetero_api.errors.HeteroError`; their message is for a person and
names the field, the file or the value, and the fix. What a resource shows in `status.conditions` is on the page of
[troubleshooting](../troubleshooting.md), what metrics count on that of [metrics](../metrics.md).

Over gRPC errors have a status, over HTTP the code beside it:

| gRPC | HTTP | When | Client raises |
|---|---|---|---|
| `INVALID_ARGUMENT`, `OUT_OF_RANGE` | 400 | A field is wrong; details name it. | `InvalidRequestError` |
| `UNAUTHENTICATED`, `PERMISSION_DENIED` | 401, 403 | No key, an unknown one, or one without the role. | `AccessError` |
| `ALREADY_EXISTS` | 409 | The request's id is in flight. | `DuplicateRequestError` |
| `FAILED_PRECONDITION` | 409 | The group's state does not allow the call. | `WrongStateError` |
| `RESOURCE_EXHAUSTED` | 429 | The queue or a key's limit is full; `Retry-After`. | `QueueFullError` |
| `UNAVAILABLE` | 503 | Loading, draining, or the group was lost; `Retry-After`. | `UnavailableError` |
| `DEADLINE_EXCEEDED` | 504 | The caller's deadline passed. | `DeadlineError` |
| `CANCELLED` | 499 | The caller went away. | `RequestCancelledError` |
| `INTERNAL` and others | 500 | A fault in the server. | `ServerError` |
"""


class _Error(NamedTuple):
    name: str
    bases: tuple[str, ...]
    words: str
    exit_code: str


def generate_errors_page(root: Path) -> list[Path]:
    """Write the page under `root`; return what was written, relative to `root`."""
    (root / PAGE).parent.mkdir(parents=True, exist_ok=True)
    parts = [_INTRO.rstrip()]
    for title, (file, words) in _HOMES.items():
        parts += [f"## {title}", *filter(None, [words]), "\n".join(_table(ROOT / file))]
    (root / PAGE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [PAGE]


def _table(file: Path) -> Iterator[str]:
    found = list(_errors(file))
    has_codes = any(error.exit_code for error in found)
    yield "| Error | Is a | Meaning |" + (" Exit code |" if has_codes else "")
    yield "|---|---|---|" + ("---|" if has_codes else "")
    codes = {error.name: error.exit_code for error in found}
    for error in found:
        code = next((codes[name] for name in _line(error, found) if codes.get(name)), "")
        bases = ", ".join(f"`{base}`" for base in error.bases)
        yield f"| `{error.name}` | {bases} | {error.words} |" + (f" {code} |" if has_codes else "")


def _line(error: _Error, found: list[_Error]) -> Iterator[str]:
    """Yield the error's name and those of its bases, nearest first."""
    by_name = {each.name: each for each in found}
    yield error.name
    for base in error.bases:
        if base in by_name:
            yield from _line(by_name[base], found)


def _errors(file: Path) -> Iterator[_Error]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        words = " ".join((ast.get_docstring(node) or "").split()) if isinstance(node, ast.ClassDef) else ""
        if isinstance(node, ast.ClassDef) and node.bases and not node.decorator_list:
            codes = [
                _EXIT_CODES[statement.value.id]
                for statement in node.body
                if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Name)
                and statement.value.id in _EXIT_CODES
            ]  # fmt: skip
            yield _Error(node.name, tuple(ast.unparse(base) for base in node.bases), words, "".join(codes))
