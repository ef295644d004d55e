"""Names of machines, found from pages of GPUs. Names repeat and change, but a board's UUID does neither.

    generic label           localhost, an exporter's pod, a container id: the target's own name counts
    one name, two machines  two live targets name different boards in one slot, or kernels that started at different
                            times: each gets its target's name. Boards without UUID: see `MachineNames`
    two names, one machine  two live targets name the same board: the first name counts for both
    renamed machine         a board appears under another name: its old slot is emptied

A target is live while its last page is younger than LIVE_MS. A name that the configuration fixes never
changes.
"""

import logging
import re
from collections import Counter
from dataclasses import dataclass, field

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.board_readings import (
    BoardReadings,
    have_different_memory_use,
    have_same_boards,
    parse_board_readings,
)
from fleetcast.ingest.node_names import find_known_name, find_or_register_node

logger = logging.getLogger(__name__)

LIVE_MS = 60_000
SAME_BOOT_S = 60.0  # a clock that is corrected moves the time at which the kernel says that it started
MOST_SHARING = 8  # targets of one name whose boards have no UUIDs
MOST_LISTED = 16  # nodes of one target that no bound applies to; a host's exporter names one
MOST_NAMES = 3  # one after the other of one machine: its label, its target's host, its target's address
_LOCAL = re.compile(
    r"(localhost|ip6-localhost|ip6-loopback)\d?(\.local(domain\d?)?)?|127(\.\d+){3}|::1|0\.0\.0\.0"
    r"|\(?none\)?|null|unknown|n/a|undefined",
    re.IGNORECASE,
)
_POD = re.compile(
    r"(.*[-.])?(exporter|dcgm|metrics|monitoring|telemetry|collector|agent)([-.].*)?-[bcdfghjklmnpqrstvwxz2456789]{5}"
)
_CONTAINER = re.compile(r"(?=.*[a-f])(?=.*\d)([0-9a-f]{12}|[0-9a-f]{64})")
_SERVICE = re.compile(r"[^.:]*(exporter|dcgm)[^.:]*")


@dataclass(slots=True)
class Target:
    """The exporter or sender that delivers pages or samples.

    `node`: the node of series that name no node, or of all series if `fixed`. `address`: host:port of
    its process. own: the target's name before a page gave it another one. renamed: label → the node
    that this label means on the target's pages. last_page_ms: the time of its last page, 0 if it has sent
    none. pages: the number of decoded pages, 0 if samples arrive without pages. named: node → the time
    of the first page with one of its boards. forgets: whether the decoder must resolve all series
    again. whole_page: the number of the last page for which the decoder did so. whole_since: the number of
    the first page of an unbroken run of such pages. unproven: node → those of its GPUs that the pages list
    without a UUID. readings: the readings of the last page, while it is in doubt which machine has
    these GPUs. is_listed: the operator lists the target, so names on its pages are exempt from the limit of
    nodes. listed: the exempt names.
    """

    node: str
    fixed: bool = False
    address: str = ""
    own: str = ""
    renamed: dict[str, str] = field(default_factory=dict)
    last_page_ms: int = 0
    pages: int = 0
    named: dict[str, int] = field(default_factory=dict)
    forgets: bool = False
    whole_page: int = 0
    whole_since: int = 0
    unproven: dict[str, set[int]] = field(default_factory=dict)
    readings: BoardReadings = field(default_factory=BoardReadings)
    is_listed: bool = False
    listed: set[str] = field(default_factory=set)

    def register_node_name(self, name: str, entities: Entities) -> str:
        """Return the fleet's name for a node on this target's pages (`find_or_register_node`). Raises RecordError."""
        is_listed = self.is_listed and (name in self.listed or len(self.listed) < MOST_LISTED)
        found = find_or_register_node(name, entities, is_listed=is_listed)
        if is_listed:
            self.listed.add(name)
        return found

    def record_full_resolution(self) -> None:
        """Record that the decoder resolves all series of this page again."""
        if self.whole_page < self.pages - 1:
            self.whole_since = self.pages
        self.whole_page, self.forgets = self.pages, False

    def rename(self, stated: str, node: str) -> None:
        """Map the name `stated` to `node` from now on, also for series that are already known."""
        if not self.fixed and self.renamed.get(stated) != node:
            self.renamed[stated], self.forgets = node, True


def is_generic_name(name: str) -> bool:
    """Return whether a name cannot distinguish one machine from another.

    >>> [is_generic_name(name) for name in ("localhost", "dcgm-exporter-6ldbb", "3f2a9c0b1d4e", "127.0.0.1", "")]
    [True, True, True, True, True]
    >>> [is_generic_name(name) for name in ("gpu-07", "exporter-host", "10.0.0.7", "dcgm01", "cafe")]
    [False, False, False, False, False]
    """
    return not name or any(form.fullmatch(name) for form in (_LOCAL, _POD, _CONTAINER))


def is_local_name(name: str) -> bool:
    """Return whether a name means the local machine on every host, such as localhost."""
    return _LOCAL.fullmatch(name) is not None


def resolve_node_name(label: str, target: Target) -> str:
    """Return the name of the machine that a line describes: its label, or the target's name.

    The target's name counts if the label is generic or if the target's name is fixed.
    """
    if target.fixed or not label:
        return target.node
    if target.node and is_generic_name(label) and not _SERVICE.fullmatch(target.node):  # a service is many machines
        label = target.node
    for _ in range(MOST_NAMES):
        if label not in target.renamed:
            break
        label = target.renamed[label]
    return label


@dataclass(slots=True)
class _Slot:
    """The board that a target last named in a GPU slot.

    page: the last page on which a line of the board was resolved. rivals: other boards that the same page names in
    this slot.
    """

    uuid: str
    target: Target
    page: int = 0
    rivals: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Kernel:
    """The running kernel of a machine, as a target reported it.

    started_s: its start in Unix s. doubted_ms: when another target first reported another start, 0 for never.
    """

    started_s: float
    target: Target
    doubted_ms: int = 0


class MachineNames:
    """The names of machines, decided by the GPU boards on all pages that a process reads.

    `clashes`: name → addresses of two targets that report different machines under this name.
    """

    def __init__(self, entities: Entities) -> None:
        self.clashes: dict[str, tuple[str, str]] = {}
        self.changes = 0  # grows with every line that says more than the lines before it on its page
        self.noted: Counter[str] = Counter()
        self._entities = entities
        self._slots: dict[str, dict[int, _Slot]] = {}  # by node
        self._boards: dict[str, tuple[str, int]] = {}
        self._kernels: dict[str, _Kernel] = {}  # by the name that the kernel has
        self._unproven: dict[str, list[Target]] = {}  # node → targets that list GPUs of it without a UUID
        self._doubts: dict[tuple[int, int], int] = {}  # ids of two targets → when they first looked like two machines

    def record_board(self, node: str, index: int, uuid: str, target: Target) -> str:
        """Record that a page names a board in a GPU slot, and return the node that the board is really in.

        Raises RecordError `two_boards` if a page names several boards in one slot.
        """
        if self.is_repeated_line(node, index, uuid, target):
            return node
        uuid = _shorten_uuid(uuid)
        self.changes += 1
        if node in self.clashes:
            node = self._rename_to_own_name(node, target)
        if not uuid or uuid.startswith("mig-"):
            self._add_unproven_gpu(node, index, target)
            return node
        known = self._boards.get(uuid)
        slot = None if known is None else self._slots.get(known[0], {}).get(known[1])
        if known is not None and known[0] != node and slot is not None and slot.uuid == uuid:
            first = slot.target
            is_new = not _has_named_node(node, target)  # else the board was moved between two machines
            if (
                first is not target
                and is_new
                and _is_target_live(first, target)
                and not target.fixed
                and known[0] not in self.clashes
            ):
                target.rename(node, known[0])
                self.noted["node_alias"] += 1
                return known[0]
            self._clear_slot(known, target)
        slots = self._slots.setdefault(node, {})
        held = slots.get(index)
        if held is not None and held.target is target and held.uuid != uuid:
            _refuse_second_board(held, uuid, f"{node}/{index}", target)
            if target.pages:  # lines of the board before may still be on the page, and stand for the slot
                target.forgets = True
        is_taken = held is not None and held.uuid != uuid and held.target is not target
        is_swap = _has_named_node(node, target) or (known is not None and known[0] == node)
        if held is not None and is_taken and not is_swap and _is_target_live(held.target, target):
            node = self._rename_clashing_targets(node, held.target, target)
            slots = self._slots.setdefault(node, {})
        if held is None or (held.uuid, held.target) != (uuid, target):
            slots[index] = _Slot(uuid, target, target.pages)
        else:
            held.page = target.pages
        target.named.setdefault(node, target.last_page_ms)
        self._boards[uuid] = (node, index)
        return node

    def is_free(self, node: str, index: int, uuid: str) -> bool:
        """Return whether a board has a UUID and is new: no page has named the board or its slot before."""
        uuid = _shorten_uuid(uuid)
        is_known = uuid in self._boards or index in self._slots.get(node, {}) or node in self.clashes
        return not is_known and not uuid.startswith("mig-") and uuid != ""

    def is_repeated_line(self, node: str, index: int, uuid: str, target: Target) -> bool:
        """Return whether an earlier line of the same page named this board in this slot."""
        uuid = _shorten_uuid(uuid)
        held = self._slots.get(node, {}).get(index)
        is_same = held is not None and held.uuid == uuid and held.target is target and held.page == target.pages > 0
        return is_same and self._boards.get(uuid) == (node, index) and node not in self.clashes

    def _add_unproven_gpu(self, node: str, index: int, target: Target) -> None:
        target.unproven.setdefault(node, set()).add(index)
        targets = self._unproven.setdefault(node, [])
        if not any(other is target for other in targets):
            targets[:] = [*[other for other in targets if _is_target_live(other, target)][-MOST_SHARING:], target]

    def separate_clashing_targets(self, page: bytes, target: Target) -> None:
        """Separate targets that list the same GPUs without UUIDs, if they are different machines.

        page: the target's last page. Targets on two hosts are two machines unless their boards report the same
        energy. Targets on one host are two machines if, for LIVE_MS, most GPUs differ in their energy or in their
        used memory. Two targets are separated only after both have sent another page. An exporter that moved would
        send only from its new address.
        """
        for node, gpus in list(target.unproven.items()):
            sharing = self._find_targets_with_gpus(node, gpus)
            others = [other for other in sharing if other is not target and _is_target_live(other, target)]
            if others:
                target.readings = parse_board_readings(page, target.last_page_ms)
            for other in others:
                if node in self.clashes or (other.fixed and target.fixed):
                    continue
                if self._are_two_machines(other, target):
                    self._rename_clashing_targets(node, other, target)
                    target.forgets = other.forgets = True
                    self._remove_gpus(node)

    def _find_targets_with_gpus(self, node: str, gpus: set[int]) -> list[Target]:
        """Return the targets that list any of these GPUs of a node, with or without UUIDs."""
        proven = {id(slot.target): slot.target for index, slot in self._slots.get(node, {}).items() if index in gpus}
        unproven = {
            id(other): other for other in self._unproven.get(node, ()) if other.unproven.get(node, set()) & gpus
        }
        return list({**proven, **unproven}.values())

    def _are_two_machines(self, other: Target, target: Target) -> bool:
        """Return whether two targets differ like two machines, and still differ after another page of each.

        The first call that finds a difference makes both decoders resolve their series again.
        """
        pair = (min(id(other), id(target)), max(id(other), id(target)))
        same, is_one_host = have_same_boards(other.readings, target.readings), self._are_on_one_host(other, target)
        has_other_work = have_different_memory_use(other.readings, target.readings)
        if same or (is_one_host and same is None and not has_other_work):
            self._doubts.pop(pair, None)
            return False
        if pair not in self._doubts:  # both resolve their lines anew, in case that one of them has another name by now
            for one in (other, target):
                one.unproven, one.forgets = {}, True
        since_ms = self._doubts.setdefault(pair, target.last_page_ms)
        return other.last_page_ms > since_ms and target.last_page_ms - since_ms >= (LIVE_MS if is_one_host else 0)

    def _are_on_one_host(self, first: Target, second: Target) -> bool:
        """Return whether two targets are on one host, by their addresses and the names that schedulers report."""
        nodes = self._entities[EntityKind.NODE]
        hosts = {find_known_name(host, nodes) for target in (first, second) if (host := _find_host(target))}
        return len(hosts) < 2

    def _remove_gpus(self, node: str) -> None:
        """Remove the GPUs of a name after both machines with this name got other names."""
        self._unproven.pop(node, None)
        if not self._slots.get(node):
            self._entities.remove_node_devices(node)

    def name_target_after_host(self, name: str, started_s: float, target: Target) -> None:
        """Name a target after its kernel's host name, unless two machines share that name.

        Two live targets with one name are two machines if their kernels started at different times.
        However, a machine with two targets may restart between their pages. So the targets are separated
        only if they still disagree after the next page of the other target. started_s: Unix s, 0 if the
        page does not state it.
        """
        known = self._kernels.get(name)
        if name in self.clashes:
            self._restore_own_name(target)
            return
        if known is None or known.target is target or not started_s or not _is_target_live(known.target, target):
            doubted_ms = known.doubted_ms if known is not None and known.target is target else 0
            self._kernels[name] = _Kernel(started_s, target, doubted_ms)
        elif known.started_s and abs(known.started_s - started_s) > SAME_BOOT_S:
            if 0 < known.doubted_ms < known.target.last_page_ms:
                self._separate_by_kernel(name, known.target, target)
                return
            known.doubted_ms = known.doubted_ms or target.last_page_ms
        else:
            known.doubted_ms = 0
        if target.node != name:
            target.own = target.own or target.node
            target.node, target.forgets = name, True

    def _separate_by_kernel(self, name: str, first: Target, second: Target) -> None:
        """Reset two targets whose kernels share a name to their own names, and record the clash."""
        self.clashes[name] = (first.address or first.own, second.address or second.own)
        self.noted["node_clash"] += 1
        logger.warning("%s and %s both name their machine %r: two machines", *self.clashes[name], name)
        if (first.own or first.node) == (second.own or second.node):
            self.clashes.setdefault(first.own or first.node, self.clashes[name])
        self._restore_own_name(first)
        self._restore_own_name(second)
        if name not in self._slots:
            self._entities.remove_node_devices(name)

    def _restore_own_name(self, target: Target) -> None:
        """Reset a target to its own name, or to its address if that name clashes as well."""
        own = target.own or target.node
        own = target.address if own in self.clashes else own
        if own and target.node != own:
            target.node, target.forgets = own, True

    def _rename_clashing_targets(self, name: str, first: Target, second: Target) -> str:
        """Give two machines that share a name the names of their targets, and record the clash.

        Returns the name of the second machine.
        """
        self.clashes[name] = (first.address or first.node, second.address or second.node)
        self.noted["node_clash"] += 1
        logger.warning("%s and %s both name their machine %r: two machines", *self.clashes[name], name)
        if first.node == second.node:
            self.clashes.setdefault(first.node, self.clashes[name])  # neither is called after the host that they share
        self._rename_to_own_name(name, first)
        return self._rename_to_own_name(name, second)

    def _rename_to_own_name(self, name: str, target: Target) -> str:
        """Map a clashing name to the target's own name, or to its address if that name clashes as well.

        Returns the new name. If the target's name is fixed, the method changes nothing and returns `name`.
        """
        own = target.address if target.node in self.clashes else target.node
        if target.fixed or not own:
            return name
        target.rename(name, own)
        return own

    def _clear_slot(self, slot: tuple[str, int], target: Target) -> None:
        """Clear a GPU slot whose board is now in another slot. target: the target that names the board now."""
        node, index = slot
        old = self._slots[node].pop(index)
        old.target.forgets = True
        self.noted["gpu_moved"] += 1
        self._entities.remove_from_node(EntityKind.GPU, f"{node}/{index}")
        if not self._slots[node]:
            self._entities.remove_node_devices(node)


def _shorten_uuid(uuid: str) -> str:
    """Return a board's UUID without its prefix, in lower case."""
    return uuid.casefold().removeprefix("gpu-")


def _refuse_second_board(held: _Slot, uuid: str, slot: str, target: Target) -> None:
    """Raise RecordError if a page names a second board in a GPU slot.

    Such a page describes several machines with one name. The second board gets the slot once the
    previous page was resolved completely and did not name the first board. The present page cannot show
    this, because its line for the first board may still follow.
    """
    if held.page == target.pages > 0:
        held.rivals.add(uuid)
    elif uuid in held.rivals and target.whole_page == target.pages:
        if target.whole_since == target.pages:
            target.forgets = True
        elif held.page < target.pages - 1:
            return
    if uuid in held.rivals:
        advice = "scrape each machine by itself, or give each a Hostname of its own"
        raise RecordError("two_boards", f"{slot} is GPU-{held.uuid} and GPU-{uuid} on one page: {advice}")


def _find_host(target: Target) -> str:
    """Return the host in a target's address, without its port, or the target's name if it has none."""
    address = target.address or target.own or target.node
    return address.rpartition(":")[0] if re.search(r":\d{1,5}$", address) else address


def _is_target_live(other: Target, target: Target) -> bool:
    return other.last_page_ms > 0 and target.last_page_ms - other.last_page_ms <= LIVE_MS


def _has_named_node(node: str, target: Target) -> bool:
    """Return whether an earlier page of a target named a board of this node."""
    return target.named.get(node, target.last_page_ms) < target.last_page_ms
