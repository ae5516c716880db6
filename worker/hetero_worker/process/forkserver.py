"""Process that has torch imported and forks ranks: the first ones and those that replace lost ones.

    python -m hetero_worker.process.forkserver     orders on standard input, answers on standard output, a line each

It says "ready", then answers each order (`ForkOrder.to_json`) with the pid of a rank. Importing torch takes longer than
everything else between a lost rank and its successor, and forked ranks share the imported memory.

A fork copies the calling thread only, and a lock that another thread holds stays locked for ever. So this process
computes nothing and has one thread, which it checks before every fork. A rank binds itself to its cores after the fork
and before torch starts any thread, like a rank that was started directly, and then sets torch's number of threads.

A rank is not a child of this process. It is forked twice, so that it becomes a child of the nearest ancestor that
adopts orphans (`death_signal.adopt_orphans`). That process waits for the rank's end, and the rank dies with it.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn, TextIO

from hetero_api.contract import EXIT_FAILURE
from hetero_api.host.death_signal import die_with_adopter
from hetero_api.supervision.forkserver import READY, ForkOrder

_TASKS: Final = Path("/proc/self/task")
_PID_BYTES: Final = 32
_GO: Final = b"1"

BeRank = Callable[[Sequence[str], Mapping[str, str]], int]
"""Type of `rank.main`; tests pass their own."""


def serve(be_rank: BeRank, *, orders: TextIO, answers: TextIO) -> None:
    """Fork a rank for every order, until `orders` ends. Raises RuntimeError when this process has several threads."""
    _say(READY, answers)
    for line in orders:
        if (threads := len(list(_TASKS.iterdir()))) != 1:
            raise RuntimeError(f"a forkserver of {threads} threads cannot fork")
        pid, allows = _fork_away(ForkOrder.from_json(line), be_rank)
        _say(str(pid), answers)
        with suppress(BrokenPipeError):  # it was killed already
            os.write(allows, _GO)
        os.close(allows)


def _say(word: str, answers: TextIO) -> None:
    answers.write(f"{word}\n")
    answers.flush()


def _fork_away(order: ForkOrder, be_rank: BeRank) -> tuple[int, int]:
    """Fork a rank that is not a child of this process; return its pid, and the pipe over which it is told to go on."""
    reader, writer = os.pipe()
    allowed, allows = os.pipe()
    go_between = os.fork()
    if go_between == 0:
        pid = os.fork()
        if pid == 0:
            for descriptor in (reader, writer, allows):
                os.close(descriptor)
            # Killed before it has told the pid, the forkserver would leave a rank that nobody knows of.
            if os.read(allowed, len(_GO)) != _GO:
                os._exit(EXIT_FAILURE)
            os.close(allowed)
            _become(order, be_rank)
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(writer)
    os.close(allowed)
    os.waitpid(go_between, 0)
    with open(reader, "rb") as answer:
        return int(answer.read(_PID_BYTES)), allows


def _become(order: ForkOrder, be_rank: BeRank) -> NoReturn:
    """Run the rank and end the process: never return to the forkserver's code."""
    exit_code = EXIT_FAILURE
    try:
        os.setsid()
        _redirect(order.log)
        die_with_adopter(order.adopter, signal_number=order.death_signal)
        os.environ.update(order.environment)
        gc.enable()
        exit_code = be_rank(order.arguments, os.environ)
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else EXIT_FAILURE
    except BaseException:  # noqa: BLE001 — the process's top
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(exit_code)


def _redirect(log: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for descriptor in (nothing, output):
        os.close(descriptor)


def run() -> None:
    """Run the forkserver until standard input ends."""
    gc.disable()  # imports create much and free nothing: collecting garbage would take a sixth of their time
    from hetero_worker.host.process_memory import import_torch, prepare_threads
    from hetero_worker.process.rank import main, preload

    prepare_threads(1)  # else the libraries would start threads, one for each of the machine's cores
    import_torch()
    preload()
    gc.freeze()  # collecting would write to imported objects, and each rank would get its own copy of their pages
    serve(main, orders=sys.stdin, answers=sys.stdout)


if __name__ == "__main__":
    run()
