"""Random lives of actions with kills before and after each commit, lost and doubled replies, and a clock that is set.

The model holds what was acknowledged. After a restart the ledger has all of it, and at most one change more.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fleetcast.fleet import failpoints
from fleetcast.fleet.clock import ManualClock
from fleetcast.placement.actions.breaker import BreakerCapacity, BreakerLimits
from fleetcast.placement.actions.life import FOLLOWED_BY, ActionRecord, ActionState, IllegalTransition
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.service.placer.actions import ActionControl, ForeignAction
from fleetcast.service.placer.metrics import PlacerMetrics
from tests.fuzz.bounds import EFFORT
from tests.placement.actions.action_world import make_action
from tests.service.placer_world import NOW_MS

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
JOBS = ("j0", "j1", "j2")
PAYERS = ("urgent", "other")
STEPS = 30
NEXT = {state: FOLLOWED_BY.get(state, frozenset()) for state in ActionState}


class Killed(BaseException):
    """The process ends here."""


class ActionLives(RuleBasedStateMachine):
    """A control that is killed and opened again, and a model of what it has acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=FAST)
        self.path = Path(self.folder.name) / "l"
        self.clock = ManualClock(NOW_MS)
        self.acknowledged: dict[str, ActionRecord] = {}
        self.kill_at = ""
        self.open()

    @initialize()
    def begin(self) -> None:
        failpoints.set_hook(self.reach)

    def reach(self, point: str) -> float:
        if self.kill_at and point == self.kill_at:
            self.kill_at = ""
            raise Killed
        return 1.0

    def open(self) -> None:
        self.ledger = Ledger(self.path)
        capacity = BreakerCapacity(1000.0, {})
        limits = BreakerLimits(1.0, 1.0)
        self.control = ActionControl(self.ledger, self.clock, limits, lambda: capacity, PlacerMetrics().actions)

    def do(self, work: Callable[[], object]) -> None:
        """Run something that may be killed. What it acknowledges is in the model."""
        try:
            work()
        except Killed:
            self.restart()
        self.kill_at = ""
        self.acknowledged = {row.action_id: row for row in self.ledger.actions.read_after(0, 10_000)}

    def restart(self) -> None:
        self.ledger._db.close()  # no transaction is ended in order, as after a kill
        self.open()
        assert verify_ledger(self.path).is_intact
        found = {row.action_id: row for row in self.ledger.actions.read_after(0, 10_000)}
        for action_id, before in self.acknowledged.items():
            now = found[action_id]
            assert now.life[: len(before.life)] == before.life, "what was acknowledged is there"
            assert len(now.life) <= len(before.life) + 1
        assert len(found) <= len(self.acknowledged) + len(JOBS)

    def choose(self, index: int) -> str:
        ids = sorted(self.acknowledged)
        return ids[index % len(ids)] if ids else "nothing-1"

    @rule(point=st.sampled_from(["ledger.before_commit", "ledger.after_commit"]))
    def arm(self, point: str) -> None:
        self.kill_at = point

    @rule(jobs=st.lists(st.sampled_from(JOBS), max_size=3), payer=st.sampled_from(PAYERS), attempt=st.integers(1, 2))
    def propose(self, jobs: list[str], payer: str, attempt: int) -> None:
        now_ms = self.clock.now_ms()
        wanted = [make_action(job, payer=payer, attempt=attempt, by_ms=now_ms + 300_000) for job in jobs]
        self.do(lambda: self.control.propose(wanted, now_ms))

    @rule()
    def send(self) -> None:
        ids = [row.action_id for row in self.control.list_open()]
        self.do(lambda: self.control.send(ids, self.clock.now_ms()))

    @precondition(lambda self: self.acknowledged)
    @rule(index=st.integers(0, 50), verb=st.sampled_from(["accept", "refuse"]), twice=st.booleans(), own=st.booleans())
    def reply(self, index: int, verb: str, twice: bool, own: bool) -> None:
        """A reply comes once or twice, or names another attempt."""
        action_id = self.choose(index)
        action = self.acknowledged[action_id].action
        attempt = action.attempt if own else action.attempt + 1

        def work() -> None:
            for _ in range(1 + twice):
                try:
                    if verb == "accept":
                        self.control.accept(action_id, action.job, attempt, self.clock.now_ms(), "agent")
                    else:
                        self.control.refuse(action_id, action.job, attempt, "no", self.clock.now_ms(), "agent")
                except IllegalTransition:
                    pass
                except ForeignAction:
                    assert not own
                else:
                    assert own

        self.do(work)

    @precondition(lambda self: self.acknowledged)
    @rule(index=st.integers(0, 50), call=st.sampled_from(["record_seen", "withdraw", "record_contradiction"]))
    def observe(self, index: int, call: str) -> None:
        action_id, now_ms = self.choose(index), self.clock.now_ms()

        def work() -> None:
            try:
                if call == "record_seen":
                    self.control.record_seen(action_id, now_ms)
                else:
                    getattr(self.control, call)(action_id, "why", now_ms)
            except IllegalTransition:
                pass

        self.do(work)

    @rule(seconds=st.sampled_from([1, 60, 301]), set_s=st.sampled_from([0, 0, 7200, -7200]))
    def pass_time(self, seconds: int, set_s: int) -> None:
        self.clock.advance(seconds)
        self.clock.time_ms += 1000 * set_s
        self.do(lambda: self.control.expire(self.clock.now_ms()))

    @invariant()
    def laws_hold(self) -> None:
        rows = self.ledger.actions.read_after(0, 10_000)
        open_now = [row for row in rows if row.is_open]
        assert len({row.action.job for row in open_now}) == len(open_now), "a job has one open action"
        assert sorted(row.action_id for row in open_now) == sorted(r.action_id for r in self.ledger.actions.list_open())
        for row in rows:
            for before, after in zip(row.life, row.life[1:], strict=False):
                assert after.state in NEXT[before.state]
        last: dict[str, ActionRecord] = {}
        for row in sorted(rows, key=lambda row: int(row.action_id.rpartition("-")[2])):
            before = last.get(wish := row.action_id.rpartition("-")[0])
            assert before is None or not before.is_open, "a proposal that is open is not repeated"
            assert before is None or not before.was_sent or before.find_time_ms(ActionState.SEEN), "nor one that failed"
            last[wish] = row

    def teardown(self) -> None:
        failpoints.set_hook(None)
        self.ledger.close()
        assert verify_ledger(self.path).is_intact
        self.folder.cleanup()


def test_no_kill_loses_an_action_or_proposes_one_twice() -> None:
    run_state_machine_as_test(
        ActionLives, settings=settings(max_examples=max(5, round(300 * EFFORT)), stateful_step_count=STEPS)
    )
