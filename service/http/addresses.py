"""Addresses of clients: which addresses count as one client, and which are trusted."""

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

from fleetcast.fleet.errors import ConfigError

LOOPBACK = ("127.0.0.0/8", "::1")
SITE_BITS = 64  # of an IPv6 address: who has one has all of its network
NOWHERE = "unknown"


@lru_cache(maxsize=4096)
def normalise_client_address(host: str) -> str:
    """Return the address under which a client is counted. All hosts without an IP address count as one.

    >>> [normalise_client_address(peer) for peer in ("10.0.0.7", "::ffff:10.0.0.7", "2001:db8::5", "unix")]
    ['10.0.0.7', '10.0.0.7', '2001:db8::/64', 'unknown']
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return NOWHERE
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, SITE_BITS), strict=False))


class Networks:
    """A set of addresses and networks from the configuration.

    Raises ConfigError for an entry that is neither an address nor a network.
    """

    def __init__(self, names: Sequence[str], key: str = "networks") -> None:
        try:
            self._networks = tuple(ipaddress.ip_network(name) for name in names)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}; expected addresses or networks such as 10.0.0.0/8") from None
        self._has = lru_cache(maxsize=4096)(self._is_in_networks)  # each connection asks, and most callers come again

    def __contains__(self, host: str) -> bool:
        return self._has(host)

    def _is_in_networks(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._networks)
