"""`fleetcast models`: what is listed and shown, and that promotion, rollback and prune say and do the same."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from fleetcast.cli.lab.models import app
from fleetcast.fleet.errors import ConfigError, FleetcastError, ModelError, UnknownEntity
from fleetcast.models.versions.card import compute_calibration, make_card_metrics
from fleetcast.models.versions.registry import Registry
from fleetcast.training.reports.card_page import render_card
from tests.models.versions.test_registry import LOST, WON, card, hurt, write
from tests.training.made_results import demand_results

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Three versions of demand: 0001 served first, 0002 serves, 0003 lost."""
    registry = Registry(tmp_path / "models")
    metrics = make_card_metrics(demand_results(origins=1).rows)
    full = msgspec.structs.replace(
        card(WON), metrics=metrics, calibration=compute_calibration(metrics), dependencies={"lightgbm": "4.7.0"}
    )
    for one in (card(WON), full, card(LOST)):
        registry.add_version("demand", write, one)
    registry.promote("demand", "0001")
    registry.promote("demand", "0002")
    return tmp_path


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.output


def told(*words: object) -> Any:
    return json.loads(invoke(*words, "--json", "-"))


def test_the_list_says_what_serves_and_what_lost(state: Path) -> None:
    lines = invoke("list", "--state", state).splitlines()
    (serving,) = [line for line in lines if "serves" in line]
    assert "0002" in serving
    assert "lost" in next(line for line in lines if "0003" in line)
    rows = told("list", "demand", "--state", state)["rows"]
    assert [(row["version"], row["serves"], row["gate"], row["damage"]) for row in rows] == [
        ("0001", False, "won", None),
        ("0002", True, "won", None),
        ("0003", False, "lost", None),
    ]


def test_a_damaged_version_is_listed_as_such(state: Path) -> None:
    hurt(Registry(state / "models"), "0001")
    assert "damaged: model.json has another sha256" in " ".join(invoke("list", "--state", state).split())
    (state / "models" / "demand" / "0003" / "card.json").unlink()
    rows = told("list", "--state", state)["rows"]
    assert rows[2]["gate"] is None
    assert "card.json: No such file" in rows[2]["damage"]


def test_an_empty_registry_says_what_makes_a_model(tmp_path: Path) -> None:
    assert "`fleetcast train demand` makes one" in invoke("list", "--state", tmp_path)
    assert told("list", "--state", tmp_path)["rows"] == []


def test_a_card_is_readable_in_a_terminal(state: Path) -> None:
    text = invoke("show", "demand", "--state", state)
    assert "demand 0002, serves" in text
    assert "won: 0.0095 against 0.0110" in text
    assert "daily seasonal" in text
    assert "0.00768 [0.00722, 0.00806]" in text
    assert "calibration of" in text
    assert "lightgbm 4.7.0" in text


def test_a_card_is_told_as_json_and_as_a_page(state: Path) -> None:
    document = told("show", "demand", "3", "--state", state)
    assert (document["version"], document["serves"], document["gate"]["won"]) == ("0003", False, False)
    page = state / "card.html"
    invoke("show", "demand", "3", "--state", state, "--html", page)
    assert "The gate does not let it serve" in page.read_text()
    with pytest.raises(FleetcastError, match="cannot write"):
        invoke("show", "demand", "3", "--state", state, "--html", state / "no" / "card.html")


def test_a_page_of_a_card_has_its_plots_and_where_it_comes_from(state: Path) -> None:
    html = render_card(Registry(state / "models").read_version_card("demand", "0002"))
    for part in ("The gate lets it serve", "Calibration, running", "8 of 20 better", "How it was made", "trees/1h.txt"):
        assert part in html
    assert "<svg" in html


def test_promotion_and_rollback_are_told(state: Path) -> None:
    with pytest.raises(ModelError, match=r"demand 0003 is not promoted: it lost to persistence"):
        invoke("promote", "demand", "3", "--state", state)
    assert "demand 0002 served already" in invoke("promote", "demand", "2", "--state", state)
    assert told("promote", "demand", "3", "--force", "--state", state) == {
        **{"kind": "demand", "version": "0003", "previous": "0002", "forced": True}
    }
    assert "lost, forced" in invoke("list", "--state", state)
    text = invoke("show", "demand", "--state", state)
    assert "promoted 0003 by force" in text
    assert "promoted 0001" not in text
    assert [row["forced"] for row in told("show", "demand", "--state", state)["promotions"]] == [True]
    assert "demand 0002 serves again, 0003 no longer" in invoke("rollback", "demand", "--state", state)
    assert told("rollback", "demand", "--state", state)["version"] == "0001"
    assert "demand as shipped serves again, 0001 no longer" in invoke("rollback", "demand", "--state", state)


def test_a_version_is_chosen_for_the_shadow(state: Path) -> None:
    assert [row["shadow"] for row in told("list", "demand", "--state", state)["rows"]] == [False, False, True]
    assert "demand 0001 runs in the shadow" in invoke("shadow", "demand", "1", "--state", state)
    assert "shadow" in next(line for line in invoke("list", "--state", state).splitlines() if "0001" in line)
    assert told("shadow", "demand", "off", "--state", state) == {"kind": "demand", "version": None}
    with pytest.raises(ConfigError, match="only versions of demand"):
        invoke("shadow", "duration", "1", "--state", state)


def test_show_without_a_version_is_the_newest_where_none_serves(tmp_path: Path) -> None:
    Registry(tmp_path / "models").add_version("risk", write, msgspec.structs.replace(card(LOST), kind="risk"))
    assert "no version of risk serves; this is the newest" in invoke("show", "risk", "--state", tmp_path)


def test_pruning_says_first_what_would_go(state: Path) -> None:
    Registry(state / "models").add_version("demand", write, card(WON))
    assert "demand: would delete 0003" in invoke("prune", "--keep", 1, "--dry-run", "--state", state)
    assert told("prune", "demand", "--keep", 1, "--state", state)["deleted"] == {"demand": ["0003"]}
    assert Registry(state / "models").list_names("demand") == ["0001", "0002", "0004"]
    assert "demand: deleted nothing" in invoke("prune", "--state", state)


def test_the_folder_comes_from_the_configuration(state: Path) -> None:
    file = state / "c.toml"
    file.write_text(f"[models]\nfolder = '{state / 'models'}'\n")
    assert told("list", "--config", file)["folder"] == str(state / "models")
    assert len(told("list", "--folder", state / "models")["rows"]) == 3


def test_wrong_names_are_errors_that_name_the_fix(state: Path) -> None:
    with pytest.raises(ConfigError, match="kind 'deman': expected one of demand, duration"):
        invoke("show", "deman", "--state", state)
    with pytest.raises(ConfigError, match="no such folder"):
        invoke("list", "--folder", state / "nowhere")
    with pytest.raises(UnknownEntity, match=r"no version 9 of demand .* the newest are: 0001, 0002, 0003"):
        invoke("promote", "demand", "9", "--state", state)
    with pytest.raises(UnknownEntity, match=r"no version of duration in .*`fleetcast train duration` makes one"):
        invoke("show", "duration", "--state", state)


@pytest.mark.parametrize(("words", "code"), [(("rollback", "duration"), 1), (("show", "deman"), 2)])
def test_exit_codes(state: Path, words: tuple[str, ...], code: int) -> None:
    command = [sys.executable, "-m", "fleetcast.cli.main", "models", *words, "--state", str(state)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == code
