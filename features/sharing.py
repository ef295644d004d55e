"""Detection of running attempts that hold the same hardware, by their events and the wiring of nodes.

    gpu, mig   they hold the same GPU (mig where it has MIG instances)
    pcie       their GPUs are nearest to the same adapter: one PCIe switch is above them all
    nic        both span several nodes, and GPUs of both are nearest to one adapter (if unknown: are on one node)
    rail       both span several nodes, and adapters of both meet at one leaf switch: one rail of a rail group
               (if unknown: GPUs of one index)

For each attempt, only the tightest kind counts. Only attempts that begin, end or move are evaluated.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import Device, Level, Topology

Share = Literal["gpu", "mig", "pcie", "nic", "rail"]
Attempt = tuple[str, int]
Place = tuple[Share, str, int | str | tuple[int, ...]]

LEVELS: dict[str, int] = {"gpu": 0, "mig": 0, "pcie": 1, "nic": 2, "rail": 3, "": 4}  # "": nothing is shared


@dataclass(frozen=True, slots=True)
class SharedHardware:
    """The tightest hardware that an attempt shares, and its partner.

    other: the partner, None if there are several.
    """

    share: Share
    other: Attempt | None


class Wiring:
    """The adapters and rail group of each node of a topology."""

    def __init__(self, topology: Topology | None = None) -> None:
        self._topology = topology
        self._rows = {} if topology is None else {node.name: row for row, node in enumerate(topology.nodes)}
        self._known: dict[str, tuple[tuple[Device, ...], str]] = {}

    def find_node_wiring(self, node: str) -> tuple[tuple[Device, ...], str]:
        """Return the node's adapters, and its rail group ("" if unknown)."""
        known = self._known.get(node)
        if known is None:
            row = self._rows.get(node)
            if self._topology is None or row is None:
                known = (), ""
            else:
                group = int(self._topology.domain[Level.RAIL_GROUP][row])
                names = self._topology.domain_names[Level.RAIL_GROUP]
                known = self._topology.find_devices(row), names[group] if group >= 0 else ""
            self._known[node] = known
        return known


def list_places(attempt: JobAttempt, wiring: Wiring) -> tuple[Place, ...]:
    """Return the hardware that an attempt holds and that others could share, the tightest kind first."""
    held = {(rank.node, gpu) for rank in attempt.ranks for gpu in rank.gpus}
    places = [_ for node, gpu in held for _ in _list_gpu_places(node, gpu, wiring)]
    hosts = attempt.hosts
    if len(hosts) > 1:
        places += [_ for node, gpu in held for _ in _list_network_places(node, gpu, wiring)]
        named = {node for node, _ in held}
        places += [("nic", node, "") for node in hosts if node not in named]
    return tuple(sorted(dict.fromkeys(places), key=lambda place: LEVELS[place[0]]))


def _list_gpu_places(node: str, gpu: int, wiring: Wiring) -> Iterator[Place]:
    yield "gpu", node, gpu
    for device in wiring.find_node_wiring(node)[0]:
        if gpu in device.gpus and len(device.gpus) > 1:
            yield "pcie", node, device.gpus


def _list_network_places(node: str, gpu: int, wiring: Wiring) -> Iterator[Place]:
    devices, group = wiring.find_node_wiring(node)
    near = [device for device in devices if gpu in device.gpus]
    yield from (("nic", node, device.name) for device in near)
    if not near:
        yield "nic", node, ""
    rails = {device.rail for device in near if device.rail >= 0}
    if group:
        yield from (("rail", group, rail) for rail in sorted(rails or {gpu}))


class Neighbours:
    """The hardware that running attempts share with each other. Only one task may change it."""

    def __init__(self) -> None:
        self._placed: dict[Attempt, tuple[tuple[RankPlacement, ...], tuple[str, ...], tuple[Place, ...]]] = {}
        self._holders: dict[Place, dict[Attempt, None]] = {}
        self._wiring: Wiring | None = None
        self._divided: frozenset[str] = frozenset()
        self._met: dict[Attempt, SharedHardware] = {}
        self._places: RunningPlaces | None = None

    def observe(
        self,
        running: Sequence[JobAttempt],
        divided: Collection[str],
        wiring: Wiring,
        places: RunningPlaces | None = None,
    ) -> Mapping[Attempt, SharedHardware]:
        """Return attempt → the hardware that it shares now, and its partner. Other attempts have no entry.

        divided: GPUs (`node/index`) with MIG instances. places: the places of `running`, the same object
        until an attempt moves.
        """
        if wiring is not self._wiring or set(divided) != self._divided:
            self._placed, self._holders, self._met = {}, {}, {}
            self._divided = frozenset(divided)
        elif places is not None and places is self._places:
            return self._met
        self._wiring = None  # after an error, the next call begins anew
        rows = {(row.job, row.attempt): row for row in running}
        touched: set[Attempt] = set()
        for key in [key for key in self._placed if key not in rows]:
            self._remove_attempt(key, touched)
        for key, row in rows.items():
            placed = self._placed.get(key)
            if placed is None or placed[0] is not row.ranks or placed[1] is not row.nodes:
                if placed is not None:
                    self._remove_attempt(key, touched)
                self._add_attempt(key, row, wiring, touched)
        self._update_companies(key for key in touched if key in self._placed)
        self._wiring, self._places = wiring, places
        return self._met

    def _add_attempt(self, key: Attempt, row: JobAttempt, wiring: Wiring, touched: set[Attempt]) -> None:
        places = list_places(row, wiring)
        self._placed[key] = row.ranks, row.nodes, places
        for place in places:
            held = self._holders.setdefault(place, {})
            if len(held) <= 2:  # beyond that each of them has several neighbours there, and goes on having them
                touched.update(held)
            held[key] = None
        touched.add(key)

    def _remove_attempt(self, key: Attempt, touched: set[Attempt]) -> None:
        self._met.pop(key, None)
        for place in self._placed.pop(key)[2]:
            held = self._holders[place]
            del held[key]
            if len(held) <= 2:
                touched.update(held)
            if not held:
                del self._holders[place]

    def _update_companies(self, keys: Iterable[Attempt]) -> None:
        for key in keys:
            found = self._find_tightest_share(key)
            if found is None:
                self._met.pop(key, None)
            elif self._met.get(key) != found:
                self._met[key] = found

    def _find_tightest_share(self, key: Attempt) -> SharedHardware | None:
        share: Share | None = None
        others: set[Attempt] = set()
        for place in self._placed[key][2]:
            if share is not None and LEVELS[place[0]] > LEVELS[share]:
                break
            held = self._holders[place]
            if len(held) > 1:
                if share is None or share == "gpu":
                    share = "mig" if place[0] == "gpu" and f"{place[1]}/{place[2]}" in self._divided else place[0]
                others.update(islice(held, 3))
        others.discard(key)
        return None if share is None else SharedHardware(share, next(iter(others)) if len(others) == 1 else None)
