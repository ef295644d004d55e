"""A pass over the queue remembers what failed by fit key: no field that matters to a filter may be left out of it."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleetcast.fleet.requests import Gang, PlacementRequest, TopologyConstraint
from fleetcast.placement.ahead.calendars import RoomCache
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.queue import WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.queues.asks import IDS_AND_TIMES, QUEUE_FIELDS, UNREAD_BY_FILTERS, make_fit_key, make_queue_ask
from tests.fuzz.bounds import examples
from tests.placement.conftest import build
from tests.placement.runs import Run, table_of

NOW_MS = 1_800_000_000_000
TIMES = RunTimeQuantiles({8: (600.0, 3600.0), 0: (60.0, 7200.0)})
NAMES = frozenset(field.name for field in msgspec.structs.fields(PlacementRequest))
MAY_BE_READ_BY_FILTERS = frozenset(
    {
        *("cluster", "gang", "gpus_per_node", "gpu_model", "gpu_memory_gib", "gpu_models", "pool", "gpu_share"),
        *("mig_profile", "cpus", "host_memory_gib", "nvme_gib", "topology", "spread", "max_risk", "power_w"),
        "avoid_nodes",
    }
)
OTHER: dict[str, list[Any]] = {
    "request_id": ["other"],
    "job": ["a", "b"],
    "attempt": [2, 7],
    "cluster": ["c1"],
    "tenant": ["red", "blue"],
    "queue": ["red", "blue"],
    "user": ["ada", "bob"],
    "class_": ["inference", "batch"],
    "priority": [-1, 5],
    "preemptible": [True],
    "gang": [2, 9, Gang(1, 4), Gang(2, 4, 2)],
    "gpus_per_node": [4, 8],
    "gpu_model": ["H100", "B200"],
    "gpu_memory_gib": [40.0, 200.0],
    "gpu_models": [("H100",), ("B200", "A100")],
    "pool": ["train"],
    "gpu_share": [250, 500],
    "mig_profile": ["1g.10gb"],
    "cpus": [1, 500],
    "host_memory_gib": [1.0, 9000.0],
    "nvme_gib": [1.0],
    "host_offload": [True],
    "topology": [TopologyConstraint("rack"), TopologyConstraint(None, "rack"), TopologyConstraint("node")],
    "spread": [True],
    "limit_s": [60.0, 86_400.0],
    "deadline_ms": [NOW_MS + 1],
    "tolerated_wait_s": [60.0],
    "max_risk": [0.01, 0.9],
    "power_w": [300.0],
    "checkpoint_cost_s": [30.0],
    "avoid_nodes": [("n000",), ("n001", "n002")],
    "dry_run": [True],
}


def test_each_field_of_a_request_is_on_one_list() -> None:
    """A new field belongs to the key until somebody declares that no filter reads it."""
    assert MAY_BE_READ_BY_FILTERS | UNREAD_BY_FILTERS == NAMES
    assert not MAY_BE_READ_BY_FILTERS & UNREAD_BY_FILTERS
    assert IDS_AND_TIMES < UNREAD_BY_FILTERS
    assert QUEUE_FIELDS < UNREAD_BY_FILTERS
    assert not IDS_AND_TIMES & QUEUE_FIELDS
    assert OTHER.keys() == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_field_is_in_the_keys_unless_it_is_declared(name: str) -> None:
    request = PlacementRequest(request_id="r")
    for value in OTHER[name]:
        other = msgspec.structs.replace(request, **{name: value})
        assert (make_fit_key(other, has_plugins=True) is make_fit_key(request, has_plugins=True)) == (
            name in IDS_AND_TIMES
        )
        assert (make_queue_ask(other) is make_queue_ask(request)) == (name in IDS_AND_TIMES)
        assert (make_queue_ask(other).in_line is make_queue_ask(request).in_line) == (
            name in IDS_AND_TIMES | QUEUE_FIELDS
        )
        if name in UNREAD_BY_FILTERS:
            assert make_fit_key(other, has_plugins=False) is make_fit_key(request, has_plugins=False)


@examples(500)
@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from(sorted(NAMES - {"mig_profile", "nvme_gib", "power_w"})),
    st.data(),
)
def test_requests_with_one_fit_key_fit_alike(nodes: list[list[int]], name: str, data: st.DataObject) -> None:
    view = build({f"r{at}": counts for at, counts in enumerate(nodes)})
    columns = {
        field: data.draw(st.sampled_from(OTHER[field]))
        for field in data.draw(
            st.lists(st.sampled_from(["gang", "cpus", "topology", "spread", "max_risk"]), unique=True)
        )
    }
    request = PlacementRequest(request_id="r", **columns)
    other = msgspec.structs.replace(request, **{name: data.draw(st.sampled_from(OTHER[name]))})
    if make_fit_key(request, has_plugins=False) is make_fit_key(other, has_plugins=False):
        np.testing.assert_array_equal(screen(request, view, OPTIONS).room, screen(other, view, OPTIONS).room)
        assert fits_now(request, view, OPTIONS) == fits_now(other, view, OPTIONS)


OPTIONS = Options(now_ms=NOW_MS)


def refuses(name: str, value: Any) -> Options:
    """The options of an operator whose own filter refuses every node to requests with that value."""

    def closed(request: PlacementRequest, view: ClusterView, options: Options) -> NDArray[np.bool_]:
        return np.full(len(view), getattr(request, name) == value)

    return Options(now_ms=NOW_MS, filters=(("closed", closed),))


def test_a_node_that_is_closed_to_one_tenant_has_room_for_another_in_the_futures() -> None:
    rooms = RoomCache(build({"r01": [8, 8]}), refuses("tenant", "red"))
    found = [
        rooms.count_members_per_node(PlacementRequest(request_id="r", tenant=tenant)).tolist()
        for tenant in ("red", "blue", "red")
    ]
    assert found == [[0, 0], [8, 8], [0, 0]]


def test_refusals_that_no_plugin_caused_are_shared_by_all_tenants() -> None:
    """A hundred tenants wait for what is not free. They use up one try, so a request behind them is still tried."""
    holders = np.zeros((2, 8), np.int32)
    view = build({"r01": [0, 4]}, holders=np.where(build({"r01": [0, 4]}).free, -1, holders), jobs=("long",))
    large = [
        WaitingEntry(PlacementRequest(request_id=f"q{at:03}", tenant=f"t{at}", gpus_per_node=8), NOW_MS - 9000 + at)
        for at in range(100)
    ]
    small = WaitingEntry(PlacementRequest(request_id="small", limit_s=60.0), NOW_MS - 1000)
    running = table_of({"long": Run(NOW_MS, 12, 7200.0)})
    found = plan([*large, small], view, running, TIMES, refuses("tenant", "red"))
    assert [entry.request.request_id for entry, _ in found.placed] == ["small"]


@pytest.mark.parametrize("name", sorted(NAMES - IDS_AND_TIMES - {"gpu_share", "topology", "gang"}))
def test_a_refusal_by_a_filter_of_the_operator_is_for_requests_that_it_refuses_alone(name: str) -> None:
    """16 nodes are free. The filter refuses the first request for the value of one field; the second starts."""
    value = OTHER[name][0]
    refused = PlacementRequest(request_id="refused", **{name: value})
    welcome = PlacementRequest(request_id="welcome")
    queue = [WaitingEntry(refused, NOW_MS - 2000), WaitingEntry(welcome, NOW_MS - 1000)]
    view = build({"r01": [8] * 16})
    found = plan(queue, view, NO_RUNNING_JOBS, TIMES, refuses(name, value))
    assert "welcome" in [entry.request.request_id for entry, _ in found.placed]
