"""Building blocks of the resource's types: base model, enumerations, quantities, forms of text, rules, errors.

A `Rule` says what types and bounds cannot say. It stands in the `rules` of the model that it is about, once for two
worlds. The CRD carries its CEL text, so that an API server that knows CEL (Kubernetes 1.25 and newer) refuses what
breaks it. Python asks `holds` of the same model, so that the operator on older servers, the gateway and `hetero
validate` refuse the same with the same words. Tests put the same documents to both, which proves that the two texts
mean the same. CEL sees the object after the schema's defaults were filled in. Only functions of Kubernetes 1.25 are
used.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hetero_api import quantity

MAX_NAME_LENGTH: Final = 40
MAX_POOL_NAME_LENGTH: Final = 11
MAX_WORKLOAD_NAME_LENGTH: Final = MAX_NAME_LENGTH + 1 + MAX_POOL_NAME_LENGTH
"""A StatefulSet's name plus its revision hash must fit a label of 63."""
MAX_QUANTITY_LENGTH: Final = 20
FORM_KEY: Final = "x-form"
"""Keyword of JSON schemas with what a pattern means in words; the CRD leaves it out."""

_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS_NAME_PATTERN: Final = rf"{_LABEL}(\.{_LABEL})*"
_QUALIFIED: Final = "[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"

QUANTITY_PATTERN: Final = r"^([1-9][0-9]*(\.(25|5|75))?|0\.(25|5|75))(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)$|^[1-9][0-9]*$"
"""More than nothing, and whole bytes whatever the unit: no fractions but quarters."""


def field_error(path: str, message: str) -> PydanticCustomError:
    """Return a validation error about a field below the model that raises it; `path` as in YAML, e.g. "cpu.numa"."""
    return field_errors([(path, message)])


def field_errors(problems: Sequence[tuple[str, str]]) -> PydanticCustomError:
    """One validation error that tells of several fields, each by its path below the model and a message."""
    text = "; ".join(f"{path}: {message}" for path, message in problems)
    return PydanticCustomError("field", "{text}", {"text": text, "problems": tuple(problems)})


def described(model: type[BaseModel], schema: JsonSchemaValue) -> JsonSchemaValue:
    """Add the docstrings of a model's fields to its JSON schema, as their descriptions.

    Pydantic's `use_attribute_docstrings` would read them at every start.
    """
    (body,) = ast.parse(inspect.getsource(model)).body
    for field, text in pairwise(ast.iter_child_nodes(body)):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                if name in model.model_fields:
                    alias = model.model_fields[name].alias or name
                    schema["properties"][alias]["description"] = " ".join(docstring.split())
    return schema


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation holds, be it optional or a list; None for a plain field."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (section_of(argument) for argument in getattr(annotation, "__args__", ()))
    return next((section for section in found if section is not None), None)


@dataclass(frozen=True, slots=True)
class Form:
    """A form that text must have: the schema gets the pattern, people get the message.

    The pattern stays within what Go's and Python's regular expressions both know.
    """

    pattern: str
    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "pattern": self.pattern, FORM_KEY: self.message}

    def _check(self, value: str) -> str:
        # `$` would let a line end pass.
        if "\n" in value or re.search(self.pattern, value) is None:
            raise PydanticCustomError("form", "{message}", {"message": f"{self.message}, not {value!r}"})
        return value


@dataclass(frozen=True, slots=True)
class Quantity:
    """Memory as a Kubernetes quantity in YAML, whole bytes in Python.

    Text only, as the CRD has it. Written back in the shortest unit that is exact.
    """

    pattern: str
    message: str
    units: Sequence[str] = quantity.BINARY_UNITS

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            self._to_bytes, handler(source), serialization=core_schema.plain_serializer_function_ser_schema(self._text)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        bounds = {"pattern": self.pattern, "maxLength": MAX_QUANTITY_LENGTH}
        return {"type": "string", **bounds, FORM_KEY: self.message}

    def _to_bytes(self, value: Any) -> int:
        if isinstance(value, str) and len(value) <= MAX_QUANTITY_LENGTH and re.fullmatch(self.pattern, value):
            return quantity.parse_bytes(value)
        raise PydanticCustomError("quantity", "{message}", {"message": f"{self.message}, not {value!r}"})

    def _text(self, count: int) -> str:
        return quantity.format_bytes(count, units=self.units)


Bytes = Annotated[int, Quantity(QUANTITY_PATTERN, "must be a quantity such as 16Gi")]
WholeMebibytes = Annotated[
    int, Quantity("^[1-9][0-9]{0,7}(Mi|Gi|Ti)$", "must be whole Mi, Gi or Ti such as 64Gi", ("Ti", "Gi", "Mi"))
]

_DNS_MESSAGE: Final = "must be of lower-case letters, digits and '-', and begin and end with a letter or a digit"

NAME_FORM: Final = Form(
    "^[a-z]([-a-z0-9]*[a-z0-9])?$",
    "must be of lower-case letters, digits and '-', begin with a letter and end with a letter or a digit",
)
Name = Annotated[str, NAME_FORM, StringConstraints(max_length=MAX_NAME_LENGTH)]
"""A DNS label of RFC 1035: Services are named after it."""

PoolName = Annotated[str, Form(f"^{_LABEL}$", _DNS_MESSAGE), StringConstraints(max_length=MAX_POOL_NAME_LENGTH)]
"""A DNS label, short enough for the names that are made from it."""

_OBJECT_NAME: Final = Form(
    f"^{DNS_NAME_PATTERN}$", "must be a name of an object: lower-case letters, digits, '-' and '.'"
)

ObjectName = Annotated[str, _OBJECT_NAME, StringConstraints(max_length=253)]
"""A DNS subdomain: what Kubernetes lets most objects be named."""

ShortObjectName = Annotated[str, _OBJECT_NAME, StringConstraints(max_length=63)]
"""An object's name that also is the value of a label."""

DataKey = Annotated[
    str,
    Form("^[-._a-zA-Z0-9]+$", "must be a key of a Secret: letters, digits, '-', '_' and '.'"),
    StringConstraints(max_length=253),
]

LabelKey = Annotated[
    str,
    Form(
        f"^({DNS_NAME_PATTERN}/)?{_QUALIFIED}$",
        "must be a label key, NAME or DOMAIN/NAME: letters, digits, '-', '_' and '.'",
    ),
    StringConstraints(max_length=317),
]
"""A qualified name: of labels, annotations, taints."""

LabelValue = Annotated[
    str,
    Form(f"^({_QUALIFIED})?$", "must be a label value: letters, digits, '-', '_' and '.'"),
    StringConstraints(max_length=63),
]

Labels = dict[LabelKey, LabelValue]
Annotations = dict[LabelKey, Annotated[str, StringConstraints(max_length=1024)]]

ExtendedResource = Annotated[
    str,
    Form(f"^{DNS_NAME_PATTERN}/{_QUALIFIED}$", "must be an extended resource such as nvidia.com/gpu"),
    StringConstraints(max_length=253),
]

IMAGE_PATTERN: Final = "[a-z0-9]+([._:/@-]+[A-Za-z0-9]+)*"

Image = Annotated[
    str,
    Form(f"^{IMAGE_PATTERN}$", "must be an image such as registry.example/team/image:tag"),
    StringConstraints(max_length=512),
]

FOLDER_PATTERN: Final = r"(/[^/\x00-\x1f]+)+/?"
"""An absolute path below /."""

HostFolder = Annotated[
    str,
    Form(f"^{FOLDER_PATTERN}$", "must be the absolute path of a folder below /"),
    StringConstraints(max_length=1024),
]


class Reason(StrEnum):
    """Kind of a problem, as an API server names it."""

    INVALID = "FieldValueInvalid"
    REQUIRED = "FieldValueRequired"
    FORBIDDEN = "FieldValueForbidden"


@dataclass(frozen=True, slots=True)
class Rule:
    """Condition that a model has to meet.

    `path` is the field that is at fault, below the model and as in YAML. `holds` is asked only of models whose fields
    are valid each.
    """

    path: str
    cel: str
    message: str
    holds: Callable[[Any], bool]
    reason: Reason = Reason.INVALID

    def problem(self, model: object) -> tuple[str, str] | None:
        """Path and message when the model breaks the rule."""
        return None if self.holds(model) else (self.path, self.message)

    def validation(self) -> dict[str, str]:
        """Return the rule as an entry of x-kubernetes-validations."""
        return validation(self.path, self.cel, self.message, self.reason)


@dataclass(frozen=True, slots=True)
class TransitionRule:
    """Condition on a change from one value of a model to another."""

    path: str
    cel: str
    message: str
    allows: Callable[[Any, Any], bool]

    def problem(self, old: object, new: object) -> tuple[str, str] | None:
        """Path and message when the change breaks the rule."""
        return None if self.allows(old, new) else (self.path, self.message)

    def validation(self) -> dict[str, str]:
        """Return the rule as an entry of x-kubernetes-validations."""
        return validation(self.path, self.cel, self.message, Reason.FORBIDDEN)


def left_out(
    field: str, message: str, *, where: tuple[str, str] | None = None, unless: tuple[str, str] | None = None
) -> Rule:
    """Return the rule that a field is left out `where` another field has a value, or `unless` it has.

    Fields are named as in Python.
    """
    other, value = where or unless or ("", "")

    def holds(model: object) -> bool:
        return getattr(model, field) is None or (getattr(model, other) == value) == (where is None)

    condition = f"self.{to_camel(other)} {'!=' if where else '=='} '{value}'"
    cel = f"{condition} || !has(self.{to_camel(field)})"
    return Rule(to_camel(field), cel, message, holds, Reason.FORBIDDEN)


def problems_of(rules: Sequence[Rule], model: object) -> list[tuple[str, str]]:
    """Path and message of every rule that the model breaks."""
    return [problem for rule in rules if (problem := rule.problem(model)) is not None]


def validation(path: str, cel: str, message: str, reason: Reason = Reason.INVALID) -> dict[str, str]:
    """Return an entry of x-kubernetes-validations.

    The message is the same text always: a messageExpression that shows a number is beyond the cost that API servers
    allow, since they count the text of a number as of any length.
    """
    entry = {"rule": cel, "message": message, "reason": str(reason)}
    return {**entry, "fieldPath": f".{path}"} if path else entry


class SpecModel(BaseModel):
    """Base of the resource's types: camelCase in YAML, strict, frozen, no unknown fields.

    A field that is null counts as absent, as an API server sees it.
    """

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True,
        extra="forbid", frozen=True, strict=True,
    )  # fmt: skip

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Conditions between the fields."""
    transitions: ClassVar[tuple[TransitionRule, ...]] = ()
    """Conditions between an old and a new value."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> Self:
        problems = problems_of(self.rules, self)
        if problems:
            raise field_errors(problems)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = described(cls, handler.resolve_ref_schema(handler(schema)))
        validations = [rule.validation() for rule in cls.rules]
        validations += [rule.validation() for rule in cls.transitions]
        if validations:
            result["x-kubernetes-validations"] = validations
        return result


class SpecEnum(StrEnum):
    """An enumeration that YAML spells as its value."""


def spelled(kind: type[StrEnum]) -> BeforeValidator:
    """Read a member of `kind` by its value; the error lists them all."""

    def parse(value: Any) -> StrEnum:
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(kind)
            message = f"must be one of {names}, not {value!r}"
            raise PydanticCustomError("enum_name", "{message}", {"message": message}) from None

    return BeforeValidator(parse)
