"""Site risk: the hazard of a day and of a week by kind of risk, fitted on a site's own archive.

`fleetcast train risk` fits a discrete-time logistic for each of RISK_KINDS and HORIZONS_DAYS. Its
features describe a node at one moment:

    of its past    faults (models/risk/hazard.py), returns from repair, drains and warnings, by node events
    of the day     the strength of each rule's recent evidence against it (models/risk/day_levels.py)

Weights have the sign of the site's data. Hard rules are no features, because a node that fails now
is not predicted. Rules that the site saw too rarely are no features either. For both, the priors
and the shipped fit still count (`compute_hazards` in models/risk/node_risk.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.sums import divide
from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.fleet.errors import ModelError
from fleetcast.fleet.nodes import NodeRecord
from fleetcast.fleet.xids import classify_severity
from fleetcast.models.risk.day_levels import DayLevels
from fleetcast.models.risk.fault_log import FaultLog
from fleetcast.models.risk.hazard import (
    FEATURES,
    HORIZONS_DAYS,
    HorizonFit,
    interpolate_fitted_hazard,
    make_feature_columns,
)
from fleetcast.models.risk.rules import RULES
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS

Array = NDArray[np.float64]

SITE_FILE = "site_risk.json"
DAY_MS = 86_400_000
EVENT_FEATURES = ("faults_90d", "drains_90d", "warnings_7d", "repair_30d")
PAST_FEATURES = (*FEATURES, *EVENT_FEATURES)
SITE_FEATURES = (*PAST_FEATURES, *(rule.name for rule in RULES))
NO_FEATURE = frozenset({"recent_fault", "drain_requested"})  # the past says it
USABLE = np.array([not rule.hard and rule.name not in NO_FEATURE for rule in RULES])
DAYS_S = np.array([days * 86_400 for days in HORIZONS_DAYS])
EVENTS_MS = 600_000  # events change slowly: their columns are made so often


class SiteFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fits of a site by kind of risk and days of the horizon.

    A kind is missing if it had too few events. notes: how the fit was made.
    """

    kinds: dict[str, dict[int, HorizonFit]]
    notes: dict[str, Any] = {}

    @property
    def fitted_rules(self) -> NDArray[np.bool_]:
        """(rule,) whether the rule is a feature of the fit."""
        names = {name for fits in self.kinds.values() for fit in fits.values() for name in fit.weights}
        return np.array([rule.name in names for rule in RULES])

    def save(self, folder: Path) -> None:
        """Write the fit into an empty folder, which the registry provides."""
        (folder / SITE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "SiteFit":
        """Load the fit from a version's folder. Raises ModelError if it is missing, damaged or incomplete."""
        path = folder / SITE_FILE
        try:
            fit = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is no fitted site risk: {explain_json_error(error)}") from None
        for kind, fits in fit.kinds.items():
            if kind not in RISK_KINDS or set(fits) != set(HORIZONS_DAYS):
                raise ModelError(f"{path}: {kind} of {sorted(fits)} days: expected {RISK_KINDS} of {HORIZONS_DAYS}")
        return fit


def make_event_columns(faults: FaultLog, records: Mapping[str, NodeRecord], names: Sequence[str], now_ms: int) -> Array:
    """Return (node, PAST_FEATURES) features from the faults and node events up to `now_ms`.

    Later faults and events are ignored.
    """
    now_day, nodes = now_ms / DAY_MS, len(names)
    rows = {name: row for row, name in enumerate(names)}
    known = faults.make_history(rows).truncate(now_day)
    recent = np.bincount(known.node[known.start_day > now_day - 90], minlength=nodes)
    predicted = np.zeros((nodes, 2))
    back_day = known.find_latest(known.end_day, nodes)
    for name, record in records.items():
        row = rows.get(name)
        if row is None:
            continue
        for event in record.events:
            age_day = now_day - event.time_ms / DAY_MS
            if age_day < 0:
                continue
            if event.type == "drain" and age_day < 90:
                predicted[row, 0] += 1
            elif event.type in ("xid", "health") and age_day < 7 and classify_severity(event) == "warning":
                predicted[row, 1] += 1
            elif event.type in ("undrain", "returned"):
                back_day[row] = max(back_day[row], now_day - age_day)
    columns = np.column_stack((np.log1p(recent), np.log1p(predicted), np.exp(-(now_day - back_day) / 30)))
    return np.concatenate((make_feature_columns(known, now_day, nodes), columns), axis=1)


@dataclass(frozen=True, slots=True)
class SiteHazard:
    """The hazard that a site's own fit expects.

    hazard: (kind, horizon, node) at RISK_HORIZONS_S, NaN for kinds without a fit. past: (kind, node)
    the hazard of the day without the rules. parts: (kind, node, rule) the hazard that each rule adds to
    `past`. seen: (rule,) whether the rule is a feature of the fit.
    """

    hazard: Array
    past: Array
    parts: Array
    seen: NDArray[np.bool_]


class SiteRisk:
    """The risk model fitted on a site's archive, while it serves or runs in the shadow.

    Only one thread may call it at a time, because it caches the features that it computes from events.
    """

    def __init__(self, fit: SiteFit, name: str) -> None:
        self.fit, self.name = fit, name
        self._events = np.zeros((0, len(PAST_FEATURES)))
        self._made_of: tuple[Sequence[str], int] = ((), -1)

    def compute_hazard(
        self, faults: FaultLog, days: DayLevels, records: Mapping[str, NodeRecord], names: Sequence[str], now_ms: int
    ) -> SiteHazard:
        """Return the present hazard of every node by the site's fit.

        days: must already include the levels of this moment.
        """
        made_of = names, now_ms // EVENTS_MS
        if made_of != self._made_of:
            self._events, self._made_of = make_event_columns(faults, records, names, now_ms), made_of
        return compute_site_hazard(self.fit, np.concatenate((self._events, days.compute_levels(names, now_ms)), axis=1))


def compute_site_hazard(fit: SiteFit, columns: Array) -> SiteHazard:
    """Return the hazard by a site's fit. columns: (node, SITE_FEATURES)."""
    nodes = len(columns)
    hazard = np.full((len(RISK_KINDS), len(RISK_HORIZONS_S), nodes), np.nan)
    past, parts = np.full((len(RISK_KINDS), nodes), np.nan), np.zeros((len(RISK_KINDS), nodes, len(RULES)))
    quiet = columns.copy()
    quiet[:, len(PAST_FEATURES) :] = 0.0
    day = HORIZONS_DAYS.index(1)
    for k, kind in enumerate(RISK_KINDS):
        fits = fit.kinds.get(kind)
        if fits is None:
            continue
        p, alone = (
            [fits[days].predict_probability(rows, SITE_FEATURES) for days in HORIZONS_DAYS] for rows in (columns, quiet)
        )
        hazard[k] = interpolate_fitted_hazard(np.stack(p), RISK_HORIZONS_S)
        past[k] = interpolate_fitted_hazard(np.stack(alone), RISK_HORIZONS_S)[RISK_HORIZONS_S.index(86_400)]
        weights = np.array([fits[HORIZONS_DAYS[day]].weights.get(rule.name, 0.0) for rule in RULES])
        pull = np.maximum(columns[:, len(PAST_FEATURES) :] * weights, 0.0)
        total = pull.sum(axis=1)
        more = np.maximum(hazard[k, RISK_HORIZONS_S.index(86_400)] - past[k], 0.0)
        parts[k] = more[:, None] * divide(pull, total[:, None], 0.0)
    return SiteHazard(hazard, past, parts, fit.fitted_rules)
