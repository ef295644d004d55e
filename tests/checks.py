"""Contract suites of the plugin points: what every implementation, ours or yours, must pass.

from tests.checks import check_source
def test_mine(tmp_path): check_source(lambda: MySource(tmp_path), batches=3)
"""

import asyncio
import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fleet.requests import PlacementRequest
from ingest.source import Batch, Source
from models.forecast import QUANTILES, Forecaster
from models.naive import DAY_BINS, error_quantiles
from placement.options import Filter, Options, Scorer
from placement.view import ClusterView
from service.adapters import Adapter

TAKE_S = 10.0


def check_source(make: Callable[[], Source], batches: int, *, replays: bool = True) -> None:
    """`make` opens the same material anew, from its beginning; at least `batches` batches can be taken from it.

    replays: after a seek nothing is skipped. A live source (`replays=False`) has nothing to go back to.
    """
    whole = asyncio.run(_taken(make(), {}, batches))
    assert any(len(batch) for batch, _ in whole), "not one record"
    for done in range(batches) if replays else ():
        position = json.loads(json.dumps(whole[done][1]))
        rest = asyncio.run(_taken(make(), position, batches - 1 - done))
        again = [record for batch, _ in rest for record in _records(batch)]
        missed = [record for batch, _ in whole[done + 1 :] for record in _records(batch) if again.count(record) < 1]
        assert not missed, f"skipped after a seek to {position}: {missed[:3]}"


async def _taken(source: Source, position: dict[str, Any], batches: int) -> list[tuple[Batch, dict[str, Any]]]:
    """(batch, position after it); the source is closed twice."""
    assert source.name
    source.seek(position)
    taken = []
    try:
        for _ in range(batches):
            batch = await asyncio.wait_for(source.next(), TAKE_S)
            taken.append((batch, copy.deepcopy(source.position())))
    finally:
        await source.close()
        await source.close()
    return taken


def _records(batch: Batch) -> list[Any]:
    rows = [
        (samples.kind, *row)
        for samples in batch.samples
        for row in zip(*(column.tolist() for column in _columns(samples)), strict=True)
    ]
    return [*rows, *batch.events, *batch.node_events]


def _columns(samples: Any) -> tuple[Any, ...]:
    return samples.metric, samples.entity, samples.time_ms, samples.value


def check_forecaster(make: Callable[[], Forecaster]) -> None:
    """Histories short and long: errors are finite, quantiles do not cross, and nothing is kept between calls."""
    assert make().name
    for bins in (1, 5, DAY_BINS + 6, 2000):
        history = 500.0 + np.cumsum(np.random.default_rng(bins).normal(0, 5, bins))
        given = history.copy()
        history.flags.writeable = False
        forecaster = make()
        for step in (1, 6, DAY_BINS):
            base, errors = forecaster.base(history, step), forecaster.errors(history, step)
            assert isinstance(base, float)
            assert errors.ndim == 1
            assert np.isfinite(errors).all()
            values = base + error_quantiles(errors, QUANTILES, history, step)
            assert values.shape == (len(QUANTILES),)
            assert math.isnan(base) or bool((np.diff(values) >= 0).all())
            forecaster.base(given[: bins // 2 + 1], step)
            again = forecaster.base(history, step)
            assert again == base or (math.isnan(again) and math.isnan(base)), "what came between changed the bet"
            np.testing.assert_array_equal(make().errors(history, step), errors)


def check_filter(rejects: Filter, requests: Sequence[PlacementRequest], views: Sequence[ClusterView]) -> None:
    """A mask over the nodes, True where one is rejected, or None when the request does not ask for it."""
    for request, view in ((request, view) for request in requests for view in views):
        mask = _pure(rejects, request, view)
        if mask is not None:
            assert mask.shape == (len(view),)
            assert mask.dtype == bool


def check_scorer(score: Scorer, requests: Sequence[PlacementRequest], views: Sequence[ClusterView]) -> None:
    """A score in [0, 1] for every node, higher is better; NaN where it knows nothing."""
    for request, view in ((request, view) for request in requests for view in views):
        scores = _pure(score, request, view)
        assert scores.shape == (len(view),)
        known = scores[~np.isnan(scores)]
        assert ((known >= 0) & (known <= 1)).all()


def _pure(function: Callable[..., Any], request: PlacementRequest, view: ClusterView) -> Any:
    """Its answer, the same for the same arguments, with nothing written into the view."""
    before = copy.deepcopy(view)
    first, second = (function(request, view, Options()) for _ in range(2))
    np.testing.assert_equal(first, second)
    for name in ("free", "usable", "state", "p_fail", "p_slow", "holders", "free_cpus", "free_host_memory_gib"):
        np.testing.assert_array_equal(getattr(view, name), getattr(before, name), err_msg=f"wrote into view.{name}")
    return first


def check_adapter(make: Callable[[Mapping[str, Any]], Adapter], options: Mapping[str, Any]) -> None:
    """Writes what is new, nothing for the same scores again, and bears nodes without a score and no nodes at all."""
    adapter = make(options)
    assert adapter.update([], [], 0) == 0
    assert adapter.update(["a", "b", "c"], [0.0, 0.9, math.nan], 1_000) > 0
    assert adapter.update(["a", "b", "c"], [0.0, 0.9, math.nan], 2_000) == 0
    assert adapter.update(["b", "a"], [0.9, 0.0], 3_000) == 0, "the order of nodes is no news"
