"""The result of a demo run: the simulator's true faults, compared with the service's flags.

All functions are pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetcast.cli.demo.evidence import REPORTED, UNFLAGGED, FlagReason

COUNTED = ("samples_total", "bad_telemetry", "ticks")
SETTLED_AFTER_MS = 60_000
LINGER_MS = 3_600_000
RELEARN_MS = 1_800_000  # how long a restarted pipeline knows no usual values
NOTICED_MS = 120_000  # a restart is noticed at most so long after the last answer of the life before
NEEDED_SHARE = 0.8
FALSE_NODES_ALLOWED = 2
RESIZE_LIMIT_MS = 900_000  # of one step in the story of the elastic gang
STOP_LIMIT_MS = 900_000  # from the decision to stop a job until the urgent gang runs


@dataclass(slots=True)
class FlagSpan:
    """A time span during which the service flagged a node.

    seen: (rule, entity, XID) → when the evidence was first observed, and the evidence.
    """

    since_ms: int
    until_ms: int
    reason: str
    seen: dict[tuple[str, str, int], tuple[int, FlagReason]] = field(default_factory=dict)

    def add_evidence(self, evidence: Iterable[FlagReason], now_ms: int) -> None:
        """Record the present evidence against the node."""
        for each in evidence:
            code = round(each.value) if each.rule.startswith("xid_") else 0
            self.seen.setdefault((each.rule, each.entity, code), (now_ms, each))

    def find_first_evidence(self, fault: Mapping[str, Any]) -> tuple[int, str] | None:
        """Return the time and the sentence of the earliest evidence of a fault's own kind and part.

        Returns None without such evidence. fault: a row of the simulator's truth.
        """
        rows = [(since_ms, each.sentence) for since_ms, each in self.seen.values() if each.shows_fault(fault)]
        return min(rows, default=None)

    @property
    def is_reported(self) -> bool:
        """Return whether the node was flagged only because of outside reports, such as a site's events."""
        rules = {each.rule for _, each in self.seen.values() if each.is_flagging}
        return bool(rules) and rules <= REPORTED


@dataclass(slots=True)
class FlagHistory:
    """The flags of all nodes over time, recorded from successive answers of `/v1/risk/nodes`."""

    flags: dict[str, list[FlagSpan]] = field(default_factory=dict)
    _open: set[str] = field(default_factory=set)
    _restarted_ms: int | None = None

    def record_answer(self, rows: Iterable[Mapping[str, Any]], as_of_ms: int) -> list[tuple[str, str]]:
        """Record one answer, and return (node, reason) of the nodes that are newly flagged."""
        now = {row["node"]: row.get("reason") or "" for row in rows if is_flagged(row)}
        fresh = [(node, reason) for node, reason in now.items() if not self._is_ongoing_flag(node, as_of_ms)]
        new = {node for node, _ in fresh}
        for node, reason in now.items():
            if node in new:
                self.flags.setdefault(node, []).append(FlagSpan(as_of_ms, as_of_ms, reason))
            else:
                self.flags[node][-1].until_ms = as_of_ms
        self._open = set(now)
        return fresh

    def record_restart(self, as_of_ms: int) -> None:
        """Record that the pipeline restarted.

        A node that is flagged before the restart and again soon after it counts as flagged without a break.
        """
        self._restarted_ms = as_of_ms

    def _is_ongoing_flag(self, node: str, as_of_ms: int) -> bool:
        if node in self._open:
            return True
        if self._restarted_ms is None or node not in self.flags:
            return False
        until_ms = self.flags[node][-1].until_ms
        return until_ms >= self._restarted_ms - NOTICED_MS and as_of_ms - until_ms <= RELEARN_MS

    def record_evidence(self, node: str, evidence: Iterable[FlagReason], now_ms: int) -> None:
        """Record evidence against a node. Ignores nodes that are not flagged."""
        if node in self._open:
            self.flags[node][-1].add_evidence(evidence, now_ms)

    def find_detection(self, fault: Mapping[str, Any]) -> tuple[int, str] | None:
        """Return when a fault was first flagged by its own kind and part, and the sentence of that evidence.

        A flag shortly after the fault's end counts too, because windows still contain the fault. Returns
        None if there is no such flag.
        """
        start_ms = fault["start_ms"]
        last_ms = (fault.get("end_ms") or start_ms) + LINGER_MS
        for flag in self.flags.get(fault["node"], ()):
            found = flag.find_first_evidence(fault)
            if found and flag.until_ms >= start_ms and found[0] <= last_ms:
                return found
        return None


@dataclass(slots=True)
class IngestionTotals:
    """The counters of `/v1/ingestion`, summed over the restarts of a pipeline.

    After each restart the counters begin at zero, as Prometheus counters do.
    """

    restarts: int = 0
    _ended: Counter[str] = field(default_factory=Counter)
    _running: Counter[str] = field(default_factory=Counter)

    def record_answer(self, ingestion: Mapping[str, Any]) -> bool:
        """Record one answer, and return whether it is the first after a restart."""
        now = Counter({name: int(ingestion.get(name, 0)) for name in COUNTED})
        now["bad_telemetry"] = count_bad_telemetry(ingestion)
        began = any(now[name] < self._running[name] for name in COUNTED)
        if began:
            self.restarts += 1
            self._ended += self._running
        self._running = now
        return began

    def __getitem__(self, name: str) -> int:
        return self._ended[name] + self._running[name]


def count_bad_telemetry(ingestion: Mapping[str, Any]) -> int:
    """Count the bad records of all sources except the inbox, to which any client may push."""
    return sum(int(source["bad"]) for source in ingestion.get("sources", ()) if source["kind"] != "inbox")


def is_flagged(row: Mapping[str, Any]) -> bool:
    """Return whether a row of `/v1/risk/nodes` recommends more than to watch the node."""
    return (row.get("action") or {}).get("code", "none") not in UNFLAGGED


def judge_faults(truth: Sequence[Mapping[str, Any]], watch: FlagHistory, now_ms: int) -> list[dict[str, Any]]:
    """Return a row for each fault that has begun.

    The row says whether the fault was visible, and when and why it was detected.
    """
    rows = []
    for fault in sorted(truth, key=lambda fault: int(fault["start_ms"])):
        if fault.get("benign") or fault["start_ms"] > now_ms:
            continue
        seen_from = fault.get("visible_ms") or fault["start_ms"]
        found = watch.find_detection(fault)
        rows.append(
            {
                "kind": fault["kind"],
                "node": fault["node"],
                "gpu": fault.get("gpu"),
                "port": fault.get("port"),
                "start_ms": seen_from,
                "visible": bool(fault.get("visible")),
                "detected_ms": max(found[0], seen_from) if found else None,
                "reason": found[1] if found else None,
            }
        )
    return rows


def find_false_nodes(truth: Sequence[Mapping[str, Any]], watch: FlagHistory) -> list[str]:
    """Return the nodes with a flag that neither a fault of the node nor an outside report explains.

    Faults that were not visible also count as an explanation.
    """
    wrong = set()
    for node, spells in watch.flags.items():
        faults = [fault for fault in truth if fault["node"] == node and not fault.get("benign")]
        for flag in spells:
            if not flag.is_reported and not any(
                fault["start_ms"] <= flag.until_ms
                and (fault.get("end_ms") is None or flag.since_ms <= fault["end_ms"] + LINGER_MS)
                for fault in faults
            ):
                wrong.add(node)
    return sorted(wrong)


def list_problems(report: Mapping[str, Any], now_ms: int) -> list[str]:
    """Return the reasons why the run failed. The list is empty if it succeeded."""
    problems = []
    if not report["samples"]:
        problems.append("no sample arrived")
    if not report["placements"]["placed"]:
        problems.append("nothing was placed")
    counted, injected = report["bad_records"], report["bad_records_injected"]
    if counted > injected or (counted < injected and not report.get("pipeline_restarts")):
        problems.append(f"{counted} bad records counted, {injected} were injected")
    old = [row for row in report["faults"] if row["visible"] and row["start_ms"] <= now_ms - SETTLED_AFTER_MS]
    found = [row for row in old if row["detected_ms"] is not None]
    if len(found) < NEEDED_SHARE * len(old):
        missed = ", ".join(f"{row['kind']} on {row['node']}" for row in old if row["detected_ms"] is None)
        problems.append(f"{len(found)} of {len(old)} visible faults detected; missed: {missed}")
    problems += list_story_problems(report.get("story") or [], now_ms)
    if len(report["false_nodes"]) > FALSE_NODES_ALLOWED:
        problems.append(f"falsely flagged: {', '.join(report['false_nodes'])}")
    return problems


def list_story_problems(turns: Sequence[Mapping[str, Any]], now_ms: int) -> list[str]:
    """Return what went wrong in the stories of the urgent gang, the lost node and the elastic gang.

    There is no problem while there is still time.
    """
    times_ms = {turn["event"]: int(turn["time_ms"]) for turn in turns}
    return [
        *_list_stop_problems(times_ms, now_ms),
        *_list_replacement_problems(times_ms, now_ms),
        *_list_resize_problems(times_ms, now_ms),
    ]


def are_stories_done(turns: Sequence[Mapping[str, Any]], now_ms: int) -> bool:
    """Return whether no step of a story is open that `list_story_problems` may still judge."""
    events = {turn["event"] for turn in turns}
    steps = {"urgent": {"urgent_runs", "urgent_placed"}, "node_lost": {"node_replaced"}, "short": {"grow_seen"}}
    is_open = any(begin in events and not ends & events for begin, ends in steps.items())
    return not is_open or bool(list_story_problems(turns, now_ms))


def _list_resize_problems(times_ms: Mapping[str, int], now_ms: int) -> list[str]:
    """Return what went wrong when the elastic gang was to shrink for an urgent gang, and to grow back afterwards."""
    for begin, end, failed, problem in (
        ("short", "shrink_seen", "shrink_failed", "the elastic gang did not shrink for the urgent one"),
        ("shrink_seen", "short_runs", "", "the elastic gang shrank, and the urgent one did not start"),
        ("short_ended", "grow_seen", "grow_failed", "the elastic gang did not grow back"),
    ):
        is_overdue = now_ms - times_ms.get(begin, now_ms) > RESIZE_LIMIT_MS and end not in times_ms
        if is_overdue or failed in times_ms:
            return [problem]
    return []


def _list_replacement_problems(times_ms: Mapping[str, int], now_ms: int) -> list[str]:
    is_overdue = now_ms - times_ms.get("node_lost", now_ms) > STOP_LIMIT_MS and "node_replaced" not in times_ms
    return ["the gang that lost a node got no other one"] if is_overdue or "node_not_replaced" in times_ms else []


def _list_stop_problems(times_ms: Mapping[str, int], now_ms: int) -> list[str]:
    """Return what went wrong when jobs were to stop for the urgent gang. There is no problem if it needed no stop."""
    if not {"stop", "urgent_placed", "urgent_runs"} & times_ms.keys():
        return []
    if "urgent_placed" in times_ms and "stop" in times_ms:
        return ["a job stopped for the urgent gang, which did not get its GPUs"]
    if "urgent_runs" not in times_ms and now_ms - times_ms.get("stop", now_ms) > STOP_LIMIT_MS:
        return ["no job stopped in time for the urgent gang"]
    return []
