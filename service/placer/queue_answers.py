"""The API's answers about queues: their state, the effect of a new queue file, and charges."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.charges import Charge, list_leaf_ancestors
from fleetcast.placement.queues.showback import By, ChargeSum, sum_charges
from fleetcast.placement.queues.standing import QueueStanding, QueueTotals, compute_needed_gpus
from fleetcast.placement.queues.tree import ANY, ROOT, Prices, QueueTree, is_at_or_below, list_unused_settings
from fleetcast.service.answers.queues import ChargeRow, Charges, QueueChange, QueuesAnswer, QueueState
from fleetcast.service.placer.queue_week import QueueWeek

FORMULA_SIGNS = tuple("=+-@＝＋－＠")  # with which a spreadsheet begins to compute
SEPARATORS = frozenset(',;|"')  # of cells, by the language of the spreadsheet


def make_queues_answer(
    tree: QueueTree, turns: TreeTurns, waiting: Sequence[WaitingEntry], opened: Iterable[Charge], week: QueueWeek,
    banked: dict[str, float], now_ms: int, generation: str, refused: str, below: Collection[str] = (),
) -> QueuesAnswer:  # fmt: skip
    """Make the answer about the state of the queues.

    waiting: all waiting entries, including waiting jobs of other schedulers. opened: charges of running jobs.
    below: return only these queues and those below them. If empty, return all queues.
    """
    standing = turns.standing
    counts, gpus = _count_waiting_by_queue(tree, waiting)
    running = Counter(name for charge in opened for name in list_leaf_ancestors(charge.leaf))
    lent = _sum_lent_gpus(standing)
    rows = []
    for stand in standing.stands.values():
        if stand.name == ROOT or (below and not any(is_at_or_below(stand.name, name) for name in below)):
            continue
        row = _make_row(stand, standing.compute_share(stand), banked)
        row.lent = lent.get(stand.name, {})
        row.waiting, row.waiting_gpus, row.running = counts[stand.name], gpus[stand.name], running[stand.name]
        row.share_7d, row.share_days = week.shares.get(stand.name), week.by_day.get(stand.name)
        row.wait_s = week.waits.get(stand.name)
        rows.append(row)
    rows.sort(key=lambda row: row.queue)
    return QueuesAnswer(now_ms, generation, rows, dict(standing.capacity), list_unused_settings(tree), refused)


def _make_row(stand: QueueTotals, share: float, banked: dict[str, float]) -> QueueState:
    node, guaranteed = stand.node, stand.guaranteed
    beyond = {name: stand.held.get(name, 0.0) - gpus for name, gpus in (guaranteed or {ANY: 0.0}).items()}
    return QueueState(
        queue=stand.name,
        parent=stand.parent.name if stand.parent is not None and stand.parent.name else None,
        weight=stand.weight,
        class_=(node.class_name or None) if node else None,
        priority=node.priority if node else 0,
        per_user=node.per_user if node else False,
        held=dict(stand.held),
        guaranteed=dict(guaranteed),
        limit=dict(node.limit) if node else {},
        borrowed={name: gpus for name, gpus in beyond.items() if gpus > 0},
        share=round(share, 4),
        decayed=round(stand.decayed_gpu_s, 1),
        banked=round(banked[stand.name], 1) if stand.name in banked else None,
    )


def _sum_lent_gpus(standing: QueueStanding) -> dict[str, dict[str, float]]:
    """Return queue → resource → the GPUs of its guarantee that other queues hold.

    Queues with the same parent may hold more than their guarantees. This excess first uses GPUs that no
    queue is guaranteed. The rest is divided among the queues that lend unused GPUs, in proportion.
    """
    found: dict[str, dict[str, float]] = {}
    for stand in standing.stands.values():
        for resource in {name for child in stand.children for name in child.guaranteed}:
            for child, gpus in _find_lenders(stand, resource, standing.capacity.get(resource, 0.0)):
                found.setdefault(child.name, {})[resource] = round(gpus, 3)
    return found


def _find_lenders(stand: QueueTotals, resource: str, capacity: float) -> Iterable[tuple[QueueTotals, float]]:
    """Return the child queues that lend this resource, and how many GPUs each lends."""
    guaranteed = [child.guaranteed.get(resource, 0.0) for child in stand.children]
    held = [child.held.get(resource, 0.0) for child in stand.children]
    whole = stand.guaranteed.get(resource, 0.0) if stand.name != ROOT else capacity
    borrowed = sum(max(0.0, mine - own) for mine, own in zip(held, guaranteed, strict=True))
    borrowed = max(0.0, borrowed - max(0.0, whole - sum(guaranteed)))
    idle = [
        max(0.0, own - max(mine, child.node.find_unlent_guarantee(resource) if child.node else 0.0))
        for child, own, mine in zip(stand.children, guaranteed, held, strict=True)
    ]
    part = min(1.0, borrowed / sum(idle)) if sum(idle) > 0 else 0.0
    return [(child, gpus * part) for child, gpus in zip(stand.children, idle, strict=True) if gpus * part > 0]


def _count_waiting_by_queue(tree: QueueTree, waiting: Sequence[WaitingEntry]) -> tuple[Counter[str], Counter[str]]:
    counts, gpus = Counter[str](), Counter[str]()
    for entry in waiting:
        wanted = compute_needed_gpus(entry.request, entry.request.members.desired)[ANY]
        for name in list_leaf_ancestors(tree.find_known_leaf(entry.request)):
            counts[name] += 1
            gpus[name] += wanted  # type: ignore[assignment]
    return counts, gpus


def compare_queue_trees(
    before: QueueTree | None, after: QueueTree, waiting: Iterable[PlacementRequest], applied: bool
) -> QueueChange:
    """Return what a new tree adds, removes and changes, and how many waiting requests it would strand.

    applied: whether the answer says that the new tree is in use.
    """
    old = {node.name: node for node in before.nodes[1:]} if before is not None else {}
    new = {node.name: node for node in after.nodes[1:]}
    changed = [
        name for name in sorted(old.keys() & new.keys()) if _list_settings(old[name]) != _list_settings(new[name])
    ]
    added, removed = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
    stranded = Counter(request.queue for request in waiting if not after.find_known_leaf(request))
    notes = list_unused_settings(after)
    if stranded:
        counts = f"{stranded.total():,} waiting requests name queues that the file does not have"
        notes.append(f"{counts}: none of them starts until a file names their queue again")
    return QueueChange(applied, after.digest[:16], added, removed, changed, notes, dict(sorted(stranded.items())))


def _list_settings(node: Any) -> tuple[Any, ...]:
    """Return the settings of a queue as a tuple, without its place in the tree."""
    return (
        *(node.weight, node.guaranteed, node.limit, node.lend, node.borrow, node.class_name, node.priority),
        *(node.order, node.max_wait_s, node.max_waiting, node.per_user, node.credits, node.preemptible),
    )


def make_charges_answer(
    charges: Sequence[Charge], by: By, from_ms: int, to_ms: int, prices: Prices, now_ms: int
) -> Charges:
    """Make the answer about granted, used, lost and waited GPU-seconds between two times.

    A time in the future counts as now.
    """
    rows = [
        ChargeRow(
            name=name,
            jobs=row.jobs,
            granted_gpu_s=round(row.granted, 3),
            promised_gpu_s=round(row.promised, 3),
            used_gpu_s=round(row.used, 3) if row.seen else None,
            idle_gpu_s=round(max(0.0, row.seen - row.used), 3) if row.seen else None,
            lost_gpu_s=round(row.lost, 3),
            waited_gpu_s=round(row.waited, 3),
            money=round(row.money, 4) if row.money is not None else None,
            unseen=_explain_unseen(row),
        )
        for name, row in sum_charges(charges, by, from_ms, min(to_ms, now_ms), prices).items()
    ]
    return Charges(now_ms, from_ms, to_ms, by, rows, prices.currency)


def _explain_unseen(row: ChargeSum) -> str | None:
    """Explain why used and idle GPU-seconds do not add up to the granted ones. Returns None if they do."""
    if row.granted - row.seen < 0.5:
        return None
    part = f"{row.seen / row.granted:.0%}" if row.seen else "none"
    return f"telemetry saw {part} of what was granted"


def format_charges_csv(answer: Charges) -> str:
    """Format the answer as CSV, with one line for each row."""
    columns = ChargeRow.__struct_fields__
    lines = [",".join((answer.by, *columns[1:]))]
    for row in answer.rows:
        values = [_format_cell(row.name), *(getattr(row, name) for name in columns[1:])]
        lines.append(",".join("" if value is None else str(value) for value in values))
    return "\n".join(lines) + "\n"


def _format_cell(text: str) -> str:
    """Format a name as a CSV cell that no spreadsheet evaluates as a formula.

    It also quotes every separator that a spreadsheet may use.

    >>> _format_cell("nlp"), _format_cell("a,b"), _format_cell("=1+1"), _format_cell("a;=1")
    ('nlp', '"a,b"', "'=1+1", '"a;=1"')
    """
    if text.startswith(FORMULA_SIGNS):
        text = f"'{text}"
    if SEPARATORS.isdisjoint(text):
        return text
    doubled = text.replace('"', '""')
    return f'"{doubled}"'
