"""Clients of all kinds that ask a group without a pause, and how each of their requests ended.

Every request is greedy or seeded, so the group's undisturbed answer is the only right one. A request that was accepted
ends once: complete, with an error, or by its client's leaving. Over HTTP, and over gRPC without resuming, a request is
lost with its gateway; a client of ours that resumes loses nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import httpx

from hetero_client import Access, Delta, Finished, HeteroClient, SamplingParams, Started
from hetero_client.errors import ClientError, IncompleteStreamError, QueueFullError, UnavailableError

JOIN_S: Final = 90.0
PAUSE_S: Final = 0.05
HTTP_S: Final = 60.0
WORDS: Final = "The quick brown fox jumps over the lazy dog, and then it does so again. "


class Ending(StrEnum):
    """How a request ended."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """Before it was accepted."""
    FAILED = "failed"
    LEFT = "left"
    """By its client."""
    WRONG = "wrong"
    """Another text, two ends, or none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's end."""

    client: str
    ending: Ending
    why: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Question:
    """A request and the texts of its completions."""

    name: str
    prompt: str
    sampling: SamplingParams
    texts: tuple[str, ...] = ()


def _question(name: str, prompt: str, max_tokens: int, **sampling: Any) -> Question:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **sampling})
    return Question(name, prompt, params)


QUESTIONS: Final = (
    _question("greedy", WORDS, 20),
    _question("long", WORDS * 3, 64),
    _question("seeded", "Once upon a time", 16, temperature=0.8, seed=7),
    _question("two", "List three reasons", 12, temperature=0.9, seed=8, n=2),
    _question("stops", "def fibonacci(n):", 24, stop=("zq",), repetition_penalty=1.1),
    _question("prompt", WORDS * 12, 6),
)
LONG_PROMPT: Final = _question("long-prompt", WORDS * 24, 4)
"""Some 1,700 tokens: dozens of steps of prefill."""


@dataclass(frozen=True, slots=True)
class Doors:
    """Where a group is asked, and what is shown there."""

    grpc: str
    http: str
    model: str
    access: Access = field(default_factory=Access)
    tls: Any = None
    """An SSLContext; None: the HTTP door has no TLS."""
    resume_s: float = 60.0
    """Patience of clients that resume."""

    def client(self) -> HeteroClient:
        return HeteroClient(self.grpc, access=self.access)

    def http_client(self) -> httpx.Client:
        scheme = "http" if self.tls is None else "https"
        headers = {"Authorization": f"Bearer {self.access.api_key}"} if self.access.api_key else {}
        return httpx.Client(
            base_url=f"{scheme}://{self.http}",
            timeout=HTTP_S,
            trust_env=False,
            headers=headers,
            verify=True if self.tls is None else self.tls,
        )


def ask_undisturbed(doors: Doors) -> dict[str, Question]:
    """Return the questions with their texts, each asked alone, by name."""
    with doors.client() as client:
        asked = (
            replace(each, texts=tuple(one.text for one in client.generate_texts(each.prompt, sampling=each.sampling)))
            for each in (*QUESTIONS, LONG_PROMPT)
        )
        return {question.name: question for question in asked}


Ask = Callable[[Doors, Question], tuple[Ending, str]]


def _judged(question: Question, texts: Sequence[str], num_ends: Sequence[int]) -> tuple[Ending, str]:
    """The ending of an answer that came without an error."""
    if list(num_ends) != [1] * len(question.texts):
        return Ending.WRONG, f"ends of its completions: {list(num_ends)}"
    if tuple(texts) != question.texts:
        return Ending.WRONG, f"{list(texts)!r:.300} is not {list(question.texts)!r:.300}"
    return Ending.COMPLETE, ""


def _stream(doors: Doors, question: Question, *, resume_s: float, pause_s: float = 0.0, salt: str = "") -> Any:
    texts, ends = [""] * len(question.texts), [0] * len(question.texts)
    accepted = False
    try:
        with doors.client() as client:
            for event in client.generate(
                question.prompt, sampling=question.sampling, resume_timeout_s=resume_s, cache_salt=salt
            ):
                accepted = accepted or isinstance(event, Started)
                if isinstance(event, Delta):
                    texts[event.index] += event.text
                    time.sleep(pause_s)
                elif isinstance(event, Finished):
                    ends[event.index] += 1
    except IncompleteStreamError as error:
        return Ending.WRONG, f"no end: {error}"
    except (UnavailableError, QueueFullError) as error:
        return (Ending.FAILED if accepted else Ending.REFUSED), f"{error.code}: {error}"
    except ClientError as error:
        return Ending.FAILED, f"{type(error).__name__}: {error}"
    return _judged(question, texts, ends)


def streamed(doors: Doors, question: Question) -> tuple[Ending, str]:
    """Over gRPC, without resuming: a rank's loss pauses it, no more."""
    ending: tuple[Ending, str] = _stream(doors, question, resume_s=0.0)
    return ending


def resumed(doors: Doors, question: Question) -> tuple[Ending, str]:
    """As users call: no loss of any process is to be seen."""
    ending: tuple[Ending, str] = _stream(doors, question, resume_s=doors.resume_s)
    return ending


def read_slowly(doors: Doors, question: Question) -> tuple[Ending, str]:
    ending: tuple[Ending, str] = _stream(doors, question, resume_s=0.0, pause_s=0.02)
    return ending


def uncached(doors: Doors, question: Question) -> tuple[Ending, str]:
    """With a salt of its own, so that the prompt is computed."""
    ending: tuple[Ending, str] = _stream(doors, question, resume_s=0.0, salt=f"{time.monotonic_ns()}")
    return ending


def leaving(doors: Doors, question: Question) -> tuple[Ending, str]:
    """Goes away after some tokens."""
    try:
        with (
            doors.client() as client,
            client.generate(question.prompt, sampling=question.sampling, resume_timeout_s=doors.resume_s) as stream,
        ):
            for number, _ in enumerate(stream):
                if number == 3:
                    return Ending.LEFT, ""
    except ClientError as error:
        return Ending.FAILED, f"{type(error).__name__}: {error}"
    return Ending.LEFT, ""


def _body(doors: Doors, question: Question, **fields: Any) -> dict[str, Any]:
    asked = question.sampling
    body = {
        "model": doors.model, "prompt": question.prompt, "max_tokens": asked.max_tokens, "ignore_eos": True,
        "temperature": asked.temperature, "seed": asked.seed, "n": asked.n, "stop": list(asked.stop) or None,
        "repetition_penalty": asked.repetition_penalty,
    }  # fmt: skip
    return body | fields


def _over_http(ask: Callable[[httpx.Client], tuple[Ending, str]], doors: Doors) -> tuple[Ending, str]:
    try:
        with doors.http_client() as http:
            return ask(http)
    except httpx.ConnectError as error:
        return Ending.REFUSED, f"{error}"
    except httpx.HTTPError as error:
        return Ending.FAILED, f"{type(error).__name__}: {error}"


def _status(response: httpx.Response) -> tuple[Ending, str]:
    refused = response.status_code in (429, 503)
    return (Ending.REFUSED if refused else Ending.FAILED), f"HTTP {response.status_code}: {response.text:.200}"


def http_whole(doors: Doors, question: Question) -> tuple[Ending, str]:
    def ask(http: httpx.Client) -> tuple[Ending, str]:
        response = http.post("/v1/completions", json=_body(doors, question))
        if response.status_code != 200:
            return _status(response)
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        return _judged(question, [choice["text"] for choice in choices], [1] * len(choices))

    return _over_http(ask, doors)


def http_streamed(doors: Doors, question: Question) -> tuple[Ending, str]:
    def ask(http: httpx.Client) -> tuple[Ending, str]:
        texts, ends, num_done = [""] * len(question.texts), [0] * len(question.texts), 0
        with http.stream("POST", "/v1/completions", json=_body(doors, question, stream=True)) as response:
            if response.status_code != 200:
                response.read()
                return _status(response)
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    num_done += 1
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        return Ending.FAILED, f"{event['error']}"
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
                        ends[choice["index"]] += choice.get("finish_reason") is not None
        if num_done != 1:
            return Ending.WRONG, f"{num_done} times [DONE]"
        return _judged(question, texts, ends)

    return _over_http(ask, doors)


CLIENTS: Final[tuple[tuple[str, Ask, str], ...]] = (
    ("grpc", streamed, "long"),
    ("grpc-seeded", streamed, "seeded"),
    ("resuming", resumed, "greedy"),
    ("resuming-two", resumed, "two"),
    ("slow", read_slowly, "stops"),
    ("prefill", uncached, "prompt"),
    ("leaving", leaving, "long"),
    ("http", http_whole, "two"),
    ("http-stream", http_streamed, "greedy"),
)
RESUMES: Final = ("resuming", "resuming-two")


class Crowd:
    """One thread a client. `start` it; `wait_progress` after a fault; `end` it, which waits for all answers."""

    def __init__(self, doors: Doors, questions: dict[str, Question]) -> None:
        self._doors, self._questions = doors, questions
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answers: list[Answer] = []

    def start(self) -> None:
        for name, ask, question in CLIENTS:
            self._begin(name, ask, self._questions[question], once=False)

    def ask_once(self, name: str, ask: Ask, question: str) -> None:
        """Ask one thing more, in a thread of its own."""
        self._begin(name, ask, self._questions[question], once=True)

    def wait_progress(self, since_s: float, timeout_s: float) -> list[str]:
        """Wait until each client had a request that began after a moment and came to its end; those that had none."""
        deadline_s = time.monotonic() + timeout_s
        wanted = {name for name, _, _ in CLIENTS}
        while time.monotonic() < deadline_s:
            with self._lock:
                good = (Ending.COMPLETE, Ending.LEFT)
                wanted -= {one.client for one in self.answers if one.began_s > since_s and one.ending in good}
            if not wanted:
                break
            time.sleep(PAUSE_S)
        return sorted(wanted)

    def end(self) -> list[str]:
        """Begin nothing more, wait for what is under way; the names of clients that hang."""
        self._leaving.set()
        deadline_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def counts(self) -> Counter[Ending]:
        return Counter(answer.ending for answer in self.answers)

    def _begin(self, name: str, ask: Ask, question: Question, *, once: bool) -> None:
        thread = threading.Thread(target=self._ask, args=(name, ask, question, once), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ask(self, name: str, ask: Ask, question: Question, once: bool) -> None:
        while not self._leaving.is_set() or once:
            began_s = time.monotonic()
            try:
                ending, why = ask(self._doors, question)
            except Exception as error:  # a client that breaks must show
                ending, why = Ending.WRONG, f"{type(error).__name__}: {error}"
            with self._lock:
                self.answers.append(Answer(name, ending, why, began_s, time.monotonic()))
            if once:
                return
            if ending in (Ending.REFUSED, Ending.FAILED):
                time.sleep(PAUSE_S)


def unexpected(answers: Sequence[Answer], *, may_fail: bool, may_refuse: bool) -> list[str]:
    """Return the requests that ended as none should have. `may_fail`: those that do not resume, with their gateway."""
    problems = []
    for one in answers:
        is_lost = one.ending is Ending.FAILED and not (may_fail and one.client not in RESUMES)
        is_refused = one.ending is Ending.REFUSED and not may_refuse
        if one.ending is Ending.WRONG or is_lost or is_refused:
            problems.append(f"{one.client} {one.ending}: {one.why}")
    return problems
