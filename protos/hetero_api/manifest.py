"""Manifest files: YAML to a typed HeteroInference, with every problem as `path: what is wrong`.

Two checks of a valid spec stand here that its types and rules do not make. `check_transition` is the Python twin of the
CRD's rules about `oldSelf`. `find_unserved` names what every gateway of this version would refuse at start, for any
model: the operator asks it before it ends a working group, and the launcher before it starts one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hetero_api.errors import ManifestError
from hetero_api.spec import SHARE_KINDS, AdaptersSpec, HeteroInference, HeteroInferenceSpec, PlacementMode
from hetero_api.spec_model import DType
from hetero_api.spec_pools import PoolType
from hetero_api.spec_types import SpecModel, TransitionRule, section_of

MAX_MANIFEST_BYTES: Final = 1024 * 1024

_WHOLE_NUMBER: Final = {"int_type", "int_parsing", "int_from_float"}
_MESSAGES: Final = {
    "missing": "is required",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}


def load_manifest(path: Path) -> HeteroInference:
    """Read one HeteroInference from a YAML file. Raises ManifestError."""
    return parse_manifest(read_document(path), source=str(path))


def read_document(path: Path) -> str:
    """Return the text of a YAML file. Raises ManifestError for one that is too large or cannot be read."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ManifestError([f"file is larger than {MAX_MANIFEST_BYTES} bytes"], source=str(path))
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(["is no UTF-8 text"], source=str(path)) from error
    except OSError as error:
        raise ManifestError([f"cannot be read: {error.strerror}"], source=str(path)) from error


def yaml_documents(text: str, *, source: str = "") -> list[Any]:
    """Return the documents in YAML text. Raises ManifestError."""
    try:
        return list(yaml.safe_load_all(text))
    except Exception as error:  # the library raises nearly anything, e.g. KeyError for "!!bool x"
        raise ManifestError([f"is no valid YAML: {error}".replace("\n", " ")], source=source) from error


def parse_manifest(text: str, *, source: str = "") -> HeteroInference:
    """One HeteroInference from YAML text. Raises ManifestError."""
    documents = [document for document in yaml_documents(text, source=source) if document is not None]
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ManifestError([f"must hold one resource, holds {len(documents)} documents"], source=source)
    return parse_resource(documents[0], source=source)


def parse_resource(resource: Mapping[str, Any], *, source: str = "") -> HeteroInference:
    """Return a typed resource from a decoded one; `status`, if any, is left aside. Raises ManifestError."""
    body = {key: value for key, value in resource.items() if key != "status"}
    try:
        return HeteroInference.model_validate(body)
    except ValidationError as error:
        raise ManifestError(describe_problems(error, HeteroInference), source=source) from error


def describe_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return every problem of a document of this model, or of a list of such, as `path: what is wrong`."""
    return [problem for detail in error.errors() for problem in _describe(detail, model)]


def _describe(detail: ErrorDetails, model: type[BaseModel]) -> list[str]:
    location = list(detail["loc"])
    context = detail.get("ctx") or {}
    kind = detail["type"]
    path = _path(location)
    if kind == "extra_forbidden":
        return [f"{path}: unknown field{_suggestion(location, model)}"]
    if kind == "field":
        return [f"{_join(path, below)}: {message}" for below, message in context["problems"]]
    if location[-1:] == ["[key]"]:
        # Of a map: the key is what is wrong, not a field of that name.
        return [f"{_path(location[:-2])}: key {_message(kind, detail, context)}"]
    message = _message(kind, detail, context)
    return [f"{path}: {message}" if path else message]


def _join(path: str, below: str) -> str:
    """Return a path and one below it, which may begin with an index."""
    return f"{path}{below}" if below.startswith("[") else ".".join(part for part in (path, below) if part)


def _message(kind: str, detail: ErrorDetails, context: Mapping[str, Any]) -> str:
    if kind in _WHOLE_NUMBER:
        return f"must be a whole number, not {detail['input']!r}"
    if kind in _MESSAGES:
        return _MESSAGES[kind]
    if "message" in context:
        return str(context["message"])
    if kind == "literal_error":
        names = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        return f"must be one of {names}, not {detail['input']!r}"
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "less_than_equal": ("at most", "le"),
        "greater_than": ("more than", "gt"),
    }
    if kind in bounds:
        word, key = bounds[kind]
        return f"must be {word} {context[key]}, not {detail['input']}"
    return _length_message(kind, detail, context) or detail["msg"]


def _length_message(kind: str, detail: ErrorDetails, context: Mapping[str, Any]) -> str:
    """Return the message for a wrong length; "" if the problem is another."""
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind in ("string_too_long", "too_long"):
        what = "characters" if isinstance(detail["input"], str) else "entries"
        return f"must have at most {context['max_length']} {what}, not {len(detail['input'])}"
    return ""


def _path(location: list[int | str]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _suggestion(location: list[int | str], model: type[BaseModel]) -> str:
    names = _known_fields(location[:-1], model)
    if not names:
        return ""
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(names)}"


def _known_fields(location: list[int | str], root: type[BaseModel]) -> list[str]:
    """Field names of the model at a location, walked through the types."""
    model: Any = root
    for part in location:
        if isinstance(part, int):
            continue
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        model = None if field is None else section_of(field.annotation)
        if model is None:
            return []
    return [field.alias or name for name, field in model.model_fields.items()]


def find_unserved(spec: HeteroInferenceSpec) -> list[str]:
    """Return every problem, `path: message` each, for which a gateway would refuse to start with this spec."""
    return [*_unsupported(spec), *_share_problems(spec)]


def check_transition(old: HeteroInferenceSpec, new: HeteroInferenceSpec) -> list[str]:
    """Problems of a change from one valid spec to another, each `path: message`; none: the change is allowed."""
    problems = _problems("spec", old, new)
    before = {pool.name: pool for pool in old.pools}
    for index, pool in enumerate(new.pools):
        if pool.name in before:
            problems += _problems(f"spec.pools[{index}]", before[pool.name], pool)
    return problems


def _problems(path: str, old: SpecModel, new: SpecModel) -> list[str]:
    rules: tuple[TransitionRule, ...] = new.transitions
    broken = [problem for rule in rules if (problem := rule.problem(old, new)) is not None]
    return [f"{path}.{below}: {message}" for below, message in broken]


def _unsupported(spec: HeteroInferenceSpec) -> list[str]:
    problems = []
    if spec.model.dtype == DType.FLOAT16 and any(pool.type == PoolType.CPU for pool in spec.pools):
        problems.append(
            "spec.model.dtype: float16: CPU ranks do not compute in float16, and there are CPU pools; use bfloat16, "
            "float32 or auto"
        )
    if spec.gateway.tls_secret_name is not None:
        problems.append("spec.gateway.tlsSecretName: spec.gateway.tls.secretName took its place; move the name there")
    if spec.gateway.auth_token_secret_ref is not None:
        problems.append(
            "spec.gateway.authTokenSecretRef: spec.gateway.auth.keysSecretRef took its place: a Secret with a keys "
            "file, whose entries `hetero key` makes"
        )
    return [*problems, *_adapter_problems(spec.engine.adapters, taken=names_of_weights(spec.model.uri))]


def names_of_weights(uri: str) -> tuple[str, str]:
    """Return the names by which requests may ask for the weights of a URI: itself, and what follows its scheme."""
    return uri, uri.partition("://")[2] or uri


def _adapter_problems(adapters: AdaptersSpec, *, taken: Sequence[str]) -> list[str]:
    path, number = "spec.engine.adapters", len(adapters.load)
    problems = []
    if number > adapters.max_loaded:
        problems.append(f"{path}.load: {number} adapters are more than maxLoaded: {adapters.max_loaded}; raise it")
    seen = set(taken)
    for index, adapter in enumerate(adapters.load):
        if adapter.name in seen:
            problems.append(
                f"{path}.load[{index}].name: {adapter.name!r} is the model's or another adapter's; take another"
            )
        if adapter.directory is not None and adapters.root_of(adapter.directory) is None:
            problems.append(f"{path}.load[{index}].directory: lies in none of {path}.roots; add its folder there")
        seen.add(adapter.name)
    return problems


def _share_problems(spec: HeteroInferenceSpec) -> list[str]:
    shares = spec.placement.shares
    given = {kind: weights for kind in SHARE_KINDS if (weights := getattr(shares, kind))}
    if spec.placement.mode != PlacementMode.LAYER:
        return _idle_ranks(given, spec.world_size) if len(given) == len(SHARE_KINDS) else []
    if shares.layer_problem:
        return [shares.layer_problem]
    return _idle_ranks(given, spec.world_size)


def _idle_ranks(given: Mapping[str, Sequence[float]], world_size: int) -> list[str]:
    """Return the problem of ranks whose weights are all 0; `given` leaves nothing that they could get otherwise."""
    idle = [rank for rank in range(world_size) if given and not any(weights[rank] for weights in given.values())]
    fields = ", ".join(f"spec.placement.shares.{kind}" for kind in given)
    return [f"{fields}: rank {rank} would own nothing of the model; give it a share or fewer ranks" for rank in idle]
