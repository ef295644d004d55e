"""The port of Slurm over a Slurm in memory, where a second writer changes things between any two calls."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.clients.slurm_control import ControlledJob, ControlledNode, NodeChange, SlurmRefused
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.schedulers.adapter import Write, WriteOutcome
from fleetcast.schedulers.slurm import (
    COMMENT,
    DRAIN,
    EXTRA,
    FEATURE,
    FEATURES,
    OURS,
    SlurmMarks,
    SlurmSettings,
)
from fleetcast.service.doors import make_door
from fleetcast.service.ports import slurm
from fleetcast.service.ports.slurm import SlurmPort
from tests.fuzz.bounds import examples
from tests.schedulers.small_fleet import weather

DONE, CONFLICT = WriteOutcome.DONE, WriteOutcome.CONFLICT
REFUSED, UNREACHABLE = WriteOutcome.REFUSED, WriteOutcome.UNREACHABLE


class SlurmInMemory:
    """Does as Slurm does: a drain overwrites the reason. `before_write` runs between a reading and its first write."""

    def __init__(self, *nodes: ControlledNode, jobs: Sequence[ControlledJob] = ()) -> None:
        self.held = {node.name: node for node in nodes}
        self.queue = {job.id: job for job in jobs}
        self.calls: list[object] = []
        self.answers: list[Exception | None] = []

    def _answer(self, *call: object) -> None:
        self.calls.append(call)
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer

    async def read_nodes(self) -> list[ControlledNode]:
        self._answer("nodes")
        return [*self.held.values()]

    async def read_jobs(self) -> list[ControlledJob]:
        return [*self.queue.values()]

    async def change_nodes(self, names: Sequence[str], change: NodeChange) -> None:
        self._answer("change", tuple(names), change)
        for name in names:
            node = self.held[name]
            parts: dict[str, Any] = {"available": change.available, "active": change.active, "extra": change.extra}
            node = replace(node, **{part: value for part, value in parts.items() if value is not None})
            if change.drain is not None:
                node = replace(node, is_drained=bool(change.drain), reason=change.drain)
            self.held[name] = node

    async def change_job(self, job: str, *, comment: str) -> None:
        self._answer("tell", job, comment)

    async def close(self) -> None:
        pass


def written(control: SlurmInMemory, *writes: Write) -> list[WriteOutcome]:
    return list(asyncio.run(SlurmPort(control).write(writes)))


def write(key: str, field: str, value: str | None, seen: str | None = None) -> Write:
    return Write(key, field, value, seen, "")


def test_nodes_that_get_the_same_go_into_one_call_and_drains_go_first() -> None:
    control = SlurmInMemory(*(ControlledNode(f"n{n}", False, available=("a",), active=("a",)) for n in range(4)))
    batch = [write(f"n{n}", FEATURE, "risk_low") for n in range(4)]
    assert written(control, *batch, write("n3", DRAIN, f"{OURS} p"), write("n2", EXTRA, "2")) == [DONE] * 6
    low = NodeChange(available=("a", "risk_low"), active=("a", "risk_low"))
    assert control.calls == [
        ("nodes",),
        ("change", ("n3",), NodeChange(drain=f"{OURS} p")),
        ("change", ("n0", "n1", "n2", "n3"), low),
        ("change", ("n2",), NodeChange(extra='{"risk_level": 2}')),
    ]


def test_nothing_is_written_over_what_was_not_seen() -> None:
    drained = ControlledNode("n1", True, "fan 3", extra="rack 7")
    ours = ControlledNode("n2", True, f"{OURS} newer")
    control = SlurmInMemory(drained, ours)
    batch = [
        write("n1", DRAIN, f"{OURS} p"),
        write("n1", EXTRA, "2"),
        write("n2", DRAIN, None, f"{OURS} older"),
        write("gone", FEATURE, "risk_low"),
        write("job 7", COMMENT, f"{OURS} start"),
    ]
    assert written(control, *batch) == [CONFLICT] * 5
    assert len(control.calls) == 1


def test_what_is_refused_holds_up_no_other_and_what_is_away_ends_the_batch() -> None:
    nodes = [ControlledNode(f"n{n}", False) for n in range(3)]
    batch = [write(f"n{n}", DRAIN, f"{OURS} {n}") for n in range(3)]
    control = SlurmInMemory(*nodes)
    control.answers = [None, SlurmRefused("no")]
    assert written(control, *batch) == [REFUSED, DONE, DONE]
    control = SlurmInMemory(*nodes)
    control.answers = [None, None, SourceError("away")]
    assert written(control, *batch) == [DONE, UNREACHABLE, UNREACHABLE]
    assert len(control.calls) == 3


def test_what_was_read_a_while_ago_is_read_again_before_the_next_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "FRESH_S", 0.0)
    control = SlurmInMemory(*(ControlledNode(f"n{n}", False) for n in range(3)))
    assert written(control, *(write(f"n{n}", DRAIN, f"{OURS} {n}") for n in range(3))) == [DONE] * 3
    assert [call[0] for call in control.calls if isinstance(call, tuple)] == ["nodes", "change"] * 3


def test_a_slurm_that_is_away_is_asked_less_and_less_often() -> None:
    async def scenario() -> None:
        control = SlurmInMemory()
        port = SlurmPort(control)
        control.answers = [SourceError("away")] * 9
        for _ in range(5):
            with pytest.raises(SourceError, match="away"):
                await port.read()
        assert len(control.calls) == 1
        assert await port.write([write("n1", DRAIN, f"{OURS} p")]) == [UNREACHABLE]
        assert len(control.calls) == 1
        await asyncio.sleep(1.1)
        with pytest.raises(SourceError, match="away"):
            await port.read()
        assert len(control.calls) == 2

    asyncio.run(scenario())


def test_only_a_job_that_waits_gets_a_comment() -> None:
    waits, runs = ControlledJob("8", "PENDING"), ControlledJob("9", "RUNNING", may_requeue=True)
    control = SlurmInMemory(jobs=[waits, runs])
    batch = [write(f"job {number}", COMMENT, f"{OURS} start") for number in (8, 9)]
    assert written(control, *batch) == [DONE, CONFLICT]
    assert control.calls[-1] == ("tell", "8", f"{OURS} start")


# -- a second writer

CONF = ("a100",)  # what a reconfiguration puts there


@dataclass
class Others:
    """What an operator has set on a node."""

    reason: str = ""
    features: tuple[str, ...] = CONF
    extra: str = ""


Act = Callable[[SlurmInMemory, dict[str, Others], str], None]


def drain(control: SlurmInMemory, others: dict[str, Others], name: str) -> None:
    others[name].reason = "fan 3 is slow"
    control.held[name] = replace(control.held[name], is_drained=True, reason="fan 3 is slow")


def resume(control: SlurmInMemory, others: dict[str, Others], name: str) -> None:
    others[name].reason = ""
    control.held[name] = replace(control.held[name], is_drained=False, reason="")


def reconfigure(control: SlurmInMemory, others: dict[str, Others], name: str) -> None:
    for each, node in control.held.items():
        others[each].features = CONF
        control.held[each] = replace(node, available=CONF, active=CONF)


def feature(control: SlurmInMemory, others: dict[str, Others], name: str) -> None:
    node, more = control.held[name], f"f{len(others[name].features)}"
    others[name].features = (*others[name].features, more)
    control.held[name] = replace(node, available=(*node.available, more), active=(*node.active, more))


def extra(control: SlurmInMemory, others: dict[str, Others], name: str) -> None:
    others[name].extra = '{"rack": 7}'
    control.held[name] = replace(control.held[name], extra='{"rack": 7}')


names = st.sampled_from(["n1", "n2", "n3"])
acts = st.tuples(st.sampled_from([drain, resume, reconfigure, feature, extra]), names)
fleets = st.none() | st.dictionaries(names, st.sampled_from([0.0, 0.1, 0.9, float("nan")]))


@examples(375)
@given(st.lists(st.tuples(fleets, st.lists(acts, max_size=3), st.lists(acts, max_size=3)), max_size=8))
def test_whatever_an_operator_does_meanwhile_stays(
    rounds: list[tuple[dict[str, float] | None, list[tuple[Act, str]], list[tuple[Act, str]]]],
) -> None:
    control = SlurmInMemory(*(ControlledNode(name, False, available=CONF, active=CONF) for name in ("n1", "n2", "n3")))
    others = {name: Others() for name in control.held}
    adapter, port = SlurmMarks(SlurmSettings(extra=True)), SlurmPort(control)

    async def scenario() -> None:
        for risk, before, between in [*rounds, (None, [], [])]:
            for act, name in before:
                act(control, others, name)
            wishes = list(adapter.wishes(weather(risk), await port.read()))
            for act, name in between:
                act(control, others, name)
            await port.write(wishes)
            for name, node in control.held.items():
                assert_kept(node, others[name])
        await port.write(list(adapter.wishes(None, await port.read())))
        for name, node in control.held.items():
            assert_kept(node, others[name])
            assert node == ControlledNode(
                name, bool(node.reason), node.reason, others[name].features, others[name].features, node.extra
            )

    asyncio.run(scenario())


def assert_kept(node: ControlledNode, others: Others) -> None:
    assert node.reason == others.reason or (not others.reason and node.reason.startswith(OURS))
    assert node.is_drained == bool(node.reason)
    assert tuple(name for name in node.available if name not in FEATURES) == others.features
    assert tuple(name for name in node.active if name not in FEATURES) == others.features
    assert ('"rack": 7' in node.extra) == bool(others.extra)


def test_options_are_checked_at_the_start() -> None:
    for options, says in (
        ({"zone": "Mars/Base"}, "options.zone = 'Mars/Base': no such time zone"),
        ({"timeout_s": 60}, "options.timeout_s = 60: must be 0.1 to 10"),
        ({"url": "host:6820"}, "options.url = 'host:6820': must be like http://HOST:6820"),
        ({"requeue": True}, r"options.requeue.*adapters.executor.*reclaim"),
        ({"url": "http://h:1", "shell": ["ssh", "a"]}, "options.shell: there are no commands where `url` is set"),
        ({"api_version": "v0.0.38"}, "options.api_version = 'v0.0.38': must be v0.0.40 or newer"),
        ({"drane": True}, "options.drane: no such key; did you mean drain"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_door("slurm", options)
