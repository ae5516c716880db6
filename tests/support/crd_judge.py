"""Judges a resource by the generated CRD as an API server does: prune, default, schema, then CEL rules.

Two independent CEL implementations evaluate each rule, a typed one (cel-python) and cel-rust's; they must agree.
Functions that Kubernetes adds to CEL, and that our rules use, are added to both. Paths are as API servers write them:
spec.pools[0].ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import cel
import celpy
from celpy import celtypes
from jsonschema import Draft4Validator, ValidationError
from jsonschema.validators import extend

Schema = Mapping[str, Any]
Engine = Callable[[str, Mapping[str, tuple[Schema, Any]]], bool]
"""Evaluates an expression; each variable comes with its schema, which gives its type."""

RULES_KEY = "x-kubernetes-validations"
_PYTHON_CEL = celpy.Environment()
"""Made once, and now: it raises the recursion limit, which Hypothesis takes amiss while it tries examples."""


class Problem(NamedTuple):
    path: str
    message: str


class CelDisagreement(AssertionError):
    """The two CEL implementations judge differently."""


def stored(schema: Schema, value: Any) -> Any:
    """A copy of the value as an API server stores it: unknown fields and nulls dropped, defaults filled in."""
    if isinstance(value, dict) and "properties" in schema:
        known = {key: item for key, item in value.items() if key in schema["properties"] and item is not None}
        defaults = {key: field["default"] for key, field in schema["properties"].items() if "default" in field}
        return {key: stored(schema["properties"][key], item) for key, item in {**defaults, **known}.items()}
    if isinstance(value, dict) and "additionalProperties" in schema:
        return {key: stored(schema["additionalProperties"], item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and "items" in schema:
        return [stored(schema["items"], item) for item in value]
    return copy.deepcopy(value)


def schema_problems(schema: Schema, value: Any) -> list[Problem]:
    """What the OpenAPI part refuses. `exclusiveMinimum` as a flag is JSON Schema of draft 4."""
    return [Problem(_error_path(error), error.message) for error in _Validator(dict(schema)).iter_errors(value)]


def rule_problems(schema: Schema, new: Any, old: Any = None) -> list[Problem]:
    """What the CEL rules refuse; rules about `oldSelf` count where `old` has the value too."""
    return list(_walk(schema, new, old, ""))


def python_engine(expression: str, variables: Mapping[str, tuple[Schema, Any]]) -> bool:
    """cel-python: types as strict as an API server's."""
    activation = {name: _typed(schema, value) for name, (schema, value) in variables.items()}
    return bool(_python_program(expression).evaluate(activation))


def rust_engine(expression: str, variables: Mapping[str, tuple[Schema, Any]]) -> bool:
    """common-expression-language, a binding of cel-rust."""
    context = cel.Context()
    for name, (schema, value) in variables.items():
        context.add_variable(name, _with_floats(schema, value))
    context.add_function("sum", sum)
    context.add_function("substring", lambda text, begin, end: text[begin:end])
    return bool(cel.evaluate(expression, context))


ENGINES: Sequence[Engine] = (python_engine, rust_engine)


def holds(expression: str, variables: Mapping[str, tuple[Schema, Any]]) -> bool:
    """The verdict of both implementations. Raises CelDisagreement."""
    verdicts = {engine(expression, variables) for engine in ENGINES}
    if len(verdicts) > 1:
        raise CelDisagreement(f"{expression} of {variables}")
    return verdicts.pop()


def _walk(schema: Schema, new: Any, old: Any, path: str) -> Iterator[Problem]:
    for rule in schema.get(RULES_KEY, ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        variables = {"self": (schema, new)} | ({"oldSelf": (schema, old)} if old is not None else {})
        if not holds(rule["rule"], variables):
            yield Problem((path + rule.get("fieldPath", "")).removeprefix("."), rule["message"])
    if isinstance(new, dict):
        for key, item in new.items():
            child = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            if child is not None:
                yield from _walk(child, item, (old or {}).get(key), f"{path}.{key}".removeprefix("."))
    elif isinstance(new, list):
        for index, item in enumerate(new):
            yield from _walk(schema.get("items", {}), item, _twin(schema, item, old), f"{path}[{index}]")


def _twin(schema: Schema, item: Any, old: Sequence[Any] | None) -> Any:
    """The old item that an item is compared with: by the keys of a list-map, else none."""
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys or not old:
        return None
    return next((other for other in old if all(other[key] == item[key] for key in keys)), None)


def _unique_keys(validator: Any, keys: Sequence[str], items: Any, schema: Schema) -> Iterator[ValidationError]:
    seen: list[tuple[Any, ...]] = []
    for index, item in enumerate(items if isinstance(items, list) else ()):
        key = tuple(item.get(name) for name in keys)
        if key in seen:
            yield ValidationError(f"Duplicate value: {key}", path=[index, keys[0]])
        seen.append(key)


_Validator = extend(Draft4Validator, {"x-kubernetes-list-map-keys": _unique_keys})


def _error_path(error: ValidationError) -> str:
    path = ""
    for part in error.absolute_path:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    if error.validator == "required":
        # "'uri' is a required property": the API names the field that is missing.
        path += f".{error.message.split(chr(39))[1]}"
    return path.removeprefix(".")


def _children(schema: Schema, value: Any) -> Iterator[tuple[Any, Schema, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {}, item
    else:
        for index, item in enumerate(value):
            yield index, schema.get("items", {}), item


def _typed(schema: Schema, value: Any) -> Any:
    if isinstance(value, dict):
        return celtypes.MapType({celtypes.StringType(k): _typed(child, v) for k, child, v in _children(schema, value)})
    if isinstance(value, list):
        return celtypes.ListType([_typed(child, item) for _, child, item in _children(schema, value)])
    types: Mapping[str, Callable[[Any], Any]] = {
        "integer": celtypes.IntType,
        "number": celtypes.DoubleType,
        "boolean": celtypes.BoolType,
        "string": celtypes.StringType,
    }
    # Fields of an open object are of the type that they have.
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return types[schema.get("type") or kinds[type(value)]](value)


def _with_floats(schema: Schema, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_floats(child, item) for key, child, item in _children(schema, value)}
    if isinstance(value, list):
        return [_with_floats(child, item) for _, child, item in _children(schema, value)]
    return float(value) if schema.get("type") == "number" else value


def _sum(numbers: Any) -> Any:
    return celtypes.IntType(sum(numbers))


def _substring(text: Any, begin: Any, end: Any) -> Any:
    return celtypes.StringType(text[begin:end])


@cache
def _python_program(expression: str) -> Any:
    return _PYTHON_CEL.program(_PYTHON_CEL.compile(expression), functions={"sum": _sum, "substring": _substring})
