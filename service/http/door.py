"""The listening socket of a port. It counts each connection before it accepts the next one.

It adds each connection to the process's pool, and then gives the connection a protocol. So a process
opens a bounded number of file descriptors. The event loop's own servers have no such bound, because they
accept all waiting connections at once.
"""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable
from typing import Any

from fleetcast.service.http.connection_pool import ConnectionPlace, ConnectionPool
from fleetcast.service.http.tls import Tls

logger = logging.getLogger(__name__)

PAUSE_S = 0.02  # wall; until the system has a connection to give, and the pool room for one
BACKLOG = 1024
BATCH = 16  # connections accepted before those that gave way to them are closed
SHUTDOWN_S = 1.0  # wall; a TLS client's time to answer our goodbye


class Listener:
    """A listening socket that accepts and counts connections.

    `make` returns the protocol of a connection. `dropped` is called for each connection that fails its TLS
    handshake. A connection holds its places during the handshake, for at most `header_timeout_s`. `files`:
    the number of file descriptors that a connection needs.
    """

    def __init__(
        self,
        sock: socket.socket,
        pool: ConnectionPool,
        make: Callable[[ConnectionPlace], asyncio.Protocol],
        tls: Tls | None = None,
        dropped: Callable[[], None] = lambda: None,
        files: int = 1,
    ) -> None:
        self._sock, self._pool, self._make, self._tls = sock, pool, make, tls
        self._dropped, self._files = dropped, files
        self._is_open = False
        self._arriving: dict[asyncio.Task[None], socket.socket] = {}

    def open(self) -> None:
        """Begin to accept connections."""
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._is_open = True
        self._resume_accepting()

    async def close(self) -> None:
        """Stop accepting connections, and end the TLS handshakes in progress."""
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._sock)
        for connection in self._arriving.values():  # its task then ends by itself; cancelled, it would leave it open
            _shut_down_socket(connection)
        await asyncio.gather(*self._arriving, return_exceptions=True)

    def _resume_accepting(self) -> None:
        if self._is_open:
            asyncio.get_running_loop().add_reader(self._sock, self._accept_connections)

    def _pause_accepting(self) -> None:
        """Leave new connections in the backlog for a moment."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.call_later(PAUSE_S, self._resume_accepting)

    def _accept_connections(self) -> None:
        for _ in range(BATCH):
            if not self._pool.is_ready_for_connection(self._files):
                self._pause_accepting()
                return
            try:
                connection, peer = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the client has gone already, or no descriptor is left
                logger.debug("no connection accepted: %s", error)
                self._pause_accepting()
                return
            connection.setblocking(False)
            place = self._pool.add_connection(
                str(peer[0]), functools.partial(_shut_down_socket, connection), self._files
            )
            task = asyncio.ensure_future(self._hand_over_connection(connection, place))
            self._arriving[task] = connection
            task.add_done_callback(self._arriving.pop)

    async def _hand_over_connection(self, connection: socket.socket, place: ConnectionPlace) -> None:
        secure: dict[str, Any] = {}
        if self._tls is not None:
            secure = {
                "ssl": self._tls.context,
                "ssl_handshake_timeout": self._pool.limits.header_timeout_s,
                "ssl_shutdown_timeout": SHUTDOWN_S,
            }
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self._make(place), connection, **secure)
        except OSError as error:  # no TLS, a version or certificate that is not accepted, too slow, or gone
            logger.debug("no TLS with a client: %s", error)
            self._dropped()
            self._pool.remove_connection(place)
            connection.close()


def _shut_down_socket(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
