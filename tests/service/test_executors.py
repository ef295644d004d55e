"""The host of executors over a real placer: actions are sent, answered and followed, and nothing is done twice."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.placement.actions.action import ActionKind
from fleetcast.placement.actions.life import ActionState
from fleetcast.schedulers.executor import ActionOrder, SendOutcome, SendReply
from fleetcast.service import executors
from fleetcast.service.adapter_records import AdapterRecords, AdaptersStatus, AdapterStatus
from fleetcast.service.adapters import AdapterHost
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import AdapterConfig, AdaptersConfig
from fleetcast.service.doors import open_executors
from fleetcast.service.executors import ExecutorHost
from tests.placement.actions.action_world import make_action
from tests.service.placer_world import NOW_MS, World
from tests.service.served_placer import serve_app

MEMORY = f"{__name__}:make_memory_executor"
ACCEPTED = SendReply(SendOutcome.ACCEPTED)


class MemoryExecutor:
    """Another system in memory. answer, later: what `send` and `follow` return. begun: action → how often it began."""

    def __init__(self) -> None:
        self.answer = self.later = ACCEPTED
        self.begun: dict[str, int] = {}
        self.sent: list[ActionOrder] = []
        self.followed: list[list[str]] = []
        self.hangs = False
        self.blocked: set[str] = set()  # jobs about which it does not answer

    def explain_inability(self, kind: str, job: str) -> str:
        return "" if kind == "preempt" else f"cannot {kind}"

    async def send(self, order: ActionOrder) -> SendReply:
        self.sent.append(order)
        if self.hangs:
            await asyncio.Event().wait()
        if order.job in self.blocked:
            return SendReply(SendOutcome.UNREACHABLE, "no answer about this job")
        if self.answer is ACCEPTED and order.action_id not in self.begun:
            self.begun[order.action_id] = 1
        return self.answer

    async def follow(self, orders: Sequence[ActionOrder]) -> Sequence[SendReply]:
        self.followed.append([order.action_id for order in orders])
        return [self.later] * len(orders)

    async def close(self) -> None:
        pass


SYSTEM = MemoryExecutor()


def make_memory_executor(options: Mapping[str, Any]) -> MemoryExecutor:
    return SYSTEM


class HostWorld:
    """A placer with a board, and hosts of one executor on it."""

    def __init__(self, placer: World, port: int, folder: Path) -> None:
        self.placer = placer
        self.port = port
        self.records = AdapterRecords(folder)
        self.mode = "write"

    def open_action(self, job: str = "big", **changes: Any) -> str:
        control = self.placer.service.actions
        action = make_action(job, executor="memory", by_ms=NOW_MS + 600_000, gpus=1.0, **changes)
        (record,) = control.propose([action], NOW_MS).opened
        assert control.send([record.action_id], NOW_MS)
        return record.action_id

    def state(self, action_id: str) -> tuple[str, str]:
        record = self.placer.service.actions.get_action(action_id)
        return record.state.value, record.why

    def run(self, until: Callable[[], Any], *, may_send: bool = True, **limits: Any) -> AdapterStatus:
        """Run one host until a condition holds, then end it. Returns the executor's last status."""
        row = AdapterConfig(MEMORY, name="memory", mode=self.mode)
        config = msgspec.structs.replace(
            self.placer.config,
            placer=msgspec.structs.replace(self.placer.config.placer, port=self.port),
            adapters=AdaptersConfig(executor=(row,), **limits),
        )

        async def go() -> AdapterStatus:
            host = ExecutorHost(config, self.placer.clock, self.records, lambda: None)
            host.run(may_send=may_send)
            for _ in range(200):
                await asyncio.sleep(0.02)
                host.pop_change()
                if until():
                    break
            else:
                raise AssertionError("it did not happen within 4 s")
            (status,) = host.list_statuses()
            await host.close()
            return status

        return asyncio.run(go())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostWorld]:
    SYSTEM.__init__()  # type: ignore[misc]
    monkeypatch.setattr(executors, "PERIOD_S", 0.05)
    placer = World(tmp_path)
    placer.board.publish()
    placer.service.view.observe_fleet()
    with serve_app(placer.app) as port:
        yield HostWorld(placer, port, tmp_path)
    placer.close()


def test_a_sent_action_is_begun_accepted_and_followed(world: HostWorld) -> None:
    action = world.open_action()
    status = world.run(lambda: [action] in SYSTEM.followed)
    assert world.state(action) == ("accepted", "")
    (order,) = SYSTEM.sent
    assert (order.kind, order.job, order.payer, order.grace_s) == ("preempt", "big", "urgent", 120.0)
    assert (status.kind, status.wishes, status.writes, status.ours) == ("executor", 1, 1, 1)
    (line,) = world.records.read_newest_lines("memory", 9)
    assert (line.key, line.field, line.value, line.outcome) == ("big", "preempt", action, "accepted")


def test_who_only_observes_refuses_and_touches_nothing(world: HostWorld) -> None:
    world.mode = "observe"
    action = world.open_action()
    world.run(lambda: world.state(action)[0] == "refused")
    assert (world.state(action)[1], SYSTEM.sent) == ("the executor only observes", [])
    assert [line.outcome for line in world.records.read_newest_lines("memory", 9)] == ["observed"]


def test_a_withdrawn_executor_refuses_new_actions_and_follows_the_others(world: HostWorld) -> None:
    first = world.open_action()
    world.run(lambda: world.state(first)[0] == "accepted")
    world.records.mark_withdrawn("memory")
    second, SYSTEM.followed = world.open_action("other"), []
    status = world.run(lambda: world.state(second)[0] == "refused" and [first] in SYSTEM.followed)
    assert (len(SYSTEM.sent), status.withdrawn) == (1, True)


def test_what_the_executor_cannot_do_or_refuses_is_refused_in_its_words(world: HostWorld) -> None:
    grown = world.open_action("other", kind=ActionKind.GROW)
    world.run(lambda: world.state(grown) == ("refused", "cannot grow"))
    SYSTEM.answer = SendReply(SendOutcome.REFUSED, "not on Sundays")
    action = world.open_action()
    world.run(lambda: world.state(action) == ("refused", "not on Sundays"))
    assert len(SYSTEM.sent) == 1


def test_an_action_that_fails_later_is_refused(world: HostWorld) -> None:
    SYSTEM.later = SendReply(SendOutcome.REFUSED, "the job is protected now")
    action = world.open_action()
    world.run(lambda: world.state(action) == ("refused", "the job is protected now"))


def test_an_executor_that_does_not_answer_gets_the_action_again_after_a_pause(world: HostWorld) -> None:
    SYSTEM.answer = SendReply(SendOutcome.UNREACHABLE, "connection refused")
    action = world.open_action()
    status = world.run(lambda: SYSTEM.sent and world.state(action)[0] == "sent")
    assert status.error == "connection refused"
    SYSTEM.answer = ACCEPTED
    world.run(lambda: world.state(action)[0] == "accepted")
    assert [order.action_id for order in SYSTEM.sent] == [action, action]


def test_a_job_without_an_answer_delays_no_other_action(world: HostWorld) -> None:
    before = world.open_action("before")
    world.run(lambda: world.state(before)[0] == "accepted")
    SYSTEM.blocked = {"stuck", "stuck too"}
    stuck = [world.open_action("stuck"), world.open_action("stuck too")]
    others = [world.open_action("one"), world.open_action("other")]
    SYSTEM.followed = []
    status = world.run(lambda: all(world.state(action)[0] == "accepted" for action in others))
    assert (status.error, [world.state(action)[0] for action in stuck]) == ("no answer about this job", ["sent"] * 2)
    assert SYSTEM.followed[0][0] == before, "what was accepted is still followed"
    SYSTEM.blocked = set()
    world.run(lambda: all(world.state(action)[0] == "accepted" for action in stuck))


def test_a_host_killed_between_send_and_accept_does_nothing_twice(
    world: HostWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = world.open_action()
    with monkeypatch.context() as patch:

        async def cut(*_: object) -> None:
            await asyncio.Event().wait()

        patch.setattr("fleetcast.service.actions_link.ActionsLink.accept", cut)
        world.run(lambda: SYSTEM.sent)
    assert world.state(action)[0] == "sent"
    world.run(lambda: world.state(action)[0] == "accepted")
    assert SYSTEM.begun == {action: 1}


def test_without_a_fresh_board_nothing_new_is_sent(world: HostWorld) -> None:
    first = world.open_action()
    world.run(lambda: world.state(first)[0] == "accepted")
    second, SYSTEM.followed = world.open_action("other"), []
    status = world.run(lambda: len(SYSTEM.followed) > 2, may_send=False)
    assert (world.state(second)[0], SYSTEM.followed[0], status.held_back) == ("sent", [first], 1)


def test_at_most_so_many_actions_begin_within_a_minute(world: HostWorld) -> None:
    actions = [world.open_action(f"job{number}") for number in range(3)]
    status = world.run(lambda: len(SYSTEM.followed) > 3, writes_per_minute=2)
    assert [world.state(action)[0] for action in actions] == ["accepted", "accepted", "sent"]
    assert status.held_back == 1


def test_an_action_that_ended_meanwhile_stays_ended(world: HostWorld) -> None:
    SYSTEM.hangs = True
    action = world.open_action()
    world.run(lambda: SYSTEM.sent)
    SYSTEM.hangs = False
    world.placer.clock.advance(601.0)
    assert [row.state for row in world.placer.service.actions.expire(world.placer.clock.now_ms())] == [
        ActionState.EXPIRED
    ]
    SYSTEM.sent = []
    world.run(lambda: SYSTEM.followed)
    assert (SYSTEM.sent, world.state(action)[0]) == ([], "expired")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"use": "lamp"}], r"adapters.executor\[0\] lamp: adapters.executor.use \(built in: .*\): 'lamp'"),
        ([{"use": MEMORY, "name": "agents"}], r"adapters.executor\[0\].name = 'agents': used already"),
        ([{"use": MEMORY, "name": "a b"}], r"adapters.executor\[0\].name = 'a b': letters"),
        ([{"use": MEMORY, "name": "m"}] * 2, r"adapters.executor\[1\].name = 'm': used already"),
    ],
)
def test_a_wrong_row_of_an_executor_is_named(rows: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_executors(AdaptersConfig(executor=tuple(AdapterConfig(**row) for row in rows)))


def test_the_adapters_process_sends_only_while_its_board_is_fresh(world: HostWorld) -> None:
    row = AdapterConfig(MEMORY, name="memory", mode="write")
    config = msgspec.structs.replace(
        world.placer.config,
        placer=msgspec.structs.replace(world.placer.config.placer, port=world.port),
        adapters=AdaptersConfig(executor=(row,)),
    )

    async def run(seconds: float, board: Board | None) -> AdaptersStatus:
        host = AdapterHost(config, world.placer.clock)
        for _ in range(round(seconds / 0.05)):
            host.begin_due_steps(board)
            await asyncio.sleep(0.05)
            _ = host.has_ended_step
        status = host.make_status()
        await host.close()
        return status

    action = world.open_action()
    assert asyncio.run(run(1.0, None)).adapters[0].held_back == 1
    assert world.state(action)[0] == "sent"
    (status,) = asyncio.run(run(2.0, BoardReader(config.board).latest())).adapters
    assert (world.state(action)[0], status.name, status.writes) == ("accepted", "memory", 1)
