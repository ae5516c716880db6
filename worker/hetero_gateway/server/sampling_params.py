"""SamplingParams: their bounds, by the comments of inference.proto, and the defaults that these state."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Final

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.request import Constraint, ConstraintKind, SamplingConfig
from hetero_gateway.server.errors import Violation

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_TEMPERATURE: Final = 100
MAX_PENALTY: Final = 2
MAX_REPETITION_PENALTY: Final = 10
MAX_LOGIT_BIASES: Final = 300
MAX_LOGIT_BIAS: Final = 100
MAX_COMPLETIONS: Final = 16
MAX_LOGPROBS: Final = 20
MAX_CHOICES: Final = 256
SEED_BITS: Final = 63
_PIECE: Final = 65_536

_KINDS: Final = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.GRAMMAR,
    "choice": ConstraintKind.CHOICE,
}


def sampling_violations(params: pb.SamplingParams, *, vocab_size: int) -> Iterable[Violation]:
    """Everything that is out of bounds."""
    # Written so that NaN, which compares with nothing, is refused.
    if not 0 <= params.temperature <= MAX_TEMPERATURE:
        yield Violation("sampling.temperature", f"must be between 0 and {MAX_TEMPERATURE}, not {params.temperature:g}")
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        yield Violation("sampling.top_p", f"must be more than 0 and at most 1, not {params.top_p:g}")
    if not 0 <= params.min_p <= 1:
        yield Violation("sampling.min_p", f"must be between 0 and 1, not {params.min_p:g}")
    yield from _lengths(params)
    yield from _stops(params, vocab_size=vocab_size)
    yield from _penalties(params)
    yield from _logit_bias(params, vocab_size=vocab_size)
    yield from _counts(params)
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


def sampling_config(params: pb.SamplingParams) -> SamplingConfig:
    """The parameters with every default filled in; the seed is drawn when there is none."""
    return SamplingConfig(
        seed=params.seed if params.HasField("seed") else secrets.randbits(SEED_BITS),
        temperature=_given(params, "temperature", 1.0),
        top_k=params.top_k,
        top_p=_given(params, "top_p", 1.0),
        min_p=params.min_p,
        max_tokens=_given(params, "max_tokens", None),
        stop=tuple(params.stop),
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=_given(params, "repetition_penalty", 1.0),
        logit_bias=tuple(sorted(params.logit_bias.items())),
        min_tokens=params.min_tokens,
        logprobs=_given(params, "logprobs", None),
        prompt_logprobs=_given(params, "prompt_logprobs", None),
        constraint=_read_constraint(params),
    )


def num_completions(params: pb.SamplingParams) -> int:
    """`n`, 1 unless given."""
    return params.n if params.HasField("n") else 1


def _given(params: pb.SamplingParams, field: Any, default: Any) -> Any:
    return getattr(params, field) if params.HasField(field) else default


def _read_constraint(params: pb.SamplingParams) -> Constraint | None:
    name = params.WhichOneof("constraint")
    if name is None:
        return None
    if name == "choice":
        return Constraint(ConstraintKind.CHOICE, "", tuple(params.choice.texts))
    return Constraint(_KINDS[name], getattr(params, name))


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


def _penalties(params: pb.SamplingParams) -> Iterable[Violation]:
    for name, value in (
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ):
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            yield Violation(f"sampling.{name}", f"must be between -{MAX_PENALTY} and {MAX_PENALTY}, not {value:g}")
    repetition = params.repetition_penalty
    if params.HasField("repetition_penalty") and not 0 < repetition <= MAX_REPETITION_PENALTY:
        problem = f"must be more than 0 and at most {MAX_REPETITION_PENALTY}, not {repetition:g}"
        yield Violation("sampling.repetition_penalty", problem)


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


def _counts(params: pb.SamplingParams) -> Iterable[Violation]:
    if params.HasField("n") and not 1 <= params.n <= MAX_COMPLETIONS:
        yield Violation("sampling.n", f"must be between 1 and {MAX_COMPLETIONS}, not {params.n}")
    for name, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if number > MAX_LOGPROBS:
            yield Violation(f"sampling.{name}", f"must be at most {MAX_LOGPROBS}, not {number}")


def _constraint(params: pb.SamplingParams) -> Iterable[Violation]:
    name = params.WhichOneof("constraint")
    if name is None:
        return
    # A form that is complete allows nothing but the end.
    if params.ignore_eos:
        yield Violation("sampling.ignore_eos", f"cannot be set with {name}, which ends with the end-of-sequence token")
    if params.min_tokens:
        yield Violation("sampling.min_tokens", f"cannot be set with {name}, which may be complete before")
    if name == "choice":
        yield from _choices(params.choice.texts)


def _choices(texts: Sequence[str]) -> Iterable[Violation]:
    if not 1 <= len(texts) <= MAX_CHOICES:
        yield Violation("sampling.choice.texts", f"must hold between 1 and {MAX_CHOICES} texts, not {len(texts)}")
    for index, text in enumerate(texts[:MAX_CHOICES]):
        if not text:
            yield Violation(f"sampling.choice.texts[{index}]", "is empty")
