"""A parser of `ibnetdiscover` output into a fabric: switches, adapters and cabled ports.

    Switch 65 "S-2c5eab0300b87b40"   # "MF0;leaf-04:MQM9701/U1" enhanced port 0 lid 73 lmc 0
    [1]  "H-e09d7303007a4bd8"[1](e09d7303007a4bd8)   # "n001 mlx5_5" lid 647 4xNDR
    Ca 1 "H-e09d7303007a4bd8"        # "n001 mlx5_5"
    [1](e09d7303007a4bd8)  "S-2c5eab0300b87b40"[1]   # lid 647 lmc 0 "MF0;leaf-04:MQM9701/U1" lid 73 4xNDR
    CA   134  1 0x7cfe9003003b4bde 4x EDR - SW  1719 10 0x7cfe9003009ce5b0 ( 'o0001 HCA-1' - 'leaf01' )   with -p

An adapter's description is "HOST DEVICE". Older drivers count "HCA-1", "HCA-2", … where today's names are
mlx5_0, mlx5_1, …. Adapters whose description names no host (fresh firmware, aggregation nodes of a switch)
belong to no node.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.node_names import check_name

MAX_PORTS = 2_000_000

_HEAD = re.compile(r'(Switch|Ca|Rt)\s+\d{1,4}\s+"([SHR]-[0-9a-f]{1,16})"\s*#\s*"([^"]{0,256})"')
_LINK = re.compile(r'\[(\d{1,3})\](?:\([0-9a-f]{1,16}\))?\s+"([SHR]-[0-9a-f]{1,16})"\[(\d{1,3})\]')
_LID = re.compile(r"\blid (\d{1,5})\b")
_SPEED = re.compile(r"\b(\d{1,2})x([A-Z]{2,4}\d{0,3})\s*$")
_PORTS = re.compile(
    r"(CA|SW)\s+(\d{1,5})\s+(\d{1,3}) 0x([0-9a-f]{1,16}) (\d{1,2})x (\S{1,6})"
    r"(?: - (CA|SW)\s+(\d{1,5})\s+(\d{1,3}) 0x([0-9a-f]{1,16}) \( '([^']{0,256})' - '([^']{0,256})' \))?"
)
_OWNED = re.compile(r"(\S{1,253}) (\S*?)(\d{1,3})(?: .*)?")

# Signalling per lane as people name it, in bytes/s of data (InfiniBand Architecture Specification, vol. 2).
LANE_BYTES_PER_S = {
    "SDR": 0.25e9,
    "DDR": 0.5e9,
    "QDR": 1.0e9,
    "FDR10": 1.25e9,
    "FDR": 1.75e9,
    "EDR": 3.125e9,
    "HDR": 6.25e9,
    "NDR": 12.5e9,
    "XDR": 25e9,
}


@dataclass(frozen=True, slots=True)
class Link:
    """One cabled port: the port at its other end, and its speed in bytes/s, 0 if unknown."""

    peer: str
    peer_port: int
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FabricAdapter:
    """The host and device of an adapter. Both are empty if its description does not name them."""

    host: str
    device: str


@dataclass(slots=True)
class Fabric:
    """The fabric in one output.

    Keys are node GUIDs of up to sixteen hex digits, without S- and H-.
    """

    switches: dict[str, str] = field(default_factory=dict)  # GUID -> name
    adapters: dict[str, FabricAdapter] = field(default_factory=dict)
    links: dict[tuple[str, int], Link] = field(default_factory=dict)  # (GUID, port) -> the other end
    lids: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)  # (lid, port) -> (GUID, port)


def is_ibnetdiscover(text: str) -> bool:
    head = "\n" + text[:20_000]
    return "\nswitchguid=" in head or "\ncaguid=" in head or any(map(_PORTS.match, head.splitlines()[:50]))


def parse_ibnetdiscover(text: str) -> Fabric:
    """Parse the output of `ibnetdiscover` into a fabric.

    Raises ConfigError if no line names a switch or an adapter, or if a host's name is invalid.
    """
    fabric = Fabric()
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if len(fabric.links) > MAX_PORTS:
            raise ConfigError(f"line {number}: more than {MAX_PORTS:,} ports")
        if head := _HEAD.match(line):
            current = _add_device(fabric, head.group(1) == "Switch", head.group(2)[2:], head.group(3))
            _add_lid(fabric, current, 0, line if head.group(1) == "Switch" else "")
        elif current and (link := _LINK.match(line)):
            _add_link(fabric, current, link, line)
        elif ports := _PORTS.match(line):
            _add_report_line(fabric, ports)
    if not fabric.switches and not fabric.adapters:
        raise ConfigError("no line of this ibnetdiscover output names a switch or an adapter")
    return fabric


def parse_adapter(description: str) -> FabricAdapter:
    """Return the host and device that an adapter's description names, both empty if it names none.

    >>> parse_adapter("n001 mlx5_3"), parse_adapter("n001 HCA-4").device
    (FabricAdapter(host='n001', device='mlx5_3'), 'mlx5_3')
    >>> parse_adapter("MT4129 ConnectX7   Mellanox Technologies")
    FabricAdapter(host='', device='')
    """
    match = _OWNED.fullmatch(description)
    if match is None:
        return FabricAdapter("", "")
    host, kind, number = match.groups()
    if kind == "HCA-":
        return FabricAdapter(host, f"mlx5_{max(0, int(number) - 1)}")
    known = kind.startswith(("mlx", "hfi1_", "bnxt_re", "irdma", "efa", "qib", "ib"))
    return FabricAdapter(host, f"{kind}{number}") if known else FabricAdapter("", "")


def _add_device(fabric: Fabric, is_switch: bool, guid: str, description: str) -> str:
    if is_switch:
        fabric.switches[guid] = parse_switch_name(description) or guid
    else:
        adapter = parse_adapter(description)
        fabric.adapters[guid] = FabricAdapter(check_name(adapter.host), adapter.device) if adapter.host else adapter
    return guid


def parse_switch_name(description: str) -> str:
    """Return the name of a switch in its description.

    >>> parse_switch_name("MF0;leaf-04:MQM9701/U1"), parse_switch_name("leaf01")
    ('leaf-04', 'leaf01')
    """
    return description.removeprefix("MF0;").split(":", 1)[0].strip().replace(" ", "_").replace("/", "_")


def _add_lid(fabric: Fabric, guid: str, port: int, text: str) -> None:
    lid = _LID.search(text)
    if lid is not None:
        fabric.lids[int(lid.group(1)), port] = (guid, port)


def _add_link(fabric: Fabric, guid: str, match: re.Match[str], line: str) -> None:
    port, peer = int(match.group(1)), match.group(2)[2:]
    speed = _SPEED.search(line)
    fabric.links[guid, port] = Link(
        peer, int(match.group(3)), _compute_speed(speed.group(1), speed.group(2)) if speed else 0.0
    )
    if guid in fabric.adapters:
        _add_lid(fabric, guid, port, line.partition("#")[2].partition('"')[0])


def _compute_speed(lanes: str, name: str) -> float:
    return int(lanes) * LANE_BYTES_PER_S.get(name, 0.0)


def _add_report_line(fabric: Fabric, match: re.Match[str]) -> None:
    """Add both ends of a line of the ports report."""
    kind, lid, port, guid, lanes, speed, peer_kind, _, peer_port, peer, mine, theirs = match.groups()
    fabric.lids[int(lid), int(port)] = (guid, int(port))
    if peer_kind is None:
        return
    for one, is_switch, description in ((guid, kind == "SW", mine), (peer, peer_kind == "SW", theirs)):
        _add_device(fabric, is_switch, one, description)
    fabric.links[guid, int(port)] = Link(peer, int(peer_port), _compute_speed(lanes, speed))


def list_cabled_devices(fabric: Fabric) -> Iterator[tuple[str, str, str, float]]:
    """Yield (host, device, GUID of its leaf switch, bytes/s) for each cabled adapter port of a host."""
    for (guid, _), link in sorted(fabric.links.items()):
        adapter = fabric.adapters.get(guid)
        if adapter is not None and adapter.host and link.peer in fabric.switches:
            yield adapter.host, adapter.device, link.peer, link.bytes_per_s
