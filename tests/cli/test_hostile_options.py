"""No option of any command gives a traceback or hangs, and a refusal names the option or the value."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from tests.cli.hostile_options import (
    HostileCase,
    cases_of,
    commands,
    complaint,
    hostile_files,
    load_everything,
    run_case,
)
from tests.fuzz.bounds import EFFORT

SHARE = 0.04  # of all cases, where the suites do not look their hardest
SEED = 1


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    load_everything()


@pytest.mark.parametrize("command", sorted(commands()))
def test_every_option_meets_every_value_with_a_sentence(command: str, tmp_path: Path) -> None:
    hostile_files(tmp_path)
    usual, *cases = cases_of(command)
    expected = run_case(usual, tmp_path).output
    problems = [complaint(case, run_case(case, tmp_path), expected) for case in _chosen(cases)]
    assert [problem for problem in problems if problem] == []


def _chosen(cases: Sequence[HostileCase]) -> Sequence[HostileCase]:
    return cases if EFFORT >= 1 else Random(SEED).sample(cases, round(SHARE * len(cases)))


def test_a_port_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    for command in ("run", "demo"):
        (case,) = [each for each in cases_of(command) if (each.option, each.value) == ("--port", "99999")]
        end = run_case(case, tmp_path)
        assert end.code == 2
        assert "--port" in end.output
        assert "99999" in end.output
