"""The chances of nodes that decisions share."""

import numpy as np
import pytest

from fleetcast.placement.machines.chances import CHANCE_WEIGHTS, MOST_SPANS, NodeChances


def test_only_some_spans_are_remembered() -> None:
    chances = NodeChances(np.log1p(-np.array([[0.1, 0.2], [0.3, 0.4]])))
    for span in range(1, 2 * MOST_SPANS):
        found, weighted = chances.compute_for_span(span)
        assert found[:, 0].tolist() == pytest.approx([0.9**span, 0.7**span])
        assert weighted.tolist() == (CHANCE_WEIGHTS["risk"] * found[0] + CHANCE_WEIGHTS["slow"] * found[1]).tolist()
        assert len(chances._by_span) <= MOST_SPANS
