"""A relay to a port of this machine that keeps what passes: what a listener on the network would have read."""

from __future__ import annotations

import asyncio


class Wire:
    """A relay to a port, which keeps what passes in either direction."""

    def __init__(self, address: str) -> None:
        self.seen = bytearray()
        self._port = int(address.rpartition(":")[2])
        self._relays: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ways = ((reader, far_writer), (far_reader, writer))
        self._relays += [asyncio.create_task(self._relay(*way)) for way in ways]

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.seen += data
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
