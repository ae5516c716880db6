"""Requests of the router's protocol to ours, and our events to its answers.

A request becomes the hetero.v1.GenerateRequest that says the same, so bounds and defaults have one home. Fields of the
protocol that ask for what is not served (media, transfers of KV caches) are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.text.structural_tags import structural_grammar
from hetero_gateway.server.errors import InvalidArguments, Violation
from hetero_gateway.server.sampling_params import ANY_OBJECT, SEED_SPACE

_ALL: Final = (1 << 32) - 1
"""top_k of -1, which means all, in an unsigned field."""
_UNSERVED: Final = (
    "kv_transfer_params", "mm_inputs", "extra_mm_inputs", "kv_transfer_params_json", "media_refs",
)  # fmt: skip
_OURS: Final = pb.SamplingParams.DESCRIPTOR.fields_by_name
_UNLESS_ZERO: Final = tuple(
    field.name
    for field in vllm.SamplingParams.DESCRIPTOR.fields
    if not field.has_presence and field.name != "top_k" and field.name in _OURS and _OURS[field.name].has_presence
)
"""Parameters of both, whose absence the protocol writes as zero."""
_IF_SET: Final = ("temperature", "max_tokens", "logprobs", "prompt_logprobs")
_REASONS: Final[Mapping[int, str]] = {
    pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort",
}  # fmt: skip


def generate_request(request: vllm.GenerateRequest, special_ids: Mapping[str, int]) -> pb.GenerateRequest:
    """Return the request that says the same. `special_ids`: the model's special tokens, by text.

    Raises InvalidArguments or InvalidRequest for what is not served, or cannot be.
    """
    _check_served(request)
    ours = prompt_request(request.request_id, request.tokenized)
    if request.WhichOneof("input") == "text":
        ours.text = request.text
    if not request.stream:
        ours.output_mode = pb.OUTPUT_MODE_FINAL_ONLY
    _set_sampling(ours.sampling, request.sampling_params)
    _set_constraint(ours.sampling, request.sampling_params, special_ids)
    return ours


def prompt_request(request_id: str, prompt: vllm.TokenizedInput) -> pb.GenerateRequest:
    """Return a request for a prompt of token ids, without parameters."""
    return pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=prompt.input_ids))


def _check_served(request: vllm.GenerateRequest) -> None:
    present = {field.name for field, _ in request.ListFields()}
    problem = "is not served: this engine has neither media nor transfers of KV caches"
    violations = [Violation(name, problem) for name in _UNSERVED if name in present]
    if request.data_parallel_rank:
        violations.append(Violation("data_parallel_rank", f"must be 0 or absent, not {request.data_parallel_rank}"))
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        violations.append(Violation("sampling_params.truncate_prompt_tokens", "is not served: prompts are not cut"))
    if violations:
        raise InvalidArguments(violations)


def _set_sampling(ours: pb.SamplingParams, params: vllm.SamplingParams) -> None:
    for name in _UNLESS_ZERO:
        if getattr(params, name):
            setattr(ours, name, getattr(params, name))
    for name in _IF_SET:
        if params.HasField(name):
            _set(ours, name, getattr(params, name))
    if params.top_k:
        ours.top_k = params.top_k if params.top_k != _ALL else 0
    if params.HasField("seed"):
        ours.seed = params.seed % SEED_SPACE
    ours.stop.extend(params.stop)
    ours.stop_token_ids.extend(params.stop_token_ids)
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            raise InvalidArguments([Violation("sampling_params.logit_bias", f"token {token_id} is no token's id")])
        ours.logit_bias[token_id] = bias


def _set(ours: pb.SamplingParams, name: str, value: Any) -> None:
    try:
        setattr(ours, name, value)
    except ValueError as error:  # e.g. -1, by which the protocol asks for all
        raise InvalidArguments([Violation(f"sampling_params.{name}", f"must not be {value}")]) from error


def _set_constraint(ours: pb.SamplingParams, params: vllm.SamplingParams, special_ids: Mapping[str, int]) -> None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            ours.json_schema = params.json_schema
        case "json_object":
            ours.json_schema = ANY_OBJECT
        case "regex":
            ours.regex = params.regex
        case "grammar":
            ours.grammar = _lark(params.grammar)
        case "structural_tag":
            field = "sampling_params.structural_tag"
            ours.grammar = structural_grammar(params.structural_tag, special_ids, field=field)
        case "choice":
            ours.choice.SetInParent()
            ours.choice.texts.extend(params.choice.choices)


def _lark(grammar: str) -> str:
    """Return a grammar in Lark's notation, as it is or made of one in GBNF. Raises InvalidArguments."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the library's parser raises Exception itself
        raise InvalidArguments([Violation("sampling_params.grammar", f"is no GBNF: {str(error)[:200]}")]) from error


class Answers:
    """The answer to one request, made of the engine's events. With `streams` new tokens are sent as they come."""

    def __init__(self, asked: GenerationRequest, *, streams: bool) -> None:
        self._prompt = asked.prompt_token_ids
        self._streams = streams
        self._token_ids: list[list[int]] = [[] for _ in range(asked.n)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(asked.n)]
        self._prompt_logprobs: vllm.InputLogProbs | None = None
        self._is_first = True

    def take(self, event: pb.Delta | pb.PromptLogprobs | pb.Finished) -> vllm.GenerateResponse | None:
        """Return the message for an event; None if there is none now."""
        match event:
            case pb.Delta():
                return self._delta(event)
            case pb.PromptLogprobs():
                self._prompt_logprobs = _input_logprobs(self._prompt, event.positions)
                return None
            case _:
                return vllm.GenerateResponse(complete=self._complete(event))

    def _delta(self, event: pb.Delta) -> vllm.GenerateResponse | None:
        tokens = self._token_ids[event.index]
        tokens += event.token_ids
        if not self._streams:
            self._logprobs[event.index] += event.logprobs
            return None
        if not event.token_ids:
            return None
        chunk = vllm.GenerateStreamChunk(
            token_ids=event.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(tokens),
            output_logprobs=_output_logprobs(event.logprobs),
            input_logprobs=self._prompt_logprobs if self._is_first else None,
            index=event.index,
        )
        self._is_first = False
        return vllm.GenerateResponse(chunk=chunk)

    def _complete(self, event: pb.Finished) -> vllm.GenerateComplete:
        complete = vllm.GenerateComplete(
            output_ids=self._token_ids[event.index],
            finish_reason=_REASONS[event.reason],
            prompt_tokens=event.usage.prompt_tokens,
            completion_tokens=event.usage.completion_tokens,
            cached_tokens=event.usage.cached_tokens,
            output_logprobs=_output_logprobs(self._logprobs[event.index]),
            input_logprobs=None if self._streams else self._prompt_logprobs,
            index=event.index,
        )
        match event.WhichOneof("matched_stop"):
            case "stop_text":
                complete.matched_stop_str = event.stop_text
            case "stop_token_id":
                complete.matched_token_id = event.stop_token_id
        return complete


def _output_logprobs(positions: Iterable[TokenLogprobs]) -> vllm.OutputLogProbs | None:
    told = list(positions)
    if not told:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[each.logprob for each in told],
        token_ids=[each.token_id for each in told],
        top_logprobs=map(_top, told),
    )


def _input_logprobs(prompt: tuple[int, ...], positions: Iterable[TokenLogprobs]) -> vllm.InputLogProbs:
    """Return a prompt's log-probabilities; its first token has none."""
    told = list(positions)
    values = [vllm.InputTokenLogProb(), *(vllm.InputTokenLogProb(value=each.logprob) for each in told)]
    return vllm.InputLogProbs(
        token_logprobs=values, token_ids=prompt, top_logprobs=[vllm.TopLogProbs(), *map(_top, told)]
    )


def _top(position: TokenLogprobs) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(values=position.top_logprobs, token_ids=position.top_token_ids)
