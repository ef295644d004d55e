"""Connections to the gRPC port. They are accepted within the limits of the process, and then relayed.

The gRPC library accepts connections in its own threads. It has no limit for each address and ignores the
limits of all other connections. So its server listens on a socket file in the state folder, which no
other user can reach. We accept the connections, end their TLS, and relay their bytes unchanged. Our end
of each relayed connection has a name, which the server sees as its peer. With that name, an RPC finds
the connection, the address and the certificate of its caller.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from fleetcast.service.http.access import CHALLENGE, Refusal
from fleetcast.service.http.certificates import ClientCertificate, read_client_certificate
from fleetcast.service.http.connection_pool import ConnectionPlace, ConnectionPool

FILES = 3  # descriptors of a connection: its own, and both ends of the way to the gRPC server
SETTINGS, GOAWAY, ENHANCE_YOUR_CALM = 4, 7, 11  # RFC 9113


class GrpcConnections:
    """The open gRPC connections, by the peer name that the gRPC server sees.

    `refused` is called with the status of each refusal.
    """

    def __init__(self, folder: Path, port: int, pool: ConnectionPool, refused: Callable[[int], None]) -> None:
        self.pool, self.refused = pool, refused
        self._name = f"grpc-{port}.sock"  # several apis may share a folder
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.path = f"/proc/self/fd/{self._folder}/{self._name}"  # short: the name of a socket has at most 107 bytes
        self.target = f"unix:{self.path}"
        self._by_peer: dict[str, GrpcConnection] = {}
        self._remove_socket_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._remove_socket_file()
        os.close(self._folder)

    def _remove_socket_file(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)

    def make_connection(self, place: ConnectionPlace) -> "GrpcConnection":
        return GrpcConnection(self, place)

    def add_connection(self, peer: str, connection: "GrpcConnection") -> None:
        self._by_peer[peer] = connection

    def remove_connection(self, peer: str) -> None:
        self._by_peer.pop(peer, None)

    def find_connection(self, peer: str) -> "GrpcConnection":
        """Return the connection that an RPC came through.

        Raises Refusal if the RPC did not come through the gRPC port, or if the connection has closed.
        """
        connection = self._by_peer.get(peer)
        if connection is None:
            raise Refusal("missing", 401, "unauthorized", "the call did not come by api.grpc_port", CHALLENGE)
        return connection


class GrpcConnection(asyncio.Protocol):
    """A caller's connection. Its bytes are relayed to the gRPC server and back."""

    def __init__(self, connections: GrpcConnections, place: ConnectionPlace) -> None:
        self._connections, self._place = connections, place
        self._calls = 0
        self._peer = ""
        self._early = bytearray()  # came before the way to the server was open
        self._server: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None
        self._certificate: ClientCertificate | None = None
        self.host = ""

    def list_certificate_names(self) -> tuple[str, ...]:
        """Return the names on the caller's certificate. Returns () without a valid certificate."""
        return self._certificate.list_valid_names() if self._certificate is not None else ()

    def __enter__(self) -> None:
        """Begin a call. The connection keeps its places until the call has ended."""
        self._calls += 1
        self._connections.pool.mark_working(self._place)

    def __exit__(self, *error: object) -> None:
        self._calls -= 1
        if not self._calls:
            self._connections.pool.mark_resting(self._place)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.host = str((transport.get_extra_info("peername") or ("",))[0])
        self._certificate = read_client_certificate(transport.get_extra_info("ssl_object"))
        self._place.close = transport.abort
        if not self._place.is_open:  # it gave way while it was handed over
            transport.abort()
        elif self._place.refusal:
            timeout_s = self._connections.pool.limits.header_timeout_s
            asyncio.get_running_loop().call_later(timeout_s, transport.abort)
        else:
            self._opening = asyncio.ensure_future(self._connect_to_server())

    async def _connect_to_server(self) -> None:
        """Connect to the gRPC server, and then send it the bytes that have already arrived."""
        way = socket.socket(socket.AF_UNIX)
        try:
            way.setblocking(False)
            way.bind("")  # the system chooses a name that nobody else has
            way.connect(self._connections.path)
            self._peer = "unix-abstract:" + way.getsockname()[1:].decode("ascii")
            loop = asyncio.get_running_loop()
            self._server, _ = await loop.create_unix_connection(lambda: _AnswerRelay(self.transport), sock=way)
        except OSError:
            way.close()
            self.transport.abort()
            return
        if self.transport.is_closing():
            self._server.abort()
            return
        self._connections.add_connection(self._peer, self)
        self._server.write(bytes(self._early))
        self._early.clear()
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._server is not None:
            if not self._server.is_closing():
                self._server.write(data)
        elif self._place.refusal:
            self._send_refusal()
        else:
            self._early += data
            self.transport.pause_reading()

    def _send_refusal(self) -> None:
        """Send a GOAWAY frame with the reason why no place is free, and close the connection."""
        limits = self._connections.pool.limits
        if self._place.refusal == "address":
            status, why = 429, f"{limits.max_connections_per_address:,} connections of {self._place.address} are open"
        else:
            status, why = 503, f"{limits.max_connections:,} connections are open"
        self._connections.refused(status)
        body = struct.pack(">II", 0, ENHANCE_YOUR_CALM) + f"too_many_connections: {why}".encode()
        self.transport.write(_make_frame(SETTINGS, b"") + _make_frame(GOAWAY, body))
        self.transport.close()

    def pause_writing(self) -> None:
        if self._server is not None:
            self._server.pause_reading()

    def resume_writing(self) -> None:
        if self._server is not None:
            self._server.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove_connection(self._peer)
        self._connections.pool.remove_connection(self._place)
        if self._server is not None:
            self._server.abort()


class _AnswerRelay(asyncio.Protocol):
    """The connection to the gRPC server. It relays the server's bytes to the caller."""

    def __init__(self, caller: asyncio.Transport) -> None:
        self._caller = caller

    def data_received(self, data: bytes) -> None:
        if not self._caller.is_closing():
            self._caller.write(data)

    def pause_writing(self) -> None:
        self._caller.pause_reading()

    def resume_writing(self) -> None:
        self._caller.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._caller.close()


def _make_frame(kind: int, body: bytes) -> bytes:
    """Encode an HTTP/2 frame of stream 0, which concerns the whole connection (RFC 9113, 4.1)."""
    return len(body).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + body
