import msgspec
import pytest

from fleetcast.features.serving import EDGES, ServedInstance, list_served_instances
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import TTFT_EDGES_MS, find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.service.answers.served_models import TimeToFirstToken
from fleetcast.service.pipeline.served_models import interpolate_quantile, make_served_document, make_served_page

SERVED = EntityKind.SERVED_MODEL
NOW_MS = 1_760_000_000_000


NOTHING = dict.fromkeys(msgspec.structs.fields(ServedInstance)[at].name for at in range(4, 12))


def instance(name: str, model: str = "m", **values: object) -> ServedInstance:
    about = {"pool": "chat", "model": model, "instance": name, "age_s": 1.0, "ttft_le": edges()}
    return msgspec.convert({**NOTHING, **about, **values}, ServedInstance)


def edges(**known: float) -> tuple[float | None, ...]:
    return tuple(known.get(f"le_{edge}") for edge in TTFT_EDGES_MS)


def test_rates_and_gauges_of_an_instance_come_from_its_rings() -> None:
    entities = Entities()
    row = entities[SERVED].add("chat/meta/llama/10.0.0.7:8000")
    store = WindowStore(entities, interval_s=15.0)
    for step in range(9):
        time_ms = NOW_MS + 15_000 * step
        told = {
            "requests_running": 4.0,
            "kv_cache_used": 0.5,
            "generated_tokens": 1500.0 * step,
            "ttft_s": 3.0 * step,
            "ttft_requests": 15.0 * step,
            EDGES[0]: 7.5 * step,
        }
        rows = [(find_metric_row(SERVED, name), row, time_ms, value) for name, value in told.items()]
        store.write(SampleBatch.from_rows(SERVED, rows), time_ms)
    (found,) = list_served_instances(store, time_ms + 1000)
    assert (found.pool, found.model, found.instance, found.age_s) == ("chat", "meta/llama", "10.0.0.7:8000", 1.0)
    assert (found.requests_running, found.kv_cache_used, found.requests_waiting) == (4.0, 0.5, None)
    assert found.generated_tokens == pytest.approx(100.0)
    assert found.ttft_requests == pytest.approx(1.0)
    assert found.ttft_le[0] == pytest.approx(0.5)
    assert list_served_instances(store, time_ms + 700_000) == [], "silent for more than ten minutes"


def test_a_store_without_served_models_makes_no_ring_for_them() -> None:
    store = WindowStore(Entities())
    assert list_served_instances(store, NOW_MS) == []
    assert SERVED not in store.rings


def test_instances_add_up_to_their_model() -> None:
    document = make_served_document(
        [
            instance("b:1", requests_running=2.0, requests_waiting=1.0, kv_cache_used=0.2, generated_tokens=10.0),
            instance("a:1", requests_running=3.0, kv_cache_used=0.8, generated_tokens=5.5),
            instance("c:1", model="z"),
        ],
        NOW_MS,
    )
    first, second = document.rows
    assert (first.pool, first.model) == ("chat", "m")
    assert [one.instance for one in first.instances] == ["a:1", "b:1"]
    assert (first.requests_running, first.requests_waiting) == (5.0, 1.0)
    assert (first.kv_cache_used, first.kv_cache_used_max) == (0.5, 0.8)
    assert first.generated_tokens_per_s == 15.5
    assert second.requests_running is None, "nobody said so, and that is not zero"
    assert second.ttft_s == TimeToFirstToken(None, None, None, None)


def test_the_time_to_first_token_is_that_of_all_requests() -> None:
    fast = instance("a:1", ttft_s=1.0, ttft_requests=10.0, ttft_le=edges(le_100=10.0, le_1000=10.0, le_200=10.0))
    slow = instance("b:1", ttft_s=9.0, ttft_requests=10.0, ttft_le=edges(le_100=0.0, le_1000=8.0))
    idle = instance("c:1", ttft_s=0.0, ttft_requests=0.0)
    (row,) = make_served_document([fast, slow, idle], NOW_MS).rows
    assert row.ttft_s == TimeToFirstToken(mean=0.5, p50=0.1, p90=1.0, p99=None)


def test_a_quantile_needs_requests() -> None:
    assert interpolate_quantile([0.1], [0.0], 0.0) is None
    assert interpolate_quantile([], [], 1.0) is None
    assert interpolate_quantile([0.1, 1.0], [4.0, 4.0], 4.0) == 0.1


def test_metrics_say_the_same() -> None:
    page = make_served_page(make_served_document([instance("a:1", requests_running=3.0)], NOW_MS)).decode()
    assert 'fleetcast_served_requests_running{pool="chat",model="m"} 3' in page
    assert make_served_page(make_served_document([], NOW_MS)) == b""
