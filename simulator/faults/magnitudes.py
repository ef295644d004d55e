"""The strength of each fault and benign look-alike: the ranges from which its numbers are drawn.

There is one struct for each kind. Defaults are those of real fleets (Azure's throttled nodes,
InfiniteHBD, Minder, Greyhound). A fault lasts a lognormal time around `median_s`, a decoy a uniform one
within `lasts_s`. Spans are [low, high]. Decoys are as strong as faults. Caps go as deep as heat
throttles, and checkpoints stop a gang as long as a hang. An exporter is away as long as a node that
reboots, and the longest sequences cost as much as a slow rank.
"""

import msgspec

Span = tuple[float, float]


class Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that every kind has. rate: how often the kind occurs in 1000 node-days."""

    rate: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            problem = _find_problem(name, getattr(self, name))
            if problem:
                raise ValueError(problem)


def _find_problem(name: str, value: object) -> str:
    """Return a sentence that says what is wrong with a value, or "" if it is valid."""
    if isinstance(value, tuple) and value and value[0] > value[-1]:
        return f"{name} = {list(value)}: the low end comes first"
    if name.endswith("_share") and isinstance(value, (int, float)) and not 0 <= value <= 1:
        return f"{name} = {value:g}: a share lies within 0 and 1"
    if name in ("rate", "median_s") and isinstance(value, (int, float)) and value < 0:
        return f"{name} = {value:g}: must not be negative"
    return ""


class FaultKind(Kind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    median_s: float = 3600.0
    precursor_share: float = 0.0


class Decoy(Kind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lasts_s: Span = (20.0, 20.0)


class ThermalThrottleKind(FaultKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: float = 0.5
    precursor_share: float = 0.4
    hot_c: Span = (85.0, 90.0)
    soft_clock: Span = (0.62, 0.8)  # of the usual SM clock
    hard_clock: Span = (0.3, 0.5)
    hard_share: float = 0.75
    tau_s: Span = (20.0, 60.0)


class EccStormKind(FaultKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: float = 1.2
    precursor_share: float = 0.4
    sbe_per_s: Span = (1.0, 60.0)  # ends of a lognormal around 3.3
    burst_every_s: Span = (120.0, 300.0)
    burst_share: Span = (0.4, 0.8)
    uncorrected_share: float = 0.6  # ends in an uncorrected error, which kills the job
    uncorrected_after_s: Span = (40.0, 240.0)
    remap_fails_share: float = 0.25
    contained_share: float = 0.6


class IbFlapKind(FaultKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: float = 0.6
    median_s: float = 7200.0
    precursor_share: float = 0.4
    gap_s: Span = (25.0, 110.0)
    down_s: Span = (1.0, 16.0)
    long_share: float = 0.02  # of the flaps, long enough to kill the job
    long_s: Span = (32.0, 45.0)
    stays_down_share: float = 0.0  # of the faults: the link does not come back
    symbols: Span = (40.0, 1500.0)


class PcieDowngradeKind(FaultKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: float = 0.5
    median_s: float = 72_000.0
    precursor_share: float = 0.4
    narrow_share: float = 0.6  # fewer lanes; the others fall back to an older generation
    widths: tuple[int, ...] = (1, 4, 8)
    generations: tuple[int, ...] = (1, 3)
    replays_per_s: Span = (0.6, 3.0)


class GpuOffBusKind(FaultKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: float = 0.9
    median_s: float = 72_000.0
    warns_share: float = 0.5  # XID 79 or a frozen page before the series vanish
    warns_s: Span = (15.0, 30.0)
    freezes_share: float = 0.3
    delay_s: Span = (0.1, 0.4)  # of a scrape
    lost_scrapes_share: float = 0.1  # while a precursor leads up


class SlowNicKind(FaultKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: float = 3.0
    median_s: float = 1440.0
    half_rate_share: float = 0.5
    half_rate_slow: Span = (1.5, 2.0)  # times as long a transfer
    slow: Span = (1.2, 1.6)
    wait_share: Span = (0.3, 0.6)
    congested_share: float = 0.5  # of those at full rate: congestion notifications and retransmissions tell of it
    notifications_per_s: Span = (50.0, 2000.0)


class PowerBrakeKind(FaultKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: float = 0.3
    median_s: float = 7200.0
    clock: Span = (0.4, 0.5)


class NodeLostKind(FaultKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: float = 1.0
    median_s: float = 72_000.0
    heartbeat_s: Span = (45.0, 45.0)
    delay_s: Span = (0.1, 0.4)
    lost_scrapes_share: float = 0.1


class CpuContentionKind(FaultKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: float = 0.8
    median_s: float = 600.0
    slow: Span = (1.1, 1.3)  # times as long the own part of a step
    util_drop: Span = (0.05, 0.3)
    steal_share: Span = (0.05, 0.25)
    gust_s: Span = (20.0, 90.0)  # irregular: how long it presses at a time
    calm_s: Span = (5.0, 25.0)


class PhaseDecoyKind(Decoy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class PowerCapKind(Decoy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lasts_s: Span = (180.0, 900.0)
    limit_w: Span = (200.0, 700.0)  # what a board can be limited to; the limit is what a job draws at this clock
    clock: Span = (0.6, 0.96)
    one_gpu_share: float = 0.3  # of the caps: of one GPU, not of all of its node


class ExporterRestartKind(Decoy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lasts_s: Span = (120.0, 120.0)
    down_s: Span = (10.0, 90.0)


class SequenceImbalanceKind(Decoy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lasts_s: Span = (180.0, 1200.0)
    spread: Span = (0.04, 0.25)  # of the load among ranks, one standard deviation
    hold_s: Span = (5.0, 90.0)  # until lengths are dealt anew


class PhaseChangeKind(Decoy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lasts_s: Span = (300.0, 1800.0)
    activity: Span = (0.45, 1.0)
    traffic: Span = (0.3, 1.8)
    step: Span = (0.7, 2.5)  # times the usual step


class Magnitudes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The strengths of all kinds, one struct for each kind, in a field with the kind's name."""

    thermal_throttle: ThermalThrottleKind = ThermalThrottleKind()
    ecc_storm: EccStormKind = EccStormKind()
    ib_flap: IbFlapKind = IbFlapKind()
    pcie_downgrade: PcieDowngradeKind = PcieDowngradeKind()
    gpu_off_bus: GpuOffBusKind = GpuOffBusKind()
    slow_nic: SlowNicKind = SlowNicKind()
    power_brake: PowerBrakeKind = PowerBrakeKind()
    node_lost: NodeLostKind = NodeLostKind()
    cpu_contention: CpuContentionKind = CpuContentionKind()
    checkpoint_stall: PhaseDecoyKind = PhaseDecoyKind(lasts_s=(10.0, 180.0))
    power_cap: PowerCapKind = PowerCapKind()
    exporter_restart: ExporterRestartKind = ExporterRestartKind()
    evaluation: PhaseDecoyKind = PhaseDecoyKind(lasts_s=(20.0, 480.0))
    sequence_imbalance: SequenceImbalanceKind = SequenceImbalanceKind()
    phase_change: PhaseChangeKind = PhaseChangeKind()
    label_rename: ExporterRestartKind = ExporterRestartKind()

    def get_kind(self, kind: str) -> Kind:
        """Return the settings of a kind. Raises ValueError that names the known kinds."""
        if kind not in self.__struct_fields__:
            raise ValueError(f"fault kind {kind!r}: expected one of {', '.join(self.__struct_fields__)}")
        found: Kind = getattr(self, kind)
        return found

    def items(self) -> list[tuple[str, Kind]]:
        return [(kind, getattr(self, kind)) for kind in self.__struct_fields__]


# What each number is where nothing is wrong; shares, times and what hardware has only some of are not scaled.
NEUTRAL = {
    **dict.fromkeys(
        ("soft_clock", "hard_clock", "clock", "half_rate_slow", "slow", "activity", "traffic", "step"), 1.0
    ),
    **dict.fromkeys(("sbe_per_s", "symbols", "replays_per_s", "notifications_per_s", "spread"), 0.0),
    **{"hot_c": 66.0, "wait_share": 0.0, "util_drop": 0.0, "steal_share": 0.0},
}
LEAST_LEFT = 0.05  # of a clock or an activity


def scale_faults(kinds: Magnitudes, times: float) -> Magnitudes:
    """Return the kinds with faults that are `times` as strong.

    With 2, each number is twice as far from its neutral value. Decoys do not change, because weak faults must be
    found among look-alikes of the usual strength.

    >>> scale_faults(USUAL, 0.5).power_brake.clock
    (0.7, 0.75)
    >>> scale_faults(USUAL, 0.5).power_cap == USUAL.power_cap
    True
    """

    def scale_span(name: str, span: Span) -> Span:
        rest = NEUTRAL[name]
        low, high = (max(rest + (end - rest) * times, LEAST_LEFT * rest) for end in span)
        return round(low, 6), round(high, 6)

    def scale_kind(row: Kind) -> Kind:
        if isinstance(row, Decoy):
            return row
        own = [name for name in row.__struct_fields__ if name in NEUTRAL]
        return msgspec.structs.replace(row, **{name: scale_span(name, getattr(row, name)) for name in own})

    return msgspec.structs.replace(kinds, **{kind: scale_kind(row) for kind, row in kinds.items()})


USUAL = Magnitudes()
FAULT_KINDS = tuple(kind for kind, row in USUAL.items() if isinstance(row, FaultKind))
DECOY_KINDS = tuple(kind for kind, row in USUAL.items() if isinstance(row, Decoy))
REALISTIC_RATES = {kind: row.rate for kind, row in USUAL.items() if isinstance(row, FaultKind)}
MEDIAN_S = {kind: row.median_s for kind, row in USUAL.items() if isinstance(row, FaultKind)}
