"""Detectors of GPU rules: one function for each rule, over all GPUs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.clock_reasons import BRAKE, IDLE, POWER_CAP, SLOWDOWN, THERMAL
from fleetcast.fleet.xids import HARD, PART, SOFT
from fleetcast.models.peers import MAD_TO_SIGMA, compute_median, compute_p90
from fleetcast.models.risk.alike import ComparableDevices
from fleetcast.models.risk.detectors import Detection, FeatureColumns, compute_newest_age_s, register_detector
from fleetcast.models.risk.learned import LearnedState
from fleetcast.models.risk.signals import Array, Mask, Times

LOW_CLOCK = 0.92  # of the usual clock
LOW_CLOCK_WITHOUT_BITS = 0.8
HALVED_CLOCK = 0.55  # a hardware slowdown or power brake divides the clock by two at least (nvml.h)
XID_FRESH_S = 86_400.0
MISSED_SCRAPES = 2.2  # a series is gone when two pages in a row came without it
REPLAYS_10M = 310  # 31 a minute: one bit error in 1e12 on a Gen5 x16 link
REPLAYS_10M_ALONE = 80  # 8 a minute (DCGM_LIMIT_MAX_PCIREPLAY_RATE), where nobody tells how wide the link is
SBE_10M = 50
CRC_10M = 60_000  # 100 a second
SBE_30M, SBE_TIMES = 3, 3.0  # above what nine of ten GPUs of the fleet have
HOT_C, HOT_OVER_C = 84.0, 15.0
HOT_FOR_LOAD_C, HOT_SIGMAS = 5.0, 5.0
STATED, LIKELY, WAITS, OPEN, DENIED = 1.0, 0.75, 0.6, 0.5, 0.0  # values of `compute_cap_evidence`
AS_STEADY = 1.05  # beside its peers it draws no more than in the last two minutes
AS_CLOCK = 0.5  # of what the clock fell by: board power falls at least so much, whatever it draws idle
AT_LIMIT, FAR_BELOW_LIMIT = 0.95, 0.7  # of the stated power limit: reached; so low that the limit cannot be the reason
LOWERED_LIMIT = 0.95  # of what most of the fleet has: somebody set it
USUAL_DECAY = 0.001  # of the gap, an observation: a changed clock limit is the new usual after some hours


class UsualClocks(LearnedState):
    """The usual clock of each GPU under load, learned over time. usual: (gpu,) MHz, NaN if unknown."""

    arrays = ("usual",)

    def __init__(self) -> None:
        self.usual = np.zeros(0)

    def learn_clocks(self, clock: Array, ceiling: Array, healthy: Mask) -> Array:
        """Update the usual clocks with this observation, and return them: (gpu,) MHz.

        clock: (gpu,) MHz. A usual clock rises at once. It falls slowly, and only if the GPU is `healthy`.
        """
        before = np.pad(self.usual, (0, len(clock) - len(self.usual)), constant_values=np.nan)
        eased = before - USUAL_DECAY * (before - clock)
        after = np.where(healthy & np.isfinite(clock) & (clock < before), eased, np.fmax(before, clock))
        self.usual = np.fmax(after, ceiling)
        return self.usual


@dataclass(frozen=True, slots=True)
class GpuView:
    """The features of all GPUs, and the values derived from them that several rules need."""

    columns: FeatureColumns
    nodes: int
    interval_s: float
    bits: NDArray[np.int64]  # clock event reasons, 0 where unknown
    has_bits: Mask
    loaded: Mask  # works, as far as anybody can tell
    idle: Mask  # surely does not
    clock: Array
    usual_clock: Array
    above_c: Array  # °C above what its slot has at its power; NaN unknown
    alike: ComparableDevices  # GPUs of one model on a node

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def changed_ms(self, name: str) -> Times:
        return self.columns.changed_ms(name)

    def has_working_value(self, values: Array) -> Mask:
        """Return (gpu,) whether the GPU works and its value is known.

        Only such GPUs show whether the condition of a rule holds.
        """
        return np.asarray(self.loaded & np.isfinite(values))

    def has_changed_since_discovery(self, feature: str) -> Mask:
        """Return (gpu,) whether the feature has changed since the GPU was first observed.

        Rules report only such changes, because operators may have handled an older one already.
        """
        first_ms = self.columns.now_ms - np.nan_to_num(self["first_seen_s"], nan=0.0) * 1000
        return np.asarray(self.columns.changed_ms(feature) > first_ms + 1000)

    def compute_peer_median(self, values: Array) -> Array:
        """Return (gpu,) for each GPU the median of `values` over the GPUs of its node and model."""
        return self.alike.groups.compute_member_medians(values)


def read_reason_bits(columns: FeatureColumns) -> tuple[NDArray[np.int64], Mask]:
    """Return (gpu,) int64 the clock event reasons, 0 if unknown, and (gpu,) whether they are known."""
    raw = columns["clock_event_reasons"]
    has = np.isfinite(raw)
    return np.where(has, np.nan_to_num(raw), 0).astype(np.int64), has


def find_loaded_gpus(columns: FeatureColumns, bits: NDArray[np.int64]) -> tuple[Mask, Mask]:
    """Return (gpu,) whether the GPU works, and (gpu,) whether it is certainly idle.

    The function uses utilisation, activity, power or the idle bit, whichever are known.
    """
    util = np.fmax(columns["gpu_util"], columns["sm_active"])
    power = columns["power_w"]
    idle = ((bits & IDLE) > 0) | (util < 0.05)
    loaded = ~idle & ((util >= 0.3) | (np.isnan(util) & (power > 200)))
    return loaded, idle & ~(util >= 0.3)


def is_at_limit(view: GpuView) -> Mask:
    """Return (gpu,) whether the power draw has reached the stated power limit."""
    return np.asarray(view["power_w"] >= AT_LIMIT * view["power_limit_w"])


def compute_cap_evidence(view: GpuView) -> Array:
    """Return (gpu,) a code for how certain it is that a power cap causes a low clock.

    STATED: the reason bit is set, or the power is at the limit.
    LIKELY, OPEN: neither the bit nor the limit is exported, and the GPU is not hot. LIKELY if its power is below
    that of its node's GPUs, as a cap would cause.
    WAITS: the bit is set and the limit was lowered, but the GPU draws far less, as a GPU of a waiting
    gang does.
    DENIED: otherwise.
    """
    limit = view["power_limit_w"]
    faulty = (view.bits & (THERMAL | BRAKE)) > 0
    bit = (view.bits & POWER_CAP) > 0
    far_below = np.fmax(view["power_w"], view["power_w_mean_2m"]) < FAR_BELOW_LIMIT * limit
    waits = bit & far_below & (limit < LOWERED_LIMIT * compute_p90(limit))
    is_capped = bit | is_at_limit(view)
    untold = ~view.has_bits & np.isnan(limit) & ~(view["gpu_temp_c"] >= HOT_C)
    cases = (faulty, waits, far_below, is_capped, untold & is_on_plateau(view), untold)
    return np.select(cases, (DENIED, WAITS, DENIED, STATED, LIKELY, OPEN), DENIED)


def is_on_plateau(view: GpuView) -> Mask:
    """Return (gpu,) whether the GPU draws steadily less than its node's working GPUs, as if capped.

    Its clock must be lower too, but not by half, because brakes and hardware slowdowns halve clocks. The GPU must
    not be warmer than the others, because heat that slows a GPU would make it warmer.
    """
    clock = view.clock / view.usual_clock
    now, lately = (
        power / view.compute_peer_median(np.where(view.loaded & (power > 0), power, np.nan))
        for power in (view["power_w"], view["power_w_mean_2m"])
    )
    warmer = view["gpu_temp_c"] - view.compute_peer_median(np.where(view.loaded, view["gpu_temp_c"], np.nan))
    cool = ~(np.fmax(warmer, view.above_c) >= HOT_FOR_LOAD_C)
    lower = (now < 1) & (1 - now >= AS_CLOCK * (1 - clock)) & (now <= AS_STEADY * lately)
    return np.asarray(view.loaded & cool & lower & (clock > HALVED_CLOCK))


@register_detector("thermal_throttle")
def detect_thermal_throttle(view: GpuView) -> Detection:
    """Detect a clock that fell while a thermal or hardware slowdown bit is set.

    Bit 4 (software power cap) is normal under load, so it does not count. A power brake sets the hardware bit
    too. So the hardware bit is no evidence of heat during a power brake.
    """
    braked = (view.bits & BRAKE) > 0
    return _detect_slowed_clock(view, (view.bits & np.where(braked, THERMAL & ~SLOWDOWN, THERMAL)) > 0)


@register_detector("power_brake")
def detect_power_brake(view: GpuView) -> Detection:
    return _detect_slowed_clock(view, (view.bits & BRAKE) > 0)


def _detect_slowed_clock(view: GpuView, bit: Mask) -> Detection:
    """Detect a clock that fell on GPUs that are not idle, while a reason bit is set.

    bit: (gpu,) whether the bit is set.
    """
    ratio = view.clock / view.usual_clock
    on = bit & ((view.bits & IDLE) == 0) & ~(ratio >= LOW_CLOCK)
    strength = np.where(np.isfinite(ratio), 0.3 + 1.4 * (1 - ratio), 0.5)
    since = np.where(bit, view.changed_ms("clock_event_reasons"), 0)
    return Detection.make_detection(on, view.clock, view.usual_clock, strength, since, view.has_bits & ~view.idle)


@register_detector("clock_low")
def detect_low_clock(view: GpuView) -> Detection:
    """Detect a clock that is far too low, without a stated reason.

    The clock must be far below both the GPU's usual clock and that of its node's working GPUs. The power must be
    below its limit, and must not look like that of a capped GPU.
    """
    peers = view.compute_peer_median(np.where(view.loaded, view.clock, np.nan))
    usual = np.fmin(view.usual_clock, peers)
    plain = ~view.has_bits | ((view.bits & (THERMAL | BRAKE | POWER_CAP | IDLE)) == 0)
    plain &= ~is_at_limit(view) & (compute_cap_evidence(view) != LIKELY)
    on = view.loaded & plain & (view.clock < LOW_CLOCK_WITHOUT_BITS * usual)
    return Detection.make_detection(
        on, view.clock, usual, 0.2 + 1.2 * (1 - view.clock / usual), None, view.has_working_value(usual)
    )


@register_detector("clock_halved")
def detect_halved_clock(view: GpuView) -> Detection:
    """Detect a working GPU at half its usual clock or less, if clock event reasons are not exported.

    The node's other GPUs must be as slow, which shows that a power brake slows the whole node. Power limits
    do not lower clocks that far. Operators lock clocks so low only for a whole gang.
    """
    on = view.loaded & ~view.has_bits & (view.clock <= HALVED_CLOCK * view.usual_clock) & ~detect_low_clock(view).on
    strength = 0.2 + 0.8 * (1 - view.clock / view.usual_clock)
    return Detection.make_detection(
        on, view.clock, view.usual_clock, strength, None, view.has_working_value(view.clock)
    )


@register_detector("gpu_hot")
def detect_hot_gpu(view: GpuView) -> Detection:
    temp = view["gpu_temp_c"]
    peers = view.compute_peer_median(temp)
    on = view.loaded & (temp >= HOT_C) & (temp - peers >= HOT_OVER_C)
    return Detection.make_detection(on, temp, peers, (temp - peers) / 40, None, view.has_working_value(temp))


@register_detector("gpu_hot_for_its_load")
def detect_excess_heat(view: GpuView) -> Detection:
    """Detect a GPU that has been too warm for its power for minutes.

    The GPU is compared with the usual temperature of its slot at that power. The difference must exceed both a
    number of degrees and the usual spread of the GPUs.
    """
    above, temp = view.above_c, view["gpu_temp_c_mean_2m"]
    known = above[np.isfinite(above)]
    sigma = MAD_TO_SIGMA * compute_median(np.abs(known)) if len(known) else 0.0
    on = view.loaded & (above >= max(HOT_FOR_LOAD_C, HOT_SIGMAS * sigma))
    return Detection.make_detection(on, temp, temp - above, 0.4 + above / 25, None, view.has_working_value(above))


def _detect_xid(view: GpuView, codes: frozenset[int], fresh: bool) -> Detection:
    code = view["xid"]
    since = view.changed_ms("xid")
    listed = np.isin(np.nan_to_num(code), list(codes))
    ours = view.has_changed_since_discovery("xid") & (view.columns.now_ms - since < XID_FRESH_S * 1000)
    on = listed & (ours if fresh else ~ours)
    return Detection.make_detection(on, code, since=since if fresh else None)


@register_detector("xid_hard")
def detect_hard_xid(view: GpuView) -> Detection:
    """Detect a hardware XID that appeared after the GPU was first observed.

    The gauge keeps its last code, so an old code is no evidence about today.
    """
    return _detect_xid(view, frozenset(HARD) - PART, fresh=True)


@register_detector("xid_part")
def detect_part_xid(view: GpuView) -> Detection:
    return _detect_xid(view, PART, fresh=True)


@register_detector("xid_soft")
def detect_soft_xid(view: GpuView) -> Detection:
    return _detect_xid(view, frozenset(SOFT), fresh=True)


@register_detector("xid_old")
def detect_old_xid(view: GpuView) -> Detection:
    return _detect_xid(view, frozenset(HARD) | frozenset(SOFT), fresh=False)


@register_detector("ecc_uncorrectable")
def detect_uncorrectable_errors(view: GpuView) -> Detection:
    count = np.fmax(view["ecc_dbe_volatile_count_30m"], view["ecc_dbe_aggregate_count_30m"])
    return Detection.make_detection(count >= 1, count, np.nan, 0.7 + 0.1 * count)


@register_detector("ecc_burst")
def detect_ecc_burst(view: GpuView) -> Detection:
    count = np.fmax(view["ecc_sbe_volatile_count_10m"], view["ecc_sbe_aggregate_count_10m"])
    return Detection.make_detection(count >= SBE_10M, count, np.nan, np.log10(np.fmax(count, 1)) / 4)


@register_detector("ecc_corrected_few")
def detect_few_corrected_errors(view: GpuView) -> Detection:
    """Detect repeated corrected errors in a fleet whose other GPUs have hardly any.

    There are too few errors for the rule about a burst.
    """
    count = np.fmax(view["ecc_sbe_volatile_count_30m"], view["ecc_sbe_aggregate_count_30m"])
    usual = compute_p90(count)
    on = (count >= SBE_30M) & (count > SBE_TIMES * usual) & ~detect_ecc_burst(view).on
    return Detection.make_detection(on, count, usual, 0.4 + np.log10(np.fmax(count, 1)) / 4)


@register_detector("row_remap_failure")
def detect_remap_failure(view: GpuView) -> Detection:
    flag = view["row_remap_failure"]
    since = np.where(view.has_changed_since_discovery("row_remap_failure"), view.changed_ms("row_remap_failure"), 0)
    return Detection.make_detection(flag > 0, flag, since=since)


@register_detector("row_remapped")
def detect_remapped_row(view: GpuView) -> Detection:
    rows = view["remapped_rows_uncorrectable"]
    since = view.changed_ms("remapped_rows_uncorrectable")
    recent = view.has_changed_since_discovery("remapped_rows_uncorrectable") & (
        view.columns.now_ms - since < XID_FRESH_S * 1000
    )
    return Detection.make_detection((rows > 0) & recent, rows, np.nan, 0.4 + 0.1 * rows, since)


@register_detector("page_retirement")
def detect_page_retirement(view: GpuView) -> Detection:
    flag = view["retired_pages_pending"]
    return Detection.make_detection(flag > 0, flag)


@register_detector("pcie_width")
def detect_narrow_pcie(view: GpuView) -> Detection:
    """Detect a working GPU with fewer PCIe lanes than its maximum or than its node's GPUs."""
    width = view["pcie_link_width"]
    full = np.fmax(view["pcie_max_link_width"], view.compute_peer_median(width))
    on = view.loaded & (width < 0.9 * full)
    return Detection.make_detection(
        on, width, full, 1.1 - width / full, view.changed_ms("pcie_link_width"), view.has_working_value(width)
    )


@register_detector("pcie_gen")
def detect_low_pcie_generation(view: GpuView) -> Detection:
    """Detect a PCIe generation below the maximum or the node's other GPUs, under load.

    The rule needs load, because an idle link lowers its generation.
    """
    gen = view["pcie_link_gen"]
    full = np.fmax(view["pcie_max_link_gen"], view.compute_peer_median(np.where(view.loaded, gen, np.nan)))
    on = view.loaded & (gen < full - 0.5)
    return Detection.make_detection(
        on,
        gen,
        full,
        1.1 - 2.0 ** np.minimum(gen - full, 0.0),
        view.changed_ms("pcie_link_gen"),
        view.has_working_value(gen),
    )


@register_detector("pcie_replays")
def detect_pcie_replays(view: GpuView) -> Detection:
    count = view["pcie_replays_count_10m"]
    least = np.where(np.isfinite(view["pcie_link_width"]), REPLAYS_10M, REPLAYS_10M_ALONE)
    return Detection.make_detection(count >= least, count, np.nan, np.log10(np.fmax(count, 1)) / 5)


@register_detector("nvlink_errors")
def detect_nvlink_errors(view: GpuView) -> Detection:
    """Detect a faulty NVLink: many CRC errors, more than a few replays, or any recovery.

    CRC errors are retried, so only a high rate of them counts.
    """
    crc = np.fmax(view["nvlink_crc_flit_errors_count_10m"], view["nvlink_crc_data_errors_count_10m"])
    replay, recovery = view["nvlink_replay_errors_count_10m"], view["nvlink_recovery_errors_count_10m"]
    on = (crc >= CRC_10M) | (replay >= 5) | (recovery >= 1)
    total = np.nan_to_num(crc) + np.nan_to_num(replay) + np.nan_to_num(recovery)
    known = np.isfinite(crc) | np.isfinite(replay) | np.isfinite(recovery)
    return Detection.make_detection(on, total, np.nan, 0.4 + np.log10(np.fmax(total, 1)) / 8, telling=known)


@register_detector("gpu_vanished")
def detect_vanished_gpu(view: GpuView) -> Detection:
    """Detect a GPU that is missing from an exporter's pages while the node's other GPUs are on them.

    A late page is no evidence. The GPU has returned only when it is on the newest page.
    """
    silent = np.nan_to_num(view["silent_s"])
    missing = silent >= MISSED_SCRAPES * view.interval_s
    node = view.columns.node
    size = np.bincount(node[node >= 0], minlength=view.nodes)
    lost = np.bincount(node[missing & (node >= 0)], minlength=view.nodes)
    empty = (lost == size) & (size > 1)  # an empty page is the exporter's trouble
    on = missing & ~(empty[np.maximum(node, 0)] & (node >= 0))
    since = np.where(on, view.columns.now_ms - (silent * 1000).astype(np.int64), 0)
    age_s = view["age_s"]
    newest_s = compute_newest_age_s(view.columns, view.nodes)
    listed = (silent <= 0) & (age_s <= np.where(node >= 0, newest_s[node], age_s) + 0.5 * view.interval_s)
    return Detection.make_detection(on, silent, since=since, telling=listed)
