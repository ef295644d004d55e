"""The executor `slurm` over a Slurm in memory that is away after any of its calls, and a process that begins again."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.clients.slurm_control import ControlledJob, SlurmRefused
from fleetcast.clients.slurm_job_commands import NodeHold, SlurmJobCommands
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.requests import RankPlacement
from fleetcast.schedulers.executor import ActionOrder, SendOutcome
from fleetcast.schedulers.slurm_stop import SlurmStop, add_stop
from fleetcast.service.doors import make_executor
from fleetcast.service.ports.slurm_executor import SlurmExecutor
from tests.fuzz.bounds import examples

VICTIM = ControlledJob("1", "RUNNING", may_requeue=True, is_batch=True, nodes="n[1-2]", user="ada")
PAYER = ControlledJob("2", "PENDING", may_requeue=True, is_batch=True, user="bob")
ORDER = ActionOrder("0f-1", "preempt", "1", 1, 8.0, (RankPlacement(0, "n1"),), (), "\n2", 120.0, 1_000_000)


class StoppableSlurm(SlurmJobCommands):
    """Slurm in memory. away_after: the numbers of calls after which it is away once, although it has done them.

    fixed: jobs and reservations of which Slurm changes and deletes no reservation.
    """

    def __init__(
        self,
        *jobs: ControlledJob,
        away_after: Sequence[int] = (),
        words: str = "",
        fixed: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.queue = {job.id: job for job in jobs}
        self.held: dict[str, str] = {}
        self.ended: set[str] = set()
        self.away_after, self.words = set(away_after), words
        self.calls: list[str] = []
        self.fixed = fixed

    def _done(self, call: str) -> None:
        self.calls.append(call)
        if len(self.calls) in self.away_after:
            raise SourceError("slurmctld is away")

    def _refuse_fixed(self, name: str) -> None:
        if name in self.fixed:
            raise SlurmRefused(f"{name} is in use")

    def _change(self, job: str, **changes: Any) -> None:
        self.queue[job] = replace(self.queue[job], **changes)

    async def read_jobs(self) -> list[ControlledJob]:
        return [*self.queue.values()]

    async def find_job(self, job: str) -> ControlledJob | None:
        return self.queue.get(job)

    async def has_ended(self, job: str) -> bool:
        return job in self.ended

    async def read_preempt_type(self) -> str:
        return "preempt/none"

    async def change_job(self, job: str, *, comment: str | None = None, admin_comment: str | None = None) -> None:
        self._change(job, admin_comment=admin_comment)
        self._done("comment")

    async def signal_job(self, job: str, signal: str, *, is_batch: bool) -> bool:
        self._done("signal")
        return True

    async def requeue_held(self, job: str) -> bool:
        if self.words:
            raise SlurmRefused(self.words)
        self._change(job, state="PENDING", restarts=self.queue[job].restarts + 1, is_held=True, nodes="")
        self._done("requeue")
        return True

    async def resize_job(self, job: str, nodes: int) -> None:
        """Give a job the first free nodes, whichever ones the caller had in mind."""
        if self.words:
            raise SlurmRefused(self.words)
        held = [f"n{number}" for number in range(1, nodes + 1)]
        self._change(job, nodes=",".join(held))
        self._done("resize")

    async def release_job(self, job: str) -> None:
        self._change(job, is_held=False)
        self._done("release")

    async def release_excluding_node(self, job: str, node: str) -> None:
        await self.release_job(job)

    async def list_holds(self) -> dict[str, str]:
        return dict(self.held)

    async def hold_nodes(self, hold: NodeHold) -> None:
        self.held[hold.name] = ",".join(hold.nodes)
        self._done("hold")

    async def set_reservation(self, job: str, name: str) -> None:
        self._refuse_fixed(job)
        self._change(job, reservation=name)
        self._done("reservation")

    async def delete_hold(self, name: str) -> None:
        self._refuse_fixed(name)
        assert name not in {job.reservation for job in self.queue.values()}  # Slurm refuses it
        del self.held[name]
        self._done("delete")

    def schedule(self) -> None:
        """Start the payer on the nodes that are reserved for it."""
        if self.queue["1"].state == "PENDING" and self.queue["2"].reservation in self.held:
            self._change("2", state="RUNNING", nodes="n[1-2]")


class Site:
    """Fresh executors on one Slurm, as after a restart before each call."""

    def __init__(self, slurm: StoppableSlurm) -> None:
        self.slurm, self.clock = slurm, ManualClock()

    @property
    def now_s(self) -> float:
        return self.clock.now_ms() / 1000

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.clock.advance(now_s - self.now_s)

    def send(self, order: ActionOrder = ORDER) -> tuple[SendOutcome, str]:
        executor = SlurmExecutor(self.slurm, clock=self.clock)
        reply = asyncio.run(executor.send(order))
        return reply.outcome, reply.why

    def follow(self, *orders: ActionOrder) -> list[tuple[SendOutcome, str]]:
        executor = SlurmExecutor(self.slurm, clock=self.clock)
        return [(reply.outcome, reply.why) for reply in asyncio.run(executor.follow(orders))]


@given(st.lists(st.integers(1, 14), max_size=4))
@examples(200)
def test_a_stop_happens_once_wherever_slurm_goes_away_and_the_process_begins_again(away_after: list[int]) -> None:
    slurm = StoppableSlurm(replace(VICTIM, admin_comment="a note of theirs"), PAYER, away_after=away_after)
    site = Site(slurm)
    while (reply := site.send())[0] is SendOutcome.UNREACHABLE:
        pass
    assert reply == site.send() == (SendOutcome.ACCEPTED, "")
    for site.now_s in (10.0, 119.0):
        site.follow(ORDER)
        assert slurm.queue["1"].state == "RUNNING"
    for site.now_s in (121.0, 122.0, 123.0, 124.0):
        site.follow(ORDER)
    slurm.schedule()
    assert slurm.queue["2"].state == "RUNNING"
    for site.now_s in range(125, 135):
        site.follow(ORDER)
    victim = slurm.queue["1"]
    assert (victim.state, victim.restarts, victim.is_held) == ("PENDING", 1, False)
    assert (victim.admin_comment, slurm.queue["2"].reservation, slurm.held) == ("a note of theirs", "", {})
    assert (slurm.calls.count("signal") <= 1, slurm.calls.count("requeue")) == (True, 1)


@given(st.lists(st.integers(1, 14), max_size=4))
@examples(100)
def test_a_replaced_node_leaves_the_shape_reserved_until_the_job_runs_there(away_after: list[int]) -> None:
    slurm = StoppableSlurm(VICTIM, away_after=away_after)
    site = Site(slurm)
    order = ORDER._replace(kind="replace", places=(RankPlacement(0, "n7"),), payer="")
    while site.send(order)[0] is SendOutcome.UNREACHABLE:
        pass
    site.now_s = 10.0
    site.follow(order)
    assert slurm.queue["1"].state == "RUNNING"
    assert set(slurm.held.values()) <= {"n2,n7"}
    reserved = bool(slurm.held)
    for site.now_s in range(121, 131):
        site.follow(order)
    job = slurm.queue["1"]
    assert (job.state, job.is_held, job.reservation) == ("PENDING", False, "fleetcast-1" if reserved else "")
    slurm._change("1", state="RUNNING", nodes="n[2,7]")
    for site.now_s in range(131, 137):
        site.follow(order)
    assert (slurm.queue["1"].reservation, slurm.held, slurm.queue["1"].admin_comment) == ("", {}, "")
    assert reserved or away_after, "only a call that was lost leaves no reservation"


GROWTH = ORDER._replace(kind="grow", ranks=(), places=(RankPlacement(0, "n7"), RankPlacement(1, "n8")), payer="")


@given(st.lists(st.integers(1, 6), max_size=3), st.lists(st.booleans(), max_size=4))
@examples(200)
def test_a_job_grows_once_wherever_slurm_goes_away_and_the_reply_is_lost(
    away_after: list[int], follows: list[bool]
) -> None:
    """follows: whether a process follows nothing, or sends again, before the placer stores the reply."""
    slurm = StoppableSlurm(VICTIM, away_after=away_after)
    site = Site(slurm)
    for is_follow in follows:
        site.follow() if is_follow else site.send(GROWTH)
        assert slurm.queue["1"].nodes in ("n[1-2]", "n1,n2,n3,n4")
    while site.send(GROWTH)[0] is SendOutcome.UNREACHABLE:
        pass
    assert slurm.queue["1"].nodes == "n1,n2,n3,n4", "Slurm gave other nodes than those of the action"
    site.send(GROWTH)
    assert slurm.calls.count("resize") == 1
    for _ in range(4):
        site.follow(GROWTH)
    assert (slurm.queue["1"].admin_comment, slurm.calls.count("resize")) == ("", 1)


def test_growth_that_slurm_refuses_or_forgets_leaves_no_mark() -> None:
    site = Site(slurm := StoppableSlurm(VICTIM, words="not today"))
    assert site.send(GROWTH) == (SendOutcome.REFUSED, "Slurm refuses: not today")
    assert (slurm.queue["1"].nodes, slurm.queue["1"].admin_comment) == ("n[1-2]", "")
    slurm.words = ""
    assert site.send(GROWTH) == (SendOutcome.ACCEPTED, "")
    assert site.send() == (SendOutcome.ACCEPTED, ""), "a growth that has happened does not delay a stop"
    site = Site(slurm := StoppableSlurm(VICTIM))
    site.send(GROWTH)
    site.now_s = GROWTH.by_ms / 1000
    site.follow()
    assert slurm.queue["1"].admin_comment == "", "its time is over"


def test_a_stopped_job_stays_held_while_its_payer_waits_and_until_the_action_is_over_at_most() -> None:
    site = Site(slurm := StoppableSlurm(VICTIM, PAYER))
    assert site.send() == (SendOutcome.ACCEPTED, "")
    site.now_s = 121.0
    site.follow(ORDER)
    site.now_s = 999.0
    site.follow(ORDER)
    assert slurm.queue["1"].is_held
    site.now_s = 1000.0
    site.follow()
    assert (slurm.queue["1"].is_held, slurm.queue["1"].admin_comment) == (False, "")


def test_a_requeued_job_that_still_completes_keeps_its_mark_until_it_is_released() -> None:
    site = Site(slurm := StoppableSlurm(VICTIM))
    site.send(ORDER._replace(payer=""))
    site.now_s = 121.0
    site.follow(ORDER)
    slurm.queue["1"] = replace(slurm.queue["1"], state="COMPLETING", nodes="n1")
    site.follow(ORDER)
    slurm.queue["1"] = replace(slurm.queue["1"], state="PENDING", nodes="")
    site.follow(ORDER)
    assert (slurm.queue["1"].is_held, slurm.queue["1"].admin_comment) == (False, "")


@pytest.mark.parametrize("by_s", [-3600, 3600])
def test_a_clock_that_is_set_changes_no_grace(by_s: int) -> None:
    slurm, clock = StoppableSlurm(VICTIM, PAYER), ManualClock(10_000_000)
    order = ORDER._replace(by_ms=11_000_000)
    executor = SlurmExecutor(slurm, clock=clock)

    def follow() -> str:
        asyncio.run(executor.follow([order]))
        return slurm.queue["1"].state

    asyncio.run(executor.send(order))
    clock.time_ms += 1000 * by_s
    clock.advance(119)
    assert follow() == "RUNNING"
    clock.advance(1)
    assert follow() == "PENDING"
    clock.advance(879)
    assert (follow(), slurm.queue["1"].is_held) == ("PENDING", True)
    clock.advance(1)
    assert (follow(), slurm.queue["1"].is_held) == ("PENDING", False)


def test_a_clock_that_was_set_back_between_two_processes_gives_at_most_one_more_grace() -> None:
    slurm, clock = StoppableSlurm(VICTIM, PAYER), ManualClock(10_000_000)
    order = ORDER._replace(by_ms=11_000_000)
    asyncio.run(SlurmExecutor(slurm, clock=clock).send(order))
    clock.time_ms -= 3_600_000
    executor = SlurmExecutor(slurm, clock=clock)
    for seconds, state in ((0, "RUNNING"), (119, "RUNNING"), (1, "PENDING")):
        clock.advance(seconds)
        asyncio.run(executor.follow([order]))
        assert slurm.queue["1"].state == state


def test_what_slurm_refuses_after_the_grace_leaves_no_mark() -> None:
    site = Site(slurm := StoppableSlurm(VICTIM, PAYER, words="not today"))
    site.send()
    site.now_s = 121.0
    assert site.follow(ORDER) == [(SendOutcome.REFUSED, "Slurm refuses: not today")]
    assert (slurm.queue["1"].state, slurm.queue["1"].admin_comment) == ("RUNNING", "")


def test_a_job_and_a_reservation_that_slurm_does_not_change_keep_no_other_reservation() -> None:
    completing = replace(VICTIM, state="COMPLETING", reservation="fleetcast-1")
    slurm = StoppableSlurm(completing, fixed={"1", "fleetcast-1", "fleetcast-7"})
    slurm.held = {"fleetcast-1": "n1", "fleetcast-7": "n7", "fleetcast-8": "n8"}
    Site(slurm).follow()
    assert slurm.held == {"fleetcast-1": "n1", "fleetcast-7": "n7"}


def test_a_job_with_an_open_action_is_not_stopped_by_a_second_action() -> None:
    stop = SlurmStop("shrink", "0e-1", 1, 0, 0, 900, ("n2",))
    marked = replace(VICTIM, admin_comment=add_stop("", stop))
    assert Site(StoppableSlurm(marked)).send() == (SendOutcome.REFUSED, "action 0e-1 on the job has not ended")


ENDED = SendOutcome.ACCEPTED, ""


@pytest.mark.parametrize("kind", ["preempt", "shrink", "replace"])
@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_job_that_requeues_itself_between_a_kill_and_the_next_try_has_stopped(kind: str, state: str) -> None:
    """The executor is killed after its signal. Then its mark goes with the attempt, and the action is sent again."""
    slurm, order = StoppableSlurm(VICTIM, PAYER), ORDER._replace(kind=kind)
    site = Site(slurm)
    assert site.send(order) == ENDED
    slurm._change("1", state=state, restarts=1, nodes="n3" if state == "RUNNING" else "")
    site.follow()
    slurm._change("1", admin_comment="")
    before = len(slurm.calls)
    assert site.send(order) == ENDED
    assert "signal" not in slurm.calls[before:]


def test_a_job_that_requeues_itself_onto_the_same_nodes_gave_none_of_them_up() -> None:
    again = replace(VICTIM, restarts=1)
    assert Site(StoppableSlurm(again)).send() == ENDED, "its attempt has stopped"
    for kind in ("shrink", "replace", "grow"):
        reply = Site(StoppableSlurm(again)).send(ORDER._replace(kind=kind))
        assert reply == (SendOutcome.REFUSED, "job 1 runs its attempt 2, not 1")


def test_a_job_that_ends_between_a_kill_and_the_next_try_has_stopped() -> None:
    completing = replace(VICTIM, state="COMPLETING")
    assert Site(StoppableSlurm(completing)).send() == ENDED
    slurm = StoppableSlurm(PAYER)
    assert Site(slurm).send() == (SendOutcome.REFUSED, "Slurm knows no job 1")
    slurm.ended.add("1")
    assert Site(slurm).send() == ENDED
    assert Site(slurm).send(ORDER._replace(kind="shrink")) == ENDED
    assert Site(slurm).send(ORDER._replace(kind="grow")) == (SendOutcome.REFUSED, "job 1 has ended")


@pytest.mark.parametrize(
    ("kind", "job", "why"),
    [
        ("preempt", "site-7", ""),
        ("preempt", "site-7_2", ""),
        ("preempt", "7", "'7' is not named like site-NUMBER, as jobs of Slurm are"),
        ("preempt", "site-train", "'site-train' is not named like site-NUMBER, as jobs of Slurm are"),
        ("move", "site-7", "Slurm cannot move a running job"),
    ],
)
def test_the_executor_says_what_it_cannot_do(kind: str, job: str, why: str) -> None:
    assert make_executor("slurm", {"prefix": "site-"}).explain_inability(kind, job) == why


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout_s": 60.0}, "options.timeout_s = 60"),
        ({"signal": "USR1; rm"}, "options.signal"),
        ({"url": "x"}, "url"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_executor("slurm", options)
