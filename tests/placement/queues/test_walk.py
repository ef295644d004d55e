"""The order of queues, merged at once, is the one that a walk from entry to entry finds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.standing import QueueStanding
from tests.fuzz.bounds import examples
from tests.placement.queues.slow_walk import walked
from tests.placement.queues.test_standing import by_arrival, ordered

TREES = (
    "[queue.a]\nweight = 40\n[queue.b]\nweight = 40\n[queue.c]\nweight = 20\n",
    "[queue.a]\nguaranteed = {gpu = 8}\nper_user = true\n[queue.b]\nlimit = {gpu = 6}\n[queue.c]\n"
    '[queue."c/x"]\nlimit = {H100 = 4}\n[queue."c/y"]\nweight = 3\nper_user = true\n',
    "[class.b]\npriority = 3\n[queue.a]\nguaranteed = {gpu = 16, H100 = 4}\n[queue.b]\nguaranteed = {A100 = 4}\n"
    '[queue.c]\nlimit = {gpu = 30}\n[queue."c/x"]\nguaranteed = {H100 = 3}\n[queue."c/y"]\n[queue."c/y/z"]\n',
)
entries = st.lists(
    st.fixed_dictionaries(
        {
            "queue": st.sampled_from(["a", "b", "c", "c/x", "c/y", "c/y/z", "gone"]),
            "user": st.sampled_from(["ada", "bob", ""]),
            "gpus_per_node": st.integers(0, 8),
            "gang": st.integers(1, 3),
            "gpu_model": st.sampled_from(["", "", "H100", "a100", "B200"]),
            "priority": st.integers(0, 1),
            "queued_ms": st.integers(0, 5),
        }
    ),
    max_size=30,
)
uses = st.dictionaries(
    st.sampled_from(["a", "a/ada", "b", "c/x", "c/y/bob", "c/y/z", "drained"]),
    st.builds(
        LeafUse,
        st.fixed_dictionaries({"gpu": st.integers(0, 20).map(float)}, optional={"H100": st.integers(0, 8).map(float)}),
        st.integers(0, 10**7).map(float),
    ),
    max_size=5,
)


def waiting(number: int, queued_ms: int, gpus_per_node: int, **fields: Any) -> WaitingEntry:
    cpus = None if gpus_per_node else 1
    return WaitingEntry(
        PlacementRequest(request_id=f"r{number}", gpus_per_node=gpus_per_node, cpus=cpus, **fields), queued_ms
    )


@examples(750)
@given(st.sampled_from(TREES), entries, uses)
def test_the_order_is_that_of_a_walk(text: str, drawn: list[dict[str, Any]], use: dict[str, LeafUse]) -> None:
    queue = [waiting(number, **fields) for number, fields in enumerate(drawn)]
    capacity = {"gpu": 64.0, "H100": 24.0, "A100": 40.0}
    expected = [entry.request.request_id for entry in walked(QueueStanding(read_queues(text), use, capacity), queue)]
    assert ordered(QueueStanding(read_queues(text), use, capacity), queue) == expected


@pytest.mark.parametrize("text", TREES)
def test_nobody_waits_in_an_empty_queue(text: str) -> None:
    assert ordered(QueueStanding(read_queues(text), {}, {"gpu": 8.0}), []) == []


@examples(500)
@given(st.sampled_from(TREES), entries, uses)
def test_the_shares_that_decide_agree_with_the_order(
    text: str, drawn: list[dict[str, Any]], use: dict[str, LeafUse]
) -> None:
    """Of two requests of one class the earlier has no larger share at the level where their queues part."""
    queue = [waiting(number, **fields) for number, fields in enumerate(drawn)]
    standing = QueueStanding(read_queues(text), use, {"gpu": 64.0, "H100": 24.0, "A100": 40.0})
    shares: dict[str, dict[str, float]] = {}
    order = standing.sort_entries(queue, by_arrival, shares)
    assert [entry.request.request_id for entry in order] == ordered(
        QueueStanding(read_queues(text), use, {"gpu": 64.0, "H100": 24.0, "A100": 40.0}), queue
    )
    tree = standing.tree
    known = [entry for entry in order if tree.find_known_leaf(entry.request)]
    for at, later in enumerate(known):
        for earlier in known[:at]:
            one, other = (shares[entry.request.request_id] for entry in (earlier, later))
            classes = {tree.list_path(tree.find_known_leaf(entry.request))[0].priority for entry in (earlier, later)}
            apart = next((pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]), None)
            if apart and len(classes) == 1:
                assert one[apart[0]] <= other[apart[1]]
