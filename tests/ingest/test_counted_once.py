"""Each part of a sum counts, and counts once: ranks of engines, drives, interfaces, CPUs, whoever sends them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.remote_write.request import Version
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import Desk, page
from tests.ingest.remote_write.test_write_decoder import World
from tests.ingest.write_requests import T0, Row

FIELD = Path(__file__).parents[1] / "field"
READ, SENT = "node_disk_read_bytes_total", "node_network_receive_bytes_total"
EXTERNAL = [{}, {"environment": "apps"}, {"__replica__": "b", "cluster": "x"}, {"prometheus": "monitoring/k8s"}]


def served(text: bytes, address: str = "engine:30000") -> dict[str, dict[str, float]]:
    """metric -> {instance: value}."""
    desk = Desk()
    desk.decoder = PageDecoder(desk.resolver, Target("engine", address=address))
    found: dict[str, dict[str, float]] = {}
    for name, value in desk.words(desk.decoder.decode(text, 1000)).items():
        metric, _, instance = name.partition(" ")
        found.setdefault(metric, {})[instance] = value
    return found


def test_every_data_parallel_rank_counts_once() -> None:
    found = served((FIELD / "09-sglang-dp-attention.prom").read_bytes())
    assert sum(found["requests_running"].values()) == 108
    assert sum(found["requests_waiting"].values()) == 28
    assert list(found["kv_cache_used"].values()) == [0.5] * 8


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("attention", [True, False])
def test_ranks_that_share_a_data_parallel_rank_count_as_one(width: int, stages: int, attention: bool) -> None:
    lines = [
        f'sglang:{name}{{dp_rank="{rank}",model_name="m",pid="{pid}",pp_rank="{stage}",tp_rank="{own}"}} {10 + rank}'
        for pid, (rank, inner, stage) in enumerate(
            (rank, inner, stage) for rank in range(4) for inner in range(width) for stage in range(stages)
        )
        for own in [rank * width + inner if attention else inner]
        for name in ("num_running_reqs", "prompt_tokens_total")
    ]
    for text in (page(*lines), page(*reversed(lines))):
        found = served(text)
        assert sum(found["requests_running"].values()) == 10 + 11 + 12 + 13
        assert sum(found["prompt_tokens"].values()) == 10 + 11 + 12 + 13


def test_engines_of_vllm_and_versions_of_triton_are_added_up() -> None:
    engines = [f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} {engine + 1}' for engine in range(4)]
    reasons = [
        f'vllm:request_success_total{{engine="{engine}",finished_reason="{why}",model_name="m"}} 5'
        for engine in range(4)
        for why in ("stop", "length", "abort")
    ]
    found = served(page(*engines, *reasons))
    assert sum(found["requests_running"].values()) == 10
    assert sum(found["requests_finished"].values()) == 60
    versions = [
        f'nv_trt_llm_request_metrics{{model="m",request_type="{kind}",version="{version}"}} {version}'
        for kind in ("scheduled", "waiting", "max")
        for version in (1, 2)
    ]
    cache = [
        f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="fraction",model="m",version="{version}"}} 0.{version}'
        for version in (2, 4)
    ]
    boards = [f'nv_inference_request_success{{gpu_uuid="GPU-{gpu}",model="m",version="1"}} 7' for gpu in range(2)]
    found = served(page(*versions, *cache, *boards))
    assert found["requests_running"] == found["requests_waiting"] == {"default/m/engine:30000": 3.0}
    assert found["kv_cache_used"] == {"default/m/engine:30000": pytest.approx(0.3)}
    assert found["requests_finished"] == {"default/m/engine:30000": 14.0}


def labelled(name: str, device: str, more: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted({"__name__": name, "device": device, "instance": "n1:9100", **more}.items()))


def sums(world: World, requests: list[list[Row]], version: Version) -> dict[tuple[str, int], float]:
    """(metric, ms after T0) -> value."""
    found: dict[tuple[str, int], float] = {}
    for rows in requests:
        batch = world.decode(rows, version, received_ms=T0 + 60_000)
        for _, metric, time_ms, value in world.named(batch):
            assert found.setdefault((metric, time_ms - T0), value) == value
    return found


@pytest.mark.parametrize("version", Version)
@pytest.mark.parametrize("together", [True, False])
def test_a_device_that_two_senders_tell_counts_once(version: Version, together: bool) -> None:
    """One series with and without an external label, of the same time and value."""
    series = [
        (labelled(name, device, more), step)
        for more in EXTERNAL[:2]
        for name, device in ((READ, "nvme0n1"), (READ, "nvme1n1"), (SENT, "eth0"), (SENT, "eth1"))
        for step in range(4)
    ]
    rows: list[Row] = [(labels, [(T0 + 15_000 * step, 1e8 * 15 * step)]) for labels, step in series]
    requests = [rows] if together else [[row] for row in rows]
    if not together:
        requests.sort(key=lambda request: request[0][1][0][0])
    found = sums(World(), requests, version)
    for metric in ("nvme_read_bytes", "net_rx_bytes"):
        assert found[metric, 30_000] - found[metric, 15_000] == 2 * 1e8 * 15, "two drives of 100 MB/s"


@given(
    st.lists(
        st.tuples(st.sampled_from(["nvme0n1", "nvme1n1", "nvme2n1"]), st.sampled_from(EXTERNAL)), min_size=1, max_size=9
    ),
    st.sampled_from(list(Version)),
)
@examples(60)
def test_a_sum_is_over_devices_whatever_senders_add(told: list[tuple[str, dict[str, str]]], version: Version) -> None:
    rows: list[Row] = [
        (labelled(READ, device, more), [(T0 + 15_000 * step, float(1 << int(device[4])) * step) for step in range(4)])
        for device, more in told
    ]
    found = sums(World(), [rows], version)
    assert found["nvme_read_bytes", 15_000] == sum(1 << int(device[4]) for device in {device for device, _ in told})


def test_what_stands_on_another_device_is_not_counted_again() -> None:
    desk = Desk("n1")
    disks = ("nvme0n1", "nvme0n1p1", "nvme0c0n1", "dm-0", "md127", "sda", "loop0", "nvme1n1")
    nets = (
        "eth0",
        "eth1",
        "bond0",
        "bond0.100",
        "eth0.7",
        "br0",
        "docker0",
        "veth12",
        "lo",
        "ib0",
        "ib0.8001",
        "enP5p9s0",
    )
    lines = [f'{READ}{{device="{disk}"}} 100' for disk in disks] + [f'{SENT}{{device="{net}"}} 10' for net in nets]
    for text in (page(*lines), page(*lines, f'{READ}{{device="nvme0n1",fleet="x"}} 100')):
        for _ in range(2):  # the second time from the shape
            words = desk.words(desk.decoder.decode(text, 1000))
            assert words == {"nvme_read_bytes n1": 200.0, "net_rx_bytes n1": 40.0}
