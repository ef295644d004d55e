"""What a GPU's own series say against it. Each function is one rule over all GPUs: Columns in, Sight out."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.xids import HARD, PART, SOFT
from models.peers import MAD_TO_SIGMA, group_median, middle, most_have, spread
from models.signals import Array, Columns, Mask, Sight, Times

IDLE, POWER_CAP, SLOWDOWN, BRAKE = 1, 4, 8, 128
THERMAL = SLOWDOWN | 32 | 64
LOW_CLOCK = 0.92  # of the usual clock
LOW_CLOCK_WITHOUT_BITS = 0.8
XID_FRESH_S = 86_400.0
MISSED_SCRAPES = 2.2  # a series is gone when two pages in a row came without it
REPLAYS_10M = 310  # 31 a minute: one bit error in 1e12 on a Gen5 x16 link
SBE_10M = 50
CRC_10M = 60_000  # 100 a second
SBE_30M, SBE_TIMES = 3, 3.0  # above what nine of ten GPUs of the fleet have
HOT_C, HOT_OVER_C = 84.0, 15.0
HOT_FOR_LOAD_C, HOT_SIGMAS = 5.0, 5.0


@dataclass(frozen=True, slots=True)
class GpuView:
    """Columns of all GPUs with what every rule asks for."""

    columns: Columns
    nodes: int
    interval_s: float
    bits: NDArray[np.int64]  # clock event reasons, 0 where unknown
    has_bits: Mask
    loaded: Mask  # works, as far as anybody can tell
    idle: Mask  # surely does not
    clock: Array
    usual_clock: Array
    above_c: Array  # °C above what its slot has at its power; NaN unknown

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def since(self, name: str) -> Times:
        return self.columns.since(name)

    def known_before(self, feature: str) -> Mask:
        """(gpu,) the value was another one when we first saw the GPU: the change is ours to report."""
        first_ms = self.columns.now_ms - np.nan_to_num(self["first_seen_s"], nan=0.0) * 1000
        return np.asarray(self.columns.since(feature) > first_ms + 1000)

    def peer_median(self, values: Array) -> Array:
        """(gpu,) median of the GPUs of its node."""
        return spread(group_median(values, self.columns.node, self.nodes)[0], self.columns.node)


def reason_bits(columns: Columns) -> tuple[NDArray[np.int64], Mask]:
    """(gpu,) the clock event reasons as integers, 0 where unknown, and where they are known."""
    raw = columns["clock_event_reasons"]
    has = np.isfinite(raw)
    return np.where(has, np.nan_to_num(raw), 0).astype(np.int64), has


def load_of(columns: Columns, bits: NDArray[np.int64]) -> tuple[Mask, Mask]:
    """(gpu,) who works and who surely idles, by utilisation, activity, power or the idle bit, whichever there is."""
    util = np.fmax(columns["gpu_util"], columns["sm_active"])
    power = columns["power_w"]
    idle = ((bits & IDLE) > 0) | (util < 0.05)
    loaded = ~idle & ((util >= 0.3) | (np.isnan(util) & (power > 200)))
    return loaded, idle & ~(util >= 0.3)


def _sight(
    view: GpuView,
    on: Mask,
    value: Array,
    usual: Array,
    strength: Array,
    since: Times | None = None,
    telling: Mask | None = None,
) -> Sight:
    n = len(on)
    return Sight(
        on,
        value,
        usual,
        np.clip(np.nan_to_num(strength), 0.0, 1.0),
        np.zeros(n, np.int64) if since is None else since,
        np.ones(n, bool) if telling is None else telling,
    )


def _unknown(view: GpuView) -> Array:
    return np.full(len(view.clock), np.nan)


def thermal_throttle(view: GpuView) -> Sight:
    """A thermal or hardware slowdown bit, and a clock that fell. Bit 4 (software power cap) is normal under load.

    A power brake sets the hardware slowdown bit, too: then that bit says nothing of heat.
    """
    ratio = view.clock / view.usual_clock
    braked = (view.bits & BRAKE) > 0
    bit = (view.bits & np.where(braked, THERMAL & ~SLOWDOWN, THERMAL)) > 0
    on = bit & ((view.bits & IDLE) == 0) & ~(ratio >= LOW_CLOCK)
    strength = np.where(np.isfinite(ratio), 0.3 + 1.4 * (1 - ratio), 0.5)
    since = np.where(bit, view.since("clock_event_reasons"), 0)
    return _sight(view, on, view.clock, view.usual_clock, strength, since, ~view.idle)


def power_brake(view: GpuView) -> Sight:
    ratio = view.clock / view.usual_clock
    bit = (view.bits & BRAKE) > 0
    on = bit & ((view.bits & IDLE) == 0) & ~(ratio >= LOW_CLOCK)
    strength = np.where(np.isfinite(ratio), 0.3 + 1.4 * (1 - ratio), 0.5)
    since = np.where(bit, view.since("clock_event_reasons"), 0)
    return _sight(view, on, view.clock, view.usual_clock, strength, since, ~view.idle)


def clock_low(view: GpuView) -> Sight:
    """Much slower than itself before and than its node's working GPUs now, where no reason is exported."""
    peers = view.peer_median(np.where(view.loaded, view.clock, np.nan))
    usual = np.fmin(view.usual_clock, peers)
    plain = ~view.has_bits | ((view.bits & (THERMAL | BRAKE | POWER_CAP | IDLE)) == 0)
    on = view.loaded & plain & (view.clock < LOW_CLOCK_WITHOUT_BITS * usual)
    return _sight(view, on, view.clock, usual, 0.2 + 1.2 * (1 - view.clock / usual), None, view.loaded)


def gpu_hot(view: GpuView) -> Sight:
    temp = view["gpu_temp_c"]
    peers = view.peer_median(temp)
    on = view.loaded & (temp >= HOT_C) & (temp - peers >= HOT_OVER_C)
    return _sight(view, on, temp, peers, (temp - peers) / 40, None, view.loaded)


def gpu_hot_for_its_load(view: GpuView) -> Sight:
    """Warmer than its slot's GPUs at that power, by more than degrees and than GPUs differ, for minutes."""
    above, temp = view.above_c, view["gpu_temp_c_mean_2m"]
    known = above[np.isfinite(above)]
    sigma = MAD_TO_SIGMA * middle(np.abs(known)) if len(known) else 0.0
    on = view.loaded & (above >= max(HOT_FOR_LOAD_C, HOT_SIGMAS * sigma))
    return _sight(view, on, temp, temp - above, 0.4 + above / 25, None, view.loaded)


def _xid(view: GpuView, codes: frozenset[int], fresh: bool) -> Sight:
    code = view["xid"]
    since = view.since("xid")
    listed = np.isin(np.nan_to_num(code), list(codes))
    ours = view.known_before("xid") & (view.columns.now_ms - since < XID_FRESH_S * 1000)
    on = listed & (ours if fresh else ~ours)
    return _sight(view, on, code, _unknown(view), np.ones(len(code)), since if fresh else None)


def xid_hard(view: GpuView) -> Sight:
    """A hardware XID that appeared before our eyes: the gauge is sticky, an old code says nothing of today."""
    return _xid(view, frozenset(HARD) - PART, fresh=True)


def xid_part(view: GpuView) -> Sight:
    return _xid(view, PART, fresh=True)


def xid_soft(view: GpuView) -> Sight:
    return _xid(view, frozenset(SOFT), fresh=True)


def xid_old(view: GpuView) -> Sight:
    return _xid(view, frozenset(HARD) | frozenset(SOFT), fresh=False)


def ecc_uncorrectable(view: GpuView) -> Sight:
    count = np.fmax(view["ecc_dbe_volatile_count_30m"], view["ecc_dbe_aggregate_count_30m"])
    return _sight(view, count >= 1, count, _unknown(view), 0.7 + 0.1 * count)


def ecc_burst(view: GpuView) -> Sight:
    count = np.fmax(view["ecc_sbe_volatile_count_10m"], view["ecc_sbe_aggregate_count_10m"])
    return _sight(view, count >= SBE_10M, count, _unknown(view), np.log10(np.fmax(count, 1)) / 4)


def ecc_corrected_few(view: GpuView) -> Sight:
    """Corrected errors again and again, fewer than a burst, where the fleet's GPUs have hardly any."""
    count = np.fmax(view["ecc_sbe_volatile_count_30m"], view["ecc_sbe_aggregate_count_30m"])
    usual = most_have(count)
    on = (count >= SBE_30M) & (count > SBE_TIMES * usual) & ~ecc_burst(view).on
    return _sight(view, on, count, np.full(len(count), usual), 0.4 + np.log10(np.fmax(count, 1)) / 4)


def row_remap_failure(view: GpuView) -> Sight:
    flag = view["row_remap_failure"]
    since = np.where(view.known_before("row_remap_failure"), view.since("row_remap_failure"), 0)
    return _sight(view, flag > 0, flag, _unknown(view), np.ones(len(flag)), since)


def row_remapped(view: GpuView) -> Sight:
    rows = view["remapped_rows_uncorrectable"]
    since = view.since("remapped_rows_uncorrectable")
    recent = view.known_before("remapped_rows_uncorrectable") & (view.columns.now_ms - since < XID_FRESH_S * 1000)
    return _sight(view, (rows > 0) & recent, rows, _unknown(view), 0.4 + 0.1 * rows, since)


def page_retirement(view: GpuView) -> Sight:
    flag = view["retired_pages_pending"]
    return _sight(view, flag > 0, flag, _unknown(view), np.ones(len(flag)))


def pcie_width(view: GpuView) -> Sight:
    """Fewer lanes than its maximum, or than its node's GPUs, while it works."""
    width = view["pcie_link_width"]
    full = np.fmax(view["pcie_max_link_width"], view.peer_median(width))
    on = view.loaded & (width < 0.9 * full)
    return _sight(view, on, width, full, 1.1 - width / full, view.since("pcie_link_width"), view.loaded)


def pcie_gen(view: GpuView) -> Sight:
    """An older generation under load than its maximum or its node's GPUs. An idle link rests low: that says nothing."""
    gen = view["pcie_link_gen"]
    full = np.fmax(view["pcie_max_link_gen"], view.peer_median(np.where(view.loaded, gen, np.nan)))
    on = view.loaded & (gen < full - 0.5)
    return _sight(
        view, on, gen, full, 1.1 - 2.0 ** np.minimum(gen - full, 0.0), view.since("pcie_link_gen"), view.loaded
    )


def pcie_replays(view: GpuView) -> Sight:
    count = view["pcie_replays_count_10m"]
    return _sight(view, count >= REPLAYS_10M, count, _unknown(view), np.log10(np.fmax(count, 1)) / 5)


def nvlink_errors(view: GpuView) -> Sight:
    """CRC errors are retried and need a rate; replays beyond a handful and any recovery are a sick link."""
    crc = np.fmax(view["nvlink_crc_flit_errors_count_10m"], view["nvlink_crc_data_errors_count_10m"])
    replay, recovery = view["nvlink_replay_errors_count_10m"], view["nvlink_recovery_errors_count_10m"]
    on = (crc >= CRC_10M) | (replay >= 5) | (recovery >= 1)
    total = np.nan_to_num(crc) + np.nan_to_num(replay) + np.nan_to_num(recovery)
    return _sight(view, on, total, _unknown(view), 0.4 + np.log10(np.fmax(total, 1)) / 8)


def gpu_vanished(view: GpuView) -> Sight:
    """Missing from the pages of an exporter that answers for the node's other GPUs."""
    silent = np.nan_to_num(view["silent_s"])
    missing = silent >= MISSED_SCRAPES * view.interval_s
    node = view.columns.node
    size = np.bincount(node[node >= 0], minlength=view.nodes)
    lost = np.bincount(node[missing & (node >= 0)], minlength=view.nodes)
    empty = (lost == size) & (size > 1)  # an empty page is the exporter's trouble
    on = missing & ~(empty[np.maximum(node, 0)] & (node >= 0))
    since = np.where(on, view.columns.now_ms - (silent * 1000).astype(np.int64), 0)
    return _sight(view, on, silent, _unknown(view), np.ones(len(on)), since)


GPU_SIGHTS: dict[str, Callable[[GpuView], Sight]] = {
    function.__name__: function
    for function in (
        thermal_throttle,
        power_brake,
        clock_low,
        gpu_hot,
        gpu_hot_for_its_load,
        xid_hard,
        xid_part,
        xid_soft,
        xid_old,
        ecc_uncorrectable,
        ecc_burst,
        ecc_corrected_few,
        row_remap_failure,
        row_remapped,
        page_retirement,
        pcie_width,
        pcie_gen,
        pcie_replays,
        nvlink_errors,
        gpu_vanished,
    )
}
