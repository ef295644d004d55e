"""The chances of nodes are remembered in order, so that the median and the highest need no sort in a decision."""

import numpy as np
import pytest

from fleetcast.placement.machines.chances import CHANCE_WEIGHTS, MOST_SPANS, NodeChances


@pytest.mark.parametrize("candidates", [0, 1, 2, 7, 40])
def test_the_median_and_the_highest_are_those_of_the_candidates(candidates: int) -> None:
    rng = np.random.default_rng(candidates)
    chances, passes = NodeChances(np.log1p(-rng.random((2, 40)))), np.zeros(40, bool)
    passes[rng.permutation(40)[:candidates]] = True
    logs = chances.logs[:, passes]
    assert chances.compute_median_survival(passes) == (np.median(logs[0]) if candidates else 0.0)
    both = np.sort(CHANCE_WEIGHTS["risk"] * logs[0] + CHANCE_WEIGHTS["slow"] * logs[1])
    assert chances.sum_highest_logs(passes, 3) == pytest.approx(both[-3:].sum())


def test_only_some_spans_are_remembered() -> None:
    chances = NodeChances(np.log1p(-np.array([[0.1, 0.2], [0.3, 0.4]])))
    for span in range(1, 2 * MOST_SPANS):
        found, weighted = chances.compute_for_span(span)
        assert found[:, 0].tolist() == pytest.approx([0.9**span, 0.7**span])
        assert weighted.tolist() == (CHANCE_WEIGHTS["risk"] * found[0] + CHANCE_WEIGHTS["slow"] * found[1]).tolist()
        assert len(chances._of_spans) <= MOST_SPANS
