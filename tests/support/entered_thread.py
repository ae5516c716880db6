"""Work on a thread of its own, while a context is entered."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self


class EnteredThread:
    """Runs `_work` on a thread while entered, until `_leaving` is set."""

    def __init__(self) -> None:
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._work, name=type(self).__name__, daemon=True)

    def _work(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        self._thread.join()
