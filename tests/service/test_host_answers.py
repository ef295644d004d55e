import numpy as np

from features.extract import extract
from features.store import WindowStore
from fleet.entities import Entities
from fleet.metrics import metric_row
from fleet.samples import EntityKind, SampleBatch
from service.host_answers import host_answers

NODE = EntityKind.NODE
T0 = 1_760_000_000_000


def test_a_host_is_told_of_by_shares_and_rates_and_only_by_what_is_known() -> None:
    entities = Entities()
    for name in ("n1", "n2"):
        entities.node(name)
    store = WindowStore(entities)
    for step in (0, 1):
        time_ms = T0 + 15_000 * step
        told = {"cpu_steal_s": 1.5 * step, "memory_available_bytes": 2e12, "net_rx_bytes": 3e9 * step}
        rows = [(metric_row(NODE, name), 0, time_ms, value) for name, value in told.items()]
        store.write(SampleBatch.of(NODE, rows), time_ms)
    frame = extract(store, time_ms).node
    assert host_answers(frame, 3) == [
        {"cpu_steal": 0.1, "memory_available_bytes": 2e12, "net_rx_bytes_per_s": 2e8},
        None,
        None,
    ]
    assert host_answers(None, 2) == [None, None]
    assert np.isnan(frame.column("cpu_idle_s")[0])
