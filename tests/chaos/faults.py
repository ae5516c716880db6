"""Faults, as data: what is done, and what may come of it.

    Effect.NONE    nothing: the same processes, the same epoch, no request fails or is refused
    Effect.HEALS   the group serves again by itself, and no request is lost whose client resumes
    Effect.ENDS    the group ends by itself; every request ends, and nothing is left

`loses_gateway`: requests may end with an error whose clients do not resume. A fault is played at all moments but those
that it leaves out, in groups of its setting.
"""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from hetero_client.home import HeteroHome
from tests.chaos.host_faults import SHARED_MEMORY, dropped, full
from tests.chaos.moments import MOMENTS
from tests.chaos.scene import GATEWAY, KEYS, LAUNCHER, MIXED, PLAIN, Scene, Setting, wait_until
from tests.chaos.strangers import STRANGERS, ranks_address

ALL: Final = tuple(MOMENTS)
FEW: Final = ("prefill", "decode", "queueing", "asleep")
BUSY: Final = ("prefill", "decode", "queueing", "leaving")
SOME: Final = ("decode", "queueing", "healing", "asleep", "waking")
TOLERATED_S: Final = 0.7
HOLD_S: Final = 2.0
PARTITION_S: Final = 5.0
DAY_S: Final = 24 * 3600.0
MODEL_FILE: Final = "model.safetensors"


class Effect(StrEnum):
    """What may come of a fault."""

    NONE = "none"
    HEALS = "heals"
    ENDS = "ends"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is done to a group. `strike` returns when it is done, and undone where that is part of it."""

    name: str
    strike: Callable[[Scene], None]
    effect: Effect = Effect.NONE
    moments: tuple[str, ...] = ALL
    setting: Setting = PLAIN
    target: str = ""
    """The rank that it is for, by what it does; another one is killed for moments that need one."""
    loses_gateway: bool = False
    needs_namespaces: bool = False
    needs_memory_limits: bool = False
    is_quick: bool = False
    """Whether `make test-all` plays it."""


def _kill(scene: Scene, roles: Iterable[str], number: signal.Signals) -> None:
    for role in roles:
        scene.strike(role, number)


def kills(*roles: str, number: signal.Signals = signal.SIGKILL) -> Callable[[Scene], None]:
    return partial(_kill, roles=roles, number=number)


def pauses(*roles: str) -> Callable[[Scene], None]:
    return partial(Scene.pause, roles=roles, seconds=TOLERATED_S)


def _kill_forkserver(scene: Scene) -> None:
    """It is started again only a few times in a group's life."""
    scene.strike("forkserver", signal.SIGKILL)
    scene.is_spent = True


# --- disks ----------------------------------------------------------------------------------------------------


def _while_broken(scene: Scene, broken: AbstractContextManager[None], roles: Iterable[str]) -> None:
    """Kill processes while a disk does not work, which is mended some seconds later."""
    with broken:
        for role in roles:
            scene.strike(role, signal.SIGKILL)
        time.sleep(HOLD_S)


def _full_home(scene: Scene, roles: Iterable[str] = ()) -> None:
    _while_broken(scene, full(scene.home), roles)


def _full_shared_memory(scene: Scene, roles: Iterable[str] = ()) -> None:
    _while_broken(scene, full(SHARED_MEMORY), roles)


def _model_reads_fail(scene: Scene, roles: Iterable[str] = ()) -> None:
    _while_broken(scene, scene.shim.disk(scene.model, reads=errno.EIO), roles)


def _cache_reads_fail(scene: Scene, roles: Iterable[str] = ()) -> None:
    _while_broken(scene, scene.shim.disk(_cache(scene), reads=errno.EIO), roles)


def _cache_writes_fail(scene: Scene, roles: Iterable[str] = ()) -> None:
    _while_broken(scene, scene.shim.disk(_cache(scene), writes=errno.ENOSPC), roles)


def _cache(scene: Scene) -> Path:
    return HeteroHome(scene.home).packed.resolve()


# --- weights --------------------------------------------------------------------------------------------------


def _with_other_weights(scene: Scene, change: Callable[[bytes], bytes], *, is_alone: bool) -> None:
    """Ranks start again from a file that is not what it was.

    One alone is refused by the group, until it starts again from the right file. All of them end the group if they
    cannot read it.
    """
    path = scene.model / MODEL_FILE
    genuine = path.read_bytes()
    spoilt = path.with_suffix(".new")
    spoilt.write_bytes(change(genuine))
    whole = path.with_suffix(".whole")
    path.rename(whole)
    spoilt.rename(path)
    try:
        for role in ("holder",) if is_alone else ("leader", "holder", "helper"):
            scene.strike(role, signal.SIGKILL)
        if is_alone:
            time.sleep(2 * HOLD_S)
        else:
            wait_until(lambda: scene.group.process.poll() is not None, 60, scene.group.describe)
    finally:
        whole.rename(path)
    if is_alone:
        scene.strike("holder", signal.SIGKILL)


def _spoils(change: Callable[[bytes], bytes], *, is_alone: bool = True) -> Callable[[Scene], None]:
    return partial(_with_other_weights, change=change, is_alone=is_alone)


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flipped(content: bytes) -> bytes:
    """The same header; every byte of the tensors is another."""
    head = 8 + int.from_bytes(content[:8], "little")
    return content[:head] + bytes(byte ^ 0x11 for byte in content[head:])


def _no_header(content: bytes) -> bytes:
    return b"\xff" * 64 + content[64:]


# --- memory and descriptors ------------------------------------------------------------------------------------


def starves(*roles: str) -> Callable[[Scene], None]:
    return partial(_starve, roles=roles)


def _starve(scene: Scene, roles: Iterable[str]) -> None:
    for role in roles:
        scene.starve(role)


def _no_descriptors(scene: Scene) -> None:
    process = psutil.Process(scene.pid(GATEWAY))
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), before[1]))
    time.sleep(HOLD_S)
    process.rlimit(psutil.RLIMIT_NOFILE, before)


# --- clocks and networks ---------------------------------------------------------------------------------------


def _clock(scene: Scene, *offsets_s: float) -> None:
    for offset_s in offsets_s:
        with scene.shim.clock(offset_s):
            time.sleep(TOLERATED_S)


def _loss(scene: Scene, percent: int) -> None:
    with dropped(("-m", "statistic", "--mode", "random", "--probability", f"{percent / 100}")):
        time.sleep(HOLD_S)


def _partition(scene: Scene, role: str, seconds: float) -> None:
    """Cut a rank, or all of them, off from the gateway."""
    gateway = int(ranks_address(scene).rpartition(":")[2])
    if role == "all":
        rules = [["-p", "tcp", way, str(gateway)] for way in ("--dport", "--sport")]
    else:
        own = [
            connection.laddr.port
            for connection in psutil.Process(scene.pid(role)).net_connections("tcp")
            if connection.raddr and connection.raddr.port == gateway
        ]
        rules = [["-p", "tcp", way, str(port)] for port in own for way in ("--dport", "--sport")]
    with dropped(*rules):
        time.sleep(seconds)


# --- certificates and roll-outs --------------------------------------------------------------------------------


def _rotate(scene: Scene) -> None:
    """New connections see the new certificate soon, the others nothing."""
    assert scene.certificates is not None
    old = scene.certificates.served(scene.record.http)
    scene.certificates.rotate()
    for address in (scene.record.http,):
        wait_until(partial(_is_other, scene, address, old), 30, lambda: "the old certificate is still shown")


def _is_other(scene: Scene, address: str, old: bytes) -> bool:
    assert scene.certificates is not None
    return scene.certificates.served(address) != old


def _spoil_certificate(scene: Scene) -> None:
    """A file that is no certificate leaves the one that serves."""
    assert scene.certificates is not None
    old = scene.certificates.served(scene.record.http)
    scene.certificates.spoil()
    time.sleep(HOLD_S)
    assert scene.certificates.served(scene.record.http) == old
    scene.certificates.rotate()
    wait_until(partial(_is_other, scene, scene.record.http, old), 30, lambda: "the old certificate is still shown")


def _touch_keys(scene: Scene) -> None:
    """The same key in a new file, beside another's."""
    assert scene.certificates is not None
    path = scene.certificates.keys
    new = path.with_suffix(".new")
    new.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    new.rename(path)
    time.sleep(HOLD_S)


def _end_launcher(scene: Scene, number: signal.Signals) -> None:
    scene.strike(LAUNCHER, number)


STOP, KILL = signal.SIGSTOP, signal.SIGKILL
_HEALS, _ENDS = Effect.HEALS, Effect.ENDS

FAULTS: Final[tuple[Fault, ...]] = (
    # Processes end.
    Fault("kill leader", kills("leader"), _HEALS, target="leader", is_quick=True),
    Fault("kill holder", kills("holder"), _HEALS, target="holder"),
    Fault("kill helper", kills("helper"), _HEALS, target="helper"),
    Fault("kill gateway", kills("gateway"), _HEALS, loses_gateway=True, is_quick=True),
    Fault("kill two ranks", kills("holder", "helper"), _HEALS, target="holder"),
    Fault("kill all ranks", kills("leader", "holder", "helper"), _HEALS, moments=SOME),
    Fault("kill rank and gateway", kills("leader", "gateway"), _HEALS, loses_gateway=True, target="leader"),
    Fault("kill everything", kills("gateway", "leader", "holder", "helper"), _HEALS, FEW, loses_gateway=True),
    Fault("kill forkserver", _kill_forkserver, Effect.NONE, ("decode", "asleep")),
    Fault("kill warden and holder", kills("warden", "holder"), _HEALS, FEW, target="holder"),
    Fault("crash holder", kills("holder", number=signal.SIGSEGV), _HEALS, SOME, target="holder"),
    Fault("abort leader", kills("leader", number=signal.SIGABRT), _HEALS, FEW, target="leader"),
    Fault("terminate helper", kills("helper", number=signal.SIGTERM), _HEALS, SOME, target="helper"),
    Fault("crash gateway", kills("gateway", number=signal.SIGSEGV), _HEALS, FEW, loses_gateway=True),
    Fault("terminate gateway", kills("gateway", number=signal.SIGTERM), _HEALS, FEW, loses_gateway=True),
    # The kernel ends processes for want of memory.
    Fault("leader out of memory", starves("leader"), _HEALS, FEW, target="leader", needs_memory_limits=True),
    Fault("holder out of memory", starves("holder"), _HEALS, SOME, target="holder", needs_memory_limits=True,
          is_quick=True),
    Fault("gateway out of memory", starves("gateway"), _HEALS, FEW, loses_gateway=True, needs_memory_limits=True),
    Fault("rank and gateway out of memory", starves("helper", "gateway"), _HEALS, ("decode", "asleep"), target="helper",
          loses_gateway=True, needs_memory_limits=True),
    # Processes stand still.
    Fault("freeze leader", kills("leader", number=STOP), _HEALS, target="leader"),
    Fault("freeze holder", kills("holder", number=STOP), _HEALS, target="holder"),
    Fault("freeze helper", kills("helper", number=STOP), _HEALS, target="helper", is_quick=True),
    Fault("freeze gateway", kills("gateway", number=STOP), _HEALS, ("decode", "healing", "asleep"), loses_gateway=True),
    Fault("pause leader", pauses("leader"), target="leader"),
    Fault("pause helper", pauses("helper"), target="helper"),
    Fault("pause gateway", pauses("gateway")),
    Fault("pause launcher", pauses("launcher"), moments=SOME),
    Fault("pause everything", pauses("launcher", "gateway", "leader", "holder", "helper"), moments=FEW),
    # Disks.
    Fault("home full", _full_home, moments=FEW, needs_namespaces=True),
    Fault("home full, holder killed", partial(_full_home, roles=("holder",)), _HEALS, FEW, needs_namespaces=True),
    Fault("home full, gateway killed", partial(_full_home, roles=("gateway",)), _HEALS, FEW, PLAIN, "", True, True),
    Fault("shared memory full", _full_shared_memory, moments=FEW, needs_namespaces=True),
    Fault("shared memory full, holder killed", partial(_full_shared_memory, roles=("holder",)), _HEALS, FEW, PLAIN,
          needs_namespaces=True),
    Fault("model unreadable", _model_reads_fail, moments=FEW),
    Fault("model unreadable, gateway killed", partial(_model_reads_fail, roles=("gateway",)), _HEALS, ("decode",),
          loses_gateway=True),
    Fault("model unreadable, holder killed", partial(_model_reads_fail, roles=("holder",)), _HEALS, FEW,
          target="holder"),
    Fault("cache unreadable, holder killed", partial(_cache_reads_fail, roles=("holder",)), _HEALS, FEW,
          target="holder"),
    Fault("cache unwritable, holder killed", partial(_cache_writes_fail, roles=("holder",)), _HEALS, FEW,
          target="holder"),
    # The clock.
    Fault("clock a day on", lambda scene: _clock(scene, DAY_S), is_quick=True),
    Fault("clock a day back", lambda scene: _clock(scene, -DAY_S)),
    Fault("clock to and fro", lambda scene: _clock(scene, 3600, -3600, 3600), moments=SOME),
    # Networks.
    Fault("loss of 5 %", lambda scene: _loss(scene, 5), moments=FEW, needs_namespaces=True),
    Fault("loss of 20 %", lambda scene: _loss(scene, 20), moments=FEW, needs_namespaces=True),
    Fault("short partition", lambda scene: _partition(scene, "all", TOLERATED_S), moments=SOME, needs_namespaces=True),
    Fault("ranks cut off", lambda scene: _partition(scene, "all", PARTITION_S), _HEALS, FEW, needs_namespaces=True),
    Fault("helper cut off", lambda scene: _partition(scene, "helper", PARTITION_S), _HEALS, FEW, needs_namespaces=True),
    Fault("no descriptors", _no_descriptors, moments=BUSY),
    # Strangers at the doors.
    *(
        Fault(stranger.__name__.replace("_", " "), stranger, moments=SOME, is_quick=stranger.__name__ == "http_reset")
        for stranger in STRANGERS
    ),
    # Certificates and keys.
    Fault("certificate rotates", _rotate, setting=KEYS, moments=SOME, is_quick=True),
    Fault("certificate is spoilt", _spoil_certificate, setting=KEYS, moments=FEW),
    Fault("keys are written again", _touch_keys, setting=KEYS, moments=FEW),
    Fault("kill gateway with keys", kills("gateway"), _HEALS, FEW, KEYS, loses_gateway=True),
    Fault("kill holder with keys", kills("holder"), _HEALS, FEW, KEYS, target="holder"),
    # A group with a GPU.
    Fault("kill GPU rank", kills("leader"), _HEALS, ("prefill", "decode", "queueing"), MIXED, "leader"),
    Fault("kill CPU rank", kills("helper"), _HEALS, ("prefill", "decode", "queueing"), MIXED, "helper"),
    Fault("freeze GPU rank", kills("leader", number=STOP), _HEALS, ("decode",), MIXED, "leader"),
    Fault("freeze CPU rank", kills("helper", number=STOP), _HEALS, ("decode",), MIXED, "helper"),
    Fault("kill gateway beside a GPU", kills("gateway"), _HEALS, ("decode",), MIXED, loses_gateway=True),
    # Another spec at the same doors.
    Fault("roll-out", Scene.roll_out, _HEALS, ("decode", "queueing", "healing", "asleep"), loses_gateway=True),
    # Weights.
    Fault("weights are cut", _spoils(_cut), _HEALS, ("decode", "asleep"), target="holder"),
    Fault("weights are others", _spoils(_flipped), _HEALS, ("decode", "asleep"), target="holder"),
    Fault("weights have no header", _spoils(_no_header), _HEALS, ("decode", "asleep"), target="holder"),
    # What cannot be healed.
    Fault("all weights have no header", _spoils(_no_header, is_alone=False), _ENDS, ("decode",)),
    Fault("kill launcher", kills(LAUNCHER), _ENDS, ("prefill", "decode", "healing", "asleep")),
    Fault("end launcher", kills(LAUNCHER, number=signal.SIGTERM), _ENDS, ("prefill", "decode", "healing", "asleep")),
)  # fmt: skip
