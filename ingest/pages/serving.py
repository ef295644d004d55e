"""A resolver of pages of vLLM, SGLang, TensorRT-LLM and Triton to served-model series.

An entity is one *instance* (an engine at one port), named `pool/model/instance`. Readers add up or average
a model's instances. So a replica that starts or stops does not look like a counter that fell.

    pool       label `pool`, else `namespace`, else "default"
    model      label `model_name` (vLLM, SGLang, TensorRT-LLM) or `model` (Triton)
    instance   label `instance`, else host:port of the page. Further data-parallel engines there have "#1", "#2", …

Each data-parallel rank is an engine. Among the tensor- and pipeline-parallel ranks within it, only the
first counts. Among SGLang's queue lengths, only the total counts. Triton's versions of a model are added
up.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.metrics import TTFT_EDGES_MS, find_metric_row
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.resolver import Resolver
from fleetcast.ingest.pages.text import Found, Target
from fleetcast.ingest.series import Fold, Series, hash_part
from fleetcast.ingest.tally import SkipRule

MAX_INSTANCES = 20_000
PREFIXES = ("vllm:", "vllm_", "sglang:", "sglang_", "trtllm:", "trtllm_", "nv_trt_llm_", "nv_inference_")
NOWHERE = -1  # a served model belongs to no node: its page may come from a service that stands before several


@dataclass(frozen=True, slots=True)
class _Reading:
    metric: int
    fold: Fold = Fold.WHOLE
    scale: float = 1.0
    label: str = ""  # the line counts where this label has this value
    value: str = ""


def _make_reading(
    metric: str, fold: Fold = Fold.WHOLE, scale: float = 1.0, label: str = "", value: str = ""
) -> _Reading:
    return _Reading(find_metric_row(EntityKind.SERVED_MODEL, metric), fold, scale, label, value)


_TRITON_KV = "nv_trt_llm_kv_cache_block_metrics"
_TRITON_REQUESTS = "nv_trt_llm_request_metrics"
# (name, with '_' behind the prefix; label value where one name says several things) -> reading
_READINGS: dict[tuple[str, str], _Reading] = {
    (name, ""): _make_reading(metric, fold)
    for metric, fold, names in (
        (
            "requests_running",
            Fold.WHOLE,
            ("vllm_num_requests_running", "sglang_num_running_reqs", "trtllm_num_requests_running"),
        ),
        (
            "requests_waiting",
            Fold.WHOLE,
            ("vllm_num_requests_waiting", "sglang_num_queue_reqs", "trtllm_num_requests_waiting"),
        ),
        (
            "kv_cache_used",
            Fold.WHOLE,
            (
                "vllm_kv_cache_usage_perc",
                "vllm_gpu_cache_usage_perc",
                "sglang_token_usage",
                "trtllm_kv_cache_utilization",
            ),
        ),
        (
            "prompt_tokens",
            Fold.SUM,
            ("vllm_prompt_tokens_total", "sglang_prompt_tokens_total", "trtllm_prompt_tokens_total"),
        ),
        (
            "generated_tokens",
            Fold.SUM,
            ("vllm_generation_tokens_total", "sglang_generation_tokens_total", "trtllm_generation_tokens_total"),
        ),
        (
            "requests_finished",
            Fold.SUM,
            (
                "vllm_request_success_total",
                "sglang_num_requests_total",
                "trtllm_request_success_total",
                "nv_inference_request_success",
            ),
        ),
    )
    for name in names
} | {
    (_TRITON_REQUESTS, "scheduled"): _make_reading("requests_running", Fold.SUM),
    (_TRITON_REQUESTS, "waiting"): _make_reading("requests_waiting", Fold.SUM),
    (_TRITON_KV, "fraction"): _make_reading("kv_cache_used", Fold.MEAN),
}
_KEYED = {_TRITON_REQUESTS: "request_type", _TRITON_KV: "kv_cache_block_type"}
# Histograms of the time to first token, and how many ms their unit is.
_TTFT = {
    "vllm_time_to_first_token_seconds": 1000.0,
    "sglang_time_to_first_token_seconds": 1000.0,
    "trtllm_time_to_first_token_seconds": 1000.0,
    "nv_inference_first_response_histogram_ms": 1.0,
}
_EDGES = {float(edge): find_metric_row(EntityKind.SERVED_MODEL, f"ttft_le_{edge}ms") for edge in TTFT_EDGES_MS}
_SUM = find_metric_row(EntityKind.SERVED_MODEL, "ttft_s")
_COUNT = find_metric_row(EntityKind.SERVED_MODEL, "ttft_requests")
_HISTOGRAM = ("_bucket", "_count", "_sum")
_OTHER_METRICS = re.compile(r"_(?:bucket|count|sum|created|info|config|duration_us)$")  # histograms, settings, times
_STAGES = ("pp_rank",)
_RANKS = ("tp_rank", "moe_ep_rank", "attn_tp_rank", "attn_cp_rank")  # within a data-parallel rank, not always from 0
# Labels that split no sum: of ranks that count the same requests, and those that Prometheus and senders add.
_NO_PARTS = frozenset(
    {
        *(*_STAGES, *_RANKS, "dp_rank", "engine", "pid", "__name__", "__replica__", "replica", "prometheus"),
        *("prometheus_replica", "cluster", "environment", "env", "region", "zone", "datacenter", "site", "tenant"),
        *("team", "job", "instance", "pod", "container", "namespace", "node", "service", "endpoint", "pool", "host"),
    }
)


def _list_spellings(name: str) -> tuple[str, str]:
    """Return a metric's name with `_` and with `:` after the engine's prefix.

    >>> _list_spellings("vllm_prompt_tokens_total")
    ('vllm_prompt_tokens_total', 'vllm:prompt_tokens_total')
    """
    engine, _, rest = name.partition("_")
    return name, f"{engine}:{rest}"


class ServingResolver(Resolver):
    """A resolver of lines of serving engines to series."""

    names = frozenset(spelling for name, _ in _READINGS for spelling in _list_spellings(name))
    names |= frozenset(spelling + end for name in _TTFT for spelling in _list_spellings(name) for end in _HISTOGRAM)

    @classmethod
    def claims(cls, name: str) -> bool:
        return name.startswith(PREFIXES)

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Found:
        """Resolve a line. Returns None for unknown names. Raises RecordError `bad_label` or `too_many_models`."""
        reading = _find_reading(name.replace(":", "_", 1), labels)
        if reading is None or isinstance(reading, SkipRule):
            return reading
        if labels.get("priority") or _is_duplicate_rank(labels):
            return SkipRule.OTHER_PART
        entity = self._find_or_add_instance(labels, target)
        parts = [f"{label}={labels[label]}" for label in sorted(labels.keys() - _NO_PARTS)] if reading.fold else []
        return Series(
            EntityKind.SERVED_MODEL,
            reading.metric,
            entity,
            NOWHERE,
            scale=reading.scale,
            fold=reading.fold,
            part=hash_part(name, *parts) if reading.fold else 0,
        )

    def _find_or_add_instance(self, labels: Mapping[str, str], target: Target) -> int:
        model = labels.get("model_name") or labels.get("model") or ""
        pool = labels.get("pool") or labels.get("namespace") or "default"
        instance = labels.get("instance") or target.address or target.node
        engine = labels.get("engine") or labels.get("dp_rank") or "0"
        name = f"{pool}/{model}/{instance}" + ("" if engine == "0" else f"#{engine}")
        table = self.entities[EntityKind.SERVED_MODEL]
        row = table.find_row(name)
        if row is not None:
            return row
        if not model or not instance or "/" in pool + instance + engine:
            raise RecordError("bad_label", f"no name of a served model: {name[:80]!r}")
        if len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise RecordError("bad_label", f"no name of a served model: {name[:80]!r}")
        if len(table) >= MAX_INSTANCES:
            raise RecordError("too_many_models", f"more than {MAX_INSTANCES:,} instances: {name[:80]!r}")
        return table.add(name)


def _is_duplicate_rank(labels: Mapping[str, str]) -> bool:
    """Return whether a line counts requests that another rank of the same engine counts as well.

    An engine is a data-parallel rank. With data-parallel attention, the tensor-parallel rank grows with the
    data-parallel rank. If several tensor-parallel ranks share a data-parallel rank, the first line on the page counts.
    """
    ranks = _STAGES if labels.get("dp_rank", "0") not in ("", "0") else (*_STAGES, *_RANKS)
    return any(labels.get(rank, "0") not in ("", "0") for rank in ranks)


def _find_reading(name: str, labels: Mapping[str, str]) -> _Reading | SkipRule | None:
    found = _READINGS.get((name, labels.get(_KEYED.get(name, ""), "")))
    if found is not None:
        return found
    if name in _KEYED:
        return SkipRule.OTHER_PART
    head, _, end = name.rpartition("_")
    unit_ms = _TTFT.get(head)
    if unit_ms is None:
        return SkipRule.NOT_USED if _OTHER_METRICS.search(name) else None
    if end == "sum":
        return _Reading(_SUM, Fold.SUM, unit_ms / 1000)
    if end == "count":
        return _Reading(_COUNT, Fold.SUM)
    return _find_bucket_reading(labels.get("le", ""), unit_ms) if end == "bucket" else SkipRule.NOT_USED


def _find_bucket_reading(le: str, unit_ms: float) -> _Reading | SkipRule:
    """Return how to read a histogram bucket, or a SkipRule if the catalogue lacks its edge.

    le: the label with the edge. unit_ms: the unit of the edge in ms. Raises RecordError `bad_label`.
    """
    try:
        row = _EDGES.get(round(float(le) * unit_ms, 6))
    except (ValueError, OverflowError):
        raise RecordError("bad_label", f"le={le[:40]!r} is no number") from None
    return SkipRule.OTHER_PART if row is None else _Reading(row, Fold.SUM)
