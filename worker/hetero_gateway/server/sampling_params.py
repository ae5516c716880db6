"""Bounds and defaults of SamplingParams, as the comments of inference.proto state them.

Clients set parameters, ranks get one resolved `Sampling`. A parameter that is a number and has the same name in both
messages needs its range here, and its default unless that is zero; both doors read it then.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from hetero_api.errors import ModelError
from hetero_api.hf_config import read_json
from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.request import Constraint, ConstraintKind
from hetero_gateway.server.errors import Violation

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_LOGIT_BIASES: Final = 300
MAX_LOGIT_BIAS: Final = 100
MAX_COMPLETIONS: Final = 16
MAX_CHOICES: Final = 256
SEED_BITS: Final = 63
SEED_SPACE: Final = 1 << 64
ANY_OBJECT: Final = '{"type": "object"}'
_PIECE: Final = 65_536
GENERATION_CONFIG_FILE: Final = "generation_config.json"
_MODEL_DEFAULTS: Final = frozenset(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"))
"""Parameters that a model's own defaults name as we do."""


class _Range(NamedTuple):
    """Bounds of a number; without `with_least` it must be more than `least`."""

    least: float
    most: float
    with_least: bool = True

    def problem(self, value: float) -> str | None:
        """Return what is wrong with a value, None if nothing is. NaN, which compares with nothing, is wrong."""
        if self.with_least:
            return None if self.least <= value <= self.most else f"must be between {self}, not {value:g}"
        return None if self.least < value <= self.most else f"must be more than {self}, not {value:g}"

    def __str__(self) -> str:
        return f"{self.least:g} and {'' if self.with_least else 'at most '}{self.most:g}"


RANGES: Final[Mapping[str, _Range]] = {
    "temperature": _Range(0, 100),
    "top_p": _Range(0, 1, with_least=False),
    "min_p": _Range(0, 1),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0.01, 10),  # logits that are divided by less overflow
    "n": _Range(1, MAX_COMPLETIONS),
    "logprobs": _Range(0, 20),
    "prompt_logprobs": _Range(0, 20),
}
_DEFAULTS: Final = ranks_pb2.Sampling(temperature=1.0, top_p=1.0, repetition_penalty=1.0)
"""Defaults that are not zero."""
_RENAMED: Final = {"logprobs": "num_logprobs", "prompt_logprobs": "num_prompt_logprobs"}


def _resolved_names() -> tuple[tuple[str, str], ...]:
    """Return the fields that clients set one by one and ranks get, each by both names."""
    known = ranks_pb2.Sampling.DESCRIPTOR.fields_by_name
    names = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence]
    pairs = [(name, _RENAMED.get(name, name)) for name in names]
    return tuple((name, ours) for name, ours in pairs if ours in known)


_RESOLVED: Final = _resolved_names()


def sampling_violations(params: pb.SamplingParams, *, vocab_size: int) -> Iterable[Violation]:
    """Yield every parameter that is out of bounds."""
    for name, bounds in RANGES.items():
        if params.HasField(name):  # type: ignore[arg-type] # names of the message's own fields
            problem = bounds.problem(getattr(params, name))
            if problem is not None:
                yield Violation(f"sampling.{name}", problem)
    yield from _lengths(params)
    yield from _stops(params, vocab_size=vocab_size)
    yield from _logit_bias(params, vocab_size=vocab_size)
    yield from _constraint(params)


def token_id_violations(field: str, ids: Sequence[int], *, vocab_size: int) -> list[Violation]:
    """Return a violation for the first id that is beyond the vocabulary."""
    # Ids are unsigned, and the common case is one pass in C. Between pieces of a long list other threads may run.
    for begin in range(0, len(ids), _PIECE):
        piece = ids[begin : begin + _PIECE]
        if max(piece) >= vocab_size:
            index = begin + next(index for index, token_id in enumerate(piece) if token_id >= vocab_size)
            return [Violation(f"{field}[{index}]", f"must be in the vocabulary [0, {vocab_size}), not {ids[index]}")]
    return []


def read_sampling_defaults(directory: Path) -> pb.SamplingParams:
    """Return the parameters that a model's generation_config.json names, none if there is no such file.

    One that is out of bounds is left out. Raises ModelError if one of them is no number.
    """
    path = directory / GENERATION_CONFIG_FILE
    params = pb.SamplingParams()
    for name, value in (read_json(path) if path.exists() else {}).items():
        if name in _MODEL_DEFAULTS and value is not None:
            whole = int(value) if isinstance(value, float) and value.is_integer() else value
            try:
                setattr(params, name, 0 if (name, whole) == ("top_k", -1) else whole)  # -1: all tokens, as in vLLM
            except (TypeError, ValueError) as error:
                raise ModelError(f"{path}: {name} must be a number, not {value!r:.40}") from error
    for violation in tuple(sampling_violations(params, vocab_size=0)):
        name = violation.field.removeprefix("sampling.")
        logger.warning("%s: %s %s; it is left out", path, name, violation.problem)
        params.ClearField(name)  # type: ignore[arg-type] # names of the message's own fields
    return params


def with_defaults(params: pb.SamplingParams, defaults: pb.SamplingParams) -> pb.SamplingParams:
    """Return parameters whose absent fields are those of `defaults`."""
    merged = pb.SamplingParams()
    merged.CopyFrom(defaults)
    merged.MergeFrom(params)
    return merged


def resolved_sampling(params: pb.SamplingParams) -> ranks_pb2.Sampling:
    """Return the parameters that ranks sample by, with every default filled in; a seed is drawn if there is none."""
    sampling = ranks_pb2.Sampling()
    sampling.CopyFrom(_DEFAULTS)
    for name, ours in _RESOLVED:
        if params.HasField(name):  # type: ignore[arg-type] # names of the message's own fields
            setattr(sampling, ours, getattr(params, name))
    if not params.HasField("seed"):
        sampling.seed = secrets.randbits(SEED_BITS)
    biases = sorted(params.logit_bias.items())
    sampling.bias_token_ids.extend(token_id for token_id, _ in biases)
    sampling.biases.extend(bias for _, bias in biases)
    return sampling


def num_completions(params: pb.SamplingParams) -> int:
    """Return `n`, 1 unless it is given."""
    return params.n if params.HasField("n") else 1


def read_constraint(params: pb.SamplingParams) -> Constraint | None:
    """Return the form that a completion is bound to; None if there is none."""
    name = params.WhichOneof("constraint")
    if name is None:
        return None
    if name == "choice":
        return Constraint(ConstraintKind.CHOICE, "", tuple(params.choice.texts))
    return Constraint(ConstraintKind(name), getattr(params, name))


def _lengths(params: pb.SamplingParams) -> Iterable[Violation]:
    if not params.HasField("max_tokens"):
        return
    if params.max_tokens < 1:
        yield Violation("sampling.max_tokens", f"must be at least 1, not {params.max_tokens}")
    elif params.min_tokens > params.max_tokens:
        problem = f"must be at most max_tokens, {params.max_tokens}, not {params.min_tokens}"
        yield Violation("sampling.min_tokens", problem)


def _stops(params: pb.SamplingParams, *, vocab_size: int) -> Iterable[Violation]:
    if len(params.stop) > MAX_STOP_STRINGS:
        yield Violation("sampling.stop", f"must hold at most {MAX_STOP_STRINGS} strings, not {len(params.stop)}")
    for index, text in enumerate(params.stop[:MAX_STOP_STRINGS]):
        field = f"sampling.stop[{index}]"
        if not text:
            yield Violation(field, "is empty; every text would end at once")
        elif len(text) > MAX_STOP_CHARS:
            yield Violation(field, f"must have at most {MAX_STOP_CHARS} characters, not {len(text)}")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        number = len(params.stop_token_ids)
        yield Violation("sampling.stop_token_ids", f"must hold at most {MAX_STOP_TOKEN_IDS} ids, not {number}")
        return
    yield from token_id_violations("sampling.stop_token_ids", params.stop_token_ids, vocab_size=vocab_size)


def _logit_bias(params: pb.SamplingParams, *, vocab_size: int) -> Iterable[Violation]:
    number = len(params.logit_bias)
    if number > MAX_LOGIT_BIASES:
        yield Violation("sampling.logit_bias", f"must hold at most {MAX_LOGIT_BIASES} tokens, not {number}")
        return
    for token_id, bias in sorted(params.logit_bias.items()):
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            yield Violation(field, f"the token must be in the vocabulary [0, {vocab_size}), not {token_id}")
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            yield Violation(field, f"must be between -{MAX_LOGIT_BIAS} and {MAX_LOGIT_BIAS}, not {bias:g}")


def _constraint(params: pb.SamplingParams) -> Iterable[Violation]:
    name = params.WhichOneof("constraint")
    if name is None:
        return
    yield from end_violations(params, name)
    if name == "choice":
        yield from _choices(params.choice.texts)


def end_violations(params: pb.SamplingParams, name: str) -> Iterable[Violation]:
    """Yield parameters that put off the end, all that a complete form allows; `name`: what asks for the form."""
    if params.ignore_eos:
        yield Violation("sampling.ignore_eos", f"cannot be set with {name}, which ends with the end-of-sequence token")
    if params.min_tokens:
        yield Violation("sampling.min_tokens", f"cannot be set with {name}, which may be complete before")


def _choices(texts: Sequence[str]) -> Iterable[Violation]:
    if not 1 <= len(texts) <= MAX_CHOICES:
        yield Violation("sampling.choice.texts", f"must hold between 1 and {MAX_CHOICES} texts, not {len(texts)}")
    for index, text in enumerate(texts[:MAX_CHOICES]):
        if not text:
            yield Violation(f"sampling.choice.texts[{index}]", "is empty")
