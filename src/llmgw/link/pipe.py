"""A TLS connection that many bytes come over, for whoever hands them on while others wait for the same thread."""

from __future__ import annotations

import os
import ssl

import trio

# Decrypted and handed on at once: a tenth of a millisecond of everybody's time, or two.
CHUNK_BYTES = 64 * 1024


class Pipe(trio.abc.Stream):
    """Tells waiting for bytes from reading them: what reads does not wait, and can be done when it is its turn."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        """``stream`` has done its handshake, with a context of the link's (``Context``)."""
        self._stream = stream
        self._spoken: ssl.SSLObject = stream.getpeercert.__self__
        self._incoming: ssl.MemoryBIO = vars(self._spoken)["bios"][0]
        self._socket = stream.transport_stream.socket

    async def wait_ready(self) -> None:
        """Until ``read`` is worth a try. Raises trio's errors of a stream that is broken, or was closed."""
        if self._is_filled:
            await trio.lowlevel.checkpoint()
        elif self._socket.fileno() < 0:
            raise trio.ClosedResourceError
        else:
            await trio.lowlevel.wait_readable(self._socket)

    def read(self, most: int = CHUNK_BYTES) -> bytes | None:
        """What has come, so much of it at most; empty at the end, be it with a goodbye or without, and None where there
        is nothing yet. Raises trio's errors of a stream that is broken, or was closed."""
        if not self._is_filled and not self._fill(most):
            return None
        parts: list[bytes] = []
        left = most
        while left > 0 and self._is_filled:
            try:
                part = self._spoken.read(left)
            except ssl.SSLWantReadError:
                break
            except (ssl.SSLEOFError, ssl.SSLSyscallError):
                part = b""
            except ssl.SSLError as error:
                raise trio.BrokenResourceError from error
            if not part:
                # (after what came before it: the next read finds the end again)
                return b"".join(parts)
            parts.append(part)
            left -= len(part)
        return b"".join(parts) or None

    @property
    def _is_filled(self) -> bool:
        incoming = self._incoming
        return bool(incoming.pending or incoming.eof or self._spoken.pending())

    def _fill(self, most: int) -> bool:
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise trio.ClosedResourceError
        try:
            data = os.read(descriptor, most)
        except BlockingIOError:
            return False
        except OSError as error:
            raise trio.BrokenResourceError from error
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        return True

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while True:
            await self.wait_ready()
            data = self.read(max_bytes or CHUNK_BYTES)
            if data is not None:
                return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def close(self) -> None:
        """Cut it: whoever waits for it is told so."""
        self._socket.close()
