"""Detectors of port rules: one function for each rule, over all ports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.topology import Topology
from fleetcast.models.peers import compute_p90
from fleetcast.models.risk.detectors import Detection, FeatureColumns, register_detector
from fleetcast.models.risk.learned import LearnedState
from fleetcast.models.risk.port_peers import PortPeers
from fleetcast.models.risk.signals import Array, Mask

ACTIVE = 4  # port state
DISABLED = 3  # physical state
SYMBOL_ERRORS_10M = 120
SYMBOLS_FEW_10M, SYMBOLS_TIMES = 5, 3.0  # above what nine of ten ports of the fleet have
ACK_TIMEOUTS = 10  # in ten minutes: each is a packet that nobody answered for, on a path that loses none


class PortLinks(LearnedState):
    """The known past of each port's link.

    was_up: (port,) whether the link was ever active. was_speed: (port,) the link's best speed so far in bytes/s.
    """

    arrays = ("was_up", "was_speed")

    def __init__(self) -> None:
        self.was_up, self.was_speed = np.zeros(0, bool), np.zeros(0)
        self._peers: PortPeers | None = None  # made anew when it does not fit, so no snapshot keeps it

    def record_links(self, up: Mask, speed: Array) -> None:
        """Record the present state of the links.

        up: (port,) whether the link is active. speed: (port,) bytes/s. There may be more ports than before.
        """
        more = len(up) - len(self.was_up)
        self.was_up = np.pad(self.was_up, (0, more)) | up
        self.was_speed = np.fmax(np.pad(self.was_speed, (0, more), constant_values=np.nan), speed)

    def find_peers(
        self, names: Sequence[str], node: NDArray[np.int32], topology: Topology, layers: Mapping[str, str]
    ) -> PortPeers:
        """Return the groups of peers of the ports, as `PortPeers.from_ports` builds them.

        names: "node/device/port" of each port. node: (port,) rows of the topology. layers: port → its link layer.
        """
        self._peers = PortPeers.from_ports(names, node, topology, self._peers, layers)
        return self._peers


@dataclass(frozen=True, slots=True)
class PortView:
    """The features of all ports, and the values derived from them that several rules need."""

    columns: FeatureColumns
    was_up: Mask  # a port that was never up is not cabled
    best: Array  # bytes/s that it should run at
    flaps: Array

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    @classmethod
    def from_columns(cls, port: FeatureColumns, links: PortLinks, peers: PortPeers) -> "PortView":
        """Build the view of the ports. Updates `links`."""
        speed, stated = port["speed_bytes_per_s"], port["max_speed_bytes_per_s"]
        links.record_links(port["state"] == ACTIVE, speed)
        was_up, was_speed = links.was_up, links.was_speed
        own = np.fmax(stated, was_speed)
        best = np.fmax(own, peers.estimate_speed(np.where(was_up, own, np.nan)))
        return cls(port, was_up, best, np.fmax(port["link_downed_count_30m"], port["link_recoveries_count_30m"]))


@register_detector("link_down")
def detect_link_down(view: PortView) -> Detection:
    """Detect a port that was up and is down now. A port that its administrator disabled does not count."""
    state = view["state"]
    on = np.isfinite(state) & (state != ACTIVE) & view.was_up & ~(view["physical_state"] == DISABLED)
    return Detection.make_detection(on, state, float(ACTIVE), since=view.columns.changed_ms("state"))


@register_detector("link_flap")
def detect_link_flap(view: PortView) -> Detection:
    return Detection.make_detection(view.flaps >= 1, view.flaps, np.nan, 0.4 + 0.1 * view.flaps)


@register_detector("link_errors")
def detect_link_errors(view: PortView) -> Detection:
    symbols = view["symbol_errors_count_10m"]
    return Detection.make_detection(symbols >= SYMBOL_ERRORS_10M, symbols, np.nan, np.log10(np.fmax(symbols, 1)) / 5)


@register_detector("link_errors_few")
def detect_few_link_errors(view: PortView) -> Detection:
    """Detect some symbol errors on a link that stays up, in a fleet whose other ports have hardly any.

    There are too few errors for the rule `link_errors`.
    """
    few, late = view["symbol_errors_count_30m"], view["symbol_errors_count_10m"]
    usual = compute_p90(few)
    on = (late >= SYMBOLS_FEW_10M) & (late < SYMBOL_ERRORS_10M) & (few > SYMBOLS_TIMES * usual) & ~(view.flaps >= 1)
    return Detection.make_detection(on, few, usual, 0.2 + np.log10(np.fmax(few, 1)) / 4)


@register_detector("link_speed")
def detect_slow_link(view: PortView) -> Detection:
    speed = view["speed_bytes_per_s"]
    on = (speed > 0) & (speed < 0.95 * view.best) & (view["state"] == ACTIVE)
    return Detection.make_detection(on, speed, view.best, 1.2 - speed / view.best)


@register_detector("link_timeouts")
def detect_link_timeouts(view: PortView) -> Detection:
    timeouts = view["ack_timeouts_count_10m"]
    return Detection.make_detection(timeouts >= ACK_TIMEOUTS, timeouts, np.nan, np.log10(np.fmax(timeouts, 1)) / 4)
