"""What InfiniBand ports and whole nodes say against themselves: Columns in, Sight out."""

from dataclasses import dataclass

import numpy as np

from models.memory import RiskMemory
from models.peers import MAD_TO_SIGMA, group_median, middle, most_have, spread
from models.port_peers import PortPeers
from models.signals import Array, Columns, Mask, Sight, Times

ACTIVE = 4  # port state
SYMBOL_ERRORS_10M = 120
SYMBOLS_FEW_10M, SYMBOLS_TIMES = 5, 3.0  # above what nine of ten ports of the fleet have
LATE_RATIO, LATE_LEAST_S, LATE_SIGMAS = 1.5, 0.05, 4.0  # over its usual; over that and above what nodes differ by
LOST_30M, LOST_LEAST, LOST_MOST = 3.0, 0.03, 0.5  # scrapes; shares of them: two restarts lose less, an outage more
LOST_TIMES = 3.0  # what most nodes lose
IN_A_ROW = 0.8  # of what it can have lost since then
ACK_TIMEOUTS = 10  # in ten minutes: each is a packet that nobody answered for, on a path that loses none
SILENT_SCRAPES, SILENT_LEAST_S = 4, 45.0
NODE_SILENT_S = 75.0  # at most
EXPORTER_SILENT_S = 120.0
FROZEN_S = 180.0
STOLEN, SHORT = 0.015, 0.2  # shares of time: of its CPUs by a host's other guests; in which a task waits for memory
STOLEN_RATIO = 4.0  # times what the fleet's nodes lose: where all guests share their hosts, that is usual
MOST = 0.5  # when more than this share of all nodes is silent at once, it is us


def _sight(on: Mask, value: Array, usual: Array, strength: Array, since: Times | None = None) -> Sight:
    strength = np.clip(np.nan_to_num(strength), 0.0, 1.0)
    since = np.zeros(len(on), np.int64) if since is None else since
    return Sight(on, value, usual, strength, since, np.ones(len(on), bool))


def unseen(rows: int) -> Sight:
    """A rule that is judged elsewhere: nothing here."""
    return _sight(np.zeros(rows, bool), np.zeros(rows), np.full(rows, np.nan), np.zeros(rows))


def port_sights(port: Columns, nodes: int, memory: RiskMemory, peers: PortPeers | None = None) -> dict[str, Sight]:
    """The rules of ports, by name. A port that was never up is not cabled; `slow_nic` needs to know the jobs."""
    state, speed = port["state"], port["speed_bytes_per_s"]
    was_up, was_speed = memory.learn_link(state == ACTIVE, speed)
    unknown = np.full(port.rows, np.nan)
    down = np.isfinite(state) & (state != ACTIVE) & was_up
    flaps = np.fmax(port["link_downed_count_30m"], port["link_recoveries_count_30m"])
    symbols = port["symbol_errors_count_10m"]
    siblings = spread(group_median(np.where(was_up, speed, np.nan), port.node, nodes)[0], port.node)
    best = np.fmax(np.fmax(port["max_speed_bytes_per_s"], was_speed), siblings)
    if peers is not None:
        best = np.fmax(best, peers.expected(np.where(was_up, best_of(port, was_speed), np.nan)))
    few, least = port["symbol_errors_count_30m"], port["symbol_errors_count_10m"]
    usually = most_have(few)
    some = (least >= SYMBOLS_FEW_10M) & (least < SYMBOL_ERRORS_10M) & (few > SYMBOLS_TIMES * usually) & ~(flaps >= 1)
    timeouts = port["ack_timeouts_count_10m"]
    slow = (speed > 0) & (speed < 0.95 * best) & (state == ACTIVE)
    since = port.since("state")
    return {
        "link_down": _sight(down, state, np.full(port.rows, float(ACTIVE)), np.ones(port.rows), since),
        "link_flap": _sight(flaps >= 1, flaps, unknown, 0.4 + 0.1 * flaps),
        "link_errors": _sight(symbols >= SYMBOL_ERRORS_10M, symbols, unknown, np.log10(np.fmax(symbols, 1)) / 5),
        "link_errors_few": _sight(some, few, np.full(port.rows, usually), 0.2 + np.log10(np.fmax(few, 1)) / 4),
        "link_speed": _sight(slow, speed, best, 1.2 - speed / best),
        "link_timeouts": _sight(timeouts >= ACK_TIMEOUTS, timeouts, unknown, np.log10(np.fmax(timeouts, 1)) / 4),
        "slow_nic": unseen(port.rows),
    }


def best_of(port: Columns, was_speed: Array) -> Array:
    """(port,) bytes/s: the best speed seen of each port by itself."""
    return np.fmax(port["max_speed_bytes_per_s"], np.fmax(was_speed, port["speed_bytes_per_s"]))


@dataclass(frozen=True, slots=True)
class Quiet:
    """(node,) seconds for which a node's GPUs and its ports told nothing; NaN where nothing ever came.

    Counted up to the last time that somebody looked (the node's own samples tell): when we are late, nobody is silent.
    """

    gpu_s: Array
    port_s: Array

    @classmethod
    def of(cls, gpu: Columns, port: Columns, node: Columns) -> "Quiet":
        looked_s = np.nan_to_num(node.age_s)
        return cls(*(np.maximum(newest_s(part, node.rows) - looked_s, 0.0) for part in (gpu, port)))

    @property
    def any_s(self) -> Array:
        return np.fmin(self.gpu_s, self.port_s)


def newest_s(columns: Columns, nodes: int) -> Array:
    """(node,) the smallest age among a node's entities."""
    age = columns.age_s
    known = np.isfinite(age) & (columns.node >= 0)
    newest = np.full(nodes, np.inf)
    np.minimum.at(newest, columns.node[known], age[known])
    return np.where(np.isfinite(newest), newest, np.nan)


def node_sights(node: Columns, gpu: Columns, quiet: Quiet, stated_gpus: Array, memory: RiskMemory) -> dict[str, Sight]:
    """The rules of whole nodes, by name. `stated_gpus`: (node,) what the topology says, 0 where it does not."""
    interval_s = memory.interval_s
    n, now_ms = node.rows, node.now_ms
    unknown = np.full(n, np.nan)
    known = np.isfinite(quiet.any_s)
    unanswered = ~(node["scrape_up"] > 0)  # asked in vain, or nobody asks and the node sends by itself
    silent = unanswered & (quiet.any_s >= min(max(SILENT_SCRAPES * interval_s, SILENT_LEAST_S), NODE_SILENT_S))
    if silent.sum() > max(MOST * known.sum(), 1) and n > 1:
        silent = np.zeros(n, bool)
    mute = (quiet.gpu_s >= EXPORTER_SILENT_S) & ~silent & (quiet.port_s < NODE_SILENT_S)
    frozen_s = _frozen(gpu, n)
    reported, most = node["gpus_reported"], np.fmax(node["max_gpus_reported"], stated_gpus)
    vanished = np.bincount(gpu.node[np.nan_to_num(gpu["silent_s"]) > 0], minlength=n) > 0  # each speaks for itself
    missing = (reported < most) & (reported > 0) & ~vanished
    took, usual, noise = (
        node["scrape_duration_s"],
        node["scrape_duration_s_mean_30m"],
        node["scrape_duration_s_std_30m"],
    )
    slow = (took > 1.0) & (took > 5 * usual) & (took > usual + 6 * np.nan_to_num(noise))
    return {
        "node_silent": _sight(silent, quiet.any_s, unknown, np.ones(n), _ago(now_ms, quiet.any_s)),
        "exporter_silent": _sight(mute, quiet.gpu_s, unknown, np.ones(n), _ago(now_ms, quiet.gpu_s)),
        "exporter_frozen": _sight(frozen_s >= FROZEN_S, frozen_s, unknown, np.ones(n), _ago(now_ms, frozen_s)),
        "gpus_missing": _sight(missing, reported, most, 0.5 + 0.5 * (1 - reported / most)),
        "scrape_slow": _sight(slow, took, usual, np.full(n, 0.5)),
        "scrapes_late": _scrapes_late(node, memory),
        "scrapes_lost": _scrapes_lost(node, silent, interval_s),
        **_host_sights(node),
    }


def _scrapes_late(node: Columns, memory: RiskMemory) -> Sight:
    """For minutes its pages take longer than they did, and the other nodes' do not: the mean, so one late page is none.

    A node's share of its usual is compared with the fleet's middle: when all are late, it is us or the network.
    """
    took = node["scrape_duration_s_mean_2m"]
    usual = memory.learn_scrape(took, node.now_ms)
    ratio = took / np.where(usual > 0, usual, np.nan)
    known = ratio[np.isfinite(ratio)]
    fleet = middle(known) if len(known) else 1.0
    sigma = MAD_TO_SIGMA * middle(np.abs(known - fleet)) if len(known) else 0.0
    over = max(LATE_RATIO * max(fleet, 1.0), fleet + LATE_SIGMAS * sigma)
    on = (ratio >= over) & (took - usual >= LATE_LEAST_S)
    return _sight(on, took, usual, 0.4 + np.log10(np.fmax(ratio, 1)) / 2)


def _scrapes_lost(node: Columns, silent: Mask, interval_s: float) -> Sight:
    """Scrapes lost now and then, in the last ten minutes and before: a restart or a reboot loses some in a row."""
    late, all_lost = node["gaps_10m"], node["gaps_30m"]
    share = all_lost * interval_s / 1800.0
    usual = most_have(share)
    again = (late >= 1) & (all_lost - late >= 1) & (all_lost >= LOST_30M)
    back = node.since("scrape_up")
    back_s = np.where(back > 0, (node.now_ms - back) / 1000, np.nan)
    in_a_row = late * interval_s >= IN_A_ROW * (600.0 - back_s)  # one outage that began before these ten minutes
    on = again & ~in_a_row & (share >= LOST_LEAST) & (share > LOST_TIMES * usual) & (share <= LOST_MOST) & ~silent
    return _sight(on, share, np.full(node.rows, usual), 0.5 + share)


def _host_sights(node: Columns) -> dict[str, Sight]:
    """What node_exporter tells of a host: shares of time, as rates of counters of seconds."""
    stolen, short, unknown = node["cpu_steal_s_mean_2m"], node["memory_pressure"], np.full(node.rows, np.nan)
    told = np.sort(stolen[np.isfinite(stolen)])
    usual = float(told[(len(told) - 1) // 4]) if len(told) else 0.0  # three of four nodes lose at least so much
    taken = (stolen >= max(STOLEN, STOLEN_RATIO * usual)) & (stolen <= 1)
    return {
        "cpu_stolen": _sight(taken, stolen, np.full(node.rows, usual), 0.2 + 2 * stolen),
        "memory_short": _sight(short >= SHORT, short, unknown, short),
    }


def _frozen(gpu: Columns, nodes: int) -> Array:
    """(node,) how long no value of any of its GPUs has changed while scrapes arrive.

    NaN for a page that has hardly ever moved since we know it: a file served by hand is no sick exporter.
    """
    frozen = gpu["frozen_s"]
    fresh = np.isfinite(frozen) & (gpu.node >= 0) & (gpu.age_s < NODE_SILENT_S)
    least, longest = np.full(nodes, np.inf), np.zeros(nodes)
    np.minimum.at(least, gpu.node[fresh], frozen[fresh])
    np.maximum.at(longest, gpu.node[fresh], np.nan_to_num(gpu["first_seen_s"][fresh]))
    return np.where(np.isfinite(least) & (longest - least > FROZEN_S), least, np.nan)


def _ago(now_ms: int, seconds: Array) -> Times:
    return np.where(np.isfinite(seconds), now_ms - np.nan_to_num(seconds) * 1000, 0).astype(np.int64)
