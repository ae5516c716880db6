"""AdapterRegistry: the LoRA adapters of a group, by the names that requests ask for.

It knows more adapters than ranks have memory for. One that is loaded has a number, by which plans name it; one that is
not gets one when a request asks for it, if need be that of the adapter that was used least recently. Requests that were
accepted keep theirs: it neither gives way nor can it be unloaded before they have ended. Its salt keeps its prefix
cache apart from that of every other adapter, also from that of an earlier one of the same name. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from hetero_api.spec import AdaptersSpec
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.group.errors import InvalidCommand, WrongState

MAX_NAME_CHARS: Final = 256
MAX_KNOWN: Final = 1024
"""Most adapters that a group knows, loaded or not."""
SETTLED_S: Final = 1.0
"""Seconds for which an adapter that a request asked for does not give way: until the request is accepted, and longer,
so that adapters that are asked for by turns are not loaded for every request.
"""
_SALT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that a group knows."""

    name: str
    number: int
    """Number on the ranks; 0: it is not loaded."""
    directory: str
    root: str
    salt: str

    def command(self) -> ranks_pb2.GroupCommand:
        """Return the command that has ranks load it."""
        order = ranks_pb2.LoadAdapter(number=self.number, directory=self.directory, root=self.root)
        return ranks_pb2.GroupCommand(load_adapter=order)


class AdapterRegistry:
    """Adapters of one group."""

    def __init__(
        self, spec: AdaptersSpec, *, taken: Collection[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`taken`: names of the model itself. Raises InvalidCommand if the resource names an adapter so."""
        self._spec = spec
        self._taken = frozenset(taken)
        self._clock = clock
        self._adapters: dict[str, Adapter] = {}
        """By name, the least recently used first."""
        self._asked_s: dict[str, float] = {}
        self._in_use: dict[int, int] = {}
        self._changed = asyncio.Event()
        for number, each in enumerate(spec.load, 1):
            assert each.directory is not None, "whoever read the resource has put directories in place of URIs"
            self.place(self.new(each.name, each.directory), number)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(sorted(self._adapters.values(), key=lambda each: each.name))

    @property
    def loaded(self) -> list[Adapter]:
        """Adapters that are on the ranks, by number."""
        return sorted((each for each in self._adapters.values() if each.number), key=lambda each: each.number)

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of this name; None if it is not known."""
        return self._adapters.get(name)

    def serves(self, asked: GenerationRequest) -> bool:
        """Return whether the adapter that a request was read for is loaded still."""
        salt = asked.cache_salt
        return any(each.number == asked.adapter and salt.startswith(each.salt) for each in self._adapters.values())

    def new(self, name: str, directory: str) -> Adapter:
        """Return an adapter that may be loaded. Raises InvalidCommand and WrongState."""
        if not self._spec.max_loaded or not self._spec.roots:
            raise WrongState(
                "this group loads no adapters: set spec.engine.adapters.maxLoaded, and roots to the folders that they "
                "may lie in"
            )
        if name in self._taken:
            raise InvalidCommand("name", "is the model's own name")
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise InvalidCommand("name", f"must have 1 to {MAX_NAME_CHARS} printable characters")
        if name in self._adapters:
            raise WrongState(f"name: {name!r} is loaded already; unload it first")
        root = self._spec.root_of(directory)
        if root is None:
            raise InvalidCommand(
                "directory", f"must lie in one of spec.engine.adapters.roots ({', '.join(self._spec.roots)})"
            )
        if len(self._adapters) >= MAX_KNOWN:
            raise WrongState(f"{MAX_KNOWN} adapters are known already; unload one first")
        return Adapter(name, 0, directory, root, secrets.token_hex(_SALT_BYTES))

    def room(self) -> tuple[int, Adapter | None] | None:
        """Return a number to load an adapter under and the adapter that has to give way; None: all are in use."""
        loaded = {each.number: each for each in self._adapters.values() if each.number}
        for number in range(1, self._spec.max_loaded + 1):
            if number not in loaded:
                return number, None
        settled_s = self._clock() - SETTLED_S
        for each in loaded.values():
            if not self._in_use.get(each.number) and self._asked_s.get(each.name, -math.inf) <= settled_s:
                return each.number, each
        return None

    def note_change(self) -> None:
        """Wake those that wait for room: there may be some."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_room(self, timeout_s: float) -> None:
        """Return when there may be room, or that which a load waits for may have changed, or it is over anyway."""
        unused = (each for each in self._adapters.values() if each.number and not self._in_use.get(each.number))
        left = (self._asked_s.get(each.name, -math.inf) + SETTLED_S - self._clock() for each in unused)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), min([timeout_s, *(each for each in left if each > 0)]))

    def room_or_refuse(self) -> tuple[int, Adapter | None]:
        """As `room`. Raises WrongState where there is none."""
        room = self.room()
        if room is None:
            raise WrongState("requests use as many adapters as spec.engine.adapters.maxLoaded allows; try again later")
        return room

    def place(self, adapter: Adapter, number: int) -> None:
        """Note the number that an adapter is loaded under from now on; 0: it is loaded no more."""
        self._adapters.pop(adapter.name, None)
        self._adapters[adapter.name] = replace(adapter, number=number)
        self.note_change()

    def ask(self, adapter: Adapter) -> None:
        """Note that a request asks for a loaded adapter."""
        self._asked_s[adapter.name] = self._clock()
        self.place(adapter, adapter.number)

    def remove(self, name: str) -> Adapter:
        """Forget an adapter: no request may ask for it any more. Raises WrongState."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise WrongState(f"name: {name!r} is not loaded")
        if adapter.number and (number := self._in_use.get(adapter.number, 0)):
            raise WrongState(f"name: {number} requests use {name!r}; try again when they have ended, or abort them")
        self._asked_s.pop(name, None)
        self.note_change()
        return self._adapters.pop(name)

    def begin(self, number: int) -> Callable[[], None]:
        """Count a request of an adapter; return a function that is to be called at its end."""
        self._in_use[number] = self._in_use.get(number, 0) + 1

        def end() -> None:
            self._in_use[number] -= 1
            self.note_change()

        return end

    def list(self) -> admin_pb2.ListAdaptersResponse:
        """Return what is known."""
        return admin_pb2.ListAdaptersResponse(
            adapters=[
                admin_pb2.LoadedAdapter(
                    name=each.name,
                    directory=each.directory,
                    requests=self._in_use.get(each.number, 0) if each.number else 0,
                )
                for each in self
            ]
        )
