"""The door of a TLS server: accepts connections, shakes hands in the newest context, hands them to the protocol.

A connection in its handshake counts against the limits, of its address and of all, and has `header_timeout_s`. Those
above are dropped: there is no way yet to tell them anything.
"""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable

from service.http.addresses import counted_as
from service.http.connections import ConnectionLimits, LimitedServer
from service.http.tls import Tls

logger = logging.getLogger(__name__)

PAUSE_S = 0.1  # wall; when the system has no connection to give
BACKLOG = 1024


class TlsDoor:
    """`dropped` hears of each connection that was not let in."""

    def __init__(self, server: LimitedServer, tls: Tls, limits: ConnectionLimits, dropped: Callable[[], None]) -> None:
        self._server = server
        self._tls = tls
        self._limits = limits
        self._dropped = dropped
        self._greeting: dict[
            asyncio.Task[None], tuple[str, socket.socket]
        ] = {}  # with the address that each counts with
        self._of_address: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def open(self, sock: socket.socket) -> AsyncIterator[None]:
        """Take connections meanwhile."""
        sock.setblocking(False)
        sock.listen(BACKLOG)
        work = asyncio.ensure_future(self._take_forever(sock))
        try:
            yield
        finally:
            work.cancel()
            for (
                _,
                connection,
            ) in self._greeting.values():  # what greets then ends by itself; cancelled, it would stay open
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            await asyncio.gather(work, *self._greeting, return_exceptions=True)

    async def _take_forever(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while not self._server.started:
            await asyncio.sleep(0.01)
        while not self._server.should_exit:
            try:
                connection, peer = await loop.sock_accept(sock)
            except OSError as error:  # it was gone already, or there are too many open files
                logger.debug("no connection taken: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            self._take(connection, str(peer[0]))

    def _take(self, connection: socket.socket, host: str) -> None:
        address = "" if host in self._limits.trusted else counted_as(host)
        crowded = address and self._of_address[address] >= self._limits.max_connections_per_address
        if crowded or len(self._greeting) >= self._limits.max_connections:
            self._dropped()
            connection.close()
            return
        task = asyncio.ensure_future(self._greet(connection))
        self._greeting[task] = address, connection
        self._of_address[address] += 1
        task.add_done_callback(self._greeted)

    def _greeted(self, task: "asyncio.Task[None]") -> None:
        address, _ = self._greeting.pop(task)
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]

    async def _greet(self, connection: socket.socket) -> None:
        loop, server = asyncio.get_running_loop(), self._server
        state = {"server_state": server.server_state, "app_state": server.lifespan.state, "_loop": loop}
        try:
            await loop.connect_accepted_socket(
                lambda: server.config.http_protocol_class(config=server.config, **state),  # type: ignore[call-arg]
                connection,
                ssl=self._tls.context,
                ssl_handshake_timeout=self._limits.header_timeout_s,
            )
        except OSError as error:  # no TLS, a version or a certificate that is not taken, too slow, or gone
            logger.debug("no TLS with a client: %s", error)
            self._dropped()
            connection.close()
