"""Models of text and other media as they are published, of which the text part is served.

Their config.json holds the text part's fields as `text_config`, and their files its tensors under a prefix, which
differs from one version of transformers to the next. Tensors of other parts are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from hetero_api.errors import ModelError

WRAPPERS: Final[Mapping[str, Mapping[str, str]]] = {
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
"""Architecture of the text part of each wrapper, by the `model_type` of text_config; without one it is the first."""
_OF_ALL_PARTS: Final = (
    "quantization_config", "compression_config", "dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id",
    "bos_token_id",
)  # fmt: skip
"""Fields beside text_config that hold for the text part, too."""
_PREFIXES: Final[Mapping[str, str]] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Prefixes of the text part's tensors in a wrapper's files, and of the same tensors in a text model's."""
_SAME_IN_BOTH: Final = ("lm_head.", "mtp.")


def text_fields(fields: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the fields of a config.json, `source`, as those of a text model.

    Raises ModelError for a wrapper's text part that is missing or of another kind.
    """
    match fields.get("architectures"):
        case [str(name), *_] if name in WRAPPERS:
            return _of_wrapper(fields, WRAPPERS[name], source)
        case _:
            return fields


def _of_wrapper(fields: Mapping[str, Any], kinds: Mapping[str, str], source: str) -> Mapping[str, Any]:
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"{source}: text_config must be an object, since it describes the part that is served")
    kind = str(text.get("model_type") or next(iter(kinds)))
    if kind not in kinds:
        raise ModelError(f"{source}: text_config.model_type {kind!r} is not supported; supported: {', '.join(kinds)}")
    if text.get("quantization_config"):
        raise ModelError(f"{source}: text_config.quantization_config is set; it must stand beside text_config")
    beside = {name: fields[name] for name in _OF_ALL_PARTS if fields.get(name) is not None}
    return {**text, **beside, "architectures": [kinds[kind]]}


def text_tensors(stored: Collection[str]) -> dict[str, str]:
    """Return the stored name of each tensor of the text part, by its name in a text model.

    Files in which no name has a wrapper's prefix are a text model's. Raises ModelError if two tensors have one name.
    """
    if not any(name.startswith(tuple(_PREFIXES)) for name in stored):
        return {name: name for name in stored}
    tensors: dict[str, str] = {}
    for name in stored:
        text = text_name(name)
        if text is not None and tensors.setdefault(text, name) != name:
            raise ModelError(f"tensors {tensors[text]} and {name} are both {text} of the text part; keep one of them")
    return tensors


def text_name(stored: str) -> str | None:
    """Return the name in a text model of a tensor or module of a wrapper; None: it is not of the text part."""
    for prefix, text in _PREFIXES.items():
        if stored.startswith(prefix):
            return text + stored.removeprefix(prefix)
    return stored if stored.startswith(_SAME_IN_BOTH) else None
