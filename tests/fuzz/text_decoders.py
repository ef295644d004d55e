"""Decoders of what operators hand us: topologies, configurations, target lists, histories, recorded pages, fits."""

import asyncio
import contextlib
import functools
import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.job_tables import read_gpu_numbers, read_job_table
from fleetcast.ingest.pages.recorded import PageReplay, ReplaySpeed
from fleetcast.ingest.pages.targets import TargetList
from fleetcast.ingest.pages.text import MAX_BAD_LINES
from fleetcast.ingest.topology.load import load_topology
from fleetcast.models.risk.node_risk import load_risk_fit
from fleetcast.service.config import load_config
from tests.fuzz.bounds import MIB
from tests.fuzz.decoder import Decoder
from tests.fuzz.door_decoders import NOW_MS, PAGE, PORTS


def file_of(data: bytes, name: str, read: Callable[[Path], object]) -> None:
    """Read or refused with a reason, as a file of that name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        with contextlib.suppress(ConfigError):
            read(path)


# -- topologies -----------------------------------------------------------------------------------------------------

RACKS = b"""[[rack]]
name = "r1"
nodes = ["n[001-004,007]", "login1"]
block = "b1"
rail_group = "g1"
cluster = "c1"
nvlink_domain = "nv1"
power_domain = "p1"
pool = "train"
gpus = 8
gpu_model = "H100"
gpu_memory_gib = 80.0
cpus = 128
host_memory_gib = 2048

[[rack]]
name = "r2"
nodes = "m[1-3]"
"""
SLURM_TREE = b"""# tree
SwitchName=leaf1 Nodes=n[001-004]
SwitchName=leaf[2] Nodes=n[005-006],n9 LinkSpeed=100
SwitchName=spine \\
  Switches=leaf[1-2]
"""
SLURM_BLOCKS = b"BlockName=b1 Nodes=n[1-4]\nblockname=b2 nodes=n[5-8]\nBlockSizes=4\n"
LABELS = b"""{"n1": {"nvidia.com/gpu.clique": "c.7", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "81559",
 "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "topology.kubernetes.io/zone": "z1"}, "n2": {}}"""
KUBECTL = b"""{"items": [{"metadata": {"name": "n1", "labels": {"cloud.provider.com/topology-rack": "r1"}},
 "status": {"capacity": {"cpu": "500m", "memory": "2113502228Ki", "nvidia.com/gpu": "8"}}}]}"""

TOPOLOGIES = Decoder(
    lambda data: file_of(data, "topology", load_topology),
    (RACKS, SLURM_TREE, SLURM_BLOCKS, LABELS, KUBECTL, b"", b"{}", b"[[rack]]\n"),
    (
        *(b"[[rack]]\n", b"nodes = ", b"SwitchName=", b"Switches=", b"Nodes=", b"BlockName=", b"[0-9999]", b"[1-3]"),
        *(b'"metadata": ', b'"labels": ', b'"nvidia.com/gpu.count": "', b'"items": [', b"32768", b"Ki", b"nan", b"inf"),
        *(b"gpus = ", b"cpus = 9223372036854775807\n", b"\\\n"),
    ),
    base_bytes=64 * MIB,  # n[0-9999] are 9 bytes
)

# -- configuration --------------------------------------------------------------------------------------------------

CONFIG = b"""state = "var"

[fleet]
name = "venus"

[clock]
epoch_ms = 1760000000000
wall_ms = 1760000000000
speed = 15.0

[scrape]
targets = ["http://127.0.0.1:9400/metrics", "http://n1:9400 gpu-1"]
interval_s = 15.0
timeout_s = 5.0
concurrency = 64

[pipeline]
tick_s = 10.0
history_days = 35
sources = [{use = "m:C", options = {a = 1, b = "x", c = true}}]

[api]
host = "127.0.0.1"
port = 8080

[placer]
port = 8081
max_risk = 0.5
"""


def decode_config(data: bytes) -> None:
    """A configuration that is taken gives a clock that can be asked."""

    def read(path: Path) -> None:
        clock = load_config(path).make_clock()
        assert isinstance(clock.now_ms(), int)
        assert clock.convert_to_wall_s(60.0) >= 0

    file_of(data, "config.toml", read)


CONFIGS = Decoder(
    decode_config,
    (CONFIG, b"", b"[api]\nport = 0\n", b"[clock]\nspeed = 1e300\n"),
    (b"[api]\n", b"port = ", b"speed = ", b"inf", b"nan", b"interval_s = ", b"tick_s = ", b"= 1e308\n", b"= 1e-308\n"),
)

TARGETS_TEXT = b"http://n1:9400/metrics\nhttps://10.0.0.7:9400 n001 # the second word\n\n# none\nhttp://[::1]:9/x?y=1\n"


def decode_targets(data: bytes) -> None:
    def read(path: Path) -> None:
        for target in TargetList([f"file:{path}"]).read_targets().values():
            assert target.host

    file_of(data, "targets.txt", read)


TARGET_LISTS = Decoder(
    decode_targets, (TARGETS_TEXT, b""), (b"http://", b"https://", b"[", b"]", b"::", b"@", b":99999", b"?", b"%")
)

FIT = b"""{"version": 1, "kinds": {"fail": {"intercept": -3.5, "weights": {"hot": 1.2}, "isotonic_x": [0.0, 0.5],
 "isotonic_y": [0.0, 1.0]}}, "notes": {"seed": 7}}"""
FITS = Decoder(
    lambda data: file_of(data, "node_risk.json", lambda path: load_risk_fit(path.parent)),
    (FIT, b"{}"),
    (b'"kinds": {', b'"weights": {', b'"isotonic_x": [', b"1e400"),
)

# -- histories ------------------------------------------------------------------------------------------------------

HELIOS = b"""job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1,u1,vc1,"a, ""b"" c",8,16,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:01:00,2020-04-01 01:01:00,3600,60
2,u1,vc1,x,0,16,1,FAILED,2020-04-01 00:00:00,None,None,0,0
3,u2,vc2,y,1,4,1,CANCELLED,2020-04-01T00:00:05,,2020-04-01 00:00:09,4,0
"""
HELIOS_GPUS = b"date,total,vc1,vc2\n2020-04-01,1064,8,16\n2020-04-02,1064,x,1e400\n"
SWF = b"; Version: 2.2\n; UnixStartTime: 1\n1 0 5 60 8 -1 -1 8 3600 -1 1 3 4 -1 1 1 -1 -1\n2 1 2 3.5 4\n\n"
SACCT = b"""JobID|JobIDRaw|State|Submit|Start|End|User|NNodes|AllocTRES|AllocGRES
7|7|COMPLETED|2026-01-01T00:00:00|2026-01-01T00:00:10|2026-01-01T01:00:00|ada|2|cpu=4,gres/gpu=16|
7|7|FAILED|2026-01-01T00:00:00|2026-01-01T02:00:10|2026-01-01T03:00:00|ada|2||gpu:h100:8
7.batch|7.batch|COMPLETED|2026-01-01T00:00:00|2026-01-01T00:00:10|2026-01-01T01:00:00||1||
8_1|9|CANCELLED by 0|Unknown|2026-01-01T00:00:10+02:00|Unknown|bob|1|gres/gpu:h100=1,gres/gpu:a100=2|
"""


def decode_history(data: bytes) -> None:
    for kind, name in (("helios", "cluster_log.csv"), ("swf", "a.swf"), ("slurm", "jobs.txt")):
        read = functools.partial(read_job_table, kind)
        file_of(data, name, read)
        file_of(data, f"{name}.gz", read)
        file_of(gzip.compress(data, 1), f"{name}.gz", read)
    file_of(data, "cluster_gpu_number.csv", lambda path: read_gpu_numbers(path.parent))


HISTORIES = Decoder(
    decode_history,
    (HELIOS, HELIOS_GPUS, SWF, SACCT, b"", b"\x1f\x8b\x08\x00"),
    (
        *(b"|", b"|#", b"job_id,gpu_num,submit_time,duration\n", b"JobID|State|Start|End\n", b"gres/gpu=", b"; "),
        *(b"2020-04-01 00:00:00", b"9999-12-31T23:59:59", b"0001-01-01T00:00:00", b"None", b"Unknown", b"\r"),
    ),
    times=200,
)


def decode_recorded(data: bytes) -> None:
    """A folder of recorded pages, one of them packed, or said to be."""
    with tempfile.TemporaryDirectory() as name:
        moment = Path(name) / f"{NOW_MS}"
        moment.mkdir()
        (moment / "n001.dcgm.prom").write_bytes(data)
        (moment / "n002.prom.gz").write_bytes(data)
        (moment / "n003.prom.gz").write_bytes(gzip.compress(data, 1))
        replay = PageReplay(Entities(), Path(name), ManualClock(NOW_MS), ReplaySpeed(speed=None))
        batch = asyncio.run(replay.next())
    assert len(batch.bad) <= 3 * (MAX_BAD_LINES + 2)  # of three pages, two of which may inflate


RECORDED = Decoder(decode_recorded, (PAGE, PORTS, gzip.compress(PAGE, mtime=0)), (b"\x1f\x8b\x08",), times=800)

TEXTS: dict[str, Decoder] = {
    "topologies": TOPOLOGIES,
    "configurations": CONFIGS,
    "target lists": TARGET_LISTS,
    "fits": FITS,
    "histories": HISTORIES,
    "recorded pages": RECORDED,
}
