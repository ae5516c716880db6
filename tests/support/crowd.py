"""Many clients that ask a group without a pause, and what befell their streams while its processes were killed.

Every stream is greedy, or seeded, so its whole text is known from an undisturbed run: one token lost, doubled or drawn
differently shows.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from hetero_client import Delta, HeteroClient, SamplingParams
from hetero_client.errors import ClientError
from tests.support.local_group import LocalGroupProcess, alive, wait_for
from tests.support.prompts import PROMPTS

FIRST_TOKEN_S: Final = 60.0
_JOIN_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    """One request that is asked again and again, and its text."""

    prompt: str
    sampling: SamplingParams
    text: str


def ask_undisturbed(client: HeteroClient, *, count: int, max_tokens: int, seeded: bool = False) -> list[Question]:
    """Questions with the texts that the group gives while nothing happens to it, each asked alone."""
    questions = []
    for index in range(count):
        # The longest prompts would make the runs long and test nothing else.
        prompt = PROMPTS[index % 16]
        sampling = SamplingParams(
            temperature=0.8 if seeded else 0.0, seed=index, max_tokens=max_tokens, ignore_eos=True
        )
        questions.append(Question(prompt, sampling, client.generate_text(prompt, sampling=sampling).text))
    return questions


@dataclass
class Crowd:
    """One thread a question, which streams it until the crowd is left. Enter it to begin."""

    address: str
    questions: Sequence[Question]
    resume_timeout_s: float = 60.0
    completed: int = 0
    token_times_s: list[float] = field(default_factory=list)
    """When each Delta came, monotonic, of all streams."""
    wrong: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(question,)) for question in self.questions]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        deadline_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        assert kind is not None or not any(thread.is_alive() for thread in self._threads), "streams hang"

    def wait_for_tokens(self, *, since_s: float, timeout_s: float = FIRST_TOKEN_S) -> None:
        """Until a token has come after a moment."""
        wait_for(
            lambda: bool(self.token_times_s) and self.token_times_s[-1] > since_s, timeout_s, lambda: str(self.errors)
        )

    def silence_after(self, moment_s: float) -> float:
        """Seconds from a moment to the end of the longest pause between two tokens since then: the outage's."""
        with self._lock:
            times_s = [moment_s, *sorted(at_s for at_s in self.token_times_s if at_s > moment_s)]
        longest = max(range(1, len(times_s)), key=lambda index: times_s[index] - times_s[index - 1])
        return times_s[longest] - moment_s

    def check(self) -> None:
        """All that ended, ended with its text."""
        assert self.errors == []
        assert self.wrong == []
        assert self.completed >= len(self.questions)

    def _ask(self, question: Question) -> None:
        try:
            with HeteroClient(self.address) as client:
                while not self._leaving.is_set():
                    self._stream(client, question)
        except ClientError as error:
            with self._lock:
                self.errors.append(error)

    def _stream(self, client: HeteroClient, question: Question) -> None:
        text: list[str] = []
        num_tokens = 0
        for event in client.generate(
            question.prompt, sampling=question.sampling, resume_timeout_s=self.resume_timeout_s
        ):
            if isinstance(event, Delta):
                text.append(event.text)
                num_tokens += len(event.token_ids)
                with self._lock:
                    self.token_times_s.append(time.monotonic())
        with self._lock:
            self.completed += 1
            if "".join(text) != question.text or num_tokens != question.sampling.max_tokens:
                self.wrong.append(f"{question.prompt[:30]!r}: {''.join(text)!r} is not {question.text!r}")


@dataclass(frozen=True, slots=True)
class Blow:
    """One signal to one process of a group, and how long it took until tokens came again."""

    victim: str
    signal_name: str
    recovery_s: float


class Killer:
    """Strikes processes of a group at random moments, and waits until it has recovered each time."""

    def __init__(self, group: LocalGroupProcess, crowd: Crowd, *, seed: int) -> None:
        self._group = group
        self._crowd = crowd
        self._random = random.Random(seed)

    def strike(self, victims: Sequence[str], signals: Sequence[signal.Signals]) -> Blow:
        """One blow, at a moment of up to two seconds from now."""
        self._crowd.wait_for_tokens(since_s=time.monotonic())
        time.sleep(self._random.uniform(0.0, 2.0))
        victim, number = self._random.choice(victims), self._random.choice(signals)
        pid = self._group.record.processes[victim]
        with self._group.admin() as admin:
            epoch = admin.topology().epoch
        struck_s = time.monotonic()
        os.kill(pid, number)
        wait_for(lambda: not alive(pid), FIRST_TOKEN_S, self._group.describe)
        ready_s = self._group.wait_ready_again(after_epoch=0 if victim == "gateway" else epoch)
        self._crowd.wait_for_tokens(since_s=ready_s)
        return Blow(victim, number.name, self._crowd.silence_after(struck_s))
