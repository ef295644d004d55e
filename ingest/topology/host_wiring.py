"""A reader of the wiring inside a node: the GPUs nearest to each network adapter, and its rail.

    nvidia-smi topo -m      a matrix of GPUs and NICs; PIX and PXB mean the same PCIe switch, NODE and SYS do not
    NCCL topology XML       the PCI tree, as NCCL dumps it or a cloud ships it for its instances

Some clouds list only PCI addresses by socket, and NCCL asks the host for the rest. Such a file is
valid and names no adapter. NCCL's graphs of rings and trees are valid as well, and name none.
Without a legend, NIC3 is mlx5_3. In a cloud's XML, the n-th adapter by bus is mlx5_n. An adapter's
rail is the place of its first GPU among all GPUs that have an adapter, as rail-optimised fabrics
are cabled. If two adapters share this GPU, the first one gets the rail.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.parsers import expat

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.topology import Device

MAX_DEVICES = 256
MAX_DEPTH = 64
_NEAR = {"PIX": 0, "PXB": 1, "PHB": 2}  # the same PCIe switch, several of them, the same host bridge
_CODES = ("X", "SYS", "NODE", "PHB", "PXB", "PIX", "NV1")  # an unknown code counts as far, the head of one as cut
_P2P = ("OK", "CNS", "GNS", "TNS", "NS", "DR", "U")  # codes of `nvidia-smi topo -p2p`
_HEADER = re.compile(r"^[ \t]*+GPU0[ \t]++(?=GPU|NIC|CPU|mlx)", re.MULTILINE)
_LEGEND = re.compile(r"^\s*NIC(\d{1,3}): (\S{1,64})\s*$", re.MULTILINE)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header
_GPU_NUMBER = re.compile(r"[0-9]{1,3}\Z")
GRAPHS, UNSAID, HOST = "graphs", "unsaid", "host"
_GPU_CLASSES, _NIC_CLASSES = ("0x0302", "0x0300"), ("0x0207", "0x0200")


def is_topo_matrix(text: str) -> bool:
    """Return whether a text is a matrix of `nvidia-smi topo`, with tabs or with spaces from a terminal."""
    plain = _ESCAPES.sub("", text[:8192])
    return _HEADER.search(plain) is not None and "ROCm" not in plain


def parse_topo_matrix(text: str) -> tuple[Device, ...]:
    """Return the network adapters in a matrix of `nvidia-smi topo -m`, with their rails.

    Raises ConfigError if it is cut, inconsistent or a matrix of `-p2p`.
    """
    plain = _ESCAPES.sub("", text)
    header = _HEADER.search(plain)
    assert header is not None
    lines = [line for line in plain[header.start() :].splitlines() if line.strip()]
    split = _split_by_tabs if "\t" in lines[0] else str.split
    names = _list_device_columns(split(lines[0]))
    gpus = [name for name in names if re.fullmatch(r"GPU\d{1,3}", name)]
    nics = [name for name in names if name not in gpus]
    columns = {name: at for at, name in enumerate(names)}
    if gpus != [f"GPU{at}" for at in range(len(gpus))] or not len(gpus) <= len(columns) == len(names) <= MAX_DEVICES:
        expected = f"GPU0, GPU1 and so on, at most {MAX_DEVICES} devices"
        raise ConfigError(f"nvidia-smi topo: its header names {names[:9]}, expected {expected}")
    rows = {cells[0]: cells[1:] for line in lines[1:] if (cells := split(line))}
    for name in gpus:
        if name not in rows:
            raise ConfigError(f"nvidia-smi topo: {len(gpus)} GPUs in the header and no row {name}: is the file cut?")
        _check_row(name, rows[name], columns)
    legend = {f"NIC{number}": name for number, name in _LEGEND.findall(plain)}
    if missing := legend and [name for name in nics if re.fullmatch(r"NIC\d+", name) and name not in legend]:
        raise ConfigError(f"nvidia-smi topo: the legend does not name {missing[0]}: is the file cut?")
    near = {nic: _find_nearest_gpus([rows[gpu][columns[nic]] for gpu in gpus]) for nic in nics}
    return _assign_rails([(legend.get(nic, re.sub(r"^NIC(?=\d+$)", "mlx5_", nic)), near[nic]) for nic in nics])


def _split_by_tabs(line: str) -> list[str]:
    cells = [cell.strip() for cell in line.split("\t")]
    return cells if cells[0] else cells[1:]


def _list_device_columns(header: Sequence[str]) -> list[str]:
    """Return the names of the device columns, which precede the columns of CPUs and NUMA nodes.

    Old drivers write the adapters' own names instead of NIC0, NIC1 and so on.
    """
    found: list[str] = []
    for name in header:
        if name.partition(" ")[0] in ("CPU", "NUMA", "") or len(found) > MAX_DEVICES:
            break
        found.append(name[:64])
    return found


def _check_row(name: str, cells: Sequence[str], columns: Mapping[str, int]) -> None:
    """Raise ConfigError if a row or one of its cells is cut, or if it belongs to a `-p2p` matrix."""
    needed = max(columns.values()) + 1
    if len(cells) < needed:
        raise ConfigError(f"nvidia-smi topo: row {name} has {len(cells)} cells, expected {needed}: is the file cut?")
    for other, at in columns.items():
        if cells[at] in _P2P:
            raise ConfigError(
                f"nvidia-smi topo -p2p: row {name} says {cells[at]!r} of {other}, which is what GPUs may do with each "
                "other; adapters and their distances are in nvidia-smi topo -m"
            )
        if not cells[at] or any(code.startswith(cells[at]) and code != cells[at] for code in _CODES):
            known = ", ".join(_CODES)
            raise ConfigError(f"nvidia-smi topo: row {name} says {cells[at]!r} of {other}, expected one of {known}")


def _find_nearest_gpus(codes: list[str]) -> tuple[int, ...]:
    """Return the indices of the GPUs at the shortest distance to an adapter.

    codes: the distance code of each GPU. The result is empty if the nearest GPUs are beyond the host bridge, or if
    all GPUs are at the distance PHB (host bridge).
    """
    found = [_NEAR.get(code, 9) for code in codes]
    best = min(found, default=9)
    gpus = tuple(gpu for gpu, distance in enumerate(found) if distance == best)
    return () if best == 9 or (best == 2 and len(gpus) == len(codes) > 1) else gpus


def _assign_rails(found: list[tuple[str, tuple[int, ...]]]) -> tuple[Device, ...]:
    """Return the network adapters with their rails, in the given order.

    found: the name and the nearest GPUs of each adapter.
    """
    first = sorted({gpus[0] for _, gpus in found if gpus})
    rails = {gpu: rail for rail, gpu in enumerate(first)}
    shared: dict[tuple[int, ...], int] = {}
    devices = []
    for name, gpus in found:
        turn = shared[gpus] = shared.get(gpus, -1) + 1
        own = gpus[turn % len(gpus)] if gpus else -1  # several adapters before the same GPUs: one each, in order
        devices.append(Device(name, gpus, rails.get(own, rails.get(gpus[0], -1)) if gpus else -1))
    return tuple(devices)


@dataclass(slots=True)
class _Bus:
    """A PCI device or bridge in the XML, or the CPU above them."""

    kind: str  # "gpu", "nic", "unsaid" or ""
    bus: str
    names: list[str] = field(default_factory=list)  # adapters that NCCL names under it
    gpu: int = -1
    children: list["_Bus"] = field(default_factory=list)


def is_nccl_xml(text: str) -> bool:
    return text[:4096].lstrip("\ufeff \t\r\n").startswith("<") and (
        "<system" in text[:8192] or "<graphs" in text[:8192]
    )


def parse_nccl_xml(text: str) -> tuple[Device, ...]:
    """Return the network adapters in an NCCL topology XML, with their rails.

    The result is empty if the XML omits the kinds of its devices, or is one of NCCL's graphs. A dump of a domain
    that spans hosts has all hosts, each with its `host_hash`. The result is then the wiring that all hosts have.
    Raises ConfigError if the text is no NCCL XML, names no PCI device, or has hosts that are wired in different ways.
    """
    root, hosts = _read_xml(text)
    if root.kind == GRAPHS:
        return ()
    wirings = {name: _find_wiring(host) for name, host in hosts.items()} or {"": _find_wiring(root)}
    first, *others = wirings
    for other in others:
        if wirings[other] != wirings[first]:
            raise ConfigError(
                f"this NCCL XML holds {len(wirings)} hosts, and those with host_hash {first} and {other} are wired "
                f"in different ways: write a file for each, named after its nodes or their GPU model"
            )
    return wirings[first]


def count_hosts(text: str) -> int:
    """Return the number of hosts in an NCCL XML. It is 1 if no CPU states a `host_hash`."""
    return max(1, len(_read_xml(text)[1]))


def _find_wiring(root: _Bus) -> tuple[Device, ...]:
    buses = list(_list_buses(root))
    gpus = sorted((bus for bus in buses if bus.kind == "gpu"), key=lambda bus: bus.bus)
    nics = sorted((bus for bus in buses if bus.kind == "nic"), key=lambda bus: bus.bus)
    if not gpus and not nics and not any(bus.kind == UNSAID for bus in buses):
        raise ConfigError("this NCCL XML names no GPU and no adapter by its PCI class")
    index = {id(bus): bus.gpu if bus.gpu >= 0 else at for at, bus in enumerate(gpus)}
    near: dict[int, tuple[int, ...]] = {}
    _pair_adapters(root, index, near)
    found = [(name, near.get(id(nic), ())) for at, nic in enumerate(nics) for name in (nic.names or [f"mlx5_{at}"])]
    return _assign_rails(found)


def _list_buses(top: _Bus) -> list[_Bus]:
    found, waiting = [], [top]
    while waiting:
        bus = waiting.pop()
        found.append(bus)
        waiting += bus.children
    return found


def _pair_adapters(top: _Bus, index: dict[int, int], near: dict[int, tuple[int, ...]]) -> None:
    """Assign to each adapter the GPUs below its lowest bridge that has GPUs. Adds the result to `near`.

    If the bridge has as many adapters as GPUs, each adapter gets one GPU, in order.
    """
    for bridge in reversed(_list_buses(top)):  # the lowest first
        below = _list_buses(bridge)
        gpus = sorted(index[id(bus)] for bus in below if bus.kind == "gpu")
        nics = sorted((bus for bus in below if bus.kind == "nic" and id(bus) not in near), key=lambda bus: bus.bus)
        if gpus and nics and bridge.bus:
            for at, nic in enumerate(nics):
                near[id(nic)] = (gpus[at],) if len(gpus) == len(nics) else tuple(gpus)


def _read_xml(text: str) -> tuple[_Bus, dict[str, _Bus]]:
    """Parse the XML into the tree of PCI devices, and into a tree for each `host_hash` that CPUs state.

    Raises ConfigError. A document type is refused, because entities make XML dangerous.
    """
    top, hosts = _Bus("", ""), dict[str, _Bus]()
    stack = [top]
    count = 0

    def begin(tag: str, given: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if len(stack) > MAX_DEPTH or count > 100 * MAX_DEVICES:
            raise ConfigError(f"NCCL XML: deeper than {MAX_DEPTH} or of more than {100 * MAX_DEVICES} elements")
        here = stack[-1]
        if tag == GRAPHS:
            here.kind = GRAPHS
        elif tag == "cpu" and given.get("host_hash"):
            here = hosts.setdefault(given["host_hash"][:64], _Bus(HOST, ""))
        elif tag == "pci":
            here = _Bus(_classify_pci_device(given.get("class", "")), given.get("busid", ""))
            stack[-1].children.append(here)
        elif tag == "net" and given.get("name"):
            here.names.append(given["name"][:64])
            here.kind = "nic"
        elif tag == "gpu" and here is not top and here.kind != HOST and _GPU_NUMBER.match(given.get("dev", "")):
            here.kind, here.gpu = "gpu", int(given["dev"])
        stack.append(here)

    def end(tag: str) -> None:
        stack.pop()

    def refuse(*_: object) -> None:
        raise ConfigError("NCCL XML with a document type is refused")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text.lstrip("\ufeff \t\r\n"), True)
    except expat.ExpatError as error:
        raise ConfigError(f"not valid XML: {error}") from None
    return top, hosts


def _classify_pci_device(pci_class: str) -> str:
    if not pci_class:
        return UNSAID
    if pci_class.startswith(_GPU_CLASSES):
        return "gpu"
    return "nic" if pci_class.startswith(_NIC_CLASSES) else ""
