"""No request that passes others delays a start that a claim promises: beside a plain search over single GPUs."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.options import Options
from fleetcast.placement.plan.queue import Plan, WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.queues_file import read_queues
from tests.fuzz.bounds import examples
from tests.placement.conftest import build
from tests.placement.runs import Run, table_of

NOW_MS = 1_800_000_000_000
GPUS = 8  # of the only node
MINUTE_MS = 60_000
TIMES = RunTimeQuantiles({})  # a job runs until its limit
Busy = dict[int, list[tuple[int, int]]]  # GPU → the spans in which it is in use
minutes = st.sampled_from([1, 2, 5, 10, 30])
asked = st.lists(st.tuples(st.integers(1, GPUS), minutes), min_size=1, max_size=10)  # GPUs, minutes
busy = st.lists(st.tuples(st.integers(1, 4), minutes), max_size=3)
most = st.sampled_from([1, 2, 3, 8])


@dataclass
class OneNode:
    """A node on which every job runs for exactly as long as it should. held: job → its GPUs and its end."""

    asks: list[tuple[int, int]]
    most: int
    limit: str = ""
    now_ms: int = NOW_MS
    held: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    waits: dict[str, WaitingEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for at, (gpus, minutes) in enumerate(self.asks):
            one = PlacementRequest(request_id=f"q{at}", queue="a", gpus_per_node=gpus, limit_s=60.0 * minutes)
            self.waits[one.request_id] = WaitingEntry(one, NOW_MS - 1000 + at)

    def run_jobs(self, jobs: list[tuple[int, int]]) -> "OneNode":
        """Let these jobs run on the first GPUs: GPUs and minutes left of each."""
        for at, (gpus, minutes) in enumerate(jobs):
            first = sum(len(own) for own, _ in self.held.values())
            own = tuple(range(first, min(first + gpus, GPUS)))
            self.held |= {f"job{at}": (own, NOW_MS + minutes * MINUTE_MS)} if own else {}
        return self

    def plan(self) -> Plan:
        holders = np.full((1, GPUS), -1, np.int32)
        for row, (own, _) in enumerate(self.held.values()):
            holders[0, list(own)] = row
        free = np.where(holders < 0, 1000, 0).astype(np.int16)
        view = build({"r0": [GPUS]}, milli=free, holders=holders, jobs=tuple(self.held))
        tree = read_queues(f'[policy]\nclaims = {self.most}\norder = "fifo"\n[queue.a]\n{self.limit}')
        quota = {job: QueueHold("a", {"gpu": float(len(own))}) for job, (own, _) in self.held.items()}
        turns = TreeTurns(tree, {}, view, TIMES, self.now_ms, jobs=quota)
        runs = {
            job: Run(self.now_ms, len(own), (end_ms - self.now_ms) / 1000) for job, (own, end_ms) in self.held.items()
        }
        return plan(list(self.waits.values()), view, table_of(runs), TIMES, Options(now_ms=self.now_ms), turns)

    def start(self, found: Plan) -> list[str]:
        """Start what a plan has placed. Returns the requests."""
        for entry, decision in found.placed:
            run_ms = round(1000 * (entry.request.limit_s or 0))
            self.held[entry.request.job_name] = decision.ranks[0].gpus, self.now_ms + run_ms
            del self.waits[entry.request.request_id]
        return [entry.request.request_id for entry, _ in found.placed]

    def advance(self) -> None:
        """Go on to the next end of a job."""
        self.now_ms = min(end_ms for _, end_ms in self.held.values())
        self.held = {job: row for job, row in self.held.items() if row[1] > self.now_ms}


def use(spans: Busy, gpus: list[int], from_ms: int, until_ms: int) -> None:
    """Add a use of GPUs. No other use of them may be at the same time."""
    for gpu in gpus:
        assert all(until_ms <= other[0] or other[1] <= from_ms for other in spans[gpu])
        spans[gpu].append((from_ms, until_ms))


def find_start_ms(spans: Busy, gpus: int, run_ms: int) -> int:
    """Return the first time at which so many GPUs are idle for so long. Every end of a use is tried."""
    for start_ms in sorted({NOW_MS, *(until_ms for rows in spans.values() for _, until_ms in rows)}):
        idle = [
            gpu
            for gpu, rows in spans.items()
            if all(until_ms <= start_ms or from_ms >= start_ms + run_ms for from_ms, until_ms in rows)
        ]
        if len(idle) >= gpus:
            return start_ms
    raise AssertionError("an idle node has room for every request")


@examples(300)
@given(asked, busy, most)
@example([(6, 10), (8, 10), (2, 30)], [(4, 5)], 2)
@example([(4, 1), (7, 1), (2, 1), (7, 1)], [(1, 1), (4, 1)], 3)
def test_every_claim_starts_as_soon_as_it_can_and_nobody_delays_it(
    asks: list[tuple[int, int]], jobs: list[tuple[int, int]], most: int
) -> None:
    node = OneNode(asks, most).run_jobs(jobs)
    found = node.plan()
    spans: Busy = {gpu: [] for gpu in range(GPUS)}
    for own, end_ms in node.held.values():
        use(spans, list(own), NOW_MS, end_ms)
    placed = {entry.request.request_id: decision.ranks[0].gpus for entry, decision in found.placed}
    claims = {claim.request.request_id: claim for claim in found.claims}
    assert len(claims) == min(most, len(asks) - len(placed))
    for request_id, (gpus, minutes) in zip(node.waits, asks, strict=True):  # in the order of the queue
        if request_id in claims:
            claim = claims[request_id]
            assert claim.start_ms == find_start_ms(spans, gpus, minutes * MINUTE_MS) > NOW_MS
            use(spans, np.flatnonzero(claim.gpus[0]).tolist(), claim.start_ms, claim.end_ms)
        elif request_id in placed:
            use(spans, list(placed[request_id]), NOW_MS, NOW_MS + minutes * MINUTE_MS)
    for request_id, (gpus, minutes) in zip(node.waits, asks, strict=True):
        if request_id not in placed:  # nothing idles that it could have without a delay of a claim
            assert find_start_ms(spans, gpus, minutes * MINUTE_MS) > NOW_MS


@examples(150)
@given(asked, busy, most)
@example([(6, 10), (8, 10), (2, 30)], [(4, 5)], 2)
def test_a_promised_start_holds_until_it_comes(
    asks: list[tuple[int, int]], jobs: list[tuple[int, int]], most: int
) -> None:
    node, promised = OneNode(asks, most).run_jobs(jobs), dict[str, int]()
    while node.waits:
        found = node.plan()
        for claim in found.claims:
            promised.setdefault(claim.request.request_id, claim.start_ms)
        for request_id in node.start(found):
            assert node.now_ms <= promised.get(request_id, node.now_ms)
        assert all(promised.get(request_id, node.now_ms) >= node.now_ms for request_id in node.waits)
        if node.waits:
            node.advance()


def test_a_reason_names_the_claim_that_the_request_would_delay() -> None:
    node = OneNode([(8, 10), (6, 10), (2, 5), (4, 14), (2, 30)], most=2).run_jobs([(4, 5)])
    found = node.plan()
    assert [(claim.request.request_id, claim.start_ms - NOW_MS) for claim in found.claims] == [
        ("q0", 5 * MINUTE_MS),
        ("q1", 15 * MINUTE_MS),
    ]
    assert [entry.request.request_id for entry, _ in found.placed] == ["q2"]
    why = {wait.entry.request.request_id: wait.why for wait in found.waiting}
    assert why["q1"].endswith("it is number 2 of those with reserved GPUs, when q0 has ended")
    assert why["q4"] == ("would fit, but on reserved GPUs: q0 is next, and should start before this job ends")


def test_a_queue_at_its_limit_claims_no_more() -> None:
    asks = [(6, 10), (6, 10)]
    assert len(OneNode(asks, most=8).run_jobs([(4, 5)]).plan().claims) == 2
    limited = OneNode(asks, most=8, limit="limit = {gpu = 11}").run_jobs([(4, 5)]).plan()
    assert [claim.request.request_id for claim in limited.claims] == ["q0"]


@pytest.mark.parametrize("most", [1, 3])
def test_free_gpus_stay_free_until_the_first_claim_on_them(most: int) -> None:
    found = OneNode([(6, 10), (4, 10), (8, 10)], most).run_jobs([(4, 5), (1, 15)]).plan()
    free = found.make_unclaimed_view().free.sum()
    soon = found.make_unclaimed_view(NOW_MS + 5 * MINUTE_MS).free.sum()
    assert soon == found.view.free.sum() == 3
    assert free < soon
