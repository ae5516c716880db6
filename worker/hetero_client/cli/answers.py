"""Showing a stream of events as it comes, and what was measured on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetero_client.cli.console import print_json, write_model_text
from hetero_client.errors import IncompleteStreamError
from hetero_client.messages import Delta, Event, Finished, Started


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """One answer as its client saw it. Monotonic seconds where a name ends in `_at_s`."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    first_token_s: float
    decode_tokens_per_s: float | None
    total_s: float
    first_token_at_s: float
    text: str

    def line(self) -> str:
        """The figures for a person."""
        rate = "" if self.decode_tokens_per_s is None else f" · decode {self.decode_tokens_per_s:.1f} tok/s"
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        return (
            f"prompt {self.prompt_tokens} tokens{cached} · output {self.output_tokens} tokens"
            f" · first token {self.first_token_s:.2f} s{rate}"
        )


def show_answer(
    events: Iterable[Event],
    *,
    sent_at_s: float,
    as_json: bool = False,
    quiet: bool = False,
    num_completions: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> AnswerFigures:
    """Write events as they come: text, one JSON object a line, or, quiet, nothing. Raises what the stream raises.

    The texts of several completions, which come all at a time, are written at the end, one after another.
    """
    started: Started | None = None
    finished: list[Finished] = []
    first_s = last_s = 0.0
    texts = [""] * num_completions
    show_text = not (as_json or quiet)
    for event in events:
        if as_json and not quiet:
            print_json(event_json(event))
        match event:
            case Started():
                started = event
            case Delta():
                last_s = clock()
                first_s = first_s or last_s
                texts[event.index] += event.text
                if show_text and num_completions == 1:
                    write_model_text(event.text)
            case Finished():
                finished.append(event)
    if show_text:
        _write_texts(texts if num_completions > 1 else [])
    if started is None or not finished:
        raise IncompleteStreamError("the stream lacked its Started or its Finished event")
    tokens = sum(end.usage.completion_tokens for end in finished)
    return AnswerFigures(
        request_id=started.request_id,
        prompt_tokens=started.prompt_tokens,
        cached_tokens=finished[0].usage.cached_tokens,
        output_tokens=tokens,
        finish_reason=finished[-1].reason.value,
        first_token_s=(first_s or clock()) - sent_at_s,
        decode_tokens_per_s=(tokens - 1) / (last_s - first_s) if tokens > 1 and last_s > first_s else None,
        total_s=clock() - sent_at_s,
        first_token_at_s=first_s or clock(),
        text=texts[0],
    )


def _write_texts(texts: Sequence[str]) -> None:
    for index, text in enumerate(texts):
        write_model_text(f"--- {index}\n{text}\n")
    if not texts:
        write_model_text("\n")


def event_json(event: Event) -> dict[str, Any]:
    """An event as JSON data; `event` tells its kind."""
    return {"event": type(event).__name__.lower(), **asdict(event)}
