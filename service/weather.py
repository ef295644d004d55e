"""The maker of Weather: the data of a board that all adapters to other schedulers use."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.topology import DOMAIN_LEVELS
from fleetcast.models.demand.rows import DemandRow
from fleetcast.models.risk.scores import RISK_KINDS
from fleetcast.placement.machines.slots import count_true_per_row
from fleetcast.schedulers.bands import HIGH, LEVELS, BandRule, Bands, Levels
from fleetcast.schedulers.weather import DemandKey, Domains, JobOutlook, Load, Outlook, StartOutlook, Weather
from fleetcast.service.answers.estimates import RunQuantiles
from fleetcast.service.answers.jobs import JobRow, RunningJobRow, SlowVerdict
from fleetcast.service.board.age import describe_staleness
from fleetcast.service.board.board import Board
from fleetcast.service.board.free import describe_window, find_placeable_nodes, find_unheld_gpus
from fleetcast.service.board.gpu_use import Occupant
from fleetcast.service.board.urgent import find_struck_nodes, forbids_placement
from fleetcast.service.config import AdaptersConfig, Config
from fleetcast.service.pipeline.demand.sections import read_demand_keys, read_demand_rows

DEMAND_FRESH_S = 600.0  # a forecast is made each minute, and takes its time for a large fleet

K = TypeVar("K")
V = TypeVar("V")


def make_band_rule(config: AdaptersConfig, *, shared: bool) -> BandRule:
    """Return the configured rule that assigns nodes to risk bands.

    shared: also limit the share of a pool that may be in the band high at once.
    """
    return BandRule(config.elevated, config.high, max_share=config.max_share if shared else 1.0)


class WeatherStation:
    """The maker of `Weather`, the data of a board that adapters may use.

    It carries the risk bands of nodes from one board to the next.
    """

    def __init__(self, config: Config, clock: Clock, bands: Bands) -> None:
        self.bands = bands
        self._config, self._clock = config, clock
        self._board: Board | None = None
        self._weather: Weather | None = None
        self._starts: Mapping[str, StartOutlook] | None = None
        self._names = b""
        self._rows: dict[str, int] = {}

    def make_weather(self, board: Board | None, starts: Mapping[str, StartOutlook] | None = None) -> Weather | None:
        """Return the Weather of a board. Returns None without a board, or if it is older than `api.stale_after_s`.

        starts: the start times of the placer's queue, by request or job.
        """
        if board is None or describe_staleness(
            self.compute_age_s(board), self._config.compute_stale_after_s(self._clock)
        ):
            return None
        if board is not self._board or starts is not self._starts or self._weather is None:
            self._weather = Weather(
                board.sequence,
                board.as_of_ms,
                self._clock.now_ms(),
                self._read_outlook(board) if board is not self._board or self._weather is None else self._weather.nodes,
                self._read_demand(board),
                LazyRows(lambda: read_job_outlooks(board)) if "doc.jobs" in board else None,
                starts,
                self._read_node_load(board),
            )
            self._board, self._starts = board, starts
        return self._weather

    def compute_age_s(self, board: Board) -> float:
        """Return the age of a board, in seconds of fleet time."""
        return (self._clock.now_ms() - board.as_of_ms) / 1000

    def _read_demand(self, board: Board) -> Mapping[DemandKey, DemandRow] | None:
        """Return the demand forecasts of a board.

        Returns None if they are missing or much older than the board, for example from before a restart.
        """
        if "demand.keys" not in board:
            return None
        age_s = (self._clock.now_ms() - board.meta("demand.keys")["as_of_ms"]) / 1000
        is_old = age_s > DEMAND_FRESH_S + self._config.compute_stale_after_s(self._clock)
        return None if is_old else LazyRows(lambda: DemandRows(board))

    def _read_outlook(self, board: Board) -> Outlook | None:
        """Return the outlook of a board's nodes. Returns None if a section is missing, as in the very first board."""
        try:
            return self._make_outlook(board)
        except KeyError:
            return None

    def _find_node_rows(self, board: Board) -> dict[str, int]:
        """Return node name → row of a board.

        While the names stay the same, this is the same object. Raises KeyError if the board has no node names.
        """
        names = bytes(board.raw("names.node"))
        if names != self._names:
            self._names, self._rows = names, {name: row for row, name in enumerate(board.names("names.node"))}
        return self._rows

    def _read_node_load(self, board: Board) -> Load | None:
        try:
            rows, node_load = self._find_node_rows(board), board.array("node.load")
        except KeyError:
            return None
        kinds = np.moveaxis(node_load, 1, 0)  # fleetcast.models.node_load.LOADS
        return Load(rows, *(_resize_rows(kind.T, len(rows), np.nan).T.astype(np.float64) for kind in kinds))

    def _make_outlook(self, board: Board) -> Outlook:
        """Return the outlook of a board's nodes. Raises KeyError if a section is missing.

        A section may still have the rows of an earlier topology. If so, its rows are cut or filled.
        """
        n, placer = len(self._find_node_rows(board)), self._config.placer
        by_kind = board.array("node.risk")
        risk = _resize_rows(
            np.fmax(by_kind[RISK_KINDS.index("fail")], by_kind[RISK_KINDS.index("slow")]).T, n, np.nan
        ).T
        pool = _resize_rows(_read_pools(board, n), n, -1)
        level = self.bands.update(self._rows, risk[0], pool)
        usable = board.array("gpu.usable")
        may_place = _resize_rows(find_placeable_nodes(board, placer), len(usable), False)
        return Outlook(
            rows=self._rows,
            risk=risk,
            level=level,
            state=_resize_rows(board.array("node.state"), n, NodeState.IN_SERVICE),
            gpus=_resize_rows(count_true_per_row(usable), n, 0),
            free=_resize_rows(count_true_per_row(usable & find_unheld_gpus(board, placer) & may_place[:, None]), n, 0),
            reasons=board.json("risk.reason"),
            causes=_find_causes(board, level),
            urgent=_find_forbidden_nodes(board),
            in_window=_find_window_nodes(board),
            pool=pool,
            pools=board.names("names.pool") if "names.pool" in board else (),
            max_risk=placer.max_risk,
            domains=LazyRows(lambda: _read_domains(board, n)),
        )


class LazyRows(Mapping[K, V]):
    """A mapping whose rows are made at its first use."""

    def __init__(self, make: Callable[[], Mapping[K, V]]) -> None:
        self._make = make
        self._made: Mapping[K, V] | None = None

    def _make_rows(self) -> Mapping[K, V]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getitem__(self, key: K) -> V:
        return self._make_rows()[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._make_rows())

    def __len__(self) -> int:
        return len(self._make_rows())


_decode_row = msgspec.json.Decoder(DemandRow).decode


class DemandRows(Mapping[DemandKey, DemandRow]):
    """The newest demand forecasts of a board, by key. A row is decoded when it is requested."""

    def __init__(self, board: Board) -> None:
        """Read the keys of the forecasts. Raises KeyError if the board has no forecast."""
        self._board = board
        self._places = {DemandKey(*key): place for place, key in enumerate(read_demand_keys(board).rows)}

    def __getitem__(self, key: DemandKey) -> DemandRow:
        (row,) = read_demand_rows(self._board, [self._places[key]])
        return _decode_row(row)

    def __iter__(self) -> Iterator[DemandKey]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_job_outlooks(board: Board) -> dict[str, JobOutlook]:
    """Return job → the outlook of its latest attempt that runs or waits.

    Raises KeyError if a section of the board is missing.
    """
    rows = msgspec.json.decode(board.raw("doc.jobs"), type=list[JobRow])
    running = msgspec.json.decode(board.raw("jobs.running"), type=list[RunningJobRow])
    verdicts = msgspec.json.decode(board.raw("doc.stragglers"), type=dict[str, SlowVerdict])
    details = msgspec.json.decode(board.raw("doc.job"), type=dict[str, _JobDetail])
    checkpoints = {(row.job, row.attempt): row.checkpoint_ms for row in running}
    known = sorted((row for row in rows if row.state in ("queued", "running")), key=lambda row: row.attempt)
    return {row.job: _make_job_outlook(row, checkpoints, verdicts.get(row.job), details.get(row.job)) for row in known}


def _make_job_outlook(
    row: JobRow,
    checkpoints: Mapping[tuple[str, int], int | None],
    verdict: SlowVerdict | None,
    detail: "_JobDetail | None",
) -> JobOutlook:
    left, run = row.remaining_s, detail.run_s if detail else None
    slow = verdict if verdict is not None and verdict.slow else None
    return JobOutlook(
        state=row.state,
        attempt=row.attempt,
        queue=row.queue,
        user=row.user,
        nodes=tuple(row.nodes),
        gpus=row.gpus,
        started_ms=row.started_ms,
        left_p50_s=left.p50 if left else None,
        left_p90_s=left.p90 if left else None,
        run_p50_s=run.p50 if run else None,
        run_p90_s=run.p90 if run else None,
        checkpoint_ms=checkpoints.get((row.job, row.attempt)),
        slow_since_ms=slow.since_ms if slow else None,
        culprit=slow.node if slow else "",
        why=slow.sentence if slow else "",
        name=next((event.name for event in detail.events if event.name), "") if detail else "",
        limit_s=detail.asks.limit_s if detail else None,
    )


class _Reason(msgspec.Struct):
    feature: str = ""


class _NodeExplanation(msgspec.Struct):
    """The part of a node's stored answer that explains the node's risk."""

    node: str
    reasons: list[_Reason] = []


class _JobRequest(msgspec.Struct, frozen=True):
    limit_s: float | None = None


class _JobEvent(msgspec.Struct):
    """An event of a job. If the event is a submission, `name` is the job's name."""

    name: str = ""


class _JobDetail(msgspec.Struct):
    """The fields of a row in `doc.job`, the details of one job, that adapters need."""

    run_s: RunQuantiles | None
    asks: _JobRequest = _JobRequest()
    events: list[_JobEvent] = []


_explained = msgspec.json.Decoder(_NodeExplanation).decode


def _find_causes(board: Board, level: Levels) -> dict[str, str]:
    """Return node → the feature of its first risk reason, for nodes in the band high."""
    if "answers.node" not in board:
        return {}
    blob, offsets = board.raw("answers.node"), board.array("answers.node.offsets")
    high = [row for row in np.flatnonzero(level == LEVELS.index(HIGH)).tolist() if row + 1 < len(offsets)]
    answers = (_explained(blob[offsets[row] : offsets[row + 1]]) for row in high)
    return {answer.node: answer.reasons[0].feature for answer in answers if answer.reasons}


def _find_window_nodes(board: Board) -> dict[str, str]:
    """Return node → a description of the maintenance window that the node is in now."""
    if "node.kept" not in board:
        return {}
    rows = np.flatnonzero(board.array("node.kept") == Occupant.WINDOW).tolist()
    names = board.names("names.node")
    return {names[row]: describe_window(board, names[row]) for row in rows if row < len(names)}


def _read_pools(board: Board, n: int) -> NDArray[Any]:
    """Return the number of each node's pool: (node,). It is 0 if the board states no pools."""
    return board.array("node.pool") if "node.pool" in board else np.zeros(n, np.int16)


def _read_domains(board: Board, n: int) -> dict[str, Domains]:
    """Return level → the domains of all nodes, for each level on the board."""
    return {
        level: Domains(board.names(f"names.{level}"), _resize_rows(board.array(f"node.domain.{level}"), n, -1))
        for level in DOMAIN_LEVELS
        if f"names.{level}" in board and f"node.domain.{level}" in board
    }


def _resize_rows(array: NDArray[Any], n: int, fill: Any) -> NDArray[Any]:
    """Return `array` with exactly n rows. Surplus rows are cut, and missing rows get the value `fill`."""
    missing = np.full((max(0, n - len(array)), *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array[:n], missing])


def _find_forbidden_nodes(board: Board) -> dict[str, str]:
    """Return node → why nothing may be placed on it.

    Such a node has a hard signal that the scores do not cover yet.
    """
    return {
        node: row.sentence for node, rows in find_struck_nodes(board).items() for row in rows if forbids_placement(row)
    }
