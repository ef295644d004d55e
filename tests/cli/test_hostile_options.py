"""No option of any command gives a traceback or hangs, and each refusal names the option."""

from pathlib import Path
from random import Random

import pytest

from tests.cli.hostile_options import (
    cases_of,
    commands,
    complaint,
    hostile_files,
    load_everything,
    run_case,
)
from tests.fuzz.bounds import EFFORT

SHARE = min(1.0, 0.15 * EFFORT)  # of all cases: 1.8 % in `make test`, all of them in `make soak`
SEED = 1
COMMANDS = sorted(commands())


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    load_everything()


@pytest.mark.parametrize("command", COMMANDS)
def test_options_meet_hostile_values_with_a_sentence(command: str, tmp_path: Path) -> None:
    """Run a command with a share of the hostile values, the same ones each time."""
    hostile_files(tmp_path)
    usual, *cases = cases_of(command)
    expected = run_case(usual, tmp_path).output
    chosen = Random(SEED).sample(cases, round(SHARE * len(cases)))
    problems = [complaint(case, run_case(case, tmp_path), expected) for case in chosen]
    assert [problem for problem in problems if problem] == []


def test_a_port_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    for command in ("run", "demo"):
        (case,) = [each for each in cases_of(command) if (each.option, each.value) == ("--port", "99999")]
        end = run_case(case, tmp_path)
        assert end.code == 2
        assert "--port" in end.output
        assert "99999" in end.output
