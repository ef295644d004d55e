"""Whatever happens to a gang's pods and to us: going on from any position, or telling twice, changes nothing."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.clients.kubernetes import Changes, Cluster, Listing
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.job_table import JobTable
from fleetcast.ingest.kubernetes.source import KINDS, KubernetesSource
from tests.fuzz.bounds import examples
from tests.ingest.small_kubernetes import CREATED_MS, SmallKubernetes, condition, ended, job, pod, running

STEP_MS = 1_500
Change = tuple[str, str, dict[str, Any]]  # collection, kind, object


@st.composite
def histories(draw: st.DrawFn) -> list[Change]:
    """A Job of two, and what its pods go through."""
    changes: list[Change] = [("jobs", "ADDED", job("t"))]
    lives = [0, 0]
    for _ in range(draw(st.integers(3, 16))):
        index = draw(st.integers(0, 1))
        name = {"life": f"-{lives[index]}", "creationTimestamp": f"2026-11-21T10:00:{lives[index]:02d}Z"}
        thing = pod("t", index, **name)  # type: ignore[arg-type]
        match draw(st.sampled_from(["runs", "runs", "runs", "restarts", "fails", "succeeds", "vanishes", "job"])):
            case "runs":
                changes.append(("pods", "MODIFIED", running(thing, f"n{index}")))
            case "restarts":
                changes.append(("pods", "MODIFIED", running(thing, f"n{index}", draw(st.integers(1, 2)))))
            case "fails":
                changes.append(
                    ("pods", "MODIFIED", ended(running(thing, f"n{index}"), draw(st.sampled_from([1, 137]))))
                )
                lives[index] += 1
            case "succeeds":
                changes.append(("pods", "MODIFIED", ended(running(thing, f"n{index}"), 0)))
            case "vanishes":
                changes.append(("pods", "DELETED", running(thing, f"n{index}")))
                lives[index] += 1
            case _:
                spec = job("t")
                spec["spec"]["suspend"] = draw(st.booleans())
                changes.append(("jobs", "MODIFIED", spec))
    last = draw(st.sampled_from(["Complete", "Failed", "deleted", "goes on"]))
    if last in ("Complete", "Failed"):
        changes.append(("jobs", "MODIFIED", job("t", conditions=[condition(last)])))
    elif last == "deleted":
        changes.append(("jobs", "DELETED", job("t")))
    return changes


class Run:
    """A source that is given changes one by one, and the table of what it tells."""

    def __init__(self, position: dict[str, Any] | None = None, at: int = 0) -> None:
        self.clock = ManualClock(CREATED_MS + 60_000 + at * STEP_MS)
        self.source = KubernetesSource(Entities(), self.clock, {}, server=SmallKubernetes())
        if position is not None:
            self.source.seek(json.loads(json.dumps(position)))
        else:
            self.source.apply_messages([Listing(name, (), "1") for name in KINDS])
        self.decode = {row.name: row.decode for row in self.source.list_collections()}

    def take(self, changes: list[Change], table: JobTable) -> list[dict[str, Any]]:
        """Positions after each change; time passes with them."""
        positions = []
        for name, kind, thing in changes:
            self.clock.advance(STEP_MS / 1000)
            thing["metadata"]["resourceVersion"] = "9"
            decoded = self.decode[name](json.dumps(thing).encode())
            batch = self.source.apply_messages([Changes(name, ((kind, decoded),), "9")])
            assert not batch.bad
            for event in batch.events:
                table.apply(event)
            positions.append(self.source.position())
        return positions

    def settle(self, table: JobTable) -> None:
        for _ in range(3):
            self.clock.advance(STEP_MS / 1000)
            for event in self.source.apply_messages([]).events:
                table.apply(event)


def told(table: JobTable) -> list[Any]:
    return [(row.job, row.attempt, row.state, row.hosts, row.started_ms, row.ended_ms, row.failure) for row in table]


@examples(120)
@given(histories(), st.data())
def test_a_restart_anywhere_changes_nothing(history: list[Change], data: st.DataObject) -> None:
    straight, table = Run(), JobTable()
    positions = straight.take(history, table)
    straight.settle(table)
    cut = data.draw(st.integers(1, len(history)))
    before, after = Run(), JobTable()
    before.take(history[:cut], after)
    again = Run(positions[cut - 1], cut)
    again.take(history[cut:], after)
    again.settle(after)
    assert told(after) == told(table)


@examples(120)
@given(histories(), st.data())
def test_what_is_told_twice_counts_once(history: list[Change], data: st.DataObject) -> None:
    """A crash after the snapshot: everything since is told again."""
    straight, table = Run(), JobTable()
    positions = straight.take(history, table)
    straight.settle(table)
    kept = data.draw(st.integers(1, len(history)))
    again = Run(positions[kept - 1], kept)
    again.take(history[kept:], table)
    again.settle(table)
    once = JobTable()
    straight = Run()
    straight.take(history, once)
    straight.settle(once)
    assert told(table) == told(once)


@examples(120)
@given(histories())
def test_attempts_are_told_in_order_and_each_ends_before_the_next(history: list[Change]) -> None:
    run, table = Run(), JobTable()
    run.take(history, table)
    run.settle(table)
    rows = sorted(table, key=lambda row: row.attempt)
    assert [row.submission is not None for row in rows] == [True] * len(rows)
    for row in rows[:-1]:
        assert row.ended_ms is not None, f"attempt {row.attempt} of {rows[-1].attempt} goes on"
    assert len(table.list_running()) <= 1


def test_without_the_official_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(ConfigError, match=r"pip install 'fleetcast\[kubernetes\]'"):
        KubernetesSource(Entities(), ManualClock(0), {})


def test_a_kubeconfig_that_is_not_there_is_a_source_that_is_away() -> None:
    with pytest.raises(SourceError, match="no way to a cluster: kubeconfig '/nowhere/kubeconfig'"):
        Cluster("/nowhere/kubeconfig").get("/api/v1/pods", {}, 1.0)
