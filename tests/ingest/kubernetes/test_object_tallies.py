"""Each object of a list or a watch is read, refused, or left out because it asks for no GPU."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fleetcast.clients.kubernetes import Changes, Listing
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.kubernetes.source import KINDS, KubernetesSource
from fleetcast.ingest.tally import SkipRule
from tests.fuzz.bounds import examples


def pod(name: str, gpus: int) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {"cpu": "1"}
    return {
        "metadata": {"name": name, "namespace": "ml", "uid": f"u-{name}", "resourceVersion": "1"},
        "spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]},
        "status": {"phase": "Pending"},
    }


OBJECTS = {
    "a pod with GPUs": ("pods", json.dumps(pod("a", 2)).encode()),
    "a pod without": ("pods", json.dumps(pod("b", 0)).encode()),
    "a broken pod": ("pods", b'{"metadata": {"name": 7}}'),
    "a node": ("nodes", b'{"metadata": {"name": "n1", "uid": "u1"}, "status": {}}'),
    "a job without GPUs": ("jobs", b'{"metadata": {"name": "j", "namespace": "ml", "uid": "u2"}, "spec": {}}'),
    "no JSON": ("jobs", b"{"),
}


@given(st.lists(st.sampled_from(sorted(OBJECTS)), max_size=8), st.booleans())
@examples(60)
def test_objects_add_up(drawn: list[str], listed: bool) -> None:
    source = KubernetesSource(Entities(), ManualClock(1_760_000_000_000), {"name": "k"})
    decode = {collection.name: collection.decode for collection in source.list_collections()}
    source.apply_messages([Listing(name, (), "1") for name in KINDS])
    for collection in ("pods", "nodes", "jobs"):
        rows = [OBJECTS[name][1] for name in drawn if OBJECTS[name][0] == collection]
        found = tuple(decode[collection](row) for row in rows)
        changes = Changes(collection, tuple(("MODIFIED", row) for row in found), "2")
        tally = source.apply_messages([Listing(collection, found, "2") if listed else changes]).get_tally()
        assert tally.all == len(rows)
        own = [name for name in drawn if OBJECTS[name][0] == collection]
        bad = own.count("a broken pod") + own.count("no JSON")
        without = own.count("a pod without") + own.count("a job without GPUs")
        assert (tally.refused, tally.ignored.get(SkipRule.NOT_USED, 0)) == (bad, without)
