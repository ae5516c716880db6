"""Writes docs/reference/rpc.md: the services for callers and administrators, from the .proto files' comments."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = Path("docs/reference/rpc.md")
_FILES: Final = {
    "hetero_api/v1/inference.proto": "Inference: what callers use, at the gateway's port 50051.",
    "hetero_api/v1/admin.proto": "Admin: what operators and administrators use, at the gateway's port 50052.",
}
_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in _FIELD.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}
_INTRO: Final = """\
<!-- Generated from protos/hetero_api/v1 by `make docs`. Do not edit. -->
# RPCs

The gateway also has `grpc.health.v1.Health` and server reflection, so `grpcurl` lists what is here. Who may call what
is on [the page of the front door](../front-door.md); statuses are on that of [errors](errors.md). `hetero.v1.Ranks`,
between a gateway and its ranks, is no interface for others: `protos/hetero_api/v1/ranks.proto` describes it.
"""

Comments = Mapping[tuple[int, ...], str]


def generate_rpc_page(root: Path) -> list[Path]:
    """Write the page under `root`; return what was written, relative to `root`."""
    files = _described()
    messages = {
        f".{file.package}.{each.name}": (file, i, each) for file in files for i, each in enumerate(file.message_type)
    }
    enums = {f".{file.package}.{each.name}": (file, i, each) for file in files for i, each in enumerate(file.enum_type)}
    lines = [_INTRO]
    shown: list[str] = []
    for file in files:
        if file.name in _FILES:
            lines += _services(file, shown)
    for name in _reached(shown, messages):
        if name in messages:
            lines += _message(*messages[name])
        elif name in enums:
            lines += _enum(*enums[name])
    (root / PAGE).parent.mkdir(parents=True, exist_ok=True)
    (root / PAGE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [PAGE]


def _described() -> Sequence[descriptor_pb2.FileDescriptorProto]:
    """Return the parsed files with all that they import, comments included."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        command = [
            sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", "--include_imports",
            "--include_source_info", f"--descriptor_set_out={out}", *_FILES,
        ]  # fmt: skip
        subprocess.run(command, check=True, cwd=ROOT / "protos")
        return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file


def _comments(file: descriptor_pb2.FileDescriptorProto) -> Comments:
    return {
        tuple(place.path): " ".join(place.leading_comments.split()).replace("|", "\\|")
        for place in file.source_code_info.location
        if place.leading_comments
    }


def _services(file: descriptor_pb2.FileDescriptorProto, shown: list[str]) -> Iterator[str]:
    comments = _comments(file)
    for i, service in enumerate(file.service):
        yield f"\n## {file.package}.{service.name}\n\n{_FILES[file.name]} {_escaped(comments.get((6, i), ''))}\n"
        yield "| RPC | Request | Answer | Meaning |\n|---|---|---|---|"
        for j, method in enumerate(service.method):
            shown += [method.input_type, method.output_type]
            request = ("stream of " if method.client_streaming else "") + _link(method.input_type)
            answer = ("stream of " if method.server_streaming else "") + _link(method.output_type)
            yield f"| `{method.name}` | {request} | {answer} | {_escaped(comments.get((6, i, 2, j), ''))} |"


def _reached(names: Sequence[str], messages: Mapping[str, Any]) -> Iterator[str]:
    """Yield names of messages and enums, each once, with those that their fields are of."""
    seen: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen[name] = None
        if name in messages:
            waiting += [field.type_name for field in _fields(messages[name][2]) if field.type_name]
    yield from sorted(name for name in seen if name.startswith(".hetero."))


def _fields(message: descriptor_pb2.DescriptorProto) -> Iterator[descriptor_pb2.FieldDescriptorProto]:
    yield from message.field
    for nested in message.nested_type:
        yield from nested.field


def _message(
    file: descriptor_pb2.FileDescriptorProto, i: int, message: descriptor_pb2.DescriptorProto
) -> Iterator[str]:
    comments = _comments(file)
    yield f"\n### {message.name}\n\n{_escaped(comments.get((4, i), ''))}\n"
    if message.field:
        yield "| Field | Type | Meaning |\n|---|---|---|"
        for j, field in enumerate(message.field):
            yield f"| `{field.name}` | {_type(field, message)} | {_escaped(comments.get((4, i, 2, j), ''))} |"


def _enum(file: descriptor_pb2.FileDescriptorProto, i: int, enum: descriptor_pb2.EnumDescriptorProto) -> Iterator[str]:
    comments = _comments(file)
    yield f"\n### {enum.name}\n\n{_escaped(comments.get((5, i), ''))}\n"
    yield "| Value | Meaning |\n|---|---|"
    for j, value in enumerate(enum.value):
        yield f"| `{value.name}` | {_escaped(comments.get((5, i, 2, j), ''))} |"


def _type(field: descriptor_pb2.FieldDescriptorProto, message: descriptor_pb2.DescriptorProto) -> str:
    entry = next(
        (nested for nested in message.nested_type if field.type_name.endswith(f".{message.name}.{nested.name}")), None
    )
    if entry is not None:
        key, value = entry.field
        return f"map of {_simple(key)} to {_simple(value)}"
    if field.HasField("oneof_index") and not field.proto3_optional:
        return f"{_simple(field)}; one of `{message.oneof_decl[field.oneof_index].name}`"
    return {_FIELD.LABEL_REPEATED: "list of "}.get(field.label, "optional " if field.proto3_optional else "") + _simple(
        field
    )


def _simple(field: descriptor_pb2.FieldDescriptorProto) -> str:
    return _SCALARS.get(field.type) or _link(field.type_name)


def _link(name: str) -> str:
    short = name.rpartition(".")[2]
    return f"[{short}](#{short.lower()})" if name.startswith(".hetero.") else f"`{name.removeprefix('.')}`"


def _escaped(text: str) -> str:
    """Return a comment as Markdown: what looks like markup stands for itself."""
    return text.replace("<", "\\<").replace("*", "\\*").replace("{", "\\{").replace("[", "\\[")
