"""Contract tests for plugins: call the check for your kind of plugin in a test of your own.

from fleetcast.checks import check_source
def test_my_source(tmp_path): check_source(lambda: MySource(tmp_path), batches=3)
"""

import asyncio
import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from fleetcast.fleet.errors import SourceError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.ingest.source import Batch, Source, check_source_class
from fleetcast.models.demand.rows import DemandRow
from fleetcast.models.forecast import QUANTILES, Forecaster, Panel
from fleetcast.placement.machines.options import Filter, Options, Scorer
from fleetcast.placement.machines.view import ClusterView
from fleetcast.schedulers.adapter import Adapter, Seen, Write
from fleetcast.schedulers.bands import Bands
from fleetcast.schedulers.weather import JobOutlook, StartOutlook, Weather
from fleetcast.service.pipeline.guarded_source import GuardedSource

WAIT_LIMIT_S = 60.0


def check_source(make: Callable[[], Source], batches: int, *, replays: bool = True) -> None:
    """Check that a source continues after a seek and after an error, and loses no record.

    `make` opens the same records from their beginning, and gives at least `batches` batches. With
    `replays=False` the source is live: it cannot go back, but must continue after an error.
    """
    source = make()
    check_source_class(type(source), "check_source")
    whole = asyncio.run(_read_batches(source, {}, batches))
    assert any(len(batch) for batch, _ in whole), "not one record"
    wanted = [record for batch, _ in whole for record in _list_records(batch)] if replays else []
    _check_error(make, batches // 2, wanted)
    for done in range(batches) if replays else ():
        position = json.loads(json.dumps(whole[done][1]))
        rest = asyncio.run(_read_batches(make(), position, batches - 1 - done))
        again = [record for batch, _ in rest for record in _list_records(batch)]
        missed = [
            record for batch, _ in whole[done + 1 :] for record in _list_records(batch) if again.count(record) < 1
        ]
        assert not missed, f"skipped after a seek to {position}: {missed[:3]}"


class _FailingSource(Source):
    """A source that fails once, after some good batches, and so loses a batch."""

    def __init__(self, source: Source, good: int) -> None:
        self.name = source.name
        self._source = source
        self._left = good

    async def next(self) -> Batch:
        batch = await self._source.next()
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError("a bug")
        return batch

    def position(self) -> dict[str, Any]:
        return self._source.position()

    def seek(self, position: dict[str, Any]) -> None:
        self._source.seek(position)

    async def close(self) -> None:
        await self._source.close()


def _check_error(make: Callable[[], Source], good: int, wanted: list[Any]) -> None:
    """Check that a source recovers from an error after `good` batches.

    It is closed, made again, and moved to its position. Then it must return the missing records.
    """

    async def run_scenario() -> None:
        source = GuardedSource(_FailingSource(make(), good), make)
        missing = list(wanted)
        try:
            while missing or not source.errors:
                try:
                    batch = await asyncio.wait_for(source.next(), WAIT_LIMIT_S)
                except SourceError:  # the pipeline would wait
                    continue
                stated = _list_records(batch)
                missing = [record for record in missing if record not in stated]
            if not wanted:
                assert await asyncio.wait_for(source.next(), WAIT_LIMIT_S)
        except (StopAsyncIteration, TimeoutError):
            raise AssertionError(f"not reported after an error: {missing[:3]}") from None
        finally:
            await source.close()
        assert source.errors == 1, source.last_error

    asyncio.run(run_scenario())


async def _read_batches(source: Source, position: dict[str, Any], batches: int) -> list[tuple[Batch, dict[str, Any]]]:
    """Read some batches from a position. Returns each batch and the position after it.

    The source is closed twice, to check that a second close does no harm.
    """
    assert source.name
    source.seek(position)
    taken = []
    try:
        for _ in range(batches):
            batch = await asyncio.wait_for(source.next(), WAIT_LIMIT_S)
            taken.append((batch, copy.deepcopy(source.position())))
    finally:
        await source.close()
        await source.close()
    return taken


def _list_records(batch: Batch) -> list[Any]:
    rows = [
        (samples.kind, *row)
        for samples in batch.samples
        for row in zip(*(column.tolist() for column in _get_columns(samples)), strict=True)
    ]
    return [*rows, *batch.events, *batch.node_events]


def _get_columns(samples: Any) -> tuple[Any, ...]:
    return samples.metric, samples.entity, samples.time_ms, samples.value


FORECASTER_STEPS = (1, 6, 144)


def check_forecaster(make: Callable[[], Forecaster], series: Callable[[int], Panel] | None = None) -> None:
    """Check a forecaster: its shapes, the order of its quantiles, and that it reads no later values.

    The forecaster must be fitted already, or need no fit. It gets short and long series, some with holes and
    one without values. series: returns three series with a number of bins, the last without values. It
    replaces the default series for a forecaster that accepts only other series.
    """
    assert make().name
    for bins in (1, 5, 150, 2000):
        panel = (series or make_walks)(bins)
        origins = np.unique(np.array([0, bins // 2, bins - 1]))
        whole = make().forecast(panel, origins, FORECASTER_STEPS)
        assert whole.shape == (len(QUANTILES), len(FORECASTER_STEPS), len(origins), len(panel.names))
        known = np.isfinite(whole)
        assert (known.all(axis=0) == known.any(axis=0)).all(), "some quantiles of a forecast are unknown"
        assert (np.diff(np.where(known, whole, 0.0), axis=0) >= 0).all(), "quantiles cross"
        assert not known[..., 2].any(), "a forecast from no value at all"
        np.testing.assert_array_equal(make().forecast(panel, origins, FORECASTER_STEPS), whole, err_msg="not the same")
        for at, origin in enumerate(origins.tolist()):
            alone = make().forecast(panel.until(origin + 1), origins[at : at + 1], FORECASTER_STEPS)
            np.testing.assert_allclose(alone[:, :, 0], whole[:, :, at], rtol=1e-9, err_msg="it saw what came later")


def make_walks(bins: int) -> Panel:
    """Make three read-only series: a random walk, another one with a hole, and one without values."""
    rng = np.random.default_rng(bins)
    values = 500.0 + np.cumsum(rng.normal(0, 5, (3, bins)), axis=1)
    values[1, bins // 3 : bins // 2] = np.nan
    values[2] = np.nan
    covariates = {name: np.maximum(values + rng.normal(0, 9, values.shape), 0.0) for name in ("queued", "arriving")}
    for array in (values, *covariates.values()):
        array.flags.writeable = False
    return Panel(
        "running", ("a", "b", "c"), 600, 1_600_000_200_000, values, np.array([1000.0, np.nan, 8.0]), covariates
    )


def check_filter(rejects: Filter, requests: Sequence[PlacementRequest], views: Sequence[ClusterView]) -> None:
    """Check a filter, which returns (n,) bool, True for each rejected node.

    It may return None if the request does not concern it. Requests that differ only in ids and times
    must have the same mask, because a pass over the queue evaluates only one of them.
    """
    for request, view in ((request, view) for request in requests for view in views):
        mask = _check_purity(rejects, request, view)
        if mask is not None:
            assert mask.shape == (len(view),)
            assert mask.dtype == bool
        for name, value in OTHER_IDS_AND_TIMES.items():
            other = msgspec.structs.replace(request, **{name: value})
            message = f"reads {name}: a refusal is remembered for all requests that differ in ids and times alone"
            np.testing.assert_equal(rejects(other, view, Options()), mask, err_msg=message)


OTHER_IDS_AND_TIMES: dict[str, Any] = {
    **dict.fromkeys(("request_id", "job"), "another"),
    **dict.fromkeys(("limit_s", "tolerated_wait_s", "checkpoint_cost_s"), 86_400.0),
    **{"attempt": 2, "deadline_ms": 2**52},
}


def check_scorer(score: Scorer, requests: Sequence[PlacementRequest], views: Sequence[ClusterView]) -> None:
    """Check that a scorer returns (n,) a score for each node, from 0 to 1, or NaN if unknown.

    A higher score is better. Raises AssertionError if the scorer is not pure or returns anything else.
    """
    for request, view in ((request, view) for request in requests for view in views):
        scores = _check_purity(score, request, view)
        assert scores.shape == (len(view),)
        known = scores[~np.isnan(scores)]
        assert ((known >= 0) & (known <= 1)).all()


def _check_purity(function: Callable[..., Any], request: PlacementRequest, view: ClusterView) -> Any:
    """Return the function's result, after checking that the function is pure.

    It must give the same result for the same arguments, and must not change the view.
    """
    before = copy.deepcopy(view)
    first, second = (function(request, view, Options()) for _ in range(2))
    np.testing.assert_equal(first, second)
    for name in ("free", "usable", "state", "p_fail", "p_slow", "holders", "free_cpus", "free_host_memory_gib"):
        np.testing.assert_array_equal(getattr(view, name), getattr(before, name), err_msg=f"wrote into view.{name}")
    return first


FOREIGN = "somebody.else/field"
HOUR_MS, BOARD_MS = 3_600_000, 10_000


def check_adapter(
    adapter: Adapter,
    weathers: Sequence[Weather],
    *,
    holds: Seen | None = None,
    keeps: frozenset[str] = frozenset(),
    hour: Sequence[Weather] | None = None,
) -> None:
    """Check a writing adapter with the weathers of a fleet.

    It must make the same wishes if it is called twice, and none once they are written. It must not touch
    fields of others, nor react to forecasts that vary by 1 %. Without weather it must withdraw everything
    that it wrote.

    holds: the other system's values at the start. The check adds a field of another owner for each
    node. keeps: fields that a withdrawal leaves. hour: `make_wavering_hour(weathers)`, which a caller that
    checks several adapters can make once.
    """
    seen = {key: dict(values) for key, values in (holds or {}).items()}
    theirs = {
        key: {field: held for field, held in values.items() if field not in adapter.fields}
        for key, values in seen.items()
    }
    some = False
    for weather in weathers:
        for name in weather.nodes.rows if weather.nodes else ():
            seen.setdefault(name, {})[FOREIGN] = "theirs"
            theirs[name] = {FOREIGN: "theirs"}
        wishes = list(adapter.wishes(weather, copy.deepcopy(seen)))
        assert wishes == list(adapter.wishes(weather, copy.deepcopy(seen))), "not the same twice"
        some |= bool(wishes)
        _apply_wishes(adapter, seen, wishes)
        assert not list(adapter.wishes(weather, seen)), "wishes that were granted are requested again"
    assert some, "not one wish"
    _apply_wishes(adapter, seen, list(adapter.wishes(None, seen)))
    for wavering in make_wavering_hour(weathers) if hour is None else hour:
        _apply_wishes(adapter, seen, wishes := list(adapter.wishes(wavering, seen)))
        assert wavering.sequence == 0 or not wishes, f"noise is written: {wishes[:3]}"
    _apply_wishes(adapter, seen, list(adapter.wishes(None, seen)))
    ours = adapter.fields - keeps
    left = [key for key, values in seen.items() if ours & values.keys()]
    assert not left, f"left behind after a withdrawal: {left[:3]}"
    rest = {key: {field: held for field, held in values.items() if field not in keeps} for key, values in seen.items()}
    assert {key: values for key, values in rest.items() if values} == theirs, "what others own was lost"


def _apply_wishes(adapter: Adapter, seen: dict[str, dict[str, str]], wishes: Sequence[Write]) -> None:
    """Apply the wishes to `seen`, as a port would."""
    for write in wishes:
        assert write.field in adapter.fields, f"{write.field} is not ours"
        held = seen.setdefault(write.key, {})
        assert write.seen == held.get(write.field), f"{write}: the guard is not what was seen"
        assert write.value != write.seen, f"{write}: no change"
        if write.value is None:
            del held[write.field]
        else:
            held[write.field] = write.value


def make_wavering_hour(weathers: Sequence[Weather]) -> list[Weather]:
    """Make an hour of weathers whose forecasts vary by 1 %, based on the last weather with nodes."""
    return list(_yield_noisy_boards(next(weather for weather in reversed(weathers) if weather.nodes)))


def _yield_noisy_boards(weather: Weather) -> Iterator[Weather]:
    """Yield the weathers of an hour, one every ten seconds, whose forecasts vary by 1 %.

    Some risks lie at the edges of the bands. The first weather has the highest values, so that noise
    cannot enter a higher band later. No start falls within the hour.
    """
    assert weather.nodes is not None
    nodes, rng, bands = weather.nodes, np.random.default_rng(1), Bands()
    risk = nodes.risk.copy()
    edges = (bands.rule.elevated, bands.rule.high, bands.rule.high * bands.rule.leave_ratio)
    risk[0, : len(edges)] = edges[: risk.shape[1]]
    for number in range(HOUR_MS // BOARD_MS):
        noisy = risk * (1 + (rng.uniform(-0.01, 0.01, risk.shape) if number else 0.01))
        now_ms, by = weather.now_ms + BOARD_MS * number, float(rng.uniform(-0.01, 0.01)) if number else 0.01
        yield dataclasses.replace(
            weather,
            sequence=number,
            as_of_ms=now_ms,
            now_ms=now_ms,
            nodes=dataclasses.replace(nodes, risk=noisy, level=bands.update(nodes.rows, noisy[0])),
            demand=weather.demand and {key: _scale_demand(row, now_ms, by) for key, row in weather.demand.items()},
            jobs=weather.jobs and {name: _scale_job(job, by) for name, job in weather.jobs.items()},
            starts=weather.starts
            and {name: _delay_start(one, weather.now_ms, by) for name, one in weather.starts.items()},
        )


def _scale_demand(row: DemandRow, issued_ms: int, by: float) -> DemandRow:
    values = [[value and value * (1 + by) for value in level] for level in row.values]
    return msgspec.structs.replace(row, issued_ms=issued_ms, values=values)


def _scale_job(job: JobOutlook, by: float) -> JobOutlook:
    stated = {name: getattr(job, name) for name in ("left_p50_s", "left_p90_s", "run_p50_s", "run_p90_s")}
    return job._replace(**{name: value and value * (1 + by) for name, value in stated.items()})


def _delay_start(start: StartOutlook, now_ms: int, by: float) -> StartOutlook:
    """Return a start that is an hour later, with a wait that differs by the factor `by`."""
    stated = {name: getattr(start, name) for name in ("p10_ms", "p50_ms", "p90_ms")}
    later = {name: at_ms and now_ms + round((at_ms - now_ms + HOUR_MS) * (1 + by)) for name, at_ms in stated.items()}
    return start._replace(**later)
