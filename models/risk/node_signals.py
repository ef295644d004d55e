"""Detectors of node rules (silence, scrapes, host): one function for each rule."""

from dataclasses import dataclass

import numpy as np

from fleetcast.features.sums import divide
from fleetcast.models.peers import MAD_TO_SIGMA, compute_median, compute_p90
from fleetcast.models.risk.detectors import Detection, FeatureColumns, compute_newest_age_s, register_detector
from fleetcast.models.risk.learned import LearnedState
from fleetcast.models.risk.signals import Array, Mask, Times

LATE_RATIO, LATE_LEAST_S, LATE_SIGMAS = 1.5, 0.05, 4.0  # over its usual; over that and above what nodes differ by
LOST_30M, LOST_LEAST, LOST_MOST = 3.0, 0.03, 0.5  # scrapes; shares of them: two restarts lose less, an outage more
LOST_TIMES = 3.0  # what most nodes lose
IN_A_ROW = 0.8  # of what it can have lost since then
SILENT_SCRAPES, SILENT_LEAST_S = 4, 45.0
TOGETHER_S = 120.0  # nodes that fall silent within this time have one cause
NODE_SILENT_S = 75.0  # at most
EXPORTER_SILENT_S = 120.0
FROZEN_S = 180.0
STOLEN, SHORT = 0.015, 0.2  # shares of time: of its CPUs by a host's other guests; in which a task waits for memory
STOLEN_RATIO = 4.0  # times what the fleet's nodes lose: where all guests share their hosts, that is usual
SCRAPE_EASES_S, SCRAPE_LEARNS_S = 14_400.0, 300.0  # of the usual time of a scrape: upwards; at first and downwards
HOST_CHANGES = ("memory_available_bytes", "cpu_idle_share", "net_rx_bytes_per_s")  # with nearly every page of a host
MOST = 0.5  # when more than this share of all nodes is silent at once, it is us


@dataclass(frozen=True, slots=True)
class SilentTimes:
    """The seconds (node,) since a node's GPUs, ports and host last sent anything, NaN if they never did.

    They end at our last scrape of the node. So if our scrapes are late, no node counts as silent.
    """

    gpu_s: Array
    port_s: Array
    host_s: Array  # since a value of the host changed last

    @classmethod
    def from_columns(cls, gpu: FeatureColumns, port: FeatureColumns, node: FeatureColumns) -> "SilentTimes":
        looked_s = np.nan_to_num(node["age_s"])
        changed_ms = np.max([node.changed_ms(name) for name in HOST_CHANGES], axis=0)
        host_s = np.where(changed_ms > 0, (node.now_ms - changed_ms) / 1000, np.nan)
        newest = (*(compute_newest_age_s(part, node.rows) for part in (gpu, port)), host_s)
        return cls(*(np.maximum(age_s - looked_s, 0.0) for age_s in newest))

    @property
    def any_s(self) -> Array:
        return np.fmin(np.fmin(self.gpu_s, self.port_s), self.host_s)


class ScrapeTimes(LearnedState):
    """The usual duration of each node's scrapes, learned over time.

    usual_s: (node,) seconds, NaN if unknown. known_s: (node,) seconds for which it has been learned.
    """

    arrays, times = ("usual_s", "known_s"), ("learned_ms",)

    def __init__(self) -> None:
        self.usual_s, self.known_s = np.zeros(0), np.zeros(0)
        self.learned_ms = 0

    def learn_durations(self, took_s: Array, now_ms: int, interval_s: float) -> Array:
        """Update the usual durations, and return them: (node,) seconds, NaN until known.

        took_s: (node,) the present durations. A usual duration falls within minutes and rises within hours.
        """
        more = len(took_s) - len(self.usual_s)
        before = np.pad(self.usual_s, (0, more), constant_values=np.nan)
        known_s = np.pad(self.known_s, (0, more))
        elapsed_s = min(max(now_ms - self.learned_ms, 0) / 1000, 10 * interval_s) if self.learned_ms else 0.0
        self.learned_ms = now_ms
        is_known = np.isfinite(took_s)
        young = (known_s < SCRAPE_LEARNS_S) | (took_s < before)
        share = np.minimum(1.0, elapsed_s / np.where(young, SCRAPE_LEARNS_S, SCRAPE_EASES_S))
        eased = before + (took_s - before) * share
        self.usual_s = np.where(is_known, np.where(np.isfinite(before), eased, took_s), before)
        self.known_s = known_s + np.where(is_known, elapsed_s, 0.0)
        return np.where(self.known_s >= SCRAPE_LEARNS_S, self.usual_s, np.nan)


@dataclass(frozen=True, slots=True)
class NodeView:
    """The features of all nodes, and the values derived from them that several rules need."""

    columns: FeatureColumns
    gpu: FeatureColumns
    quiet: SilentTimes
    silent: Mask
    stated_gpus: Array  # what the topology says, 0 where it does not
    usual_scrape_s: Array  # NaN until known
    interval_s: float

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    @classmethod
    def from_columns(
        cls,
        node: FeatureColumns,
        gpu: FeatureColumns,
        quiet: SilentTimes,
        stated_gpus: Array,
        scrapes: ScrapeTimes,
        interval_s: float,
    ) -> "NodeView":
        """Build the view of the nodes. Updates `scrapes`."""
        usual_s = scrapes.learn_durations(node["scrape_duration_s_mean_2m"], node.now_ms, interval_s)
        return cls(node, gpu, quiet, _is_silent(node, quiet, interval_s), stated_gpus, usual_s, interval_s)

    def find_past_ms(self, seconds: Array) -> Times:
        """Return (node,) the time that lies `seconds` (node,) in the past, in Unix ms, 0 for NaN."""
        now_ms = self.columns.now_ms
        return np.where(np.isfinite(seconds), now_ms - np.nan_to_num(seconds) * 1000, 0).astype(np.int64)


def _is_silent(node: FeatureColumns, quiet: SilentTimes, interval_s: float) -> Mask:
    """Return (node,) whether the node is silent: it sends nothing, and its scrapes fail or are missing.

    If most nodes are silent at once, the cause is on our side. Then only those nodes count that fell silent
    well before the others.
    """
    unanswered = ~(node["scrape_up"] > 0)
    silent = unanswered & (quiet.any_s >= min(max(SILENT_SCRAPES * interval_s, SILENT_LEAST_S), NODE_SILENT_S))
    common = silent.sum() > max(MOST * np.isfinite(quiet.any_s).sum(), 1) and node.rows > 1
    if not common:
        return silent
    return np.asarray(silent & (quiet.any_s > compute_median(quiet.any_s[silent]) + TOGETHER_S))


@register_detector("node_silent")
def detect_silent_node(view: NodeView) -> Detection:
    return Detection.make_detection(view.silent, view.quiet.any_s, since=view.find_past_ms(view.quiet.any_s))


@register_detector("exporter_silent")
def detect_silent_exporter(view: NodeView) -> Detection:
    gpu_s = view.quiet.gpu_s
    others_s = np.fmin(view.quiet.port_s, view.quiet.host_s)
    on = (gpu_s >= EXPORTER_SILENT_S) & ~view.silent & (others_s < NODE_SILENT_S)
    return Detection.make_detection(on, gpu_s, since=view.find_past_ms(gpu_s))


@register_detector("exporter_frozen")
def detect_frozen_exporter(view: NodeView) -> Detection:
    frozen_s = _measure_frozen_s(view.gpu, view.columns.rows)
    return Detection.make_detection(frozen_s >= FROZEN_S, frozen_s, since=view.find_past_ms(frozen_s))


@register_detector("gpus_missing")
def detect_missing_gpus(view: NodeView) -> Detection:
    """Detect nodes with fewer GPUs than before, or than the topology states.

    Nodes with a GPU that vanished from the pages do not count, because another rule reports them.
    """
    reported, most = view["gpus_reported"], np.fmax(view["max_gpus_reported"], view.stated_gpus)
    vanished = np.bincount(view.gpu.node[np.nan_to_num(view.gpu["silent_s"]) > 0], minlength=view.columns.rows) > 0
    on = (reported < most) & (reported > 0) & ~vanished
    return Detection.make_detection(on, reported, most, 0.5 + 0.5 * (1 - reported / most))


@register_detector("scrape_slow")
def detect_slow_scrapes(view: NodeView) -> Detection:
    took, usual = view["scrape_duration_s"], view["scrape_duration_s_mean_30m"]
    noise = np.nan_to_num(view["scrape_duration_s_std_30m"])
    return Detection.make_detection((took > 1.0) & (took > 5 * usual) & (took > usual + 6 * noise), took, usual, 0.5)


@register_detector("scrapes_late")
def detect_late_scrapes(view: NodeView) -> Detection:
    """Detect nodes whose pages have taken longer than usual for minutes, compared with the fleet's median.

    If the pages of all nodes are late, the cause is on our side or in the network. The mean of minutes decides, so
    one late page gives no signal.
    """
    took, usual = view["scrape_duration_s_mean_2m"], view.usual_scrape_s
    ratio = divide(took, usual)
    known = ratio[np.isfinite(ratio)]
    fleet = compute_median(known) if len(known) else 1.0
    sigma = MAD_TO_SIGMA * compute_median(np.abs(known - fleet)) if len(known) else 0.0
    over = max(LATE_RATIO * max(fleet, 1.0), fleet + LATE_SIGMAS * sigma)
    on = (ratio >= over) & (took - usual >= LATE_LEAST_S)
    return Detection.make_detection(on, took, usual, 0.4 + np.log10(np.fmax(ratio, 1)) / 2)


@register_detector("scrapes_lost")
def detect_lost_scrapes(view: NodeView) -> Detection:
    """Detect nodes that lose scrapes now and then, both in the last ten minutes and before.

    A restart or a reboot does not count, because it loses several scrapes in a row.
    """
    late, all_lost = view["gaps_10m"], view["gaps_30m"]
    share = all_lost * view.interval_s / 1800.0
    usual = compute_p90(share)
    again = (late >= 1) & (all_lost - late >= 1) & (all_lost >= LOST_30M)
    back = view.columns.changed_ms("scrape_up")
    back_s = np.where(back > 0, (view.columns.now_ms - back) / 1000, np.nan)
    in_a_row = late * view.interval_s >= IN_A_ROW * (600.0 - back_s)  # one outage that began before these ten minutes
    rare = (share >= LOST_LEAST) & (share > LOST_TIMES * usual) & (share <= LOST_MOST)
    return Detection.make_detection(again & ~in_a_row & rare & ~view.silent, share, usual, 0.5 + share)


@register_detector("cpu_stolen")
def detect_stolen_cpu(view: NodeView) -> Detection:
    stolen = view["cpu_steal_share_mean_2m"]
    known = np.sort(stolen[np.isfinite(stolen)])
    usual = float(known[(len(known) - 1) // 4]) if len(known) else 0.0  # three of four nodes lose at least so much
    on = (stolen >= max(STOLEN, STOLEN_RATIO * usual)) & (stolen <= 1)
    return Detection.make_detection(on, stolen, usual, 0.2 + 2 * stolen)


@register_detector("memory_short")
def detect_short_memory(view: NodeView) -> Detection:
    short = view["memory_pressure_share"]
    return Detection.make_detection(short >= SHORT, short, np.nan, short)


def _measure_frozen_s(gpu: FeatureColumns, nodes: int) -> Array:
    """Return (node,) for how many seconds no value of the node's GPUs has changed although scrapes arrive.

    The result is NaN for a page that has hardly ever changed. Such a page may be a static file instead of an
    exporter's page.
    """
    frozen = gpu["frozen_s"]
    fresh = np.isfinite(frozen) & (gpu.node >= 0) & (gpu["age_s"] < NODE_SILENT_S)
    least, longest = np.full(nodes, np.inf), np.zeros(nodes)
    np.minimum.at(least, gpu.node[fresh], frozen[fresh])
    np.maximum.at(longest, gpu.node[fresh], np.nan_to_num(gpu["first_seen_s"][fresh]))
    return np.where(np.isfinite(least) & (longest - least > FROZEN_S), least, np.nan)
