"""Signals found by comparison within a gang: low clocks, and ports that move less than their siblings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.models.peers import Array, Groups, compute_robust_z, encode_values
from fleetcast.models.risk.detectors import register_reporter
from fleetcast.models.risk.rules import BY_NAME, COMPUTE, COUNT, ROW, RULES
from fleetcast.models.risk.signals import Mask, Signal, Signals
from fleetcast.models.stragglers.gang import GangColumns, GangMembers
from fleetcast.models.stragglers.power_caps import find_capped_nodes
from fleetcast.models.stragglers.siblings import find_slow_siblings
from fleetcast.models.stragglers.untold_links import find_unexported_links

OUTLIER_Z = -6.0
OUTLIER_RATIO = 0.88
SUSTAINED_MS = 30_000  # three scrapes in a row; two where they come less often
FORGET_MS = 60_000
FORGET_SCRAPES = 2.5  # without it, where they come less often: one may be lost
COMPUTE_RULES = np.array([rule.blames is COMPUTE for rule in RULES])


class GangStreaks:
    """The signals of gang comparisons by rule and entity, and since when each has lasted without a pause.

    interval_s: seconds between scrapes. Ticks are more frequent, so several ticks see the same sample.
    """

    def __init__(self, interval_s: float = 15.0) -> None:
        self._sustained_ms = max(SUSTAINED_MS, round(interval_s * 1000))
        self._forget_ms = max(FORGET_MS, round(FORGET_SCRAPES * interval_s * 1000))
        self._seen: dict[tuple[str, str], tuple[int, int, Signal]] = {}  # first, last, the last one
        self.drops: dict[str, list[int]] = {}  # GPU -> when it was seen behind a dropped link

    def __len__(self) -> int:
        return len(self._seen)

    def filter_sustained_signals(self, found: list[Signal], now_ms: int) -> list[Signal]:
        """Record the signals found now, and return those that have lasted long enough without a pause.

        Intended conditions and counts of errors need not last. A returned signal is repeated for its rule's
        `clears_s` after it was last found.
        """
        for signal in found:
            first_ms, last_ms, _ = self._seen.get((signal.rule, signal.entity), (now_ms, now_ms, signal))
            if now_ms - last_ms > self._forget_ms:
                first_ms = now_ms
            self._seen[signal.rule, signal.entity] = (first_ms, now_ms, signal)
        signals_left = []
        for key, (first_ms, last_ms, signal) in list(self._seen.items()):
            rule = BY_NAME[signal.rule]
            firm = last_ms - first_ms >= self._sustained_ms or rule.intended or rule.evidence is COUNT
            if now_ms - last_ms > (rule.clears_s * 1000 if firm else self._forget_ms):
                del self._seen[key]
            elif firm:
                signals_left.append(replace(signal, since_ms=first_ms))
        return signals_left

    def find_recent(self, rule: str, now_ms: int) -> list[Signal]:
        """Return the signals of a rule that were found within its `clears_s`.

        These signals are needed while a gang stalls, because then none of its members draws any power.
        """
        clears_ms = BY_NAME[rule].clears_s * 1000
        return [
            seen
            for (name, _), (_, last_ms, seen) in self._seen.items()
            if name == rule and now_ms - last_ms <= clears_ms
        ]

    def drop_node(self, node: str) -> None:
        """Remove all signals of a node, and the recorded times at which its GPUs had a dropped link."""
        self._seen = {key: seen for key, seen in self._seen.items() if key[1].split("/")[0] != node}
        self.drops = {name: times for name, times in self.drops.items() if name.split("/")[0] != node}

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the state for a snapshot."""
        seen = [[*times, msgspec.to_builtins(signal)] for *times, signal in self._seen.values()]
        return {"seen": seen, "drops": self.drops}, {}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the state that `dump` returned. Leaves out signals of rules that no longer exist."""
        rows = [(first, last, msgspec.convert(seen, Signal)) for first, last, seen in about["seen"]]
        self._seen = {(seen.rule, seen.entity): (first, last, seen) for first, last, seen in rows if seen.rule in ROW}
        self.drops = {name: list(times) for name, times in about.get("drops", {}).items()}

    def shift_times(self, by_ms: int) -> None:
        """Shift all stored times by `by_ms`, because the clock was set."""
        self._seen = {key: (first + by_ms, last + by_ms, seen) for key, (first, last, seen) in self._seen.items()}
        self.drops = {name: [time_ms + by_ms for time_ms in times] for name, times in self.drops.items()}


def make_gang_signals(
    gangs: GangMembers, signals: Signals, gpu: GangColumns, port: GangColumns, streaks: GangStreaks, now_ms: int
) -> Signals:
    """Return the signals that only a comparison within a gang shows: slow clocks, and slow ports.

    Updates `streaks`.
    """
    caps = find_capped_nodes(gangs, gpu)
    explained = {cap.node: OUTLIER_RATIO * cap.value for cap in streaks.find_recent("power_cap", now_ms) + caps}
    explained |= dict.fromkeys(signals.node[COMPUTE_RULES[signals.rule]].tolist(), 0.0)
    clocks = [one for one in _find_slow_clocks(gangs, gpu) if one.value < explained.get(one.node, np.inf)]
    slow, dropping = find_unexported_links(gangs, gpu, port, streaks.drops, now_ms)
    dropped = {signal.entity for signal in dropping}
    links = _compare_ports(gangs, port, now_ms) + [signal for signal in slow if signal.entity not in dropped]
    return Signals.from_signals(streaks.filter_sustained_signals(caps + clocks + links + dropping, now_ms))


@register_reporter("gang_outlier")
def _find_slow_clocks(gangs: GangMembers, gpu: GangColumns) -> list[Signal]:
    """Return a signal for each node whose working GPUs have far lower clocks than their gang's.

    Only GPUs of the same model are compared. The clocks must be low both now and over two minutes.
    """
    if not len(gangs.attempts):
        return []
    models, model = encode_values(gpu.last.get("model", np.zeros(len(gpu.names))))
    together = gangs.together[gangs.of_gpu] & (gangs.of_gpu >= 0)
    group = np.where(together, gangs.of_gpu * len(models) + model, -1)
    groups = Groups(group, len(gangs.attempts) * len(models))
    slow = np.ones(len(gpu.names), bool)
    median = np.ones(len(gpu.names))
    for values in (gpu.last["sm_clock_mhz"], gpu.mean["sm_clock_mhz"]):
        z, median = compute_robust_z(values, groups)
        slow &= (z <= OUTLIER_Z) & (values <= OUTLIER_RATIO * median)
    worst: dict[int, Signal] = {}
    for row in np.flatnonzero(slow).tolist():
        node = int(gpu.node[row])
        clock, usual = float(gpu.mean["sm_clock_mhz"][row]), float(median[row])
        if node not in worst or clock < worst[node].value:
            worst[node] = Signal("gang_outlier", node, gangs.nodes[node], clock, usual, min(1.0, usual / clock - 1))
    return list(worst.values())


def _compare_ports(gangs: GangMembers, port: GangColumns, now_ms: int) -> list[Signal]:
    """Return a signal for each port with a slow link, by comparison with its siblings in the same gang."""
    if not len(port.names) or not len(gangs.attempts):
        return []
    together = (gangs.of_port >= 0) & gangs.together[gangs.of_port]
    settled = gangs.has_run_half_hour(gangs.of_port, now_ms)
    slow, usual, waits = find_slow_siblings(port, together, gangs.of_port, len(gangs.attempts), settled)
    return _report_slow_ports(port, slow, usual) + _report_waiting_ports(port, waits)


@register_reporter("slow_nic")
def _report_slow_ports(port: GangColumns, slow: Mask, usual: Array) -> list[Signal]:
    """Return a signal for each port whose share of the traffic fell.

    slow: (port,). usual: (port,) the traffic of its siblings in bytes/s.
    """
    value = port.last["bytes_per_s"]
    return [
        Signal(
            "slow_nic",
            int(port.node[row]),
            port.names[row],
            float(value[row]),
            float(usual[row]),
            min(1.0, 0.3 + 1.4 * max(0.0, 1 - float(value[row] / usual[row]))),
        )
        for row in np.flatnonzero(slow).tolist()
    ]


@register_reporter("port_waits")
def _report_waiting_ports(port: GangColumns, waits: Array) -> list[Signal]:
    """Return a signal for each port whose data waits far longer than that of its siblings.

    waits: (port,) the siblings' waits in ticks/s, NaN for ports without such a signal.
    """
    value = port.last["tx_wait_per_s"]
    return [
        Signal("port_waits", int(port.node[row]), port.names[row], float(value[row] / max(waits[row], 1.0)), 1.0, 0.7)
        for row in np.flatnonzero(np.isfinite(waits)).tolist()
    ]
