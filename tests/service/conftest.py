"""Placers of tests start with a few files of queues, over and over: each file's tree is tried once."""

from collections.abc import Iterator

import pytest

from fleetcast.placement.ahead.queue_trial import try_tree
from fleetcast.placement.queues.tree import QueueTree
from fleetcast.service.placer import queue_file


@pytest.fixture(scope="session", autouse=True)
def _trees_are_tried_once() -> Iterator[None]:
    """Remember the trees that passed. A trial is a fifth of the processor time of such a test."""
    passed: set[str] = set()  # their digests

    def try_new_tree(tree: QueueTree) -> None:
        if tree.digest not in passed:
            try_tree(tree)
            passed.add(tree.digest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_file, "try_tree", try_new_tree)
        yield
