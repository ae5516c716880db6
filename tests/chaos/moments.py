"""Moments of a group's life at which something is done to it: how each is reached.

A moment's function returns when the moment is there. Those that heal or load kill a rank first, another one than the
fault is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGKILL
from typing import Final

from hetero_api.group_state import GroupState
from hetero_client import Delta
from hetero_client.errors import RequestError
from tests.chaos.crowd import Crowd, leaving, streamed, uncached
from tests.chaos.scene import Scene, wait_until

REACH_S: Final = 40.0
NUM_QUEUED: Final = 10
TRIES: Final = 8
_FAST_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Moment:
    """`reach` is given the scene, the clients, and the rank that may be killed for it."""

    name: str
    reach: Callable[[Scene, Crowd, str], None]
    is_loaded: bool = True
    """Whether clients ask meanwhile."""
    kills: bool = False
    """Whether a rank is killed for it."""


def _decode(scene: Scene, crowd: Crowd, _: str) -> None:
    with scene.doors().client() as client:
        question = scene.questions["long"]
        with client.generate(question.prompt, sampling=question.sampling) as stream:
            num_deltas = 0
            for event in stream:
                num_deltas += isinstance(event, Delta)
                if num_deltas == 3:
                    return


def _first_token(scene: Scene, crowd: Crowd, _: str) -> None:
    with scene.doors().client() as client:
        question = scene.questions["greedy"]
        with client.generate(question.prompt, sampling=question.sampling) as stream:
            next(event for event in stream if isinstance(event, Delta))


def _prefill(scene: Scene, crowd: Crowd, _: str) -> None:
    """A part of a long prompt is computed, and the rest is not."""
    with scene.admin() as admin:
        before = admin.stats().prompt_tokens
        crowd.ask_once("long-prompt", uncached, "long-prompt")
        wait_until(lambda: admin.stats().prompt_tokens > before + 256, REACH_S, lambda: str(admin.stats()))


def _queueing(scene: Scene, crowd: Crowd, _: str) -> None:
    for _number in range(NUM_QUEUED):
        crowd.ask_once("queued", streamed, "long")
    with scene.admin() as admin:
        wait_until(lambda: admin.stats().waiting_requests > 0, REACH_S, lambda: str(admin.stats()))


def _leaving(scene: Scene, crowd: Crowd, _: str) -> None:
    """Many clients go away at once."""
    num_before = len(crowd.answers)
    for _number in range(NUM_QUEUED):
        crowd.ask_once("left", leaving, "long")
    wait_until(
        lambda: any(answer.client == "left" for answer in crowd.answers[num_before:]), REACH_S, lambda: "nobody left"
    )


def _in_state(scene: Scene, victim: str, states: tuple[GroupState, ...], *, tries: int) -> bool:
    """Kill a rank and wait for a state on the way back; whether it was seen."""
    epoch_before = scene.identity()[1]
    scene.strike(victim, SIGKILL)
    deadline_s = time.monotonic() + REACH_S
    with scene.admin() as admin:
        while time.monotonic() < deadline_s:
            try:
                seen = admin.topology(timeout_s=1.0, wait_for_ready=True)
            except RequestError:
                continue
            if seen.state in states:
                return True
            if seen.state is GroupState.READY and seen.epoch > epoch_before:
                break
            time.sleep(_FAST_S)
    assert tries > 1, f"{states} were never seen"
    scene.settle()
    return False


def _healing(scene: Scene, crowd: Crowd, victim: str) -> None:
    states = (GroupState.NEW, GroupState.ABORTED, GroupState.FORMING)
    _reach_state(scene, victim, states)


def _loading(scene: Scene, crowd: Crowd, victim: str) -> None:
    _reach_state(scene, victim, (GroupState.LOADING,))


def _reach_state(scene: Scene, victim: str, states: tuple[GroupState, ...]) -> None:
    """Kill a rank until one of the states was seen: each lasts for milliseconds only."""
    for tries in range(TRIES, 0, -1):
        if _in_state(scene, victim, states, tries=tries):
            return


def _idle(scene: Scene, crowd: Crowd, _: str) -> None:
    """Awake: somebody has just asked."""
    with scene.doors().client() as client:
        client.generate_text("a", sampling=scene.questions["greedy"].sampling)


def _asleep(scene: Scene, crowd: Crowd, _: str) -> None:
    def rests() -> bool:
        topology = scene.topology()
        return topology is not None and topology.idle is not None and topology.idle.rests

    wait_until(rests, REACH_S, scene.group.describe)


def _waking(scene: Scene, crowd: Crowd, victim: str) -> None:
    _asleep(scene, crowd, victim)
    crowd.ask_once("waking", streamed, "greedy")
    time.sleep(0.01)


MOMENTS: Final = {
    moment.name: moment
    for moment in (
        Moment("prefill", _prefill),
        Moment("first-token", _first_token),
        Moment("decode", _decode),
        Moment("queueing", _queueing),
        Moment("leaving", _leaving),
        Moment("healing", _healing, kills=True),
        Moment("loading", _loading, kills=True),
        Moment("idle", _idle, is_loaded=False),
        Moment("asleep", _asleep, is_loaded=False),
        Moment("waking", _waking, is_loaded=False),
    )
}
