"""The served models' document: instances added up to models.

Requests, tokens and times to first token add up over the instances of a model; the use of the KV cache is their mean,
with the fullest beside it. A quantile of the time to first token is read off the summed histogram, by a straight line
within its bucket, over the edges that all instances have; beyond the last of those it is null.
"""

from collections.abc import Sequence
from typing import Any

from features.serving import ServedInstance
from fleet.metrics import TTFT_EDGES_MS
from service.documents import number
from service.exposition import Page

QUANTILES = (0.5, 0.9, 0.99)


def served_document(instances: Sequence[ServedInstance], now_ms: int) -> dict[str, Any]:
    """`GET /v1/served-models`: a row a pool and model, in order of their names."""
    models: dict[tuple[str, str], list[ServedInstance]] = {}
    for instance in instances:
        models.setdefault((instance.pool, instance.model), []).append(instance)
    return {"as_of_ms": now_ms, "rows": [_row(*key, models[key]) for key in sorted(models)]}


def _row(pool: str, model: str, instances: list[ServedInstance]) -> dict[str, Any]:
    used = [one.kv_cache_used for one in instances if one.kv_cache_used is not None]
    return {
        "pool": pool,
        "model": model,
        "instances": [
            {
                "instance": one.instance,
                "age_s": one.age_s,
                "requests_running": one.requests_running,
                "requests_waiting": one.requests_waiting,
                "kv_cache_used": None if one.kv_cache_used is None else number(one.kv_cache_used),
            }
            for one in sorted(instances, key=lambda one: one.instance)
        ],
        "requests_running": _total(instances, "requests_running"),
        "requests_waiting": _total(instances, "requests_waiting"),
        "kv_cache_used": number(sum(used) / len(used)) if used else None,
        "kv_cache_used_max": number(max(used)) if used else None,
        "requests_per_s": _total(instances, "requests_finished"),
        "prompt_tokens_per_s": _total(instances, "prompt_tokens"),
        "generated_tokens_per_s": _total(instances, "generated_tokens"),
        "ttft_s": ttft(instances),
    }


def _total(instances: Sequence[ServedInstance], name: str) -> float | None:
    """The sum over those that say it; None where nobody does."""
    told = [value for one in instances if (value := getattr(one, name)) is not None]
    return number(sum(told)) if told else None


def ttft(instances: Sequence[ServedInstance]) -> dict[str, float | None]:
    """Mean and quantiles, in seconds, of the requests of the window; None without requests."""
    telling = [one for one in instances if one.ttft_requests and one.ttft_s is not None]
    requests = sum(one.ttft_requests or 0.0 for one in telling)
    mean = sum(one.ttft_s or 0.0 for one in telling) / requests if requests > 0 else None
    edges, counts = [], []
    for at, edge_ms in enumerate(TTFT_EDGES_MS):
        told = [one.ttft_le[at] for one in telling]
        if telling and None not in told:
            edges.append(edge_ms / 1000)
            counts.append(sum(value or 0.0 for value in told))
    quantiles = {f"p{round(100 * q)}": quantile(edges, counts, q * requests) for q in QUANTILES}
    return {"mean": None if mean is None else number(mean), **quantiles}


def quantile(edges: Sequence[float], counts: Sequence[float], rank: float) -> float | None:
    """Where a cumulative histogram reaches `rank`; None beyond its last edge, and where there are no requests.

    >>> quantile([0.1, 1.0], [10.0, 20.0], 15.0), quantile([0.1, 1.0], [10.0, 20.0], 30.0)
    (0.55, None)
    """
    if rank <= 0:
        return None
    low, below = 0.0, 0.0
    for edge, count in zip(edges, counts, strict=True):
        if count >= rank:
            return number(low + (edge - low) * (rank - below) / (count - below)) if count > below else number(edge)
        low, below = edge, max(below, count)
    return None


def served_page(document: dict[str, Any]) -> bytes:
    """The same as metrics of ours."""
    page = Page()
    labelled = [({"pool": row["pool"], "model": row["model"]}, row) for row in document["rows"]]
    for name, text in (
        ("requests_running", "Requests that instances of a served model work on."),
        ("requests_waiting", "Requests that wait for an instance of a served model."),
        ("kv_cache_used", "Mean share of the KV cache in use over a model's instances."),
        ("requests_per_s", "Requests finished per second."),
        ("generated_tokens_per_s", "Tokens generated per second."),
    ):
        page.gauge(f"served_{name}", text, [(labels, row[name]) for labels, row in labelled])
    page.gauge(
        "served_ttft_seconds",
        "Time to first token of the last two minutes.",
        [({**labels, "quantile": key}, row["ttft_s"][key]) for labels, row in labelled for key in row["ttft_s"]],
    )
    return page.encode() if labelled else b""
