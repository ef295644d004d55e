"""The load of served models, summed over their instances.

Rates and histograms are added up. The use of the KV cache is a mean. The value of the fullest instance
is shown with it.
"""

from collections.abc import Sequence

from msgspec import structs

from fleetcast.features.serving import ServedInstance
from fleetcast.fleet.metrics import TTFT_EDGES_MS
from fleetcast.service.answers.served_models import InstanceLoad, ServedModel, ServedModels, TimeToFirstToken
from fleetcast.service.board.board import Section
from fleetcast.service.exposition import Page
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.documents import round_number
from fleetcast.service.pipeline.publish import encode
from fleetcast.service.pipeline.tick import Tick

QUANTILES = (0.5, 0.9, 0.99)


class ServedInstances(Capability):
    """The capability that publishes the served models of a tick."""

    def __init__(self) -> None:
        self._document = ServedModels(0, [])

    def make_sections(self, tick: Tick) -> list[Section]:
        self._document = make_served_document(tick.served, tick.now_ms)
        return [Section("doc.served_models", encode(self._document), tick.now_ms)]

    def make_page(self, tick: Tick) -> bytes:
        return make_served_page(self._document)


def make_served_document(instances: Sequence[ServedInstance], now_ms: int) -> ServedModels:
    """Make the document of `GET /v1/served-models`: a row for each pool and model, in order of names."""
    models: dict[tuple[str, str], list[ServedInstance]] = {}
    for instance in instances:
        models.setdefault((instance.pool, instance.model), []).append(instance)
    return ServedModels(now_ms, [_make_model_row(*key, models[key]) for key in sorted(models)])


def _make_model_row(pool: str, model: str, instances: list[ServedInstance]) -> ServedModel:
    used = [one.kv_cache_used for one in instances if one.kv_cache_used is not None]
    return ServedModel(
        pool=pool,
        model=model,
        instances=[
            InstanceLoad(
                instance=one.instance,
                age_s=one.age_s,
                requests_running=one.requests_running,
                requests_waiting=one.requests_waiting,
                kv_cache_used=None if one.kv_cache_used is None else round_number(one.kv_cache_used),
            )
            for one in sorted(instances, key=lambda one: one.instance)
        ],
        requests_running=_sum_reported(instances, "requests_running"),
        requests_waiting=_sum_reported(instances, "requests_waiting"),
        kv_cache_used=round_number(sum(used) / len(used)) if used else None,
        kv_cache_used_max=round_number(max(used)) if used else None,
        requests_per_s=_sum_reported(instances, "requests_finished"),
        prompt_tokens_per_s=_sum_reported(instances, "prompt_tokens"),
        generated_tokens_per_s=_sum_reported(instances, "generated_tokens"),
        ttft_s=compute_ttft(instances),
    )


def _sum_reported(instances: Sequence[ServedInstance], name: str) -> float | None:
    """Return the sum of a value over the instances that report it, or None if no instance does.

    name: the attribute of ServedInstance.
    """
    reported = [value for one in instances if (value := getattr(one, name)) is not None]
    return round_number(sum(reported)) if reported else None


def compute_ttft(instances: Sequence[ServedInstance]) -> TimeToFirstToken:
    """Compute the mean and quantiles of the time to first token within the window, in seconds.

    Only histogram edges that all instances have are used.
    """
    telling = [one for one in instances if one.ttft_requests and one.ttft_s is not None]
    requests = sum(one.ttft_requests or 0.0 for one in telling)
    mean = sum(one.ttft_s or 0.0 for one in telling) / requests if requests > 0 else None
    edges, counts = [], []
    for at, edge_ms in enumerate(TTFT_EDGES_MS):
        reported = [one.ttft_le[at] for one in telling]
        if telling and None not in reported:
            edges.append(edge_ms / 1000)
            counts.append(sum(value or 0.0 for value in reported))
    quantiles = (interpolate_quantile(edges, counts, q * requests) for q in QUANTILES)
    return TimeToFirstToken(None if mean is None else round_number(mean), *quantiles)


def interpolate_quantile(edges: Sequence[float], counts: Sequence[float], rank: float) -> float | None:
    """Return the value at which a cumulative histogram reaches `rank`.

    Returns None without requests, or beyond the last edge. counts: requests up to each edge.

    >>> interpolate_quantile([0.1, 1.0], [10.0, 20.0], 15.0), interpolate_quantile([0.1, 1.0], [10.0, 20.0], 30.0)
    (0.55, None)
    """
    if rank <= 0:
        return None
    low, below = 0.0, 0.0
    for edge, count in zip(edges, counts, strict=True):
        if count >= rank:
            return (
                round_number(low + (edge - low) * (rank - below) / (count - below))
                if count > below
                else round_number(edge)
            )
        low, below = edge, max(below, count)
    return None


def make_served_page(document: ServedModels) -> bytes:
    """Make the metrics page of the served models."""
    page = Page()
    labelled = [({"pool": row.pool, "model": row.model}, row) for row in document.rows]
    for name, text in (
        ("requests_running", "Requests that instances of a served model work on."),
        ("requests_waiting", "Requests that wait for an instance of a served model."),
        ("kv_cache_used", "Mean share of the KV cache in use over a model's instances."),
        ("requests_per_s", "Requests finished per second."),
        ("generated_tokens_per_s", "Tokens generated per second."),
    ):
        page.add_gauge(f"served_{name}", text, [(labels, getattr(row, name)) for labels, row in labelled])
    page.add_gauge(
        "served_ttft_seconds",
        "Time to first token of the last two minutes.",
        [
            ({**labels, "quantile": key}, value)
            for labels, row in labelled
            for key, value in structs.asdict(row.ttft_s).items()
        ],
    )
    return page.encode() if labelled else b""
