"""The cluster-autoscaler's gRPC expander: chooses the node groups that are least likely to fail.

The label `fleetcast.io/pool` of a group's template names the group's pool. Without the label, the group's
own name is that of its pool. Its risk is the mean risk of the pool's nodes within a day, times the number of
nodes to add. That is the expected number of failures. Groups of unknown risk are never removed, and neither
are groups of a pool with a low risk. The autoscaler's next expander chooses among the remaining groups.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import RequestError
from fleetcast.models.risk.scores import RISK_HORIZONS_S
from fleetcast.schedulers.adapter import NotKnown, Seen, Verb, Write
from fleetcast.schedulers.bands import BandRule
from fleetcast.schedulers.weather import Outlook, Weather

LABEL = "fleetcast.io/pool"
DAY = RISK_HORIZONS_S.index(86_400)
ALIKE = 1.25  # times the least risk: no difference
QUIET = BandRule().elevated  # a pool below it is never left out


class GroupOption(msgspec.Struct, rename="camel"):
    """A node group that could grow by a number of nodes. labels: those of its template node."""

    id: str
    node_count: int = 1
    labels: dict[str, str] = {}


class ExpanderQuestion(msgspec.Struct):
    options: list[GroupOption]


class ExpanderAnswer(msgspec.Struct):
    ids: list[str]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ExpanderQuestion).decode


class ExpanderAdapter:
    """The adapter `expander`, which returns the node groups that are least likely to fail.

    It returns at least one of the options, in their order. Without fresh weather, it returns all options.
    """

    fields: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.verbs = {"best_options": Verb(self._answer_best_options, _answer_all_options)}
        self._outlook: Outlook | None = None
        self._pools: Mapping[str, float] = {}

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterable[Write]:
        return ()

    def _answer_best_options(self, weather: Weather, body: bytes) -> bytes:
        options = _decode_options(body)
        if weather.nodes is None:
            raise NotKnown("the board has no scores yet")
        if weather.nodes is not self._outlook:
            self._outlook, self._pools = weather.nodes, compute_pool_risks(weather.nodes)
        return _encode(ExpanderAnswer(choose_best_options(options, self._pools)))


def compute_pool_risks(outlook: Outlook) -> dict[str, float]:
    """Return pool → mean risk of its nodes within a day. Pools of unknown risk are left out."""
    risk, found = outlook.risk[DAY], {}
    for code, pool in enumerate(outlook.pools):
        known = risk[(outlook.pool == code) & np.isfinite(risk)]
        if len(known):
            found[pool] = float(known.mean())
    return found


def choose_best_options(options: Sequence[GroupOption], pools: Mapping[str, float]) -> list[str]:
    """Return the ids of the options whose risk is the least, low, or unknown.

    pools: pool → risk of a node.
    """
    risks = [pools.get(option.labels.get(LABEL, option.id)) for option in options]
    costs = [None if p is None else p * max(1, option.node_count) for p, option in zip(risks, options, strict=True)]
    least = min((cost for cost in costs if cost is not None), default=0.0)
    return [
        option.id
        for option, p, cost in zip(options, risks, costs, strict=True)
        if p is None or cost is None or p < QUIET or cost <= ALIKE * least
    ]


def _answer_all_options(body: bytes) -> bytes:
    return _encode(ExpanderAnswer([option.id for option in _decode_options(body)]))


def _decode_options(body: bytes) -> list[GroupOption]:
    try:
        return _decode(body).options
    except msgspec.ValidationError as error:
        raise RequestError(explain_decode_error(error, _decode, body)) from None
