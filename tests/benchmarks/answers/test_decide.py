from fleetcast.benchmarks.answers.decide import BestFit, BestGang, make_synthetic_view, run
from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.engine import decide


def test_every_case_measures_a_success() -> None:
    records = run((1_000,))
    placed = ["one_gpu", "gang_in_one_rack", "gang_anywhere"]
    cases = [*placed, *(f"{case}_new_risks" for case in placed), "cannot_fit_one_rack"]
    assert [record["case"] for record in records] == [case for case in cases for _ in range(2)]
    assert all(record["value"] > 0 for record in records)
    assert len({record["peer"]["name"] for record in records}) == 2


def test_the_peer_solves_the_same_task() -> None:
    view = make_synthetic_view(200)
    names = BestFit(view).place_gang(10, 8)
    assert len(set(names)) == 10
    assert all(view.free[view.topology.names.index(name)].all() for name in names)


def test_the_second_peer_answers_as_much_as_a_decision() -> None:
    view = make_synthetic_view(600)
    answer = BestGang(view).place_gang(40, 8, in_one_rack=True)
    request = PlacementRequest(request_id="a", gang=40, gpus_per_node=8, topology=TopologyConstraint(required="rack"))
    decision = decide(request, view)
    assert len(answer.ranks) == len(decision.ranks) == 40
    assert all(gpus == tuple(range(8)) for _, gpus in answer.ranks)
    row = view.topology.names.index
    assert len({row(name) // 128 for name, _ in answer.ranks}) == 1
    assert sum(answer.rejected.values()) == sum(decision.rejected.values())
    assert len(answer.runners_up) == len(decision.runners_up) == 2


def test_the_second_peer_says_why_a_gang_does_not_fit() -> None:
    view = make_synthetic_view(600)
    answer = BestGang(view).place_gang(128, 8, in_one_rack=True)
    assert not answer.ranks
    assert answer.sentence.startswith("refused: needs 128 x 8 GPUs; the best rack has room for ")
    assert f"{answer.rejected['busy']} busy" in answer.sentence
