"""Check that a run of the simulation repeats, that it passes on our code, and that it finds each defect.

`make test` runs three of these tests. The others have the marker `simulation`: `make simulation` runs them all.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.mutations import MUTATIONS

pytestmark = pytest.mark.timeout(900)  # not a measure: a busy machine takes its time
ROOT = Path(__file__).resolve().parents[2]
FOUND_WITHIN_STEPS = 100_000
LONG = pytest.mark.simulation

# (seed, episode, defect): episodes that failed on the code as it once was, which the defect brings back.
KEPT = (
    (1, 0, "expire-by-the-clock"),  # GPUs were given away under a job whose start was acknowledged in time
    (17, 0, "folders-not-synced"),  # a power cut took the folder of the inbox, with all that was acknowledged
    (8, 0, "board-while-held-up"),  # the first board was made of half of the inbox: the archive held up its reader
    (1, 8, "outages-stop-no-clock"),  # GPUs were given away under a job whose start found no api
    (5, 2, "the-fold-has-a-bound-of-its-own"),  # a board knew less than the one before, after a restart
)


def simulate(*options: str) -> dict[str, Any]:
    (row,) = simulate_seeds(*options)
    return row


def simulate_seeds(*options: str) -> list[dict[str, Any]]:
    """Run the simulation in a process of its own and return one row a seed. Lines follow one another by `--then`."""
    command = [sys.executable, "-m", "tests.simulation", *options]
    ended = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    rows: list[dict[str, Any]] = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == any(row["failure"] is not None for row in rows), ended.stderr
    return rows


def test_a_seed_is_the_same_run_every_time() -> None:
    once = ("--seed", "11", "--steps", "1000")
    first, other, second = simulate_seeds(*once, "--seeds", "2", "--then", *once)
    assert first.pop("steps_per_s")
    assert second.pop("steps_per_s")
    assert first == second
    assert first["digest"] != other["digest"]


@pytest.mark.parametrize(
    ("seed", "episode", "defect"), [KEPT[0], *(pytest.param(*row, marks=LONG) for row in KEPT[1:])]
)
def test_an_episode_that_failed_once_fails_with_its_defect_alone(seed: int, episode: int, defect: str) -> None:
    options = ("--seed", str(seed), "--episode", str(episode))
    alone, defective = simulate_seeds(*options, "--then", *options, "--mutation", defect)
    assert alone["failure"] is None
    assert defective["failure"]["law"] in MUTATIONS[defect].laws


@LONG
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_defect_is_found(name: str) -> None:
    mutation = MUTATIONS[name]
    failure = simulate("--seed", str(mutation.seed), "--steps", str(FOUND_WITHIN_STEPS), "--mutation", name)["failure"]
    assert failure is not None, f"{name} was not found within {FOUND_WITHIN_STEPS:,} steps"
    assert failure["law"] in mutation.laws, failure["why"]


def test_a_failure_names_the_law_the_last_steps_and_the_command_that_replays_it() -> None:
    row = simulate("--seed", "1", "--steps", "10000", "--mutation", "fold-twice")
    failure = row["failure"]
    assert (failure["law"], failure["seed"], failure["episode"]) == ("found once", 1, 0)
    assert failure["trace"][-1].startswith(f"step {failure['step']} at ")
    assert simulate(*failure["replay"].split()[3:])["failure"] == failure
