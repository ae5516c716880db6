"""One fault at one moment, and what must hold afterwards."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.crowd import Crowd, unexpected
from tests.chaos.faults import FAULTS, Effect, Fault
from tests.chaos.host_faults import can_limit_memory
from tests.chaos.moments import MOMENTS, Moment
from tests.chaos.scene import END_S, GATEWAY, LAUNCHER, Scene, Setting, new_folder, save_model, wait_until
from tests.chaos.statuses import Watcher

PROGRESS_S: Final = 60.0
ENDED_RESUME_S: Final = 3.0
PAIRS_A_GROUP: Final = 60
"""A group's launcher writes a line on each loss, into a pipe that is read when it ends."""
STALL_LOOK_S: Final = 0.1
STALL_S: Final = 3.0
TRIES: Final = 3
MOST_PROBLEMS: Final = 6
PROBLEM_CHARS: Final = 1500


@dataclass(frozen=True, slots=True)
class Pair:
    """A fault at a moment."""

    fault: Fault
    moment: Moment

    @property
    def name(self) -> str:
        return f"{self.fault.setting.name}: {self.fault.name} / {self.moment.name}"


@dataclass(slots=True)
class Row:
    """What came of a pair."""

    pair: Pair
    seconds: float = 0.0
    answers: str = ""
    problems: list[str] = field(default_factory=list)
    skipped: str = ""

    def __str__(self) -> str:
        outcome = f"SKIPPED {self.skipped}" if self.skipped else "FAILED" if self.problems else "ok"
        line = f"{self.pair.name:<52} {self.pair.fault.effect:<6} {self.seconds:6.1f} s  {self.answers:<34} {outcome}"
        return "\n".join([line, *(f"    {problem:.{PROBLEM_CHARS}}" for problem in self.problems[:MOST_PROBLEMS])])


def all_pairs() -> list[Pair]:
    """Every fault at each of its moments; those of one setting stand together, and those that end a group last."""
    pairs = [Pair(fault, MOMENTS[name]) for fault in FAULTS for name in fault.moments]
    order = list(dict.fromkeys(pair.fault.setting.name for pair in pairs))
    return sorted(pairs, key=lambda pair: (order.index(pair.fault.setting.name), pair.fault.effect is Effect.ENDS))


class StallWatch:
    """Notices that this whole run stood still, as when a machine sleeps: then no deadline of a pair meant anything."""

    def __init__(self) -> None:
        self.was_stalled = False
        threading.Thread(target=self._watch, name="stalls", daemon=True).start()

    def take(self) -> bool:
        """Return whether it stood still since the last call."""
        was_stalled, self.was_stalled = self.was_stalled, False
        return was_stalled

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while True:
            time.sleep(STALL_LOOK_S)
            now_s = time.monotonic()
            self.was_stalled = self.was_stalled or now_s - looked_s > STALL_S
            looked_s = now_s


def play(pairs: Sequence[Pair], *, folder: Path, can_use_namespaces: bool) -> Iterator[Row]:
    """Play pairs in their order, with as few groups as that takes."""
    kept = folder / "kept"
    kept.mkdir()
    model = save_model(folder / "model")
    scene: Scene | None = None
    stalls = StallWatch()
    waiting = [(pair, TRIES) for pair in reversed(pairs)]
    while waiting:
        pair, tries = waiting.pop()
        stalls.take()
        if pair.fault.needs_namespaces and not can_use_namespaces:
            yield Row(pair, skipped="needs namespaces of its own (root)")
            continue
        if pair.fault.needs_memory_limits and not can_limit_memory():
            yield Row(pair, skipped="needs cgroups that limit memory (root)")
            continue
        row = Row(pair)
        began_s = time.monotonic()
        try:
            if scene is None or scene.setting != pair.fault.setting or scene.num_pairs >= PAIRS_A_GROUP:
                ending, scene = scene, None
                row.problems.extend(_ended(ending))
                scene = _begun(pair.fault.setting, folder, model=model, kept=kept)
            _play_one(scene, row)
        except Exception as error:  # it is told in the table, and the next pair gets another group
            row.problems.append(f"{error}\n{traceback.format_exc()}")
        row.seconds = time.monotonic() - began_s
        if scene is not None and (row.problems or scene.is_spent or pair.fault.effect is Effect.ENDS):
            if not row.problems and pair.fault.effect is not Effect.ENDS:
                row.problems.extend(_ended(scene))
            scene.__exit__(None, None, None)
            scene = None
        if row.problems and stalls.take() and tries > 1:
            waiting.append((pair, tries - 1))
            row.skipped, row.problems = "this run itself stood still; it is played again", []
        yield row
    if scene is not None:
        last = Row(pairs[-1], problems=_ended(scene))
        if last.problems:
            yield last


def _begun(setting: Setting, folder: Path, *, model: Path, kept: Path) -> Scene:
    scene = Scene(setting, new_folder(folder, setting.name), model=model, kept=kept)
    try:
        scene.start()
    except BaseException:
        with suppress(AssertionError):
            scene.__exit__(None, None, None)
        raise
    return scene


def _ended(scene: Scene | None) -> list[str]:
    """End a group as a user does; what was wrong with that."""
    if scene is None:
        return []
    problems = scene.stop() + scene.unclean_files()
    scene.__exit__(None, None, None)
    return problems


def _play_one(scene: Scene, row: Row) -> None:
    pair = row.pair
    ends = pair.fault.effect is Effect.ENDS
    scene.num_pairs += 1
    scene.wounds.clear()
    crowd = Crowd(scene.doors(resume_s=ENDED_RESUME_S) if ends else scene.doors(), scene.questions)
    try:
        with Watcher(scene.admin, scene.read_record) as watcher:
            if pair.moment.is_loaded:
                crowd.start()
            before = scene.identity()
            pair.moment.reach(scene, crowd, _victim(pair))
            pair.fault.strike(scene)
            if ends:
                _check_end(scene, crowd, row)
            else:
                _check_healed(scene, crowd, row, before)
    finally:
        hanging = crowd.end()
        row.answers = ", ".join(f"{count} {ending}" for ending, count in sorted(crowd.counts().items()))
    row.problems.extend(f"{name} hangs" for name in hanging)
    row.problems.extend(watcher.claims.overclaims(scene.wounds))
    wounds = {wound.name for wound in scene.wounds}
    row.problems.extend(
        unexpected(
            crowd.answers,
            may_fail=pair.fault.loses_gateway or ends,
            may_refuse=bool(wounds) or pair.fault.effect is not Effect.NONE,
        )
        if not ends
        else [text for text in unexpected(crowd.answers, may_fail=True, may_refuse=True) if "wrong" in text]
    )


def _victim(pair: Pair) -> str:
    """The rank that is killed for a moment: not the one that the fault is for."""
    roles = list(pair.fault.setting.ranks)
    return next(role for role in reversed(roles) if role != pair.fault.target)


def _check_healed(scene: Scene, crowd: Crowd, row: Row, before: tuple[dict[str, int], int]) -> None:
    pair = row.pair
    scene.settle()
    if not pair.moment.is_loaded:
        crowd.start()
    late = crowd.wait_progress(time.monotonic(), PROGRESS_S)
    row.problems.extend(f"{name} got nothing more" for name in late)
    row.problems.extend(f"{name} hangs" for name in crowd.end())
    scene.settle()
    after = scene.identity()
    if pair.fault.effect is Effect.NONE and not pair.moment.kills and after != before:
        row.problems.append(f"{before} became {after}")
    row.problems.extend(scene.census())


def _check_end(scene: Scene, crowd: Crowd, row: Row) -> None:
    process = scene.group.process
    wait_until(lambda: process.poll() is not None, END_S, lambda: "the launcher goes on")
    row.problems.extend(scene.leftovers())
    wounds = {wound.name for wound in scene.wounds}
    if LAUNCHER not in wounds and GATEWAY not in wounds and not process.returncode:
        row.problems.append("it ended with status 0")
