"""Events that name a device by its PCI address, before and after the exporters tell which GPU that is."""

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.topology import NodeSpec
from fleetcast.ingest.source import Batch
from tests.service.pipeline.test_state import MINUTE, empty_state


def xid(sequence: int, device: str) -> NodeEvent:
    return NodeEvent(
        node="n1", source="kernel", sequence=sequence, time_ms=5, type="xid", code=79, device=device, message="gone"
    )


def test_an_address_is_a_gpu_as_soon_as_an_exporter_tells_which() -> None:
    state = empty_state([NodeSpec("n1", gpus=8)])
    (before,) = state.apply(Batch(node_events=(xid(1, "0000:9b:00"),)), MINUTE)
    assert before.gpu is None
    assert [event.gpu for event in state.copy_events(0).nodes["n1"].events] == [None]
    state.entities.devices.record_device("n1", "00000000:9B:00.0", 5)
    assert [event.gpu for event in state.copy_events(0).nodes["n1"].events] == [5]
    assert [event.gpu for event in state.copy_events(0).nodes["n1"].standing.values()] == [5]
    (after,) = state.apply(Batch(node_events=(xid(2, "0000:9b:00"),)), MINUTE)
    assert after.gpu == 5
    assert len(state.copy_events(0).nodes["n1"].standing) == 1
