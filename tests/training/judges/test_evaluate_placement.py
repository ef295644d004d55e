"""The judge of packing, on a cluster small enough to pack by hand."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleetcast.fleet.errors import RecordError
from fleetcast.placement.machines.potential import (
    compute_potential,
    count_fragmented_milli,
    count_stranded_milli,
    count_usable_milli,
    list_ways,
)
from fleetcast.placement.machines.shapes import MemberShape, RecentShapes, make_shape_demand
from fleetcast.training.judges.packing import PackedFleet, draw_arrivals, pack_pods
from fleetcast.training.judges.placement import evaluate, make_policies
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.packing_sets import PackingSet, read_machines, read_pods

METHODS = {"ours", "fgd", "best_fit", "dot_prod", "packing", "random"}
NODES = pd.DataFrame(
    {
        "sn": ["b", "a", "c", "cpu-only"],
        "cpu_milli": [64_000, 64_000, 8_000, 64_000],
        "memory_mib": [1000, 1000, 1000, 1000],
        "gpu": [4, 4, 2, 0],
        "model": ["T4", "V100", "T4", None],
    }
)
PODS = pd.DataFrame(
    {
        "cpu_milli": [4000, 2000, 8000, 6000],
        "memory_mib": [10, 10, 10, 10],
        "num_gpu": [1, 1, 2, 0],
        "gpu_milli": [1000, 400, 1000, 0],
        "gpu_spec": [None, "T4", "V100|T4", None],
    }
)


def write(folder: Path, nodes: bool = True, **pods: pd.DataFrame) -> Path:
    place = folder / "placement" / "made"
    place.mkdir(parents=True, exist_ok=True)
    if nodes:
        NODES.to_parquet(place / "made_node_list_all.parquet")
    for name, table in pods.items():
        table.to_csv(place / f"made_pod_list_{name}.csv", index=False)
    return folder


def judged(train: Path, test: Path, seed: int = 1) -> Results:
    return evaluate(train, test, seed, lambda line: None)


def test_every_policy_has_both_numbers_and_the_nodes_come_from_the_train_folder(tmp_path: Path) -> None:
    train = write(tmp_path / "train", old=PODS)
    test = write(tmp_path / "test", nodes=False, new=PODS)
    results = judged(train, test)
    assert {(row.dataset, row.method, row.metric) for row in results.rows} == {
        ("made/new", method, metric) for method in METHODS for metric in ("allocated_at_130", "seconds")
    }
    shares = [row.value for row in results.select(metric="allocated_at_130")]
    assert all(share is not None and 50 <= share <= 100 for share in shares)
    again = judged(train, test).select(metric="allocated_at_130")
    assert [row.value for row in again] == shares


def test_what_cannot_be_read_is_skipped_with_its_reason(tmp_path: Path) -> None:
    test = write(tmp_path, good=PODS, bad=PODS.drop(columns="gpu_milli"), parts=PODS.assign(gpu_milli=[500, 1, 500, 0]))
    results = judged(tmp_path / "nowhere", test)
    assert {row.dataset for row in results.rows} == {"made/good"}
    assert sorted(results.skipped) == [
        "made/bad: missing column: no column gpu_milli",
        "made/parts: bad gpu_milli: it is of one GPU, at most 1000, and 1000 where num_gpu is above 1",
    ]
    assert judged(tmp_path, tmp_path / "empty").skipped == [f"placement: no pod list in {tmp_path / 'empty'}"]


@pytest.mark.parametrize("value", [-1, float("nan"), "many"])
def test_a_number_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(RecordError, match="cpu_milli must be a number"):
        read_pods("x", PODS.astype({"cpu_milli": object}).assign(cpu_milli=[value, 1, 1, 1]))


def test_nodes_without_gpus_are_left_out_and_the_others_stand_by_name() -> None:
    machines = read_machines(NODES)
    assert (machines.milli > 0).sum(axis=1).tolist() == [4, 4, 2]
    assert [machines.models[code] for code in machines.model] == ["V100", "T4", "T4"]


def test_arrivals_ask_for_130_percent_and_hold_every_pod() -> None:
    machines, pods = read_machines(NODES), read_pods("x", PODS)
    drawn = draw_arrivals(pods, machines, 1.3, 7)
    each = np.array([kind.shape.gpus * kind.shape.milli for kind in pods.kinds])
    assert 13_000 <= each[drawn].sum() < 15_000
    assert set(drawn.tolist()) == {0, 1, 2, 3}
    assert not np.array_equal(drawn, draw_arrivals(pods, machines, 1.3, 8))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_policy_gives_anything_twice(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machines, pods = read_machines(NODES), read_pods("x", PODS)
    make = make_policies(PackingSet("made/x", machines, pods, (pods,)), 3)[method]
    fleets: list[PackedFleet] = []
    taken = PackedFleet.place_pod

    def checked(fleet: PackedFleet, kind: object, row: int, slot: int) -> None:
        taken(fleet, kind, row, slot)  # type: ignore[arg-type]
        fleets.append(fleet)
        assert (fleet.milli >= 0).all()
        assert (fleet.cpus >= 0).all()
        assert (fleet.memory_mib >= 0).all()

    monkeypatch.setattr(PackedFleet, "place_pod", checked)
    share = pack_pods(machines, pods.kinds, draw_arrivals(pods, machines, 1.3, 5), make)
    left = fleets[-1].milli.sum()
    assert share == pytest.approx(1 - left / 10_000)


def test_fragments_are_what_the_demand_cannot_use() -> None:
    demand = make_shape_demand(
        {MemberShape(1, 500, 1.0): 1, MemberShape(2, 1000, 4.0): 1, MemberShape(0, 0, 9.0): 2}, ["T4"]
    )
    assert demand is not None
    milli = np.array([[1000, 1000], [1000, 300], [600, 600], [1000, 1000]])
    cpus, model = np.array([8.0, 8.0, 8.0, 0.5]), np.zeros(4, np.int64)
    # a quarter wants half a GPU, a quarter two whole ones, a half no GPU at all
    assert count_usable_milli(demand, milli, cpus, model).tolist() == [1000.0, 250.0, 300.0, 0.0]
    assert count_fragmented_milli(demand, milli, cpus, model).tolist() == [1000.0, 1050.0, 900.0, 2000.0]
    assert demand.cpus_per_gpu == pytest.approx(5.0 / 2.5)
    more = count_stranded_milli(demand, milli, cpus)
    assert more[3] > more[0]
    assert compute_potential(demand, milli, cpus, model) == pytest.approx(
        count_fragmented_milli(demand, milli, cpus, model) + more
    )


def test_a_demand_without_gpus_says_nothing_and_rare_shapes_are_left_out() -> None:
    assert make_shape_demand({}, []) is None
    assert make_shape_demand({MemberShape(0, 0, 4.0): 3}, ["T4"]) is None
    common = {MemberShape(gpus): 1000 - gpus for gpus in (1, 2)}
    demand = make_shape_demand({**common, MemberShape(8): 1}, ["T4"])
    assert demand is not None
    assert demand.gpus.tolist() == [1, 2]
    wants_t4 = make_shape_demand({MemberShape(1, models=("t4",)): 1}, ["Tesla T4", "V100"])
    assert wants_t4 is not None
    assert wants_t4.hosts[:, 0].tolist() == [True, False, False]


def test_of_equal_slots_the_first_is_a_way() -> None:
    found = list_ways(MemberShape(1, 300), np.array([[1000, 500, 500, 200], [1000, 1000, 0, 0]]))
    assert list(zip(found.at.tolist(), found.slot.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0)]
    assert found.milli[1].tolist() == [1000, 200, 500, 200]
    whole = list_ways(MemberShape(2), np.array([[1000, 500, 1000, 1000], [1000, 0, 0, 0]]))
    assert whole.at.tolist() == [0]
    assert whole.milli.tolist() == [[0, 500, 0, 1000]]


def test_only_the_newest_shapes_are_remembered() -> None:
    recent = RecentShapes(2)
    for gpus, members in ((1, 1), (2, 3), (4, 5)):
        recent.add(MemberShape(gpus), members)
    assert recent.count_members() == {MemberShape(2): 3, MemberShape(4): 5}
