"""Check that the simulation of actions passes on our code, repeats, and finds each of its defects."""

import pytest

from tests.simulation.actions.mutations import ACTION_MUTATIONS
from tests.simulation.test_simulation import simulate, simulate_seeds

pytestmark = pytest.mark.timeout(900)
FOUND_WITHIN_STEPS = 20_000
ACTIONS = ("--world", "actions")


def test_a_short_run_of_actions_breaks_no_law_and_repeats() -> None:
    line = (*ACTIONS, "--seed", "3", "--steps", "300")
    run, again = simulate_seeds(*line, "--then", *line)
    assert run["failure"] is None
    assert run["action sent"] > 0
    assert run["digest"] == again["digest"]


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("seed", "episode", "steps"),
    [
        (107, 1, 1000),  # fairness forgot a stop whose request no longer waited
        (2, 7, 1000),  # a gang gave a whole step, and its queue less than its guarantee was left
        (37, 1, 951),  # a request got a healthy node of a gang that was to get another one
        (60014, 7, 1000),  # a request got GPUs of a job that refused it, and that stopped for another request
        (50002, 1, 1000),  # the law counted nodes that a gang had left twice
        (50077, 8, 1000),  # the law did not count a stopped job that fits elsewhere
        (60001, 0, 1000),  # the law took a job on a lost node for one at work
        (50097, 3, 1000),  # a gang left a node that was back, and the circuit breaker counted it as lost
        (50128, 6, 1000),  # the law asked for the end of an action after a pass in which the placer was killed
    ],
)
def test_an_episode_that_failed_once_breaks_no_law(seed: int, episode: int, steps: int) -> None:
    run = simulate(*ACTIONS, "--seed", str(seed), "--episode", str(episode), "--steps", str(steps))
    assert run["failure"] is None


@pytest.mark.simulation
@pytest.mark.parametrize("name", ACTION_MUTATIONS)
def test_a_defect_of_actions_is_found(name: str) -> None:
    mutation = ACTION_MUTATIONS[name]
    options = "--seed", str(mutation.seed), "--steps", str(FOUND_WITHIN_STEPS), "--mutation", name
    failure = simulate(*ACTIONS, *options)["failure"]
    assert failure is not None, f"{name} was not found within {FOUND_WITHIN_STEPS:,} steps"
    assert failure["law"] in mutation.laws, failure["why"]
