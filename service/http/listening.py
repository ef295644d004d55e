"""Binding of a server's listening socket."""

import socket

from fleetcast.fleet.errors import ConfigError


def bind_socket(host: str, port: int, keys: str) -> socket.socket:
    """Bind a socket to an address.

    Raises ConfigError if the address is unavailable. The error names the configuration keys.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        why = error.strerror or str(error)
        raise ConfigError(f"{keys} = {host}:{port}: cannot listen there ({why}): set another") from None
    return sock
