"""`hetero generate` and `hetero chat`, and the display of a streamed answer with its figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_client.cli import options
from hetero_client.cli.console import print_error, print_json, print_note, write_model_text
from hetero_client.errors import IncompleteStreamError, NotConnectedError, RequestError
from hetero_client.messages import ChatMessage, Delta, Event, Finished, Prompt, SamplingParams, Started

if TYPE_CHECKING:
    from hetero_client.client import HeteroClient

CHAT_HELP = "/exit ends, /reset forgets the conversation, Ctrl-C stops an answer"


@options.takes_sampling(*options.SAMPLING_OPTIONS)
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to complete; - reads standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, through the chat template.")
    ] = False,
    system: options.SystemOption = None,
    priority: options.PriorityOption = 0,
    request_id: Annotated[str, typer.Option(help="Name of the request, for logs. Default: assigned.")] = "",
    timeout: options.TimeoutOption = None,
    resume_timeout: options.ResumeTimeoutOption = 60.0,
    figures: Annotated[bool, typer.Option("--figures", help="Print token counts and rates to standard error.")] = False,
    as_json: options.JsonOption = False,
    address: options.AddressOption = None,
    group: options.GroupOption = None,
    api_key_file: options.ApiKeyFileOption = None,
    ca: options.CaOption = None,
    tls: options.TlsOption = None,
    *,
    sampling: SamplingParams,
) -> None:
    """Complete one prompt and stream the text.

    \b
    hetero generate "The capital of France is" -n 16 --temperature 0
    hetero generate --chat "Name three rivers." --json | jq -r 'select(.event=="delta").text'
    cat notes.txt | hetero generate - -n 100 --figures
    hetero generate --chat "Is water wet?" --choice yes --choice no
    hetero generate --chat "Name a river." --json-schema river.schema.json

    If the gateway or its group is lost meanwhile, the answer continues when they are back. With --json every event is
    one JSON object on a line: started, delta ..., finished.
    """
    text = options.read_text(Path(prompt)) if prompt == "-" else prompt
    question: Prompt = conversation(text, system=system) if chat or system is not None else text
    with options.inference_client(address, group, api_key_file=api_key_file, ca=ca, tls=tls) as client:
        sent_at_s = time.monotonic()
        with client.generate(
            question, sampling=sampling, request_id=request_id, timeout_s=timeout, priority=priority,
            resume_timeout_s=resume_timeout,
        ) as stream:  # fmt: skip
            answer = show_answer(stream, sent_at_s=sent_at_s, as_json=as_json, num_completions=sampling.n or 1)
    if figures:
        print_note(answer.line())


@options.takes_sampling(*options.CHAT_SAMPLING)
def chat(
    system: options.SystemOption = None,
    timeout: options.TimeoutOption = None,
    address: options.AddressOption = None,
    group: options.GroupOption = None,
    api_key_file: options.ApiKeyFileOption = None,
    ca: options.CaOption = None,
    tls: options.TlsOption = None,
    *,
    sampling: SamplingParams,
) -> None:
    """Talk with the model; each turn sees the whole conversation.

    \b
    hetero chat
    hetero chat --system "You answer in one sentence." --temperature 0.7

    /exit (or Ctrl-D) ends, /reset forgets the conversation, Ctrl-C stops an answer.
    """
    with options.inference_client(address, group, api_key_file=api_key_file, ca=ca, tls=tls) as client:
        info = client.model_info()
        origin = f" ({info.source})" if info.source else ""
        print_note(f"{info.model_uri}{origin} at {client.address}; {CHAT_HELP}")
        _converse(client, system=system, sampling=sampling, timeout_s=timeout)


def conversation(text: str, *, system: str | None) -> list[ChatMessage]:
    """Return a conversation of one user message, after the system's if there is one."""
    return [*opening(system), ChatMessage("user", text)]


def opening(system: str | None) -> list[ChatMessage]:
    """Return the messages that a conversation begins with."""
    return [] if system is None else [ChatMessage("system", system)]


def _converse(client: HeteroClient, *, system: str | None, sampling: SamplingParams, timeout_s: float | None) -> None:
    history = opening(system)
    while (line := _read_line()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            history = opening(system)
        elif line.startswith("/"):
            print_error(f"unknown command {line}; {CHAT_HELP}")
        elif line:
            question = ChatMessage("user", line)
            answer = _answer(client, [*history, question], sampling=sampling, timeout_s=timeout_s)
            if answer is not None:
                history += [question, ChatMessage("assistant", answer)]


def _answer(
    client: HeteroClient, messages: list[ChatMessage], *, sampling: SamplingParams, timeout_s: float | None
) -> str | None:
    """Return the answer's text; None if it failed or was stopped, so that the turn does not count."""
    try:
        with client.generate(messages, sampling=sampling, timeout_s=timeout_s) as stream:
            return show_answer(stream, sent_at_s=time.monotonic(), as_json=False).text
    except NotConnectedError:
        raise
    except RequestError as error:
        print_error(str(error))
    except KeyboardInterrupt:
        print_note("\n(stopped)")
    return None


def _read_line() -> str | None:
    """Return the next line, stripped; None at the end of input."""
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401  input() gets line editing and history by this import

            return input("> ").strip()
    except EOFError:
        return None
    line = sys.stdin.readline()
    return line.strip() if line else None


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Figures of one answer, seen by its client. Names in `_at_s` are monotonic times."""

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
        """Return the figures in a line."""
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
    """Write events as they come: text, a JSON object a line, or nothing if `quiet`. Raises the stream's errors.

    The texts of several completions come interleaved, so they are written at the end, one after another.
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
    """Return an event as JSON data, with its kind in `event`."""
    return {"event": type(event).__name__.lower(), **asdict(event)}
