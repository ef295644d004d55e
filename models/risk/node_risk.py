"""Computation of node risk: the probability that a node fails, needs a drain, or is slow.

    hazard(kind, horizon) = history hazard(horizon)      from the node's own faults (fault_log, hazard),
                                                         higher if jobs fail more often (job_outcomes)
                          + excess hazard of the hour    the greater of rule priors and the fitted logistic

If a site's own fit serves (site_risk.py), it replaces the hazard of a day and of a week. Signals
that this fit does not know count as above.

p = 1 - exp(-hazard) grows with the horizon, as both terms do. The share of a reason is its part of the
hazard.
"""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.sums import divide
from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.printable import escape_unprintable
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import Topology
from fleetcast.fleet.xids import find_advice
from fleetcast.models.calibrate import map_probabilities
from fleetcast.models.risk.hazard import FAULTS_PER_NODE_DAY, FEATURES, PUBLISHED
from fleetcast.models.risk.job_outcomes import MOST_TIMES
from fleetcast.models.risk.part_risk import compute_part_risks
from fleetcast.models.risk.rules import ACTION_WORDS, ACTIONS, ROW, RULES
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, Action, HardReason, Reason, RiskScores
from fleetcast.models.risk.signals import Array, Mask, Signals, describe_signal
from fleetcast.models.risk.site_risk import SiteHazard

# Share of the base rate by kind: every fault ends in a repair; 23 % of InfiniteHBD's are of classes that slow a node
# down first (temperature, fan, power supply, PCIe width, link down, NIC speed).
BASE_SHARE = np.array([1.0, 1.0, 0.23])
MAX_REASONS = 8
CERTAIN = 0.995
FIT_FILE = "node_risk.json"
REPEAT_ROW, OUTCOME_ROW = ROW["recent_fault"], ROW["failed_jobs"]
DAY = RISK_HORIZONS_S.index(86_400)
GRAVITY = np.array([ACTIONS.index(rule.action) for rule in RULES])


class KindFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fit of one kind of risk: a logistic on rule levels, then isotonic steps.

    p = iso(sigmoid(intercept + levels @ weights)).
    """

    intercept: float
    weights: dict[str, float]
    isotonic_x: tuple[float, ...]
    isotonic_y: tuple[float, ...]


class RiskFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The coefficients that `fleetcast train risk` writes. `notes`: seed, sizes, scores on held-out nodes."""

    version: int
    kinds: dict[str, KindFit]
    notes: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return f"rules+logistic-{self.version}"


@cache
def load_shipped_fit() -> RiskFit | None:
    """Load the coefficients that ship with the program.

    Returns None if the build has none. Then only the rule priors count.
    """
    file = resources.files("fleetcast.models") / "fitted" / FIT_FILE
    return msgspec.json.decode(file.read_bytes(), type=RiskFit) if file.is_file() else None


def load_risk_fit(folder: Path) -> RiskFit:
    """Load the coefficients that `fleetcast train risk` wrote into a folder.

    Raises ConfigError if there are none.
    """
    path = folder / FIT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RiskFit)
    except OSError as error:
        raise ConfigError(f"cannot read the fitted model {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no fitted model: {explain_json_error(error)}") from None


@dataclass(frozen=True, slots=True)
class ExcessHazard:
    """The hazard of the next hour that signals add to the base hazard.

    total: (kind, node). parts: (kind, node, rule), which sum to `total`.
    """

    total: Array
    parts: Array


def compute_base_hazard(horizon_s: float) -> Array:
    """Return (kind,) the expected number of faults of an ordinary node within the horizon."""
    return FAULTS_PER_NODE_DAY * BASE_SHARE * horizon_s / 86_400


def compute_usual_risk(risk: Array) -> Array:
    """Return (kind, horizon) the probabilities of an ordinary node: the median of the known nodes.

    risk: (kind, horizon, node), NaN if unknown. If no node is known, the published rates are returned instead
    of NaN.
    """
    published = compute_published_risk()
    known = np.isfinite(risk)
    if not known.any():
        return published
    rows = np.where(known, risk, np.nan)
    rows = np.where(known.any(axis=2, keepdims=True), rows, published[:, :, None])
    return np.asarray(np.nanmedian(rows, axis=2))


def compute_published_risk() -> Array:
    """Return (kind, horizon) the probabilities of an ordinary node by published rates."""
    return 1 - np.exp(-np.stack([compute_base_hazard(horizon_s) for horizon_s in RISK_HORIZONS_S], axis=1))


def compute_prior_excess(levels: Array) -> ExcessHazard:
    """Return the excess hazard by the rules' priors, each scaled by its signal's strength.

    The priors count as independent hazards. levels: (node, rule).
    """
    prior = np.array([rule.prior for rule in RULES]).T
    hazard = -np.log1p(-np.minimum(prior, CERTAIN))
    rows = _find_rows_with_signals(levels)
    own = hazard[:, None, :] * levels[None, rows, :]
    own[:, :, REPEAT_ROW] = 0.0  # the history's
    found = _make_zero_excess(levels)
    found.parts[:, rows], found.total[:, rows] = own, own.sum(axis=2)
    return found


def _find_rows_with_signals(levels: Array) -> NDArray[np.intp]:
    """Return the rows of the nodes that have a signal of any rule. All other nodes have no excess."""
    return np.flatnonzero(levels.any(axis=1))


def _make_zero_excess(levels: Array) -> ExcessHazard:
    shape = (len(RISK_KINDS), *levels.shape)
    return ExcessHazard(np.zeros(shape[:2]), np.zeros(shape))


def compute_fitted_excess(levels: Array, fit: RiskFit) -> ExcessHazard:
    """Return the excess hazard by the fitted logistic regression.

    It is divided among the rules by their parts of the logit. levels: (node, rule).
    """
    found, rows = _make_zero_excess(levels), _find_rows_with_signals(levels)
    own = levels[rows]
    for k, kind in enumerate(RISK_KINDS):
        row = fit.kinds.get(kind)
        if row is None:
            continue
        weights = np.array([row.weights.get(rule.name, 0.0) for rule in RULES])
        logit = row.intercept + (levels @ weights)[rows]  # a product of some rows alone is rounded otherwise
        p = map_probabilities(1 / (1 + np.exp(-logit)), row.isotonic_x, row.isotonic_y)
        hazard = -np.log1p(-np.minimum(p, CERTAIN)) - compute_base_hazard(RISK_HORIZONS_S[0])[k]
        pull = np.maximum(own * weights, 0.0)
        pulled = pull.sum(axis=1)
        total = np.where(pulled > 0, np.maximum(hazard, 0.0), 0.0)
        found.total[k, rows], found.parts[k, rows] = total, total[:, None] * divide(pull, pulled[:, None], 0.0)
    return found


def compute_excess_hazard(levels: Array, fit: RiskFit | None) -> ExcessHazard:
    """Return, for each kind and node, the greater of the excess hazards by the priors and by the fit.

    Both are based on the same evidence, so they are not added. levels: (node, rule).
    """
    prior = compute_prior_excess(levels)
    if fit is None:
        return prior
    fitted = compute_fitted_excess(levels, fit)
    more = fitted.total > prior.total
    prior.total[more], prior.parts[more] = fitted.total[more], fitted.parts[more]
    return prior


def compute_published_hazard(nodes: int) -> Array:
    """Return (horizon, node) the published history hazard of nodes that never had a fault."""
    return PUBLISHED.compute_hazard(np.zeros((nodes, len(FEATURES))), RISK_HORIZONS_S)


def compute_outcome_factor(levels: Array) -> Array:
    """Return (node,) the factor by which failing jobs raise the hazard of a node's history.

    levels: (node, rule).
    """
    return 1 + (MOST_TIMES - 1) * levels[:, OUTCOME_ROW]


def compute_hazards(excess: ExcessHazard, history: Array, site: SiteHazard | None = None) -> Array:
    """Return (kind, horizon, node) the hazards of signals and history together.

    history: (horizon, node) hazard by history alone. site: the hazard by a site's fit. For a day and more, it
    replaces the hazard, and the excess of rules that it does not know is added. The hazard of a shorter
    horizon is at most that of the day.
    """
    shipped = excess.total[:, None, :] + BASE_SHARE[:, None, None] * history[None, :, :]
    if site is None:
        return shipped
    combined = site.hazard + excess.parts[:, :, ~site.seen].sum(axis=2)[:, None, :]
    short = np.minimum(excess.total[:, None, :] + site.hazard[:, :DAY], combined[:, DAY : DAY + 1])
    return np.where(np.isnan(site.hazard), shipped, np.concatenate((short, combined[:, DAY:]), axis=1))


def compute_probabilities(excess: ExcessHazard, history: Array, known: Mask, site: SiteHazard | None = None) -> Array:
    """Return (kind, horizon, node) probabilities, NaN if unknown. history, site: as in `compute_hazards`."""
    return np.where(known[None, None, :], 1 - np.exp(-compute_hazards(excess, history, site)), np.nan)


def find_explained_excess(excess: ExcessHazard, site: SiteHazard | None) -> ExcessHazard:
    """Return the hazard that the reasons must explain: the excess, and the parts of a site's fit."""
    if site is None:
        return excess
    own = ~np.isnan(site.past)[:, :, None] & site.seen[None, None, :]
    parts = np.where(own, site.parts, excess.parts)
    return ExcessHazard(parts.sum(axis=2), parts)


def score_nodes(
    signals: Signals,
    known: Mask,
    now_ms: int,
    fit: RiskFit | None,
    history: Array | None = None,
    topology: Topology | None = None,
    site: SiteHazard | None = None,
) -> RiskScores:
    """Return the probabilities, reasons and actions of all nodes.

    known: (node,) whether any telemetry or event of the node ever arrived. history: (horizon, node) hazard by
    own faults. None means that no node ever had one. topology: if None, the risks of parts are left
    out. site: the hazard by a site's own fit.
    """
    nodes = len(known)
    levels = signals.compute_levels(nodes)
    excess = compute_excess_hazard(levels, fit)
    history = (compute_published_hazard(nodes) if history is None else history) * compute_outcome_factor(levels)
    values = compute_probabilities(excess, history, known, site)
    hard_rule = np.array([rule.hard for rule in RULES])
    hard = np.zeros(nodes, bool)
    hard[signals.node[hard_rule[signals.rule] & signals.firm]] = True
    hazard, total = compute_signal_hazards(signals, levels, find_explained_excess(excess, site), history[DAY])
    reasons = _list_reasons(signals, hazard / total[signals.node], now_ms)
    gravest = _find_gravest_signals(signals)
    actions = {node: _choose_action(signals, gravest.get(node), rows[0].sentence) for node, rows in reasons.items()}
    parts = {} if topology is None else compute_part_risks(signals, hazard, topology)
    return RiskScores(values, reasons, actions, hard, fit.name if fit else "rules", parts)


def compute_signal_hazards(
    signals: Signals, levels: Array, excess: ExcessHazard, history: Array
) -> tuple[Array, Array]:
    """Return (signal,) each signal's part of its node's hazard within a day, and (node,) that hazard.

    The hazard is that of the node's worst kind of risk. Several signals of one rule divide its part. history:
    (node,) the history hazard of the day. The signal of a recent fault gets the excess of this hazard over that of
    the least burdened node.
    """
    own = history / compute_outcome_factor(levels)
    again = np.where(levels[:, REPEAT_ROW] > 0, np.maximum(own - _find_least_hazard(own, levels), 0.0), 0.0)
    total = excess.total + BASE_SHARE[:, None] * history
    worst = (excess.total).argmax(axis=0)
    rows = np.arange(levels.shape[0])
    weight = np.zeros_like(levels)
    np.add.at(weight, (signals.node, signals.rule), signals.strength)
    own_share = divide(signals.strength, weight[signals.node, signals.rule], 0.0)
    node, rule = signals.node, signals.rule
    kind = worst[node]
    part = excess.parts[kind, node, rule]
    part = np.where(rule == REPEAT_ROW, BASE_SHARE[kind] * again[node], part)
    part = np.where(rule == OUTCOME_ROW, BASE_SHARE[kind] * (history - own)[node], part)
    return part * own_share, total[worst, rows]


def _find_least_hazard(own: Array, levels: Array) -> float:
    """Return the least hazard of a node without a recent fault. If each node had one, return the least of all.

    own: (node,) hazards by history. levels: (node, rule). A repaired node may have a lower hazard than a node
    that never failed, so nodes with a recent fault do not count.
    """
    quiet = own[levels[:, REPEAT_ROW] == 0]
    return float((quiet if len(quiet) else own).min(initial=np.inf))


def _list_reasons(signals: Signals, shares: Array, now_ms: int) -> dict[int, tuple[Reason, ...]]:
    """Return node row -> at most MAX_REASONS reasons, firm evidence first, then by share.

    shares: (signal,).
    """
    order = np.lexsort((-shares, ~signals.firm, signals.node))
    reasons: dict[int, list[Reason]] = {}
    for at in order.tolist():
        shown_reasons = reasons.setdefault(int(signals.node[at]), [])
        if len(shown_reasons) < MAX_REASONS:
            shown_reasons.append(_make_reason(signals, at, float(shares[at]), now_ms))
    return {node: tuple(rows) for node, rows in reasons.items()}


def _make_reason(signals: Signals, at: int, share: float, now_ms: int) -> Reason:
    rule = RULES[signals.rule[at]]
    value, usual, since_ms = float(signals.value[at]), float(signals.usual[at]), int(signals.since_ms[at])
    entity = signals.entity[at]
    text = describe_signal(rule.name, entity, value, usual, since_ms, now_ms)
    words = escape_unprintable(signals.words[at]) if signals.words else ""
    kind = HardReason if rule.hard else Reason
    return kind(
        feature=rule.feature,
        entity=entity,
        value=round(value, 3) if np.isfinite(value) else 0.0,
        usual=round(usual, 3) if np.isfinite(usual) else None,
        unit=rule.unit,
        share=round(share, 3),
        since_ms=since_ms or None,
        sentence=_add_words(text, words, rule.kind is EntityKind.PORT) if words else text,
    )


def _add_words(text: str, words: str, places: bool) -> str:
    """Add `words` at the end of a sentence.

    If `places` is true, add them in brackets after the port that the sentence names.

    >>> _add_words("port mlx5_3: link down", "rail 3, GPU 3", True)
    'port mlx5_3 (rail 3, GPU 3): link down'
    """
    head, colon, rest = text.partition(": ")
    return f"{head} ({words}){colon}{rest}" if places else f"{text}: {words}"


def _find_gravest_signals(signals: Signals) -> dict[int, int]:
    """Return node row → the index of its firm signal with the gravest action. The first one wins a tie."""
    firm = np.flatnonzero(signals.firm)
    order = firm[np.lexsort((firm, -GRAVITY[signals.rule[firm]]))]
    nodes, first = np.unique(signals.node[order], return_index=True)
    return dict(zip(nodes.tolist(), order[first].tolist(), strict=True))


def _choose_action(signals: Signals, gravest: int | None, first: str) -> Action:
    """Return the action of a node's gravest firm signal, or `watch` if no signal is firm.

    gravest: the index of that signal. first: the sentence of the node's first reason.
    """
    code = "watch" if gravest is None else RULES[signals.rule[gravest]].action
    words = ACTION_WORDS[code]
    then = "" if gravest is None else _find_xid_advice(signals, gravest)
    return Action(code, f"{words[0].upper()}{words[1:]}: {first}.{then}")


def _find_xid_advice(signals: Signals, at: int) -> str:
    """Return NVIDIA's advice about an XID as a sentence, or "" if the signal is not about an XID."""
    code = signals.value[at]
    if RULES[signals.rule[at]].feature != "xid" or not np.isfinite(code):
        return ""
    words = find_advice(round(float(code)))
    return f" NVIDIA's advice for XID {code:.0f}: {words}." if words else ""
