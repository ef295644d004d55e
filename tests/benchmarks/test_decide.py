from benchmarks.decide import best_fit, run, synthetic_view


def test_every_case_measures_a_success() -> None:
    records = run((1_000,))
    assert [record["case"] for record in records] == ["one_gpu", "gang_in_one_rack", "gang_anywhere", "queue_pass"]
    assert all(record["value"] > 0 for record in records)


def test_the_peer_solves_the_same_task() -> None:
    view = synthetic_view(200)
    rows = best_fit(view, 10, 8)
    assert len(set(rows)) == 10
    assert all(view.free[row].all() for row in rows)
