"""Completions bound to a form: a JSON Schema, a regular expression, a grammar, a list of choices.

A constraint is compiled once a request. Every completion then has a matcher of its own, which returns before each draw
the tokens that may come next, and takes the token that came. llguidance does both; this module adds the following:

- Nothing of it runs on the event loop for long: compiling and masks have threads of their own.
- A request cannot harm the gateway. The text is bounded, the library's own limits bound time and memory, and the
  threads have stacks that fit the deepest nesting which the text's bound allows (the library recurses). The first mask
  is computed with the constraint, because it shows which constraints are expensive.
- The library takes some megabytes, and is imported when the first constraint comes.
- A mask never allows a token that ranks cannot embed: ids beyond the tokenizer's (padding) are not in it.

A form that is complete allows only the model's end-of-sequence tokens. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from hetero_gateway.engine.errors import EngineFault, InvalidRequest
from hetero_gateway.engine.request import Constraint, ConstraintKind, GenerationRequest
from hetero_gateway.engine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CONSTRAINT_CHARS: Final = 65_536
COMPILE_LIMIT_S: Final = 10.0
_STACK_BYTES: Final = 256 * 1024 * 1024
"""Stack of a thread, in address space; memory is taken only as deep as the nesting goes. Source: twice 10,000 levels of
8 KiB each."""
_KEPT: Final = 64
"""Compiled constraints that are kept for the next request which asks for the same."""
_MAX_PROBLEM_CHARS: Final = 500
WHITESPACE: Final = r"\r?\n[ \t]{0,40}|[ \t]{1,40}"
"""White space between two parts of JSON, unless the schema's `x-guidance` says otherwise: a model that may write any
number of newlines writes them until its tokens are used up."""

_T = TypeVar("_T")


class TokenMatcher:
    """Progress of one completion through its form."""

    def __init__(self, matcher: LLMatcher, *, field_name: str, vocab_size: int) -> None:
        self._matcher = matcher
        self._field = field_name
        self._vocab_size = vocab_size
        self._dead_end: tuple[list[int], InvalidRequest] | None = None
        """Proposed tokens behind which the form cannot go on, and why."""

    def mask(self) -> bytes:
        """Return the tokens that may come next, as in TokenMasks of ranks.proto. Raises InvalidRequest. Any thread."""
        mask = _clipped(self._matcher.compute_bitmask(), self._vocab_size)
        if self._matcher.is_error():
            raise InvalidRequest(self._field, f"became too complex: {_short(self._matcher.get_error())}")
        if not mask.strip(b"\0"):
            raise InvalidRequest(self._field, "came to where no token of the model's vocabulary can follow")
        return mask

    def masks(self, proposed: Sequence[int]) -> list[bytes]:
        """Return the mask of the next token, and those behind each proposed token as far as all of them are allowed.

        Raises InvalidRequest as `mask` does. Where the form cannot go on behind proposed tokens, `advance` raises that
        when it has gone along them. Any thread.
        """
        masks, self._dead_end = [self.mask()], None
        ahead = TokenMatcher(self._matcher.deep_copy(), field_name=self._field, vocab_size=self._vocab_size)
        for index, token_id in enumerate(proposed):
            if not masks[-1][token_id >> 3] >> (token_id & 7) & 1:
                break
            try:
                ahead.advance(token_id)
                masks.append(ahead.mask())
            except InvalidRequest as error:
                self._dead_end = [*proposed[: index + 1]], error
                break
        return masks

    def advance(self, token_id: int) -> None:
        """Go on with a token that the mask allowed. Raises InvalidRequest."""
        if self._dead_end is not None:
            self._approach(*self._dead_end, token_id=token_id)
        if not self._matcher.consume_token(token_id):
            raise InvalidRequest(self._field, f"became too complex: {_short(self._matcher.get_error())}")

    def _approach(self, token_ids: list[int], problem: InvalidRequest, *, token_id: int) -> None:
        """Go on with a token towards the dead end, or away from it. Raises InvalidRequest at the end."""
        if token_ids.pop(0) != token_id:
            self._dead_end = None
        elif not token_ids:
            raise problem

    def replay(self, token_ids: Sequence[int], *, field_name: str) -> None:
        """Go on with tokens of an earlier stream. Raises InvalidRequest if they do not fit the form."""
        fitting = self._matcher.try_consume_tokens(list(token_ids))
        if fitting < len(token_ids):
            raise InvalidRequest(
                f"{field_name}.token_ids[{fitting}]", f"token {token_ids[fitting]} does not fit {self._field}"
            )


@dataclass(frozen=True, slots=True)
class CompiledConstraint(Constraint):
    """A valid constraint, which takes the Constraint's place in a request."""

    prototype: LLMatcher = field(kw_only=True, repr=False, compare=False)
    vocab_size: int = field(kw_only=True)

    def matcher(self) -> TokenMatcher:
        """Return a matcher at the form's beginning."""
        return TokenMatcher(self.prototype.deep_copy(), field_name=self.field_name, vocab_size=self.vocab_size)


class ConstraintCompiler:
    """Compiler of one model's constraints. `vocab_size` is the model's, padding included.

    The tokenizer is prepared, which takes about a second, when the first constraint comes.
    """

    def __init__(self, tokenizer: TextTokenizer, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._text = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="constraints")
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._kept: OrderedDict[Constraint, CompiledConstraint] = OrderedDict()

    async def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Return the compiled constraint. Raises InvalidRequest if it is malformed or too complex."""
        kept = self._kept.get(constraint)
        if kept is None:
            kept = await self._compile_in_time(constraint)
            self._keep(constraint, kept)
        else:
            self._kept.move_to_end(constraint)
        return kept

    async def _compile_in_time(self, constraint: Constraint) -> CompiledConstraint:
        field_name = constraint.field_name
        _check_size(constraint, field_name)
        if not self._eos_token_ids:
            raise InvalidRequest(field_name, "needs a model that names its end-of-sequence token; this one does not")
        try:
            async with asyncio.timeout(COMPILE_LIMIT_S):
                return await self._in_thread(lambda: self._compile(constraint, field_name))
        except TimeoutError as error:
            raise InvalidRequest(
                field_name, f"was not compiled within {COMPILE_LIMIT_S:g} s; make it simpler, or try later"
            ) from error

    def _compile(self, constraint: Constraint, field_name: str) -> CompiledConstraint:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._load_tokenizer(field_name)
        try:
            grammar = _grammar(constraint, field_name)
        except ValueError as error:  # e.g. a number that the library cannot hold
            raise InvalidRequest(field_name, _short(str(error))) from error
        prototype = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if prototype.is_error():
            raise InvalidRequest(field_name, _short(prototype.get_error()))
        asked = {each.name: getattr(constraint, each.name) for each in fields(Constraint)}
        compiled = CompiledConstraint(**asked, prototype=prototype, vocab_size=self._vocab_size)
        # On the prototype itself, so that what this works out is there for all its copies.
        TokenMatcher(prototype, field_name=field_name, vocab_size=self._vocab_size).mask()
        return compiled

    def _load_tokenizer(self, field_name: str) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    # A tokenizer may know more tokens than the model has rows; masks are cut to the model's.
                    size = max(self._vocab_size, self._text.vocab_size)
                    self._tokenizer = LLTokenizer(self._text.to_json(), n_vocab=size, eos_token=self._eos_token_ids)
                except ValueError as error:
                    raise InvalidRequest(
                        field_name, f"constraints do not work with this model's tokenizer: {_short(str(error))}"
                    ) from error
            return self._tokenizer

    def _keep(self, constraint: Constraint, compiled: CompiledConstraint) -> None:
        self._kept[constraint] = compiled
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def _in_thread(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        # Threads begin as work comes, with the stack size of that moment.
        usual = threading.stack_size(_STACK_BYTES)
        try:
            return asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            threading.stack_size(usual)


class Mask(NamedTuple):
    """Tokens that a draw may choose from, as in TokenMasks of ranks.proto. With a `problem` the form cannot go on."""

    allowed: bytes
    problem: InvalidRequest | None = None


class MaskedDraws(NamedTuple):
    """Draws of one completion in a step: behind its tokens, and behind each proposed token. None: it has ended."""

    matcher: TokenMatcher | None
    proposed: Sequence[int] = ()


class MaskWriter:
    """Writer of the masks of steps, one step after another, in a thread of its own."""

    def __init__(self, *, vocab_size: int) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._anything = all_tokens(vocab_size)

    async def masks(self, draws: Sequence[MaskedDraws]) -> list[list[Mask]]:
        """Return the masks of each completion's draws: one, and one more behind each proposed token.

        Without a matcher, where there is a problem, and behind a proposed token that the form refuses, a mask allows
        everything: that draw does not count.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: [*map(self._masks, draws)])

    def _masks(self, draws: MaskedDraws) -> list[Mask]:
        matcher, proposed = draws
        masks: list[Mask] = []
        if matcher is not None:
            try:
                masks = [*map(Mask, matcher.masks(proposed) if proposed else [matcher.mask()])]
            except InvalidRequest as error:
                masks = [Mask(self._anything, error)]
        return masks + [Mask(self._anything)] * (1 + len(proposed) - len(masks))


def matchers_of(asked: GenerationRequest, received: Sequence[Sequence[int]]) -> list[TokenMatcher | None]:
    """Return a matcher a completion, past the tokens that it received. Raises InvalidRequest if these do not fit."""
    constraint = asked.constraint
    if constraint is None:
        return [None] * asked.n
    if not isinstance(constraint, CompiledConstraint):
        raise EngineFault("the request's constraint was not compiled")
    matchers = [constraint.matcher() for _ in range(asked.n)]
    for index, (matcher, token_ids) in enumerate(zip(matchers, received, strict=False)):
        matcher.replay(token_ids, field_name=f"received[{index}]")
    return [*matchers]


def all_tokens(vocab_size: int) -> bytes:
    """Return a mask that allows every token."""
    return _clipped(b"\xff" * -(-vocab_size // 8), vocab_size)


def _clipped(mask: bytes, vocab_size: int) -> bytes:
    """Return `mask` without tokens beyond the vocabulary."""
    length, odd = divmod(vocab_size, 8)
    if not odd:
        return mask[:length]
    return mask[:length] + bytes((mask[length] & (1 << odd) - 1,))


def _check_size(constraint: Constraint, field_name: str) -> None:
    size = len(constraint.text) + len(constraint.prelude) + sum(map(len, constraint.choices))
    if size > MAX_CONSTRAINT_CHARS:
        raise InvalidRequest(field_name, f"must have at most {MAX_CONSTRAINT_CHARS} characters, not {size}")


def _grammar(constraint: Constraint, field_name: str) -> str:
    """Return the form's grammar, behind its prelude if it has one."""
    form = _form_grammar(constraint, field_name)
    if not constraint.prelude:
        return form
    is_json = constraint.kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX)
    named = json.loads(form)["grammars"][0] if is_json else {"lark_grammar": form}
    return json.dumps({"grammars": [{"lark_grammar": constraint.prelude}, {**named, "name": "form"}]})


def _form_grammar(constraint: Constraint, field_name: str) -> str:
    from llguidance import LLMatcher

    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            schema = _json_schema(constraint.text, field_name)
            if not schema.lstrip().startswith("{"):  # true or false, which have no options
                return LLMatcher.grammar_from_json_schema(schema)
            return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(constraint.text)
        case ConstraintKind.CHOICE:
            # A string of Lark's notation is one of JSON's.
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, constraint.choices)))


def _json_schema(text: str, field_name: str) -> str:
    # The library reads the schema as a part of something bigger: its line and column would mean nothing to the client.
    try:
        schema = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequest(field_name, f"is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(field_name, f"must be a JSON object (a schema), not {_short(text)}")
    return text


def _short(problem: str) -> str:
    problem = " ".join(problem.replace("<non-verbose/>", "").split())
    return problem if len(problem) <= _MAX_PROBLEM_CHARS else problem[: _MAX_PROBLEM_CHARS - 1] + "…"
