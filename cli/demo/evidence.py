"""Comparison of a flagged node's reasons with an injected fault, by the fault's kind and part.

All functions are pure. The service's answers do not name rules. So the module finds the rule of a reason by the
feature and by the template of the sentence.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

UNFLAGGED = frozenset({"none", "watch"})
SLOW_CLOCK = frozenset({"clock_low", "clock_halved", "gang_outlier"})  # they do not say why a clock is slow
SHOWN_BY: Mapping[str, frozenset[str]] = {
    "thermal_throttle": SLOW_CLOCK | {"thermal_throttle"},
    "power_brake": SLOW_CLOCK | {"power_brake"},
    "ecc_storm": frozenset({"ecc_uncorrectable", "ecc_burst", "row_remap_failure", "row_remapped"}),
    "gpu_off_bus": frozenset({"gpu_vanished"}),
    "pcie_downgrade": frozenset({"pcie_width", "pcie_gen", "pcie_replays", "slow_link"}),
    "ib_flap": frozenset({"link_down", "link_flap", "link_errors", "link_drops"}),
    "slow_nic": frozenset({"slow_nic", "port_waits", "link_speed", "link_timeouts", "slow_link"}),
    "node_lost": frozenset({"node_silent", "node_lost"}),
    "cpu_contention": frozenset({"cpu_stolen"}),
}
XIDS: Mapping[int, str] = {79: "gpu_off_bus", **dict.fromkeys((48, 63, 64, 92, 94, 95), "ecc_storm")}
REPORTED = frozenset(
    {
        *("node_lost", "xid_reported", "xid_noted", "health_failed", "health_degraded"),
        *("link_predicted", "drain_requested"),
    }
)  # rules of the events of a site or a visitor: whoever reports a healthy node is wrong, not the service


@dataclass(frozen=True, slots=True)
class FlagReason:
    """One reason of a flagged node. `rule` is "" if its sentence matches no rule."""

    rule: str
    entity: str
    value: float
    sentence: str

    @property
    def is_flagging(self) -> bool:
        """Return whether the rule of the reason recommends more than to watch the node."""
        from fleetcast.models.risk.rules import BY_NAME

        return bool(self.rule) and BY_NAME[self.rule].action not in UNFLAGGED

    def shows_fault(self, fault: Mapping[str, Any]) -> bool:
        """Return whether this reason fits the fault: its kind, and its part or its whole node.

        fault: a row of the simulator's truth.
        """
        if not self.is_flagging or not self._matches_location(fault):
            return False
        if self.rule.startswith("xid_"):
            return XIDS.get(round(self.value)) == str(fault["kind"])
        return self.rule in SHOWN_BY.get(str(fault["kind"]), frozenset())

    def _matches_location(self, fault: Mapping[str, Any]) -> bool:
        node, *part = self.entity.split("/")
        gpu, port = fault.get("gpu"), fault.get("port")
        if node != fault["node"] or not part:
            return bool(node == fault["node"])
        if len(part) == 1:  # a GPU
            return port is None and gpu in (None, int(part[0]))
        return gpu is None and port is not None and part[0] == f"mlx5_{port}"


def parse_flag_reasons(reasons: list[Mapping[str, Any]]) -> tuple[FlagReason, ...]:
    """Parse the `reasons` in an answer of `/v1/nodes/{node}`."""
    return tuple(
        FlagReason(_find_rule(row["feature"], row["sentence"]), row["entity"], row["value"] or 0.0, row["sentence"])
        for row in reasons
    )


def _find_rule(feature: str, sentence: str) -> str:
    """Return the name of a reason's rule, or "" if its sentence matches no rule.

    >>> _find_rule("sm_clock_mhz", "GPU 3: SM clock 990 MHz, usual 1,980; power brake since 14:02 UTC")
    'power_brake'
    """
    from fleetcast.models.risk.rules import RULES

    said = re.sub(r"^(GPU|port) [^:]*: ", "", sentence)
    return next(
        (rule.name for rule in RULES if rule.feature == feature and _compile_template(rule.says).fullmatch(said)), ""
    )


@cache
def _compile_template(says: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", ".*", re.escape(says)))
