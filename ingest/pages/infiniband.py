"""A resolver of InfiniBand and RoCE port counters, as node_exporter, sysfs and perfquery name them.

Data counters of sysfs and perfquery count 4-byte words. Classic counters stop at their width (255, 65,535,
15, 2**32 - 1) until they are reset. Such a value counts as missing. The adapter's hw_counters have 64 bits
and are refreshed every `lifespan` ms, so a repeated reading does not mean that the port is idle.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpus import GpuInventory
from fleetcast.ingest.pages.resolver import Resolver
from fleetcast.ingest.pages.text import Found, Target
from fleetcast.ingest.series import Series

MAX_PORTS_PER_NODE = 256
_WORD = 4.0
_GBIT = 1e9 / 8
_NEVER = float("nan")
_U8, _U16, _U32, _U4 = 255.0, 65_535.0, 4_294_967_295.0, 15.0


@dataclass(frozen=True, slots=True)
class _Counter:
    """A port counter: its metric, its names in the three sources, and the value at which it stops.

    It also states whether the counter counts words. `exporter`: its names in node_exporter, without the prefix and
    `_total`.
    """

    metric: str
    exporter: tuple[str, ...]
    sysfs: str
    perfquery: str
    ceiling: float
    words: bool = False


_COUNTERS = (
    _Counter("rx_bytes", ("port_data_received_bytes",), "port_rcv_data", "PortRcvData", _U32, True),
    _Counter("tx_bytes", ("port_data_transmitted_bytes",), "port_xmit_data", "PortXmitData", _U32, True),
    _Counter("rx_packets", ("port_packets_received",), "port_rcv_packets", "PortRcvPkts", _U32),
    _Counter("tx_packets", ("port_packets_transmitted",), "port_xmit_packets", "PortXmitPkts", _U32),
    _Counter("tx_wait", ("port_transmit_wait",), "port_xmit_wait", "PortXmitWait", _U32),
    _Counter("link_downed", ("link_downed",), "link_downed", "LinkDownedCounter", _U8),
    _Counter("link_recoveries", ("link_error_recovery",), "link_error_recovery", "LinkErrorRecoveryCounter", _U8),
    _Counter("symbol_errors", ("symbol_error",), "symbol_error", "SymbolErrorCounter", _U16),
    _Counter("rx_errors", ("port_errors_received",), "port_rcv_errors", "PortRcvErrors", _U16),
    _Counter("tx_discards", ("port_discards_transmitted",), "port_xmit_discards", "PortXmitDiscards", _U16),
    _Counter(
        "rx_remote_physical_errors",
        ("port_receive_remote_physical_errors",),
        "port_rcv_remote_physical_errors",
        "PortRcvRemotePhysicalErrors",
        _U16,
    ),
    _Counter(
        "integrity_errors",
        ("local_link_integrity_errors",),
        "local_link_integrity_errors",
        "LocalLinkIntegrityErrors",
        _U4,
    ),
    _Counter(
        "buffer_overruns",
        ("excessive_buffer_overrun_errors",),
        "excessive_buffer_overrun_errors",
        "ExcessiveBufferOverrunErrors",
        _U4,
    ),
    _Counter(
        "constraint_errors",
        ("port_constraint_errors_received",),
        "port_rcv_constraint_errors",
        "PortRcvConstraintErrors",
        _U8,
    ),
)

# Adapters of the days before 64-bit counters in sysfs have them in a folder of their own; these never stick.
_LEGACY = {
    "legacy_data_received_bytes": "rx_bytes",
    "legacy_data_transmitted_bytes": "tx_bytes",
    "legacy_packets_received": "rx_packets",
    "legacy_packets_transmitted": "tx_packets",
}
# The adapter's own counters: metric -> names in node_exporter (without prefix and _total), name in sysfs.
_ADAPTER = {
    "cnp_sent": ("np_cnp_packets_sent", "np_cnp_sent"),
    "cnp_handled": ("rp_cnp_packets_handled", "rp_cnp_handled"),
    "out_of_sequence": ("out_of_sequence_packets_received", "out_of_sequence"),
    "packet_seq_errors": ("packet_sequence_errors", "packet_seq_err"),
    "ack_timeouts": ("local_ack_timeout_errors", "local_ack_timeout_err"),
    "adp_retransmits": ("roce_adp_retransmits", "roce_adp_retrans"),
    "rnr_naks": ("rnr_nak_retry_packets_received", "rnr_nak_retry_err"),
}
_GAUGES = {
    "node_infiniband_state_id": ("state", 1.0),
    "node_infiniband_physical_state_id": ("physical_state", 1.0),
    "node_infiniband_rate_bytes_per_second": ("speed_bytes_per_s", 1.0),
    "infiniband_state": ("state", 1.0),
    "infiniband_phys_state": ("physical_state", 1.0),
    "infiniband_rate": ("speed_bytes_per_s", _GBIT),  # sysfs says Gb/s
}


@dataclass(frozen=True, slots=True)
class _Reading:
    metric: int
    scale: float
    ceiling: float


def _make_reading_table() -> dict[str, _Reading]:
    table: dict[str, _Reading] = {}
    for counter in _COUNTERS:
        metric = find_metric_row(EntityKind.PORT, counter.metric)
        words = _WORD if counter.words else 1.0
        for name in counter.exporter:
            table[f"node_infiniband_{name}_total"] = _Reading(metric, 1.0, counter.ceiling * words)
        for name in (counter.sysfs, f"infiniband_{counter.sysfs}", counter.perfquery):
            table[name] = _Reading(metric, words, counter.ceiling)
    for name, target in _LEGACY.items():
        table[f"node_infiniband_{name}_total"] = _Reading(find_metric_row(EntityKind.PORT, target), 1.0, _NEVER)
    for target, (exporter_name, sysfs_name) in _ADAPTER.items():
        reading = _Reading(find_metric_row(EntityKind.PORT, target), 1.0, _NEVER)
        for name in (f"node_infiniband_{exporter_name}_total", sysfs_name, f"infiniband_{sysfs_name}"):
            table[name] = reading
    for name, (target, scale) in _GAUGES.items():
        table[name] = _Reading(find_metric_row(EntityKind.PORT, target), scale, _NEVER)
    return table


PORT_READINGS = _make_reading_table()


class InfinibandResolver(Resolver):
    """A resolver of port lines to series. The labels `device` and `port` name a port of the target's node."""

    names = frozenset(PORT_READINGS)

    def __init__(self, entities: Entities, inventory: GpuInventory) -> None:
        super().__init__(entities, inventory)
        self._ports: dict[str, int] = {}

    @classmethod
    def claims(cls, name: str) -> bool:
        return name in PORT_READINGS

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Found:
        """Resolve a line. Returns None for other metrics. Raises RecordError `bad_label` or `too_many_ports`."""
        reading = PORT_READINGS.get(name)
        if reading is None:
            return None
        device = labels.get("device") or labels.get("hca", "")
        port = labels.get("port", "")
        if not device:
            if name.startswith(("node_infiniband_", "infiniband_")):
                raise RecordError("bad_label", f"{name} without device")
            return None
        if "/" in device or len(device) > 64 or not (port.isascii() and port.isdecimal() and len(port) <= 3):
            raise RecordError("bad_label", f"{name}: device={device[:40]!r}, port={port[:40]!r}")
        node = self.find_node(labels, target)
        entity = self._find_or_add_port(node, device, int(port))
        return Series(
            EntityKind.PORT,
            reading.metric,
            entity,
            self.entities.find_or_add_node(node),
            entity,
            reading.scale,
            ceiling=reading.ceiling,
        )

    def _find_or_add_port(self, node: str, device: str, port: int) -> int:
        table = self.entities[EntityKind.PORT]
        row = table.find_row(f"{node}/{device}/{port}")
        if row is not None:
            return row
        if self._ports.get(node, 0) >= MAX_PORTS_PER_NODE:
            raise RecordError("too_many_ports", f"more than {MAX_PORTS_PER_NODE} on {node}")
        self._ports[node] = self._ports.get(node, 0) + 1
        return self.entities.add_to_node(EntityKind.PORT, node, device, port)
