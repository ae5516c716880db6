"""Writes docs/reference/heteroinference.md: every field, rule, condition and column of the HeteroInference resource.

All of it is read from the contract: fields and bounds from the CRD's schema, forms of text and rules from the types,
what a change restarts from `hetero_api.effects`, and what conditions and effects mean from their docstrings.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hetero_api import effects, status
from hetero_api.contract import API_VERSION, GROUP, KIND, SHORT_NAME
from hetero_api.crd import COLUMNS, RULES_KEY, crd
from hetero_api.effects import Effect, effect_of
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_types import FORM_KEY
from hetero_api.status import ConditionType

REFERENCE: Final = Path("docs/reference/heteroinference.md")
Schema = Mapping[str, Any]

_INTRO: Final = f"""\
<!-- Generated from protos/hetero_api by `make docs`. Do not edit. -->
# {KIND} ({GROUP}/{API_VERSION})

One resource is one LLM replica over ranks of different kinds. `kubectl explain {SHORT_NAME}.spec` shows the same texts.

**Who checks.** `hetero validate FILE`, the operator and the gateway hold every bound and rule below, in the same
words. The API server holds the bounds, and from Kubernetes 1.25 on the rules as well: there a bad resource is refused
by `kubectl apply`. On older servers, and for the few things that no schema can say (keys of labels), the operator
reports `Accepted=False` with reason `InvalidSpec`, applies nothing of it, and leaves alone what runs.

**Text and null.** A field that is null counts as absent. Memory is text such as `16Gi`, `512M` or `1.5Gi`.
"""


def generate_reference(root: Path) -> list[Path]:
    """Write the page under `root`; returns what was written, relative to `root`."""
    (root / REFERENCE).parent.mkdir(parents=True, exist_ok=True)
    (root / REFERENCE).write_text(render_reference(), encoding="utf-8")
    return [REFERENCE]


def render_reference() -> str:
    """The page as Markdown, ending in a newline."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    blocks = [
        _INTRO,
        *_name_section(schema["properties"]["metadata"]),
        *_effects_section(),
        *_sections("spec", schema["properties"]["spec"], with_effects=True),
        *_sections("status", schema["properties"]["status"], with_effects=False),
        *_conditions_section(),
        *_columns_section(),
    ]
    return "\n".join(block.rstrip("\n") + "\n" for block in blocks)


def _name_section(metadata: Schema) -> Iterator[str]:
    name = metadata["properties"]["name"]
    yield "## metadata"
    yield (
        f"`name` has at most {name['maxLength']} characters: lower-case letters, digits and `-`, a letter first. "
        "Objects are named after it."
    )


def _effects_section() -> Iterator[str]:
    yield "## What a change restarts"
    meanings = _member_docstrings(effects, Effect)
    yield _table(("On change", "Meaning"), [(f"**{effect}**", meanings[effect.name]) for effect in Effect])


def _sections(path: str, schema: Schema, *, with_effects: bool) -> Iterator[str]:
    """A section of the object and of every object below it."""
    yield f"{'##' if '.' not in path else '###'} {path}"
    yield schema["description"]
    head = ["Field", "Type", *(["Default"] if with_effects else []), "Bounds", *(["On change"] if with_effects else [])]
    yield _table([*head, "Description"], [_row(path, n, schema, with_effects) for n in schema["properties"]])
    yield from _rules(schema)
    for name, field in schema["properties"].items():
        inner = field.get("items", field)
        if "properties" in inner:
            # The field's own words tell more than the description of its type.
            described = {**inner, "description": field.get("description") or inner["description"]}
            yield from _sections(_below(path, name, field), described, with_effects=with_effects)


def _below(path: str, name: str, field: Schema) -> str:
    return f"{path}.{name}{'[]' if field['type'] == 'array' else ''}"


def _row(path: str, name: str, schema: Schema, with_effects: bool) -> list[str]:
    field = schema["properties"][name]
    required = name in schema.get("required", ())
    cells = [f"`{name}`", _type(field)]
    if with_effects:
        cells.append("**required**" if required else _default(field))
    cells.append("; ".join(_bounds(field)))
    if with_effects:
        cells.append(_effect(_below(path, name, field)))
    return [*cells, field["description"]]


def _type(field: Schema) -> str:
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if "additionalProperties" in field:
        return "map of strings"
    return str(field["type"])


def _default(field: Schema) -> str:
    default = field.get("default")
    return f"`{json.dumps(default)}`" if default is not None and not isinstance(default, dict) else ""


def _bounds(field: Schema) -> Iterator[str]:
    if "enum" in field:
        yield ", ".join(f"`{value}`" for value in field["enum"])
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None:
        above = "more than " if field.get("exclusiveMinimum") else ""
        yield f"{above}{low:,g}" + ("" if high is None else f", at most {high:,g}" if above else f" to {high:,g}")
    if field.get("minItems"):
        yield f"at least {field['minItems']}"
    for key, what in (("maxItems", "entries"), ("maxProperties", "entries"), ("maxLength", "characters")):
        if key in field:
            yield f"at most {field[key]} {what}"
    yield from (f"one {key} each" for key in field.get("x-kubernetes-list-map-keys", ()))
    if field.get("pattern") in _forms_by_pattern():
        yield _forms_by_pattern()[field["pattern"]]
    if "additionalProperties" in field:
        yield "keys are label keys, NAME or DOMAIN/NAME"
    for key in ("items", "additionalProperties"):
        if key in field and "properties" not in field[key]:
            yield from (f"each {bound}" for bound in _bounds(field[key]))


def _effect(path: str) -> str:
    try:
        return str(effect_of(path.removeprefix("spec.").replace("[]", "")))
    except KeyError:
        return "see below"


def _rules(schema: Schema) -> Iterator[str]:
    rules = schema.get(RULES_KEY, ())
    if rules:
        lines = [f"- {_rule_line(rule)}" for rule in rules]
        yield "Rules:\n\n" + "\n".join(lines)


def _rule_line(rule: Mapping[str, str]) -> str:
    when = "once the resource exists, " if "oldSelf" in rule["rule"] else ""
    return f"`{rule['fieldPath'].removeprefix('.')}`: {when}{rule['message']}"


def _conditions_section() -> Iterator[str]:
    yield "## Conditions"
    yield "Each is there from the operator's first report on, `Unknown` where nothing is known yet."
    meanings = _member_docstrings(status, ConditionType)
    yield _table(("Type", "True means"), [(f"`{kind}`", meanings[kind.name]) for kind in ConditionType])


def _columns_section() -> Iterator[str]:
    yield f"## Columns of kubectl get {SHORT_NAME}"
    rows = [(name, f"`{path}`", "`-o wide`" if wide else "", text) for name, _, path, text, wide in COLUMNS]
    yield _table(("Column", "Field", "Only with", "Meaning"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _member_docstrings(module: ModuleType, kind: type[StrEnum]) -> dict[str, str]:
    """What the string below each member of an enumeration says."""
    tree = ast.parse(inspect.getsource(module))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
    found: dict[str, str] = {}
    for member, text in pairwise(body):
        if isinstance(member, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            (target,) = member.targets
            found[ast.unparse(target)] = " ".join(str(text.value.value).split())
    return found


@cache
def _forms_by_pattern() -> dict[str, str]:
    return dict(_forms(HeteroInferenceSpec.model_json_schema()))


def _forms(node: Any) -> Iterator[tuple[str, str]]:
    """Every pattern of a JSON schema that is told in words, and the words."""
    if isinstance(node, dict):
        if FORM_KEY in node and "pattern" in node:
            yield node["pattern"], node[FORM_KEY]
        for value in node.values():
            yield from _forms(value)
    elif isinstance(node, list):
        for value in node:
            yield from _forms(value)
