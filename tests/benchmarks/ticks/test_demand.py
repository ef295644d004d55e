from fleetcast.benchmarks.ticks.demand import make_synthetic_panel


def test_what_is_made_up_adds_up() -> None:
    panel = make_synthetic_panel(3, 500)
    started, ended = panel.covariates["started"], panel.covariates["ended"]
    assert (panel.values[:, 1:] - panel.values[:, :-1] == (started - ended)[:, 1:]).all()
    assert (ended >= 0).all()
    assert (panel.values <= panel.capacity[:, None]).all()
