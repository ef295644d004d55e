"""The GPUs that an attempt holds on each node, whole or in part, for occupancy, charges and gauges.

A rank states its GPUs, and its share if it does not hold whole ones. If the start events omit both, the
submission states them: the share, or the number of GPUs of a member on a node.
"""

from collections.abc import Mapping

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import WHOLE_GPU, RankPlacement

NO_COUNTS: Mapping[str, int] = {}


def find_submitted_share(attempt: JobAttempt) -> int:
    """Return the share of each GPU that the submission states, in thousandths. It is a whole GPU by default."""
    return (attempt.submission.gpu_share if attempt.submission else None) or WHOLE_GPU


def find_rank_share(attempt: JobAttempt, rank: RankPlacement) -> int:
    """Return the share of a GPU that a rank holds on each of its GPUs, in thousandths."""
    return rank.gpu_share or find_submitted_share(attempt)


def has_gpu_parts(attempt: JobAttempt) -> bool:
    """Return whether the events of an attempt state parts of GPUs."""
    return find_submitted_share(attempt) < WHOLE_GPU or any(rank.gpu_share for rank in attempt.ranks)


def count_unnamed_gpus(attempt: JobAttempt, node: str, node_gpus: Mapping[str, int] = NO_COUNTS) -> int:
    """Return the number of GPUs that an attempt holds on a node if no event names their indices.

    A submission states the number. Without a submission, the attempt holds the whole node, which has
    ``node_gpus[node]`` GPUs. If only the training loop reports the attempt, nothing is known about its GPUs. It
    then counts as holding one.
    """
    if attempt.submission is not None:
        return attempt.submission.gpus_per_node
    return 1 if attempt.source == "sdk" else node_gpus.get(node, 1)


def count_held_milli(attempt: JobAttempt, node_gpus: Mapping[str, int] = NO_COUNTS) -> dict[str, int]:
    """Return node → thousandths of GPUs that the attempt holds there.

    ``node_gpus``: as for `count_unnamed_gpus`.
    An attempt never counts as holding more than the node has, whatever its events state. So the charges always
    agree with the occupancy.
    """
    whole, found = find_submitted_share(attempt), dict[str, int]()
    for rank in attempt.ranks:
        gpus = len(rank.gpus) or count_unnamed_gpus(attempt, rank.node, node_gpus)
        found[rank.node] = found.get(rank.node, 0) + gpus * (rank.gpu_share or whole)
    if not attempt.ranks:
        for node in attempt.nodes:
            found[node] = found.get(node, 0) + count_unnamed_gpus(attempt, node, node_gpus) * whole
    return {node: min(milli, (node_gpus.get(node) or milli) * WHOLE_GPU) for node, milli in found.items()}


def count_wanted_milli(attempt: JobAttempt, node_gpus: Mapping[str, int] = NO_COUNTS) -> int:
    """Return the thousandths of GPUs that an attempt holds, or wants while it waits."""
    if attempt.ranks or attempt.nodes:
        return sum(count_held_milli(attempt, node_gpus).values())
    return attempt.gpus * find_submitted_share(attempt)
