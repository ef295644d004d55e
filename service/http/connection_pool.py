"""The open connections of a process, over all of its listeners, and the file descriptors that they may use.

Every listener adds its connections to the pool. A connection holds one place for each file descriptor
that it uses.

    silent    has not yet sent a whole request      the oldest one is closed first for a new connection
    resting   its last request has been answered    closed for a new one when no connection is silent
    working   a request is in progress              never closed for a new one
    refused   no place was left                     waits to be refused in its own protocol; the oldest
                                                    is closed for a new one

The pool closes no connection within its first `GRACE_S`, the time to send a request. Until then, new
connections wait in the backlog of their listener. So connections that send no request cannot keep other
clients out.
"""

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from fleetcast.fleet.errors import ConfigError
from fleetcast.service.http.addresses import LOOPBACK, Networks, normalise_client_address

logger = logging.getLogger(__name__)

RESERVED_FILES = 256  # descriptors for everything else: board, inbox, ledger, log, archive and the link to the placer
MIN_RESERVED_FILES = 160  # the link alone may open 100
MIN_PLACES = 32
GRACE_S = 0.25  # wall
DISPLACED = "displaced"
Refusal = Literal["", "address", "process"]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits on a process's connections. `trusted` addresses have no limit per address."""

    max_connections: int = 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    max_connections_per_address: int = 256
    trusted: Networks = field(default_factory=lambda: Networks(LOOPBACK))
    max_refused: int = 256  # connections without a place that wait to be refused


@dataclass(slots=True, eq=False)
class ConnectionPlace:
    """A connection's entry in the pool. The pool calls `close` to end the connection at once.

    The protocol of the connection may replace `close`.
    """

    address: str  # empty if the address has no limit
    files: int
    close: Callable[[], None]
    refusal: Refusal = ""
    is_open: bool = True
    since: float = field(default_factory=time.monotonic)  # it is silent, resting or refused


class ConnectionPool:
    """The pool of places for the connections of one process.

    `count` is called with a label for each connection that is closed to make room for another one.
    """

    def __init__(self, limits: ConnectionLimits, count: Callable[[str], None] = lambda reason: None) -> None:
        self.limits = limits
        self.used = 0
        self._count = count
        self._of_address = Counter[str]()
        self._silent: dict[ConnectionPlace, None] = {}
        self._resting: dict[ConnectionPlace, None] = {}
        self._refused: dict[ConnectionPlace, None] = {}

    def is_ready_for_connection(self, files: int = 1) -> bool:
        """Return whether a new connection can be accepted now.

        If so, the new connection finds room or is refused, and the pool closes no connection within its grace
        time.
        """
        if self.used + files <= self.limits.max_connections:
            return True
        if self._silent or self._resting:
            return _is_grace_over(self._silent) or _is_grace_over(self._resting)
        return len(self._refused) < self.limits.max_refused or _is_grace_over(self._refused)

    def add_connection(self, host: str, close: Callable[[], None], files: int = 1) -> ConnectionPlace:
        """Add a new connection to the pool, and return its place.

        If there is no room, the place has a `refusal`, which the connection's protocol must send.
        """
        address = normalise_client_address(host) if host and host not in self.limits.trusted else ""
        place = ConnectionPlace(address, files, close)
        place.refusal = self._make_room(place)
        if place.refusal:
            if len(self._refused) >= self.limits.max_refused:
                self._displace_oldest(self._refused)
            self._refused[place] = None
        else:
            self.used += files
            self._of_address[address] += files
            self._silent[place] = None
        return place

    def mark_working(self, place: ConnectionPlace) -> None:
        """Record that a request is in progress, so that the connection keeps its places."""
        self._silent.pop(place, None)
        self._resting.pop(place, None)

    def mark_resting(self, place: ConnectionPlace) -> None:
        """Record that all requests of the connection have been answered."""
        self.mark_working(place)
        if place.is_open and not place.refusal:
            place.since = time.monotonic()
            self._resting[place] = None

    def remove_connection(self, place: ConnectionPlace) -> None:
        """Free the places of a connection that has ended. A second call changes nothing."""
        if not place.is_open:
            return
        place.is_open = False
        self.mark_working(place)
        if place.refusal:
            self._refused.pop(place, None)
            return
        self.used -= place.files
        self._of_address[place.address] -= place.files
        if not self._of_address[place.address]:
            del self._of_address[place.address]

    def _make_room(self, place: ConnectionPlace) -> Refusal:
        limits = self.limits
        if place.address and self._of_address[place.address] + place.files > limits.max_connections_per_address:
            return "address"
        while self.used + place.files > limits.max_connections:
            idle = [places for places in (self._silent, self._resting) if places]
            if not idle:
                return "process"
            self._displace_oldest(next(filter(_is_grace_over, idle), idle[0]))
        return ""

    def _displace_oldest(self, places: dict[ConnectionPlace, None]) -> None:
        """Close the connection that has been in `places` for the longest time."""
        place = next(iter(places))
        self.remove_connection(place)
        self._count(DISPLACED)
        place.close()


def _is_grace_over(places: dict[ConnectionPlace, None]) -> bool:
    """Return whether the grace time of the oldest connection in `places` is over."""
    return bool(places) and time.monotonic() - next(iter(places)).since >= GRACE_S


def fit_limits_to_files(limits: ConnectionLimits, key: str = "api.max_connections") -> ConnectionLimits:
    """Raise the soft limit of open files as far as needed and allowed, and return limits that fit into it.

    Raises ConfigError if the system allows too few files to serve any client.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + limits.max_refused + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    room = soft - max(MIN_RESERVED_FILES, min(RESERVED_FILES, soft // 2))
    if room < MIN_PLACES:
        raise ConfigError(
            f"ulimit -n is {soft}: at least {MIN_RESERVED_FILES + MIN_PLACES} are needed, and {wanted} for "
            f"{key} = {limits.max_connections}: raise it (systemd: LimitNOFILE)"
        )
    max_refused = min(limits.max_refused, room // 4)
    fitted = replace(limits, max_connections=min(limits.max_connections, room - max_refused), max_refused=max_refused)
    logger.warning(
        "ulimit -n is %d: at most %d connections are open at once instead of %s = %d, which needs %d",
        *(soft, fitted.max_connections, key, limits.max_connections, wanted),
    )
    return fitted
