from fleetcast.benchmarks.answers.decide import BestFit, make_synthetic_view, run


def test_every_case_measures_a_success() -> None:
    records = run((1_000,))
    cases = ["one_gpu", "gang_in_one_rack", "gang_anywhere", "cannot_fit_one_rack"]
    assert [record["case"] for record in records] == cases
    assert all(record["value"] > 0 for record in records)


def test_the_peer_solves_the_same_task() -> None:
    view = make_synthetic_view(200)
    names = BestFit(view).place_gang(10, 8)
    assert len(set(names)) == 10
    assert all(view.free[view.topology.names.index(name)].all() for name in names)
