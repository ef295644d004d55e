"""The chances of nodes that decisions share."""

import numpy as np
import pytest

from fleetcast.placement.machines.chances import CHANCE_WEIGHTS, MOST_SPANS, NodeChances


def test_only_some_spans_are_remembered() -> None:
    chances = NodeChances(np.log1p(-np.array([[0.1, 0.2], [0.3, 0.4]])))
    for span in range(1, 2 * MOST_SPANS):
        first = CHANCE_WEIGHTS["risk"] * 0.9**span + CHANCE_WEIGHTS["slow"] * 0.7**span
        assert chances.weigh_for_span(span)[0] == pytest.approx(first)
        assert len(chances._by_span) <= MOST_SPANS
