"""Decoders of counters and of topologies: sysfs files, perfquery's text, fabrics, wirings of hosts, serving pages."""

import contextlib
from pathlib import Path

import numpy as np

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.ports.perfquery import parse_counters
from fleetcast.ingest.ports.rows import PortRows
from fleetcast.ingest.ports.sysfs import parse_leading_number
from fleetcast.ingest.topology.ibnetdiscover import parse_ibnetdiscover
from fleetcast.ingest.topology.load import load_topology
from tests.fuzz.bounds import MIB
from tests.fuzz.decoder import Decoder
from tests.fuzz.text_decoders import file_of


def decode_number(data: bytes) -> None:
    with contextlib.suppress(RecordError):
        value = parse_leading_number(data)
        assert value is None or (np.isfinite(value) and value >= 0)


NUMBERS = Decoder(
    decode_number,
    (b"4: ACTIVE\n", b"400 Gb/sec (4X NDR)\n", b"2.5 Gb/sec\n", b"N/A (no PMA)\n", b"18446744073709551615\n", b""),
    (b": ", b"Gb/sec", b"N/A", b"."),
)

COUNTERS_TEXT = b"""# Port extended counters: Lid 134 port 1 (CapMask: 0x5300 CapMask2: 0x0000002)
PortSelect:......................1
CounterSelect:...................0x0000
PortXmitData:....................178791657177235
PortRcvData:.....................4294967295
SymbolErrorCounter:..............65535
"""
ERRORS_TEXT = b"""Errors for "n001 mlx5_3"
   GUID 0x7cfe900300179b31 port 1: [SymbolErrorCounter == 14] [PortXmitWait == 14681376621 (13.673G)]
Errors for 0x2c903006e29b0 "MF0;leaf-04:SX6036/U1"
   GUID 0x2c903006e29b0 port ALL: [LinkDownedCounter == 48]
   GUID 0x2c903006e29b0 port 7: [LinkDownedCounter == 8 (8.000)]
"""


def decode_counters(data: bytes) -> None:
    bad: list[RecordError] = []
    rows = PortRows(Entities())
    for port in parse_counters(data.decode(errors="replace"), bad):
        rows.add_port("n1", "mlx5_0", port.port, port.readings, 1000)
    for samples in rows.pop_batch().samples:
        assert np.isfinite(samples.value).all()
    assert len(bad) <= data.count(b"\n") + 2


COUNTERS = Decoder(
    decode_counters,
    (COUNTERS_TEXT, ERRORS_TEXT, COUNTERS_TEXT + ERRORS_TEXT, b""),
    (b"# Port counters: Lid 1 port 1\n", b"PortXmitData:....", b"Errors for ", b"GUID 0x1 port ", b"[", b" == ", b"]"),
    times=120,
)

FABRIC = b"""switchguid=0x2c5eab0300b87b40(2c5eab0300b87b40)
Switch\t65 "S-2c5eab0300b87b40"\t\t# "MF0;leaf-04:MQM9701/U1" enhanced port 0 lid 73 lmc 0
[1]\t"H-e09d7303007a4bd8"[1](e09d7303007a4bd8) \t\t# "n001 mlx5_5" lid 647 4xNDR
[35]\t"S-2c5eab0300c26280"[32]\t\t# "MF0;spine-02:MQM9701/U1" lid 236 4xNDR
Switch\t65 "S-2c5eab0300c26280"\t\t# "MF0;spine-02:MQM9701/U1" enhanced port 0 lid 236 lmc 0
Ca\t1 "H-e09d7303007a4bd8"\t\t# "n001 mlx5_5"
[1](e09d7303007a4bd8) \t"S-2c5eab0300b87b40"[1]\t\t# lid 647 lmc 0 "MF0;leaf-04:MQM9701/U1" lid 73 4xNDR
"""
REPORT = (
    b"CA   134  1 0x7cfe9003003b4bde 4x EDR - SW  1719 10 0x7cfe9003009ce5b0 ( 'o0001 HCA-1' - 'leaf01' )\n"
    b"SW  1719  1 0x7cfe9003009ce5b0 4x EDR - SW  1516  1 0x7cfe900300b07320 ( 'leaf01' - 'spine01' )\n"
    b"SW  2052 37 0x506b4b03005c2740 4x ???                                    'leaf02'\n"
)
MATRIX = b"\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\nGPU0\t X \tNV18\tPXB\tSYS\t0-63\nGPU1\tNV18\t X \tSYS\tPIX\t0-63\n"
NCCL = b"""<system version="1"><cpu numaid="0"><pci busid="0001:00:00.0" class="0x060400">
<pci busid="0001:01:00.0" class="0x030200"><gpu dev="0"/></pci>
<pci busid="0001:02:00.0" class="0x020700"><nic><net name="mlx5_0" speed="400000"/></nic></pci></pci></cpu></system>
"""
NETQ = b"""[{"nodes": [{"compounded_nodes": [{"id": "a", "name": "leaf", "tier": 1, "device_type": "switch"},
 {"id": "b", "name": "n1", "tier": -1, "device_type": "host"}]}], "links": [{"src": "a", "target": "b"}]}]"""
COMPUTES = b'[{"Name": "n1", "DomainUUID": "d", "GpuIDList": ["a", "b"]}]'


def decode_wiring(data: bytes) -> None:
    """As a file of a topology, and as a fabric that perfquery's ports are looked up in."""

    def read(path: Path) -> None:
        topology = load_topology(path).add_unplaced_nodes(["n-x"])
        for row in range(min(len(topology), 50)):
            assert all(device.rail >= -1 for device in topology.find_devices(row))

    file_of(data, "topology", read)
    with contextlib.suppress(ConfigError):
        parse_ibnetdiscover(data.decode(errors="replace"))


WIRINGS = Decoder(
    decode_wiring,
    (FABRIC, REPORT, MATRIX, NCCL, NETQ, COMPUTES, b"[{}]", b"<system/>"),
    (
        *(b"switchguid=", b"Switch\t1 ", b'"H-', b" lid 1", b"CA 1 1 0x1 4x EDR", b"GPU0\t", b"NIC0", b"<pci>"),
        *(b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b'"links": [', b'"Name": '),
    ),
    base_bytes=8 * MIB,
    times=200,
)

SERVING = b"""vllm:num_requests_running{engine="0",model_name="meta/llama"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="meta/llama"} 7.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="meta/llama"} 9.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="meta/llama"} 10.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="meta/llama"} 4.0
sglang:num_queue_reqs{model_name="m",priority="",tp_rank="0"} 6.0
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="t",version="1"} 0.75
trtllm_kv_cache_utilization{model_name="m"} 0.6
node_cpu_seconds_total{cpu="0",mode="steal"} 3
node_cpu_seconds_total{cpu="1",mode="steal"} 5
node_disk_read_bytes_total{device="nvme0n1"} 5e+9
"""


def decode_serving(page: bytes) -> None:
    """The same page says the same by its shape and line by line."""
    entities = Entities()
    decoder = PageDecoder(ExporterResolver(entities), Target("host", address="host:8000"))
    first, again = (decoder.decode(page, 1_760_000_000_000) for _ in range(2))
    for one, other in zip(first.samples, again.samples, strict=True):
        assert np.array_equal(one.value, other.value)
        assert (one.entity < len(entities[one.kind])).all()
        assert np.isfinite(one.value).all()


SERVED = Decoder(decode_serving, (SERVING,), (b'le="', b'model_name="', b'cpu="', b" NaN\n", b" 1\n"), times=200)

INFINIBAND = {
    "sysfs number": NUMBERS,
    "perfquery": COUNTERS,
    "fabric or wiring": WIRINGS,
    "serving page": SERVED,
}
