"""A Service of TCP in front of several servers: each connection goes to the next one that takes it."""

import contextlib
import itertools
import socket
import threading


class Relay:
    """Listens on loopback from construction to `close`, on a port of its own if none is given."""

    def __init__(self, behind: list[int], port: int = 0) -> None:
        self._next = itertools.cycle(range(len(behind)))
        self._behind = behind
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                here, _ = self._socket.accept()
                threading.Thread(target=self._join, args=(here,), daemon=True).start()

    def _join(self, here: socket.socket) -> None:
        first = next(self._next)
        with here:
            for port in self._behind[first:] + self._behind[:first]:
                try:
                    there = socket.create_connection(("127.0.0.1", port), 10)
                except OSError:
                    continue
                with there:
                    there.settimeout(None)
                    back = threading.Thread(target=_pass, args=(there, here), daemon=True)
                    back.start()
                    _pass(here, there)
                    back.join()
                return

    def close(self) -> None:
        self._socket.close()


def _pass(source: socket.socket, sink: socket.socket) -> None:
    """Until one of them ends; then both do."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
