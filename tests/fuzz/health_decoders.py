"""Decoders of what kernels and health checkers say."""

import contextlib
import functools
import json

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeTable
from fleetcast.ingest.health.gpud import (
    Known,
    _make_checked_batch,
    decode_events,
    decode_states,
    make_state_events,
    make_xid_events,
)
from fleetcast.ingest.health.nvsentinel import TYPE, decode
from fleetcast.ingest.health.ufm import UfmSource, decode_alerts
from fleetcast.ingest.kernel_log.events import KernelReader
from fleetcast.models.risk.node_events import make_event_signals
from fleetcast.service.api.routes.kernel_log import decode_kernel_log as decode_log
from tests.fuzz.bounds import MIB
from tests.fuzz.decoder import Decoder
from tests.fuzz.door_decoders import FUTURE_MS, NOW_MS

LOG = b"""Feb 23 16:24:18 n1 kernel: NVRM: Xid (PCI:0000:9b:00): 79, pid=1, GPU has fallen off the bus.
2025-02-23T16:24:18,283302+00:00 n1 kernel: [ 3098.275513] NVRM: The NVIDIA GPU 0000:18:00.0
[Sun Feb 23 16:24:18 2025] NVRM: fallen off the bus and is not responding to commands.
<4>[ 3098.275513] nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
6,3964,206764307,-;mlx5_core 0000:5c:00.0: Detected insufficient power on the PCIe slot (27W).
kern  :warn  : 2025-01-21T04:41:44,283302+00:00 nvidia 0000:9b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal)
1740327858.283302 n1 kernel: pcieport 0000:97:01.0: pciehp: Slot(1): Link Down
{"__REALTIME_TIMESTAMP":"1740327858283302","_HOSTNAME":"n1","_TRANSPORT":"kernel","MESSAGE":"NVRM: knvlink_x: Failed"}
NVRM: GPU 0000:9b:00.0: RmInitAdapter failed! (0x62:0xffff:2351)
NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)
amdgpu 0000:c3:00.0: amdgpu: socket: 0, die: 1, 1 new uncorrectable hardware errors detected in gfx block
[41394.501783] amdgpu 0000:0e:00.0: amdgpu: GPU reset begin!
"""
ENVELOPE = (
    b'{"specversion":"1.0","id":"a","source":"s","type":"%b","time":"2025-01-21T04:41:44Z","data":{"healthEvent":'
    b'{"nodeName":"n1","checkName":"SysLogsXIDError","isFatal":true,"errorCode":["XID_79"],"recommendedAction":5,'
    b'"entitiesImpacted":[{"entityType":"PCI","entityValue":"0000:9B:00.0"}],'
    b'"generatedTimestamp":"2025-01-21T04:41:44.1Z","message":"m"}}}' % TYPE.encode()
)
LOG_WORDS = (
    *(b"NVRM: ", b"Xid (PCI:", b"0000:9b:00", b"): 79, ", b"fallen off the bus", b"SXid (", b"Fatal", b"Nonfatal"),
    *(b"mlx5_core ", b"AER: ", b"Uncorrected (Fatal) error received: ", b"pciehp: Slot(", b"severity="),
    *(b"Feb 29 24:61:61 ", b"[Sun Feb 31 16:24:18 2025]", b"<4>", b"[ 1e9.5] ", b" kernel: ", b'{"MESSAGE":', b"[1,2]"),
    *(b"6,3964,", b"99999999999999999999", b"9999-12-31T23:59:59+00:00 ", b"0001-01-01T00:00:00+23:59 ", b"(((((((("),
)  # fmt: skip


def _applied(log: bytes, headers: dict[str, str] | None = None) -> None:
    """Whatever a log or a checker says, the table takes it and the rules can speak of it."""
    if headers is None:
        decoded = decode_log(log, KernelReader("", fallback="n1"), NOW_MS)
    else:
        decoded = decode(log, headers, NOW_MS, FUTURE_MS)
    table = NodeTable()
    for record in decoded.records:
        assert isinstance(record.event, NodeEvent)
        table.apply(record.event)
    rows = {name: row for row, name in enumerate(table.nodes)}
    make_event_signals(table.nodes, rows, {}, NOW_MS)


GPUD = b"""[{"component":"fan","states":[{"time":"2025-01-21T04:41:44Z","name":"fan","health":"Unhealthy",
 "reason":"stuck","suggested_actions":{"description":"d","repair_actions":["REBOOT_SYSTEM"]}},{"health":"Degraded","name":"x"}]}]"""
GPUD_EVENTS = b"""[{"component":"error-xid","startTime":"2025-01-21T04:41:44Z","events":[{"time":"2025-01-21T04:41:44Z",
 "name":"error_xid","type":"Fatal","message":"XID 79 on PCI:0000:9B:00"}]},{"component":"os","events":null}]"""
UFM = b"""[{"alert_id":1,"timestamp":"2025-01-21 04:41:44","node_guid":"0x1","node_name":"n1 mlx5_3","port":1,
 "port_name":"1","severity":"Major","probability":80.5,"influencers":[],"description":"symbol errors"}]"""


def _gpud(body: bytes) -> None:
    """Either answer of a daemon: told once, and not again."""
    with contextlib.suppress(RecordError):
        _make_checked_batch(list(make_xid_events("n1", decode_events(body), NOW_MS)), NOW_MS)
    known: Known = {}
    with contextlib.suppress(RecordError):
        states = decode_states(body)
        _make_checked_batch(list(make_state_events("n1", states, known, NOW_MS)), NOW_MS)
        json.dumps(known)


def _ufm(body: bytes) -> None:
    source = UfmSource(ENTITIES, ManualClock(NOW_MS), {"url": "http://ufm", "verify": False})
    with contextlib.suppress(RecordError):
        alerts, bad = decode_alerts(body)
        ports = {
            key: (alert.probability, alert) for alert in alerts if (key := source._find_port_key(alert)) is not None
        }
        source._make_change_events(ports, bad, NOW_MS)
        json.dumps(source._known)


ENTITIES = Entities()
ENTITIES.find_or_add_node("n1")
HEALTH_WORDS = (
    *(
        b'"component":',
        b'"states":',
        b'"health":"Unhealthy"',
        b'"events":',
        b"XID 79",
        b'"time":"0001-01-01T00:00:00Z"',
    ),
    *(
        b'"repair_actions":null',
        b'"probability":1e400',
        b'"node_name":"n1"',
        b'"port_name":"mlx5_0/1"',
        b"null",
        b"\\u0000",
    ),
)

HEALTH = {
    "gpud": Decoder(_gpud, (GPUD, GPUD_EVENTS, b"[]", b"null"), HEALTH_WORDS, base_bytes=4 * MIB),
    "ufm": Decoder(_ufm, (UFM, b"[]", b"null"), HEALTH_WORDS, base_bytes=4 * MIB),
    "kernel log": Decoder(_applied, (LOG, *LOG.splitlines(), b""), LOG_WORDS, base_bytes=4 * MIB),
    "nvsentinel": Decoder(
        functools.partial(_applied, headers={}),
        (ENVELOPE, b"[" + ENVELOPE + b"," + ENVELOPE + b"]", b"[]", b""),
        (b'"isHealthy":true', b'"errorCode":null', b'{"seconds":9e9}', b'"processingStrategy":2', b"\xff", b"[", b"{"),
        base_bytes=4 * MIB,
    ),
}
