"""Volcano's `extender` plugin (pkg/scheduler/plugins/extender): prioritize and enqueueable.

Structs of Volcano's scheduler have their Go names. A pod in them is a v1.Pod. We read only the
fields that we need.

prioritize    a score from 0 to 100 for every node of the request: ten times that of kube-scheduler's extender
enqueueable   reject a gang that no set of our nodes could ever hold, and abstain otherwise

enqueueable never permits a job, because a permit would overrule the plugins of later tiers. It also never
holds a job back for lack of room, because the job could then not preempt others.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.gpu_resources import is_gpu_resource
from fleetcast.schedulers.adapter import NotKnown, Seen, Verb, Write
from fleetcast.schedulers.kube_types import KubeContainer, KubePod, KubePodSpec, KubeResources, Quantities
from fleetcast.schedulers.ratings import NEUTRAL, Ratings
from fleetcast.schedulers.weather import Weather

SCALE = 10
ABSTAIN, REJECT = 0, -1


class VolcanoTask(msgspec.Struct, rename="pascal"):
    """The fields of a TaskInfo that we read."""

    pod: KubePod | None = None


class VolcanoNode(msgspec.Struct, rename="pascal"):
    """The fields of a NodeInfo that we read."""

    name: str


class PrioritizeArgs(msgspec.Struct):
    task: VolcanoTask | None = None
    nodes: list[VolcanoNode] | None = None


class VolcanoScores(msgspec.Struct, rename="camel"):
    """The answer of prioritize. Volcano treats an answer without `nodeScore` as an error."""

    node_score: dict[str, float]
    error_message: str = ""


class VolcanoGroupSpec(msgspec.Struct, rename="pascal"):
    min_resources: Quantities | None = None


class VolcanoGroup(msgspec.Struct, rename="pascal"):
    spec: VolcanoGroupSpec | None = None


class VolcanoJob(msgspec.Struct, rename="pascal"):
    """The fields of a JobInfo that we read: the minimal resources of its gang."""

    pod_group: VolcanoGroup | None = None

    @property
    def gpus(self) -> int:
        asked = self.pod_group and self.pod_group.spec and self.pod_group.spec.min_resources
        together = {name: amount for name, amount in (asked or {}).items() if is_gpu_resource(name)}
        return KubePod(spec=KubePodSpec([KubeContainer(KubeResources(together))])).gpus


class EnqueueableArgs(msgspec.Struct):
    job: VolcanoJob | None = None


class EnqueueableAnswer(msgspec.Struct):
    """The answer of enqueueable. status: 1 permit, 0 abstain, -1 reject."""

    status: int


Args = TypeVar("Args", bound=msgspec.Struct)
_encode = msgspec.json.Encoder().encode
_read_prioritize = msgspec.json.Decoder(PrioritizeArgs)
_read_enqueueable = msgspec.json.Decoder(EnqueueableArgs)


class VolcanoAdapter:
    """The adapter `volcano`, which rates nodes for Volcano and rejects gangs that can never fit.

    Raises RequestError for bodies of the wrong form.
    """

    fields: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._ratings = Ratings()
        self._weather: Weather | None = None
        self.verbs: Mapping[str, Verb] = {
            "prioritize": Verb(self._answer_prioritize, _prioritize_without_weather),
            "enqueueable": Verb(self._answer_enqueueable, _answer_with_abstention),
        }

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterable[Write]:
        return ()

    def _answer_prioritize(self, weather: Weather, body: bytes) -> bytes:
        ratings, args = self._get_ratings(weather), _decode_args(_read_prioritize, body)
        pod = args.task.pod if args.task else None
        scores, rows = ratings.compute_scores(ratings.normalise_gpus(pod.gpus if pod else 0)), ratings.outlook.rows
        names = [node.name for node in args.nodes or ()]
        return _encode_scores({name: int(scores[rows[name]]) if name in rows else NEUTRAL for name in names})

    def _answer_enqueueable(self, weather: Weather, body: bytes) -> bytes:
        ratings, args = self._get_ratings(weather), _decode_args(_read_enqueueable, body)
        gpus = args.job.gpus if args.job else 0
        could = int(ratings.outlook.gpus[~ratings.find_unusable_nodes().mask].sum())
        return _encode(EnqueueableAnswer(REJECT if gpus > could else ABSTAIN))

    def _get_ratings(self, weather: Weather) -> Ratings:
        """Return the ratings for this weather. Raises NotKnown if it has no nodes."""
        if weather.nodes is None:
            raise NotKnown("the board has no scores yet")
        if weather is not self._weather:
            self._ratings.use_outlook(weather.nodes)
            self._weather = weather
        return self._ratings


def _prioritize_without_weather(body: bytes) -> bytes:
    args = _decode_args(_read_prioritize, body)
    return _encode_scores({node.name: NEUTRAL for node in args.nodes or ()})


def _answer_with_abstention(body: bytes) -> bytes:
    _decode_args(_read_enqueueable, body)
    return _encode(EnqueueableAnswer(ABSTAIN))


def _encode_scores(scores: Mapping[str, int]) -> bytes:
    return _encode(VolcanoScores({name: float(SCALE * score) for name, score in scores.items()}))


def _decode_args(decoder: msgspec.json.Decoder[Args], body: bytes) -> Args:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(explain_decode_error(error, decoder, body)) from None
