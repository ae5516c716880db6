"""`spec.model`: which model is served, and how its files reach the pods."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Final, NamedTuple

from pydantic import Field

from hetero_api.spec_types import (
    FOLDER_PATTERN,
    IMAGE_PATTERN,
    DataKey,
    Form,
    HostFolder,
    ObjectName,
    Reason,
    Rule,
    SpecEnum,
    SpecModel,
    spelled,
)
from hetero_api.weight_format import INT4_GROUPS

_HUB_PART: Final = "[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_VARIANT: Final = "[A-Za-z0-9_][A-Za-z0-9._-]{0,63}"
_CLAIM: Final = "[a-z0-9]([-a-z0-9.]*[a-z0-9])?"


class UriForm(NamedTuple):
    """A kind of model URI: its scheme, how the rest looks, and how to write it."""

    scheme: str
    pattern: str
    written: str


URI_FORMS: Final = (
    UriForm("hf", f"^hf://{_HUB_PART}/{_HUB_PART}(:{_VARIANT})?$", "hf://ORG/NAME or hf://ORG/NAME:VARIANT"),
    UriForm("pvc", f"^pvc://{_CLAIM}({FOLDER_PATTERN})?$", "pvc://CLAIM or pvc://CLAIM/PATH"),
    UriForm("oci", f"^oci://{IMAGE_PATTERN}(#{FOLDER_PATTERN})?$", "oci://IMAGE or oci://IMAGE#/PATH"),
    UriForm("file", f"^file://{FOLDER_PATTERN}$", "file:///PATH, an absolute path on the node"),
)
URI_SCHEMES: Final = tuple(form.scheme for form in URI_FORMS)
_ANY_SCHEME: Final = f"^({'|'.join(URI_SCHEMES)})://"
_PARENT: Final = r"/\.\.(/|$)"
_ONE_MODEL_IN_GGUF: Final = r"^hf://.*:|\.gguf$"


class DType(SpecEnum):
    """Arithmetic type."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantization(SpecEnum):
    """Quantisation that ranks apply to weights at load."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class SecretKeyRef(SpecModel):
    """A key of a Secret in the resource's namespace."""

    name: ObjectName
    """Name of the Secret, in the resource's namespace."""
    key: DataKey = "token"
    """Key within the Secret."""


class ModelCache(SpecModel):
    """Where pods keep fetched model files, so that a node fetches a model once."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "claimName",
            "!(has(self.claimName) && has(self.hostPath))",
            "set claimName or hostPath, not both",
            lambda cache: cache.claim_name is None or cache.host_path is None,
        ),
    )

    claim_name: ObjectName | None = None
    """PersistentVolumeClaim that holds the cache; ReadWriteMany where pods run on more than one node. Default: an
    emptyDir, filled again for each pod.
    """
    host_path: HostFolder | None = None
    """Folder on each node that holds the cache; it has to exist, and pods have to be allowed to write to it."""


def _quoted(pattern: str) -> str:
    """Return a pattern as a raw CEL literal; none of ours holds a single quote."""
    return f"r'{pattern}'"


def _form_rule(form: UriForm) -> Rule:
    prefix = f"{form.scheme}://"
    return Rule(
        "uri",
        f"!self.uri.startsWith('{prefix}') || self.uri.matches({_quoted(form.pattern)})",
        f"must be written as {form.written}",
        lambda model: not model.uri.startswith(prefix) or re.fullmatch(form.pattern, model.uri) is not None,
    )


URI_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "uri",
        f"self.uri.matches('{_ANY_SCHEME}')",
        f"must start with one of {', '.join(f'{scheme}://' for scheme in URI_SCHEMES)}",
        lambda model: re.match(_ANY_SCHEME, model.uri) is not None,
    ),
    *(_form_rule(form) for form in URI_FORMS),
    Rule(
        "uri",
        f"!self.uri.matches({_quoted(_PARENT)})",
        "must not hold '..' in its path",
        lambda model: re.search(_PARENT, model.uri) is None,
    ),
)
"""Rules of the URI of a model, in a section with a field `uri`."""
FOLDER_URI_RULES: Final[tuple[Rule, ...]] = (
    *URI_RULES,
    Rule(
        "uri",
        f"!self.uri.matches({_quoted(_ONE_MODEL_IN_GGUF)})",
        "must name a folder of safetensors files: neither a file in GGUF nor a VARIANT",
        lambda model: re.search(_ONE_MODEL_IN_GGUF, model.uri) is None,
    ),
)
"""Rules of a URI that names no GGUF file."""


def where_given(field: str, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return rules of a field for a section that may leave it out."""

    def loose(rule: Rule) -> Rule:
        return replace(
            rule,
            cel=f"!has(self.{field}) || {rule.cel}",
            holds=lambda model: getattr(model, field) is None or rule.holds(model),
        )

    return tuple(map(loose, rules))


UriText = Annotated[str, Field(max_length=1024, json_schema_extra={"pattern": _ANY_SCHEME})]


def _only_for_the_hub(field: str, *, absent: str) -> Rule:
    """Return a setting of fetching, which only Hub models need. `absent` is CEL for its being left out."""
    python_field = {"revision": "revision", "tokenSecretRef": "token_secret_ref", "cache": "cache"}[field]

    def holds(model: ModelSpec) -> bool:
        return model.uri.startswith("hf://") or getattr(model, python_field) in (None, ModelCache())

    message = "is for hf:// models only; leave it out"
    return Rule(field, f"self.uri.startsWith('hf://') || {absent}", message, holds, Reason.FORBIDDEN)


class ModelSpec(SpecModel):
    """Which model is served."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *URI_RULES,
        Rule(
            "quantizationGroupSize",
            f"!has(self.quantizationGroupSize) || self.quantizationGroupSize in {list(INT4_GROUPS)}",
            f"must be one of {', '.join(map(str, INT4_GROUPS))}",
            lambda model: model.quantization_group_size in (None, *INT4_GROUPS),
        ),
        Rule(
            "quantizationGroupSize",
            "!has(self.quantizationGroupSize) || self.quantization == 'int4'",
            "is for quantization: int4 only; leave it out",
            lambda model: model.quantization_group_size is None or model.quantization == Quantization.INT4,
            Reason.FORBIDDEN,
        ),
        _only_for_the_hub("revision", absent="!has(self.revision)"),
        _only_for_the_hub("tokenSecretRef", absent="!has(self.tokenSecretRef)"),
        _only_for_the_hub("cache", absent="!(has(self.cache.claimName) || has(self.cache.hostPath))"),
    )

    uri: UriText
    """Where the model is: hf://ORG/NAME on the Hugging Face Hub, pvc://CLAIM/PATH in a PersistentVolumeClaim,
    oci://IMAGE (or oci://IMAGE#/PATH) in an image, whose /models is taken where no PATH is given, file:///PATH on every
    node. It is a folder with config.json, the tokenizer and safetensors files, or a GGUF file in their place. Of
    several models in GGUF, hf://ORG/NAME:Q4_K_M means the one whose file's name ends so, and a PATH that ends with
    .gguf means that file.
    """
    revision: Annotated[
        str | None,
        Form("^[A-Za-z0-9_][A-Za-z0-9_-]*([./][A-Za-z0-9_-]+)*$", "must be a branch, a tag or a commit"),
        Field(max_length=128),
    ] = None
    """Branch, tag or commit of an hf:// model. Default: main."""
    dtype: Annotated[DType, spelled(DType)] = DType.AUTO
    """Arithmetic type. auto: bfloat16 on GPUs, float32 where only CPUs take part. float16: on GPUs only."""
    quantization: Annotated[Quantization, spelled(Quantization)] = Quantization.NONE
    """Format that weights of an unquantised checkpoint get as they are loaded. none: they stay as the checkpoint
    has them, also where that is quantised (GGUF, AWQ, GPTQ, compressed-tensors).
    """
    quantization_group_size: int | None = None
    """Inputs of an int4 weight's row that share a scale, 32, 64 or 128: the fewer, the closer, and the more bytes.
    Default: 32.
    """
    max_model_len: Annotated[int | None, Field(ge=16, le=10_485_760)] = None
    """Longest prompt plus completion, in tokens. Default: the model's own."""
    token_secret_ref: SecretKeyRef | None = None
    """Secret with the Hub's token, for a gated hf:// model."""
    cache: ModelCache = ModelCache()
    """Where the files of an hf:// model are kept between pods."""
