"""The table of all rules: the evidence against a node, its certainty, and the action that follows.

A rule is one row of `RULES` and one function. If the entity's own samples show the evidence,
`register_detector` registers the function. If gangs, node events or ended jobs show it, `register_reporter`
does (models/risk/detectors.py). All other properties of a rule are fields of its row.

A rule concerns one kind of entity. It is *shown* as a reason once it was seen `shown_after` times
in a row, and is *firm* after `firm_after` times. Only firm rules lead to an action beyond `watch`.
A rule clears after `clears_s` of observations against it. A rule about absence has 0 for both numbers,
because an absent entity brings no observations.

`prior` is the probability of (fail, drain, slow) within one hour at full strength, from operators'
reports: hard XIDs, lost GPUs and DBEs end the job. Thermal, power, PCIe and link faults slow it
down and need a repair.

`early` marks early signs, which reports saw before losses and throttling (scrape latency and lost
samples: arXiv 2603.28781. Temperature against load, symbol errors, corrected errors: the health
checks of operators). No report says how often a fault follows within the hour. We assume priors of
some tens of times the base rate of 1.7e-4, a tenth of those of hard signals. Early signs lead only to the
action `watch`: they flag no node and blame no member.
"""

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from fleetcast.fleet.samples import EntityKind

GPU, PORT, NODE = EntityKind.GPU, EntityKind.PORT, EntityKind.NODE

ACTIONS = ("none", "watch", "avoid", "drain_at_job_end", "drain_now", "replace_part")
ACTION_WORDS = {
    "none": "nothing to do",
    "watch": "watch",
    "avoid": "place nothing large here",
    "drain_at_job_end": "drain when the running job ends",
    "drain_now": "drain now",
    "replace_part": "drain now and replace the part",
}


class Cause(StrEnum):
    """The reason why a member with a signal slows its gang down."""

    COMPUTE = "compute"
    LINK = "link"
    STOPPED = "stopped"


class EvidenceKind(StrEnum):
    """The kinds of evidence of a signal, which decide how a repair makes it void (models/risk/repairs.py)."""

    CODE = "code"  # a code or a row count, sticky until a reset
    COUNT = "count"  # of errors, in a window
    STATE = "state"  # of now
    STANDING = "standing"  # reported, and taken back by whoever reported it


COMPUTE, LINK, STOPPED = Cause.COMPUTE, Cause.LINK, Cause.STOPPED
CODE, COUNT, STATE, STANDING = EvidenceKind.CODE, EvidenceKind.COUNT, EvidenceKind.STATE, EvidenceKind.STANDING


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: a row of `RULES`.

    hard: the rule acts at once, is published in the urgent section, and counts as a fault of the node.
    feature: its name in answers. says: a template in `signals.WORDS`. by_ratio: a gang slows down by the ratio
    of the value to its usual one. names_part: the fault of a hard rule counts as one of hardware.
    intended: an operator wants the condition, so it is no fault.
    """

    name: str
    kind: EntityKind
    feature: str
    unit: str
    prior: tuple[float, float, float]
    action: str = "watch"
    shown_after: int = 1
    firm_after: int = 2
    clears_s: float = 180.0
    _: KW_ONLY
    says: str
    hard: bool = False
    evidence: EvidenceKind = STATE
    early: bool = False
    blames: Cause | None = None
    by_ratio: bool = False
    names_part: bool = True
    intended: bool = False


# fmt: off
RULES = (
    Rule("thermal_throttle", GPU, "sm_clock_mhz", "MHz", (0.02, 0.25, 0.9), "drain_at_job_end",
         says="{clock}thermal slowdown{since}", blames=COMPUTE, by_ratio=True),
    Rule("power_brake", GPU, "sm_clock_mhz", "MHz", (0.05, 0.4, 0.9), "drain_at_job_end",
         says="{clock}power brake{since}", blames=COMPUTE, by_ratio=True),
    Rule("clock_low", GPU, "sm_clock_mhz", "MHz", (0.01, 0.1, 0.7), "avoid", 4, 6,
         says="{clock}slower than its peers under load", blames=COMPUTE, by_ratio=True),
    Rule("gpu_hot", GPU, "gpu_temp_c", "°C", (0.0, 0.02, 0.1), "watch", 2, 4,
         says="{value} °C, its node's other GPUs {usual}"),
    Rule("gpu_hot_for_its_load", GPU, "gpu_temp_c", "°C", (0.005, 0.02, 0.03), "watch", 12, 20,
         says="{value} °C, its slot at this power usually {usual}{since}", early=True),
    Rule("xid_hard", GPU, "xid", "code", (0.9, 0.9, 0.1), "drain_now", 1, 1, 600.0,
         says="{xid}{at}", hard=True, evidence=CODE),
    Rule("xid_part", GPU, "xid", "code", (0.8, 0.9, 0.2), "replace_part", 1, 1, 600.0,
         says="{xid}{at}", hard=True, evidence=CODE),
    Rule("xid_soft", GPU, "xid", "code", (0.1, 0.3, 0.02), "drain_at_job_end", 1, 1, 600.0,
         says="{xid}{at}", evidence=CODE),
    Rule("xid_old", GPU, "xid", "code", (0.01, 0.02, 0.0),
         says="{xid}, older than our records"),
    Rule("ecc_uncorrectable", GPU, "ecc_dbe_volatile", "events", (0.7, 0.8, 0.02), "drain_now", 1, 1, 600.0,
         says="{value} uncorrectable ECC errors in 30 min", hard=True, evidence=COUNT),
    Rule("ecc_burst", GPU, "ecc_sbe_volatile", "events", (0.25, 0.4, 0.05), "drain_at_job_end", 1, 2, 600.0,
         says="{value} corrected ECC errors in 10 min", evidence=COUNT),
    Rule("ecc_corrected_few", GPU, "ecc_sbe_volatile", "events", (0.01, 0.02, 0.0), "watch", 2, 4, 600.0,
         says="{value} corrected ECC errors in 30 min, usual {usual}", evidence=COUNT, early=True),
    Rule("row_remap_failure", GPU, "row_remap_failure", "flag", (0.5, 0.9, 0.02), "replace_part", 1, 1, 600.0,
         says="row remapping failed{since}", hard=True),
    Rule("row_remapped", GPU, "remapped_rows_uncorrectable", "rows", (0.15, 0.4, 0.0), "drain_at_job_end", 1, 1, 600.0,
         says="{value} rows remapped after uncorrectable errors{since}", evidence=CODE),
    Rule("page_retirement", GPU, "retired_pages_pending", "flag", (0.05, 0.2, 0.0),
         says="page retirement pending until a reset{since}"),
    Rule("pcie_width", GPU, "pcie_link_width", "lanes", (0.03, 0.4, 0.8), "drain_at_job_end", 1, 2, 300.0,
         says="PCIe link x{value} under load, usual x{usual}{since}", blames=LINK),
    Rule("pcie_gen", GPU, "pcie_link_gen", "generation", (0.03, 0.3, 0.6), "drain_at_job_end", 1, 4, 300.0,
         says="PCIe link at generation {value} under load, usual {usual}{since}", blames=LINK),
    Rule("pcie_replays", GPU, "pcie_replays", "events", (0.05, 0.2, 0.3), "avoid", 1, 3, 600.0,
         says="{value} PCIe replays in 10 min", evidence=COUNT, blames=LINK),
    Rule("nvlink_errors", GPU, "nvlink_replay_errors", "events", (0.2, 0.4, 0.3), "drain_at_job_end", 1, 2, 600.0,
         says="{value} NVLink errors in 10 min", evidence=COUNT, blames=LINK),
    Rule("clock_halved", GPU, "sm_clock_mhz", "MHz", (0.02, 0.2, 0.8), "avoid", 2, 3,
         says="{clock}by half at least, as brakes do; why is not exported", blames=COMPUTE, by_ratio=True),
    Rule("slow_link", GPU, "pcie_tx_bytes_per_s", "B/s", (0.01, 0.1, 0.5), "avoid", 3, 4, 180.0,
         says="sends {rate} over PCIe, its node's others {usual_rate}: a slow link; no InfiniBand counters are sent",
         blames=LINK, by_ratio=True),
    Rule("link_drops", GPU, "pcie_tx_bytes_per_s", "events", (0.05, 0.15, 0.3), "avoid", 1, 1, 600.0,
         says="stopped sending {times} in 30 min as its gang waited: a dropping link; no InfiniBand counters are sent",
         evidence=COUNT, blames=LINK),
    Rule("gpu_vanished", GPU, "silent_s", "s", (0.95, 0.95, 0.05), "drain_now", 0, 0, 30.0,
         says="series vanished {age} ago", hard=True, blames=STOPPED),
    Rule("link_down", PORT, "state", "id", (0.5, 0.5, 0.6), "drain_at_job_end", 1, 2, 120.0,
         says="InfiniBand link down{since}", blames=STOPPED),
    Rule("link_flap", PORT, "link_downed", "events", (0.15, 0.3, 0.4), "avoid", 1, 2, 600.0,
         says="InfiniBand link went down {times} in 30 min", evidence=COUNT, blames=LINK),
    Rule("link_errors", PORT, "symbol_errors", "events", (0.05, 0.15, 0.3), "avoid", 1, 3, 600.0,
         says="{value} symbol errors in 10 min", evidence=COUNT, blames=LINK),
    Rule("link_errors_few", PORT, "symbol_errors", "events", (0.005, 0.02, 0.03), "watch", 4, 8, 600.0,
         says="{value} symbol errors in 30 min, usual {usual}", evidence=COUNT, early=True),
    Rule("link_speed", PORT, "speed_bytes_per_s", "B/s", (0.02, 0.3, 0.7), "avoid", 2, 3, 180.0,
         says="InfiniBand link at {speed}, usual {usual_speed}", blames=LINK, by_ratio=True),
    Rule("link_timeouts", PORT, "ack_timeouts", "events", (0.05, 0.15, 0.4), "avoid", 1, 3, 600.0,
         says="{value} packets without acknowledgement in time in 10 min", evidence=COUNT, blames=LINK),
    Rule("slow_nic", PORT, "tx_bytes", "B/s", (0.02, 0.2, 0.8), "avoid", 3, 4, 180.0,
         says="moves {rate}, its sibling ports {usual_rate}", blames=LINK, by_ratio=True),
    Rule("port_waits", PORT, "tx_wait", "times", (0.02, 0.2, 0.7), "avoid", 3, 4, 180.0,
         says="its data waits {value} times as long to be sent as that of its sibling ports", blames=LINK),
    Rule("node_silent", NODE, "age_s", "s", (0.6, 0.6, 0.05), "avoid", 0, 0, 15.0,
         says="node has not answered for {age}", hard=True, blames=STOPPED, names_part=False),
    Rule("exporter_silent", NODE, "age_s", "s", (0.02, 0.05, 0.0), "watch", 0, 0, 15.0,
         says="no GPU telemetry for {age}"),
    Rule("exporter_frozen", NODE, "frozen_s", "s", (0.02, 0.05, 0.0), "watch", 2, 2, 60.0,
         says="exporter frozen: no value has changed for {age}"),
    Rule("exporter_partial", NODE, "exporter_partial", "GPUs", (0.02, 0.05, 0.0), "watch", 1, 1, 30.0,
         says="its exporter no longer lists {value} of {usual} GPUs{since}; nothing else says that they failed"),
    Rule("gpus_missing", NODE, "gpus_reported", "GPUs", (0.02, 0.05, 0.0), "watch", 2, 6, 120.0,
         says="{value} of {usual} GPUs reported"),
    Rule("scrape_slow", NODE, "scrape_duration_s", "s", (0.01, 0.02, 0.01), "watch", 4, 8,
         says="exporter takes {value} s to answer, usual {usual}"),
    Rule("scrapes_late", NODE, "scrape_duration_s", "s", (0.01, 0.02, 0.01), "watch", 10, 16,
         says="exporter takes {value} s to answer{since}, its usual {usual}", early=True),
    Rule("scrapes_lost", NODE, "scrape_up", "ratio", (0.02, 0.03, 0.01), "watch", 8, 12,
         says="{percent} % of its scrapes in 30 min were lost, usual {usual_percent} %", evidence=COUNT, early=True),
    Rule("cpu_stolen", NODE, "cpu_steal_s", "ratio", (0.0, 0.02, 0.5), "avoid", 1, 2, 60.0,
         says="other guests of its host take {percent} % of its CPU time", blames=COMPUTE),
    Rule("memory_short", NODE, "memory_pressure", "ratio", (0.02, 0.02, 0.2), "watch", 2, 4,
         says="tasks wait for memory {percent} % of the time"),
    Rule("xid_reported", NODE, "xid", "code", (0.9, 0.9, 0.1), "drain_now", 1, 1, 600.0,
         says="{xid}{at}, reported by the node", hard=True, evidence=CODE),
    Rule("xid_noted", NODE, "xid", "code", (0.1, 0.3, 0.02), "drain_at_job_end", 1, 1, 600.0,
         says="{xid}{at}, reported by the node", evidence=CODE),
    Rule("health_failed", NODE, "health", "flag", (0.8, 0.9, 0.1), "drain_now", 1, 1, 600.0,
         says="a health check failed{since}", hard=True, evidence=STANDING, names_part=False),
    Rule("health_degraded", NODE, "health", "flag", (0.03, 0.1, 0.1), "avoid", 1, 1, 600.0,
         says="a health check warns{since}", evidence=STANDING),
    Rule("link_predicted", NODE, "probability", "ratio", (0.15, 0.3, 0.4), "avoid", 1, 1, 600.0,
         says="a link failure is predicted with probability {value}{since}"),
    Rule("node_lost", NODE, "node_lost", "flag", (0.99, 0.99, 0.0), "drain_now", 1, 1, 60.0,
         says="node reported lost{at}", hard=True, evidence=STANDING, blames=STOPPED, names_part=False),
    Rule("drain_requested", NODE, "drained", "flag", (0.0, 0.0, 0.0), "watch", 1, 1, 0.0,
         says="drained{since}", evidence=STANDING),
    Rule("gang_outlier", NODE, "sm_clock_mhz", "MHz", (0.01, 0.1, 0.7), "avoid", 1, 1, 180.0,
         says="SM clocks down to {value} MHz, its gang's at {usual}", blames=COMPUTE, by_ratio=True),
    Rule("power_cap", NODE, "sm_clock_mhz", "MHz", (0.0, 0.0, 0.0), "watch", 1, 1, 180.0,
         says="power capped{since}", blames=COMPUTE, by_ratio=True, intended=True),
    Rule("recent_fault", NODE, "fault_age_s", "s", (0.02, 0.02, 0.02), "watch", 1, 1, 0.0,
         says="had a fault {age} ago", evidence=STANDING),
    Rule("failed_jobs", NODE, "failed_job_share", "ratio", (0.0, 0.0, 0.0), "watch", 1, 1, 0.0,
         says="{percent} % of the jobs on it failed{of_all}"),
)
# fmt: on
BY_NAME = {rule.name: rule for rule in RULES}
ROW = {rule.name: row for row, rule in enumerate(RULES)}
OF_KIND = {kind: tuple(row for row, rule in enumerate(RULES) if rule.kind is kind) for kind in (GPU, PORT, NODE)}
