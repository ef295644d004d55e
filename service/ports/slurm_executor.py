"""The executor that stops, shrinks and requeues running jobs of Slurm.

    send     mark in AdminComment → nodes reserved for the payer → signal to the batch script
    follow   after the grace: requeuehold, scancel or NodeList=…; once the payer runs: release
    grow     mark with the job's present nodes → NumNodes=…, the number of these and the new nodes

The mark of a growth fixes the job's new size, so a growth that is sent again asks for no more nodes, whichever ones
Slurm gave. It stays until the placer has stored the reply.

The mark of a stop is written before the signal, so a signal is sent at most once. All later steps follow from what
Slurm shows. The nodes are reserved from the first step on, so a job that ends within its grace frees them for the payer
as well. A mark has times of the system clock, which outlive the process. Within a process the steady clock measures
the grace, so setting the system clock neither shortens nor lengthens it. For a job that gets other nodes, its new and
its healthy nodes are reserved until it runs there.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from fleetcast.clients.slurm_control import ControlledJob, SlurmRefused, drop_ambiguous_rows
from fleetcast.clients.slurm_job_commands import PREFIX, NodeHold, SlurmJobCommands
from fleetcast.fleet.clock import Clock, SystemClock
from fleetcast.fleet.errors import ConfigError, RecordError, SourceError
from fleetcast.ingest.preemptible import LABEL, find_in_comment, parse_preemptible
from fleetcast.ingest.slurm.jobs import expand_node_list
from fleetcast.placement.actions.action import ActionKind, parse_recovery_payer
from fleetcast.schedulers.executor import ACCEPTED, ActionOrder, SendOutcome, SendReply, make_refusal
from fleetcast.schedulers.slurm_stop import (
    GANG,
    PENDING,
    REQUEST,
    SlurmStop,
    add_stop,
    find_attempt,
    is_replaced,
    may_release,
    parse_slurm_job,
    parse_stop,
    remove_stop,
)
from fleetcast.service.plugins import read_options

logger = logging.getLogger(__name__)

KINDS = frozenset({ActionKind.PREEMPT, ActionKind.SHRINK, ActionKind.GROW, ActionKind.REPLACE})
NO_PREEMPTION = ("preempt/none", "(null)", "")
RUNNING, COMPLETING = "RUNNING", "COMPLETING"
HOLD_S = 600  # how long nodes are reserved after the grace, at most
CONFIG_S = 600.0  # between two readings of Slurm's PreemptType
MOST_TIMEOUT_S = 10.0


class SlurmExecutorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the executor, described in docs/schedulers/slurm.md."""

    prefix: str = ""
    shell: list[str] = []
    timeout_s: float = 3.0
    signal: str = "USR1"


def make_slurm_executor(options: Mapping[str, Any]) -> "SlurmExecutor":
    """Make the built-in executor `slurm`. Raises ConfigError."""
    given = read_options(options, SlurmExecutorOptions)
    if not 0.1 <= given.timeout_s <= MOST_TIMEOUT_S:
        raise ConfigError(f"options.timeout_s = {given.timeout_s:g}: must be 0.1 to {MOST_TIMEOUT_S:g}")
    if not given.signal.isalnum():
        raise ConfigError(f"options.signal = {given.signal!r}: give a name like USR1, or a number")
    return SlurmExecutor(SlurmJobCommands(given.shell, given.timeout_s), given.prefix, given.signal)


class SlurmExecutor:
    """An executor for Slurm's jobs."""

    def __init__(
        self, slurm: SlurmJobCommands, prefix: str = "", signal: str = "USR1", clock: Clock | None = None
    ) -> None:
        self._slurm, self._prefix, self._signal, self._clock = slurm, prefix, signal, clock or SystemClock()
        self._ends_ms: dict[str, tuple[float, float]] = {}  # action → end of its grace, and its expiry, steady clock
        self._own_preemption = ""
        self._config_s = -math.inf  # when PreemptType was read
        self._unheld: set[str] = set()  # actions whose nodes Slurm did not reserve
        self._gangs_ms: dict[str, float] = {}  # job that lost nodes → steady ms until which others are reserved for it

    def explain_inability(self, kind: str, job: str) -> str:
        if not parse_slurm_job(job, self._prefix):
            return f"{job!r} is not named like {self._prefix}NUMBER, as jobs of Slurm are"
        return "" if kind in KINDS else f"Slurm cannot {kind} a running job"

    async def send(self, order: ActionOrder) -> SendReply:
        if why := self.explain_inability(order.kind, order.job):
            return make_refusal(why)
        return await _answer(self._begin(order, parse_slurm_job(order.job, self._prefix)))

    async def follow(self, orders: Sequence[ActionOrder]) -> Sequence[SendReply]:
        """Make the steps that are due, and release stopped jobs whose payer runs."""
        try:
            jobs = {job.id: job for job in drop_ambiguous_rows(await self._slurm.read_jobs(), lambda job: job.id)}
            holds = await self._slurm.list_holds()
        except (SourceError, SlurmRefused) as error:
            return [SendReply(SendOutcome.UNREACHABLE, str(error))] * len(orders)
        replies = [await _answer(self._continue(order, jobs, holds)) for order in orders]
        open_actions = {order.action_id for order in orders}
        try:
            await self._end_stops(jobs, open_actions, holds)
            await self._end_holds(jobs, holds)
        except (SourceError, SlurmRefused) as error:
            logger.warning("stopped jobs are not released yet: %s", error)
        return replies

    async def close(self) -> None:
        await self._slurm.close()

    # -- the first step

    async def _begin(self, order: ActionOrder, number: str) -> SendReply:
        """Check the job, mark it, and send it the signal. Raises SourceError or SlurmRefused.

        A process that was killed after the signal leaves the action to be sent again. If the job has ended or requeued
        itself by then, nothing is left to do.
        """
        job = await self._slurm.find_job(number)
        if job is None:
            if not await self._slurm.has_ended(number):
                return make_refusal(f"Slurm knows no job {number}")
            return make_refusal(f"job {number} has ended") if order.kind == ActionKind.GROW else ACCEPTED
        stop = parse_stop(job.admin_comment)
        if stop is not None and stop.action == order.action_id:
            return ACCEPTED if order.kind != ActionKind.GROW else await self._grow(order, job, stop)
        nodes = _list_nodes(job)
        freed = _list_freed_nodes(order, nodes)
        if _has_given_up(job, order, freed):
            return ACCEPTED
        why = _explain_refusal(job, order) or _explain_nodes(order, nodes, freed)
        if not why and stop is not None and not _has_happened(job, stop):
            why = f"action {stop.action} on the job has not ended"
        if not why and order.kind == ActionKind.PREEMPT:
            why = await self._explain_own_preemption()
        if why:
            return make_refusal(why)
        if order.kind == ActionKind.GROW:
            return await self._grow(order, job, await self._mark(order, job, nodes))
        await self._mark_and_signal(order, job, freed)
        return ACCEPTED

    async def _grow(self, order: ActionOrder, job: ControlledJob, mark: SlurmStop) -> SendReply:
        """Give a job its new size, unless it has that size. Raises SourceError or SlurmRefused."""
        size = len({*mark.nodes, *(place.node for place in order.places)})
        if job.state == RUNNING and find_attempt(job) == mark.attempt and len(_list_nodes(job)) < size:
            try:
                await self._slurm.resize_job(job.id, size)
            except SlurmRefused:
                await self._slurm.change_job(job.id, admin_comment=remove_stop(job.admin_comment))
                raise
        return ACCEPTED

    async def _mark(self, order: ActionOrder, job: ControlledJob, nodes: Sequence[str]) -> SlurmStop:
        """Write the mark of an action, and return it. nodes: those of the mark."""
        now_s = self._clock.now_ms() // 1000
        stop = SlurmStop(
            kind=order.kind,
            action=order.action_id,
            attempt=order.attempt,
            since_s=now_s,
            grace_s=math.ceil(order.grace_s),
            until_s=max(now_s, order.by_ms // 1000),
            nodes=tuple(nodes),
            payer=self._name_payer(order) if order.kind not in (ActionKind.REPLACE, ActionKind.GROW) else "",
        )
        self._measure_rest_s(stop)
        await self._slurm.change_job(job.id, admin_comment=add_stop(remove_stop(job.admin_comment), stop))
        return stop

    def _name_payer(self, order: ActionOrder) -> str:
        """Return the payer of an action as a mark names it."""
        if gang := parse_slurm_job(parse_recovery_payer(order.payer), self._prefix):
            return GANG + gang
        return parse_slurm_job(order.payer, self._prefix) or (REQUEST if order.payer.strip() else "")

    async def _mark_and_signal(self, order: ActionOrder, job: ControlledJob, freed: Sequence[str]) -> None:
        stop = await self._mark(order, job, freed)
        if stop.slurm_payer:
            await self._hold_nodes(stop, await self._slurm.find_job(stop.slurm_payer), await self._slurm.list_holds())
        elif stop.gang:
            await self._hold_for_gang(await self._slurm.find_job(stop.gang), stop.nodes, stop)
        elif order.kind == ActionKind.REPLACE and order.places:
            nodes = {*_list_nodes(job), *(place.node for place in order.places)}.difference(stop.nodes)
            await self._hold_for_gang(job, nodes, stop)
        if order.grace_s > 0:
            try:
                await self._slurm.signal_job(job.id, self._signal, is_batch=job.is_batch)
            except SlurmRefused:
                await self._slurm.change_job(job.id, admin_comment=job.admin_comment)
                raise

    def _measure_rest_s(self, stop: SlurmStop) -> tuple[float, float]:
        """Return the seconds until the grace of a stop ends, and until its action expires.

        For a stop that an earlier process began, the first call uses the system clock. The result never exceeds the
        whole grace.
        """
        steady_ms = self._clock.steady_ms()
        if stop.action not in self._ends_ms:
            gone_ms = max(0, self._clock.now_ms() - 1000 * stop.since_s)
            begun_ms = steady_ms - gone_ms
            whole_ms = 1000 * (stop.until_s - stop.since_s)
            self._ends_ms[stop.action] = begun_ms + 1000 * stop.grace_s, begun_ms + whole_ms
        grace_end_ms, end_ms = self._ends_ms[stop.action]
        return (grace_end_ms - steady_ms) / 1000, (end_ms - steady_ms) / 1000

    async def _explain_own_preemption(self) -> str:
        """Return how Slurm itself preempts, or "" if it does not: two systems must not stop the same jobs."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._config_s + CONFIG_S:
            kind = await self._slurm.read_preempt_type()
            self._own_preemption = "" if kind in NO_PREEMPTION else f"Slurm preempts by itself: PreemptType = {kind}"
            self._config_s = now_s
        return self._own_preemption

    # -- later steps

    async def _continue(
        self, order: ActionOrder, jobs: Mapping[str, ControlledJob], holds: Mapping[str, str]
    ) -> SendReply:
        """Make the step that is due for one action. Raises SourceError or SlurmRefused."""
        job = jobs.get(parse_slurm_job(order.job, self._prefix))
        stop = parse_stop(job.admin_comment) if job else None
        if job is None or stop is None or stop.action != order.action_id:
            return ACCEPTED  # the job has ended, or nothing is left to do: the board shows what happened
        if job.state != RUNNING or stop.kind == ActionKind.GROW or _has_happened(job, stop):
            return ACCEPTED  # `_end_stops` does the rest
        if _is_protected(job):
            await self._slurm.change_job(job.id, admin_comment=remove_stop(job.admin_comment))
            return make_refusal(f"its owner forbids it: {LABEL}=false")
        await self._hold_nodes(stop, jobs.get(stop.slurm_payer), holds)
        if self._measure_rest_s(stop)[0] <= 0:
            try:
                await self._stop(job, stop)
            except SlurmRefused:
                await self._slurm.change_job(job.id, admin_comment=remove_stop(job.admin_comment))
                raise
        return ACCEPTED

    async def _stop(self, job: ControlledJob, stop: SlurmStop) -> None:
        if stop.kind == ActionKind.SHRINK:
            left = [name for name in _list_nodes(job) if name not in stop.nodes]
            await self._slurm.shrink_job(job.id, left)
        elif job.may_requeue:
            await self._slurm.requeue_held(job.id)
        else:
            await self._slurm.cancel_job(job.id)

    async def _hold_nodes(self, stop: SlurmStop, payer: ControlledJob | None, holds: Mapping[str, str]) -> None:
        """Reserve the nodes of a stop for a Slurm job that waits. Without the reservation Slurm's order decides."""
        if payer is None or payer.state != PENDING or not payer.user or stop.action in self._unheld:
            return
        grace_s, time_s = self._measure_rest_s(stop)
        left_s = min(time_s, grace_s + HOLD_S)
        hold = NodeHold(payer.id, payer.user, stop.nodes, max(1, math.ceil(left_s / 60)))
        try:
            if hold.name not in holds:
                await self._slurm.hold_nodes(hold)
            elif new := {*stop.nodes}.difference(held := _expand(holds[hold.name])):
                await self._slurm.change_held_nodes(hold.name, sorted({*held, *new}))
            if payer.reservation != hold.name:
                await self._slurm.set_reservation(payer.id, hold.name)
        except SlurmRefused as error:
            logger.warning("nodes %s are not reserved for job %s: %s", ",".join(stop.nodes), payer.id, error)
            self._unheld.add(stop.action)

    async def _hold_for_gang(self, gang: ControlledJob | None, nodes: Collection[str], stop: SlurmStop) -> None:
        """Reserve nodes for a job that lost some: for its restart, or while other jobs leave them.

        Without the reservation Slurm's order decides.
        """
        if gang is None or not gang.user:
            return
        grace_s, time_s = self._measure_rest_s(stop)
        minutes = max(1, math.ceil(min(time_s, grace_s + HOLD_S) / 60))
        hold = NodeHold(gang.id, gang.user, sorted(nodes), minutes)
        try:
            holds = await self._slurm.list_holds()
            if hold.name not in holds:
                await self._slurm.hold_nodes(hold)
                self._gangs_ms[gang.id] = self._clock.steady_ms() + 60_000.0 * minutes
            elif new := {*nodes}.difference(held := _expand(holds[hold.name])):
                await self._slurm.change_held_nodes(hold.name, sorted({*held, *new}))
        except SlurmRefused as error:
            logger.warning("nodes %s are not reserved for job %s: %s", ",".join(hold.nodes), gang.id, error)

    async def _end_stops(
        self, jobs: Mapping[str, ControlledJob], open_actions: set[str], holds: Mapping[str, str]
    ) -> None:
        """Release the jobs whose stop has ended, and remove the marks. Raises SourceError.

        A requeued job that is still COMPLETING needs its mark: nothing else shows that we hold it. After a shrink Slurm
        refuses every change of the job for a while, and without slurmdbd for ever.
        """
        stops = {job.id: parse_stop(job.admin_comment) for job in jobs.values()}
        marked = {stop.action for stop in stops.values() if stop is not None}
        self._ends_ms = {action: ends_ms for action, ends_ms in self._ends_ms.items() if action in marked}
        for job in jobs.values():
            stop = stops[job.id]
            if stop is None:
                continue
            is_over = self._measure_rest_s(stop)[1] <= 0
            try:
                if job.state == PENDING and _has_happened(job, stop):
                    if is_over or may_release(stop, jobs):
                        await self._release(job, stop, holds)
                elif _may_forget(job, stop, is_over=is_over, is_open=stop.action in open_actions):
                    await self._slurm.change_job(job.id, admin_comment=remove_stop(job.admin_comment))
            except SlurmRefused as error:
                logger.info("the mark of job %s stays: %s", job.id, error)

    async def _release(self, job: ControlledJob, stop: SlurmStop, holds: Mapping[str, str]) -> None:
        if job.is_held and stop.kind == ActionKind.REPLACE:
            if PREFIX + job.id in holds:
                await self._slurm.set_reservation(job.id, PREFIX + job.id)
            await self._slurm.release_excluding_node(job.id, ",".join(stop.nodes))
        elif job.is_held:
            await self._slurm.release_job(job.id)
        await self._slurm.change_job(job.id, admin_comment=remove_stop(job.admin_comment))

    async def _end_holds(self, jobs: Mapping[str, ControlledJob], holds: Mapping[str, str]) -> None:
        """End the reservations that their job no longer needs, or whose job is gone.

        A waiting job needs its reservation until it runs. A running gang needs it until it has all the nodes, or until
        its time is over. Slurm deletes no reservation in use, so the job leaves it first. A job also leaves one that
        no longer exists. What Slurm refuses is tried again by the next call. Raises SourceError, or SlurmRefused for
        an unreadable list of nodes.
        """
        for job in jobs.values():
            is_using = job.reservation == PREFIX + job.id
            if is_using and (job.state != PENDING or job.reservation not in holds):
                await _log_refusal(self._slurm.set_reservation(job.id, ""))
        stops = [stop for job in jobs.values() if (stop := parse_stop(job.admin_comment)) is not None]
        gangs = {stop.gang for stop in stops if self._measure_rest_s(stop)[1] > 0}
        now_ms = self._clock.steady_ms()
        self._gangs_ms = {gang: end_ms for gang, end_ms in self._gangs_ms.items() if now_ms < end_ms}
        gangs |= self._gangs_ms.keys()
        for name, nodes in holds.items():
            payer = jobs.get(name.removeprefix(PREFIX))
            waits = payer is not None and (payer.state == PENDING or is_replaced(payer))
            if payer is None or not (waits or (payer.id in gangs and not _has_nodes(payer, nodes))):
                await _log_refusal(self._slurm.delete_hold(name))


def _has_happened(job: ControlledJob, stop: SlurmStop) -> bool:
    """Return whether an action has happened to a job: it was requeued since, gave up its nodes, or got more.

    After a stop the job holds none of the nodes that the stop frees. After a growth it holds more nodes than before.
    """
    if stop.kind == ActionKind.GROW and find_attempt(job) == stop.attempt:
        return len(_list_nodes(job)) > len(stop.nodes)
    return find_attempt(job) > stop.attempt or not {*stop.nodes}.intersection(_list_nodes(job))


def _may_forget(job: ControlledJob, stop: SlurmStop, *, is_over: bool, is_open: bool) -> bool:
    """Return whether the mark of an action is no longer needed. is_open: the placer has stored our acceptance.

    Until it has, the placer may send a growth again, and the mark keeps it from growing the job twice.
    """
    if is_over and not is_open:
        return True
    return job.state == RUNNING and _has_happened(job, stop) and (is_open or stop.kind != ActionKind.GROW)


async def _log_refusal(work: Awaitable[None]) -> None:
    """Make a change that may concern one job or reservation alone, and log it if Slurm refuses it."""
    try:
        await work
    except SlurmRefused as error:
        logger.info("a reservation stays as it is: %s", error)


async def _answer(work: Awaitable[SendReply]) -> SendReply:
    """Return the reply of a step, or the reply for the error that occurred instead."""
    try:
        return await work
    except SlurmRefused as error:
        return make_refusal(f"Slurm refuses: {error}")
    except SourceError as error:
        return SendReply(SendOutcome.UNREACHABLE, str(error))


def _is_protected(job: ControlledJob) -> bool:
    return parse_preemptible(find_in_comment(job.comment)) is False


def _has_given_up(job: ControlledJob, order: ActionOrder, freed: Sequence[str]) -> bool:
    """Return whether the attempt of an action has ended, and the job has given up what the action frees.

    freed: the nodes that the job still holds of those. A later attempt may hold them, but a stop is of one attempt.
    """
    if order.kind == ActionKind.GROW:
        return False
    if order.kind == ActionKind.PREEMPT:
        return find_attempt(job) > order.attempt or job.state == COMPLETING
    return find_attempt(job) > order.attempt and not freed


def _explain_refusal(job: ControlledJob, order: ActionOrder) -> str:
    """Return why an action on a job must not begin, or "" if it may."""
    if job.state != RUNNING:
        return f"job {job.id} is {job.state}"
    if find_attempt(job) != order.attempt:
        return f"job {job.id} runs its attempt {find_attempt(job)}, not {order.attempt}"
    if order.kind != ActionKind.GROW and _is_protected(job):
        return f"its owner forbids it: {LABEL}=false"
    return ""


def _explain_nodes(order: ActionOrder, nodes: Sequence[str], freed: Sequence[str]) -> str:
    """Return why an action does not suit the nodes that its job holds now, or "" if it does."""
    if order.kind == ActionKind.GROW:
        return ""
    if not freed:
        return f"the job holds none of {', '.join(sorted({rank.node for rank in order.ranks}))}"
    if order.kind == ActionKind.SHRINK and len(freed) == len(nodes):
        return "the job would lose all of its nodes: Slurm shrinks by whole nodes"
    return ""


def _list_freed_nodes(order: ActionOrder, nodes: Sequence[str]) -> list[str]:
    """Return the nodes that an action frees: all nodes of a preempted job, else those of the affected ranks."""
    if order.kind == ActionKind.PREEMPT:
        return list(nodes)
    affected = {rank.node for rank in order.ranks}
    return [name for name in nodes if name in affected]


def _has_nodes(job: ControlledJob, nodes: str) -> bool:
    """Return whether a job holds all nodes of one of Slurm's lists."""
    return {*_expand(nodes)} <= {*_list_nodes(job)}


def _list_nodes(job: ControlledJob) -> tuple[str, ...]:
    return _expand(job.nodes)


def _expand(nodes: str) -> tuple[str, ...]:
    """Return the nodes in one of Slurm's lists. Raises SlurmRefused for an unreadable list."""
    try:
        return expand_node_list(nodes)
    except RecordError as error:
        raise SlurmRefused(str(error)) from None
