"""Parts of GPUs, requests without GPUs, lists of models, pools."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import Decision, Gang, PlacementRequest, TopologyConstraint
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.placement.ahead.paths import sample_timelines
from fleetcast.placement.ahead.start_time import estimate_start
from fleetcast.placement.engine import decide, fits_now, is_still_valid
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.slots import convert_to_milli
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.queue import WaitingEntry, plan
from fleetcast.placement.plan.timeline import (
    RunTimeQuantiles,
    Timeline,
    add_request_placement,
    estimate_releases,
)
from tests.fuzz.bounds import examples
from tests.placement.runs import Run, table_of


def ask(name: str = "a", **changed: Any) -> PlacementRequest:
    return PlacementRequest(request_id=name, **changed)


def after(view: ClusterView, request: PlacementRequest) -> tuple[Decision, ClusterView]:
    decision = decide(request, view)
    assert decision.outcome == "placed", decision.sentence
    return decision, add_request_placement(view, request, decision.ranks)


def test_two_parts_share_a_gpu_and_a_third_that_does_not_fit_takes_another(make_view) -> None:
    view = make_view({"r01": [2]})
    first, view = after(view, ask("a", gpu_share=460))
    assert first.sentence == "placed 0.46 GPU on n001"
    second, view = after(view, ask("b", gpu_share=500))
    third, view = after(view, ask("c", gpu_share=50))
    assert [(rank.gpus, rank.gpu_share) for one in (first, second, third) for rank in one.ranks] == [
        ((6,), 460),
        ((6,), 500),
        ((7,), 50),
    ]
    assert view.milli[0, 6:].tolist() == [40, 950]


def test_a_whole_gpu_is_never_one_of_which_a_part_is_taken(make_view) -> None:
    _, view = after(make_view({"r01": [1]}), ask("a", gpu_share=1))
    refused = decide(ask("b"), view)
    assert (refused.outcome, refused.rejected) == ("refused", {"busy": 1})


def test_a_gang_of_parts_says_what_is_short(make_view) -> None:
    view = make_view({"r01": [1], "r02": [1]})
    placed, _ = after(view, ask(gang=4, gpu_share=400))
    assert placed.sentence == "placed 4 x 0.4 GPU in rail group rg1"
    refused = decide(ask(gang=3, gpu_share=400, topology=TopologyConstraint("rack")), view)
    assert refused.sentence == (
        "refused: needs 3 x 0.4 GPU inside one rack; the best rack r01 has room for 2 x 0.4 GPU; "
        "room for 4 x 0.4 GPU is scattered over 2 racks"
    )


def test_a_request_without_gpus_needs_free_cpus_only_and_holds_them(make_view) -> None:
    view = make_view({"r01": [0]})
    decision, view = after(view, ask("a", gang=2, gpus_per_node=0, cpus=50))
    assert decision.sentence == "placed 2 x 50 CPUs on n001"
    assert all(rank.gpus == () for rank in decision.ranks)
    assert view.free_cpus.tolist() == [28.0]
    refused = decide(ask("b", gpus_per_node=0, cpus=50), view)
    assert refused.sentence == "refused: needs 50 CPUs; no room for 50 CPUs; of 1 node: 1 with too few free CPUs"


def pools() -> ClusterView:
    specs = [
        NodeSpec(f"n{at}", 2, model, 80, 64, 512, pool=pool)
        for at, (model, pool) in enumerate([("H100", "train"), ("A100", "train"), ("L4", "serve")])
    ]
    free, none = np.ones((3, 2), bool), np.zeros(3)
    return ClusterView(
        topology=Topology.build(specs),
        milli=convert_to_milli(free),
        usable=free,
        state=np.zeros(3, np.int8),
        p_fail=none,
        p_slow=none,
        reason={},
        holders=np.full((3, 2), -1, np.int32),
        jobs=(),
        free_cpus=np.full(3, 64.0),
        free_host_memory_gib=np.full(3, 512.0),
    )


def test_any_model_of_a_list_will_do_and_other_pools_are_counted() -> None:
    view = pools()
    decision = decide(ask(gpu_models=("l4", "a100"), pool="train"), view)
    assert [rank.node for rank in decision.ranks] == ["n1"]
    assert decision.rejected == {"pool": 1, "gpu_model": 1}
    refused = decide(ask(gpu_models=("L4", "A100"), pool="nowhere"), view)
    assert refused.sentence == (
        "refused: needs 1 GPU of model L4 or A100 in pool nowhere; 0 free GPUs fit; of 3 nodes: 3 of another pool"
    )


def test_a_part_comes_back_when_its_job_ends(make_view) -> None:
    _, view = after(make_view({"r01": [1]}), ask("a", gpu_share=300))
    _, view = after(view, ask("b", gpu_share=300))
    running = table_of({"a": Run(0, 1, 100.0), "b": Run(0, 1, 200.0), "running": Run(0, 7, 300.0)})
    ahead = Timeline(view, estimate_releases(view, running, RunTimeQuantiles({}), 0))
    assert [int(ahead.make_view_after(step).milli[0, 7]) for step in range(4)] == [400, 700, 1000, 1000]
    assert ahead.make_view_after(3).milli.min() == 1000


def test_what_waits_for_a_part_starts_when_a_gpu_is_free_and_cpus_alone_start_now_or_never(make_view) -> None:
    view = make_view({"r01": [0]}, free_cpus=np.array([8.0]))
    running, options = table_of({"running": Run(0, 8, 3600.0)}), Options(now_ms=1_000_000)
    queue = [WaitingEntry(ask("part", gpu_share=300), 0), WaitingEntry(ask("cpus", gpus_per_node=0, cpus=16), 0)]
    run_times = RunTimeQuantiles({8: (3600.0, 3600.0), 0: (60.0, 60.0)})
    paths = sample_timelines(queue, view, running, run_times, options)
    assert set(paths.starts_s) == {"part"}
    assert estimate_start(ask("b", gpus_per_node=0, cpus=8), paths).start_ms == dict.fromkeys(
        ("p10", "p50", "p90"), 1_000_000
    )
    never = estimate_start(ask("c", gpus_per_node=0, cpus=16), paths)
    assert (never.start_ms, never.constraint) == (None, "cpus")
    waits = {wait.entry.request.request_id: wait.why for wait in plan(queue, view, running, run_times, options).waiting}
    assert waits["part"].startswith("waits for 0.3 GPU; no room for 0.3 GPU; ")
    assert waits["cpus"].startswith("waits for 16 CPUs; no room for 16 CPUs; ")


REQUESTS = st.one_of(
    st.builds(dict, gpu_share=st.integers(1, 1000), gang=st.integers(1, 5), cpus=st.sampled_from([None, 1, 40])),
    st.builds(dict, gpus_per_node=st.integers(1, 8), gang=st.integers(1, 2), cpus=st.sampled_from([None, 1, 40])),
    st.builds(dict, gpus_per_node=st.just(0), cpus=st.integers(1, 128), spread=st.booleans()),
    st.builds(dict, gpu_share=st.integers(1, 1000), gang=st.just(Gang(1, 9, 2)), spread=st.booleans()),
)


@examples(300)
@given(st.lists(REQUESTS, min_size=1, max_size=25), st.lists(st.integers(0, 8), min_size=1, max_size=4))
def test_no_thousandth_of_a_gpu_and_no_cpu_is_given_twice(make_view, wanted, free) -> None:
    empty = view = make_view({"r01": free})
    given = np.zeros(view.milli.shape, np.int64)
    whole = np.zeros(view.milli.shape, bool)
    for number, columns in enumerate(wanted):
        request = ask(f"j{number}", **columns)
        decision = decide(request, view)
        assert decision.nodes == decision.candidates + sum(decision.rejected.values())
        assert fits_now(request, view) == (decision.outcome == "placed")
        if decision.outcome != "placed":
            continue
        assert is_still_valid(request, decision, view)
        for rank in decision.ranks:
            at = view.inventory.row[rank.node], list(rank.gpus)
            assert not whole[at].any()
            assert rank.milli == 1000 or len(rank.gpus) == 1
            given[at] += rank.milli
            whole[at] |= rank.milli == 1000
        view = add_request_placement(view, request, decision.ranks)
        assert (given <= empty.milli).all()
        assert np.array_equal(view.milli, empty.milli - given)
        assert (view.free_cpus >= 0).all()
    jobs = table_of({job: Run(0, 1) for job in view.jobs})
    ahead = estimate_releases(replace(view, usable=view.usable), jobs, RunTimeQuantiles({}), 0)
    ended = Timeline(view, ahead).make_view_after(len(ahead))
    assert ahead == [] or (ended.milli == 1000).all()


@pytest.mark.parametrize("share", [1, 333, 999])
def test_a_decision_on_parts_does_not_hold_once_they_are_taken(make_view, share: int) -> None:
    view = make_view({"r01": [1]})
    decision, _ = after(view, ask("a", gpu_share=share))
    assert is_still_valid(ask("a", gpu_share=share), decision, view)
    milli = view.milli.copy()
    milli[0, 7] = share - 1
    assert not is_still_valid(ask("a", gpu_share=share), decision, replace(view, milli=milli))
