"""The closed list of rules: what may speak against a node, how sure it must be, and what to do then.

A rule looks at one kind of entity. It is *shown* as a reason as soon as it is seen `shown_after` times in a row, and
*firm* after `firm_after` times: only firm rules lead to an action beyond `watch`. It clears after `clears_s` of
observations that speak against it. Rules about absence count 0 times: what is absent brings no observations.

`prior` is the probability of (fail, drain, slow) within one hour at full strength, from operators' reports: hard
XIDs, lost GPUs and DBEs end the job; thermal, power, PCIe and link faults slow it down and need a repair.

`EARLY` are early signs: what public reports saw before losses and throttling (scrape latency and lost samples: arXiv
2603.28781; temperature against load, symbol errors, corrected errors: the health checks of operators). None of them
says how often a fault follows within the hour: their priors, some tens of times the base rate of 1.7e-4 and a tenth of
what hard signals have, are an assumption. They only watch: they flag nothing and blame nobody.
"""

from dataclasses import dataclass

from fleet.samples import EntityKind

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


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of `RULES`. `hard`: acts at once and is published in the urgent section."""

    name: str
    kind: EntityKind
    feature: str
    unit: str
    prior: tuple[float, float, float]
    action: str = "watch"
    shown_after: int = 1
    firm_after: int = 2
    clears_s: float = 180.0
    hard: bool = False


RULES = (
    Rule("thermal_throttle", GPU, "sm_clock_mhz", "MHz", (0.02, 0.25, 0.9), "drain_at_job_end"),
    Rule("power_brake", GPU, "sm_clock_mhz", "MHz", (0.05, 0.4, 0.9), "drain_at_job_end"),
    Rule("clock_low", GPU, "sm_clock_mhz", "MHz", (0.01, 0.1, 0.7), "avoid", 4, 6),
    Rule("gpu_hot", GPU, "gpu_temp_c", "°C", (0.0, 0.02, 0.1), "watch", 2, 4),
    Rule("gpu_hot_for_its_load", GPU, "gpu_temp_c", "°C", (0.005, 0.02, 0.03), "watch", 12, 20),
    Rule("xid_hard", GPU, "xid", "code", (0.9, 0.9, 0.1), "drain_now", 1, 1, 600.0, True),
    Rule("xid_part", GPU, "xid", "code", (0.8, 0.9, 0.2), "replace_part", 1, 1, 600.0, True),
    Rule("xid_soft", GPU, "xid", "code", (0.1, 0.3, 0.02), "drain_at_job_end", 1, 1, 600.0),
    Rule("xid_old", GPU, "xid", "code", (0.01, 0.02, 0.0), "watch"),
    Rule("ecc_uncorrectable", GPU, "ecc_dbe_volatile", "events", (0.7, 0.8, 0.02), "drain_now", 1, 1, 600.0, True),
    Rule("ecc_burst", GPU, "ecc_sbe_volatile", "events", (0.25, 0.4, 0.05), "drain_at_job_end", 1, 2, 600.0),
    Rule("ecc_corrected_few", GPU, "ecc_sbe_volatile", "events", (0.01, 0.02, 0.0), "watch", 2, 4, 600.0),
    Rule("row_remap_failure", GPU, "row_remap_failure", "flag", (0.5, 0.9, 0.02), "replace_part", 1, 1, 600.0, True),
    Rule("row_remapped", GPU, "remapped_rows_uncorrectable", "rows", (0.15, 0.4, 0.0), "drain_at_job_end", 1, 1, 600.0),
    Rule("page_retirement", GPU, "retired_pages_pending", "flag", (0.05, 0.2, 0.0), "watch"),
    Rule("pcie_width", GPU, "pcie_link_width", "lanes", (0.03, 0.4, 0.8), "drain_at_job_end", 1, 2, 300.0),
    Rule("pcie_gen", GPU, "pcie_link_gen", "generation", (0.03, 0.3, 0.6), "drain_at_job_end", 1, 4, 300.0),
    Rule("pcie_replays", GPU, "pcie_replays", "events", (0.05, 0.2, 0.3), "avoid", 1, 3, 600.0),
    Rule("nvlink_errors", GPU, "nvlink_replay_errors", "events", (0.2, 0.4, 0.3), "drain_at_job_end", 1, 2, 600.0),
    Rule("gpu_vanished", GPU, "silent_s", "s", (0.95, 0.95, 0.05), "drain_now", 0, 0, 30.0, True),
    Rule("link_down", PORT, "state", "id", (0.5, 0.5, 0.6), "drain_at_job_end", 1, 2, 120.0),
    Rule("link_flap", PORT, "link_downed", "events", (0.15, 0.3, 0.4), "avoid", 1, 2, 600.0),
    Rule("link_errors", PORT, "symbol_errors", "events", (0.05, 0.15, 0.3), "avoid", 1, 3, 600.0),
    Rule("link_errors_few", PORT, "symbol_errors", "events", (0.005, 0.02, 0.03), "watch", 4, 8, 600.0),
    Rule("link_speed", PORT, "speed_bytes_per_s", "B/s", (0.02, 0.3, 0.7), "avoid", 2, 3, 180.0),
    Rule("link_timeouts", PORT, "ack_timeouts", "events", (0.05, 0.15, 0.4), "avoid", 1, 3, 600.0),
    Rule("slow_nic", PORT, "tx_bytes", "B/s", (0.02, 0.2, 0.8), "avoid", 3, 4, 180.0),
    Rule("node_silent", NODE, "age_s", "s", (0.6, 0.6, 0.05), "avoid", 0, 0, 15.0, True),
    Rule("exporter_silent", NODE, "age_s", "s", (0.02, 0.05, 0.0), "watch", 0, 0, 15.0),
    Rule("exporter_frozen", NODE, "frozen_s", "s", (0.02, 0.05, 0.0), "watch", 2, 2, 60.0),
    Rule("gpus_missing", NODE, "gpus_reported", "GPUs", (0.1, 0.5, 0.0), "drain_at_job_end", 2, 6, 120.0),
    Rule("scrape_slow", NODE, "scrape_duration_s", "s", (0.01, 0.02, 0.01), "watch", 4, 8),
    Rule("scrapes_late", NODE, "scrape_duration_s", "s", (0.01, 0.02, 0.01), "watch", 10, 16),
    Rule("scrapes_lost", NODE, "scrape_up", "ratio", (0.02, 0.03, 0.01), "watch", 8, 12),
    Rule("cpu_stolen", NODE, "cpu_steal_s", "ratio", (0.0, 0.02, 0.5), "avoid", 1, 2, 60.0),
    Rule("memory_short", NODE, "memory_pressure", "ratio", (0.02, 0.02, 0.2), "watch", 2, 4),
    Rule("xid_reported", NODE, "xid", "code", (0.9, 0.9, 0.1), "drain_now", 1, 1, 600.0, True),
    Rule("xid_noted", NODE, "xid", "code", (0.1, 0.3, 0.02), "drain_at_job_end", 1, 1, 600.0),
    Rule("health_failed", NODE, "health", "flag", (0.8, 0.9, 0.1), "drain_now", 1, 1, 600.0, True),
    Rule("health_degraded", NODE, "health", "flag", (0.03, 0.1, 0.1), "avoid", 1, 1, 600.0),
    Rule("link_predicted", NODE, "probability", "ratio", (0.15, 0.3, 0.4), "avoid", 1, 1, 600.0),
    Rule("node_lost", NODE, "node_lost", "flag", (0.99, 0.99, 0.0), "drain_now", 1, 1, 60.0, True),
    Rule("drain_requested", NODE, "drained", "flag", (0.0, 0.0, 0.0), "watch", 1, 1, 0.0),
    Rule("gang_outlier", NODE, "sm_clock_mhz", "MHz", (0.01, 0.1, 0.7), "avoid", 1, 1, 180.0),
    Rule("recent_fault", NODE, "fault_age_s", "s", (0.02, 0.02, 0.02), "watch", 1, 1, 0.0),
    Rule("failed_jobs", NODE, "failed_job_share", "ratio", (0.0, 0.0, 0.0), "watch", 1, 1, 0.0),
)
ROW = {rule.name: row for row, rule in enumerate(RULES)}
OF_KIND = {kind: tuple(row for row, rule in enumerate(RULES) if rule.kind is kind) for kind in (GPU, PORT, NODE)}

# What a slow gang is put down to.
COMPUTE = frozenset({"thermal_throttle", "power_brake", "clock_low", "gang_outlier", "cpu_stolen"})
STOPPED = frozenset({"gpu_vanished", "node_silent", "node_lost", "link_down"})
EARLY = frozenset({"gpu_hot_for_its_load", "ecc_corrected_few", "link_errors_few", "scrapes_late", "scrapes_lost"})
PORT_RULES = frozenset(rule.name for rule in RULES if rule.kind is PORT)
LINK = (PORT_RULES - STOPPED - EARLY) | {"pcie_width", "pcie_gen", "pcie_replays", "nvlink_errors"}
