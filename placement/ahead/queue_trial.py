"""Trial of a queue tree on sample requests before the placer serves it.

The sample covers a pass, start times, charges, credits and showback. The reader of the queues file
limits each number by itself. The trial checks that results computed from these numbers are finite.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import MAX_AMOUNT, MAX_COUNT, PlacementRequest
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.placement.ahead.paths import sample_timelines
from fleetcast.placement.ahead.start_time import compute_start_times, estimate_start
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS
from fleetcast.placement.machines.slots import convert_to_milli
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.charges import Charge, HeldGpus, PastUse, compute_leaf_use
from fleetcast.placement.queues.credits import compute_banks
from fleetcast.placement.queues.showback import sum_charges
from fleetcast.placement.queues.tree import ANY, QueueNode, QueueTree

NOW_MS = 1_600_000_000_000
YEAR_MS = 365 * 86_400_000
MOST_TRIED = 24  # leaves, those of extreme numbers first
MOST_MODELS = 8
GPUS = 8  # of a node of the sample
USER = "user"


def try_tree(tree: QueueTree) -> None:
    """Raise RequestError if computing with the tree gives numbers that are not finite.

    The trial uses a sample of requests and charges. The error names the number.
    """
    try:
        with np.errstate(all="raise", under="ignore"), warnings.catch_warnings():
            warnings.simplefilter("error")
            leaves = _choose_extreme_leaves(tree)
            for name, value in _compute_numbers(_extract_subtree(tree, leaves), leaves):
                if not math.isfinite(value):
                    raise RequestError(f"the {name} would be {value}: choose numbers of usual size", None)
    except RequestError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise RequestError(f"a sample of requests fails with it ({why}): choose numbers of usual size", None) from error


def _choose_extreme_leaves(tree: QueueTree) -> list[QueueNode]:
    """Return the leaves whose settings are the smallest and the largest, then the first few others."""
    leaves = list(tree.list_leaves())
    numbers = [
        lambda node: node.weight,
        lambda node: node.priority,
        lambda node: node.max_wait_s,
        lambda node: sum(node.guaranteed.values()),
        lambda node: sum(node.limit.values()),
        lambda node: node.credits.rate if node.credits else 0.0,
        lambda node: node.credits.cap_gpu_s if node.credits else 0.0,
    ]
    found = [choose(leaves, key=number) for number in numbers for choose in (min, max)]
    return list({node.name: node for node in [*found, *leaves[:MOST_TRIED]]}.values())[:MOST_TRIED]


def _extract_subtree(tree: QueueTree, leaves: list[QueueNode]) -> QueueTree:
    """Return the tree of these leaves and the queues above them."""
    rows_of_leaves = sorted({tree.row[node.name] for leaf in leaves for node in tree.list_path(leaf.name)})
    row = {old: new for new, old in enumerate(rows_of_leaves)}
    nodes = [
        replace(
            tree.nodes[old],
            parent=row.get(tree.nodes[old].parent, -1),
            children=tuple(row[child] for child in tree.nodes[old].children if child in row),
        )
        for old in rows_of_leaves
    ]
    return replace(tree, nodes=tuple(nodes), policy=replace(tree.policy, unknown_queue=""))


def _compute_numbers(tree: QueueTree, leaves: list[QueueNode]) -> Iterable[tuple[str, float]]:
    """Yield names and values of the numbers that the placer computes with a tree."""
    view = _make_sample_view([name for name in tree.resources if name != ANY][:MOST_MODELS])
    charges = _make_charges(leaves, view)
    past = PastUse(tree.policy.half_life_s)
    for charge in charges:
        if charge.ended_ms is not None:
            past.add(charge)
    opened = [charge for charge in charges if charge.ended_ms is None]
    use = compute_leaf_use(opened, past, NOW_MS)
    banks = compute_banks(tree, compute_banks(tree, {}, opened, NOW_MS - YEAR_MS), opened, NOW_MS)
    idle = compute_banks(tree, compute_banks(tree, {}, [], NOW_MS - YEAR_MS), [], NOW_MS)
    for name, bank in (*banks.items(), *compute_banks(tree, idle, opened, NOW_MS + YEAR_MS).items()):
        yield from ((f"credits of {name!r}", value) for value in (bank.earned, bank.spent, bank.expired, bank.banked))
    banked = {name: bank.banked for name, bank in idle.items()}
    run_times, options = RunTimeQuantiles({}), Options(now_ms=NOW_MS)
    turns = TreeTurns(tree, use, view, run_times, NOW_MS, banked)
    queue = [WaitingEntry(request, NOW_MS - 3_600_000) for request in _make_requests(leaves, view)]
    paths = sample_timelines(queue, view, NO_RUNNING_JOBS, run_times, options, turns=turns)
    for start_ms in compute_start_times(paths).values():
        yield from (("start time", float(value)) for value in start_ms)
    estimate = estimate_start(queue[0].request, paths)
    yield from (("start time", float(value)) for value in (estimate.start_ms or {}).values())
    for stand in turns.standing.stands.values():
        yield f"share of {stand.name!r}", turns.standing.compute_share(stand)
        yield f"use of {stand.name!r}", stand.decayed_gpu_s
        yield from ((f"guarantee of {stand.name!r}", gpus) for gpus in stand.guaranteed.values())
        yield from ((f"reserve of {stand.name!r}", gpus) for gpus in stand.reserve.values())
    for row in sum_charges(charges, "queue", 0, NOW_MS, tree.prices).values():
        yield from (("showback", value) for value in (row.granted, row.promised, row.waited, row.money or 0.0))


def _make_sample_view(models: list[str]) -> ClusterView:
    """Return an idle fleet with two nodes of each GPU model and two of unknown model."""
    nodes = [NodeSpec(f"n{at}", GPUS, model, 80, 128, 2048) for at, model in enumerate([*models, *models, "", ""])]
    topology, n = Topology.build(nodes, generation=1), len(nodes)
    free = np.ones((n, GPUS), bool)
    return ClusterView(
        topology=topology,
        milli=convert_to_milli(free),
        usable=free,
        state=np.zeros(n, np.int8),
        p_fail=np.full(n, 0.001),
        p_slow=np.full(n, 0.001),
        reason={},
        holders=np.full((n, GPUS), -1, np.int32),
        jobs=(),
        free_cpus=np.full(n, 128.0),
        free_host_memory_gib=np.full(n, 2048.0),
        as_of_ms=NOW_MS,
        generation=1,
        models=(),
    )


def _make_charges(leaves: list[QueueNode], view: ClusterView) -> list[Charge]:
    """Return an open and a closed charge for each leaf. Each holds GPUs of every model."""
    held = tuple(HeldGpus("", model, float(GPUS)) for model in ("", *view.inventory.gpu_models))
    found: list[Charge] = []
    for node in leaves:
        leaf = f"{node.name}/{USER}" if node.per_user else node.name
        for began_ms, ended_ms in ((NOW_MS - YEAR_MS, NOW_MS - YEAR_MS // 2), (NOW_MS - 60_000, None)):
            job = f"j{len(found)}"
            row = (job, 1, leaf, USER, "training", held, 3600.0, began_ms - 60_000, began_ms, began_ms, ended_ms)
            found.append(Charge(len(found), job, *row, outcome="finished" if ended_ms else ""))
    return found


def _make_requests(leaves: list[QueueNode], view: ClusterView) -> list[PlacementRequest]:
    """Return requests of each leaf: ordinary ones, and the most extreme ones that a caller may send."""
    shapes: list[Mapping[str, object]] = [
        {"gpus_per_node": GPUS},
        {"gpu_share": 1, "priority": MAX_COUNT, "limit_s": 1e-3},
        {"gang": 2, "priority": -MAX_COUNT, "limit_s": MAX_AMOUNT, "tolerated_wait_s": 0.0},
        {"gpus_per_node": 1, "deadline_ms": MAX_COUNT, "tolerated_wait_s": MAX_AMOUNT},
    ]
    shapes += [{"gpu_model": model} for model in view.inventory.gpu_models]
    return [
        PlacementRequest(request_id=f"r{at}-{number}", queue=node.name, user=USER, **shape)  # type: ignore[arg-type]
        for at, node in enumerate(leaves)
        for number, shape in enumerate(shapes)
    ]
