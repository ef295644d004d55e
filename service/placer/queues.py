"""The present state of the queues: file, charges and banks. They determine the order of a pass."""

import asyncio

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.machines.words import format_count
from fleetcast.placement.plan.queue import ONE_LINE
from fleetcast.placement.plan.turns import QueueTurns, TreeTurns
from fleetcast.placement.queues.charges import LeafUse, compute_leaf_use
from fleetcast.placement.queues.credits import Bank, compute_banks
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.queues_file import count_installed_gpus
from fleetcast.placement.queues.standing import explain_never_fits
from fleetcast.placement.queues.tree import QueueTree, is_at_or_below
from fleetcast.service.board.board import Board
from fleetcast.service.placer.charged_clock import ChargedClock
from fleetcast.service.placer.charging import ChargeWriter
from fleetcast.service.placer.growth_holds import count_growths, list_growths
from fleetcast.service.placer.queue_file import QueueFile, QueueFileContents
from fleetcast.service.placer.running_jobs import find_charged_leaf
from fleetcast.service.placer.view import ObservedFleet


class ServedQueues:
    """The placer's queues: their file, charges and banks.

    `file.tree` is None if all requests wait in one line.
    """

    def __init__(self, path: str, ledger: Ledger, clock: Clock, tick_s: float = 30.0) -> None:
        self.clock = clock
        self.ledger = ledger
        self.file = QueueFile(path, ledger, clock.now_ms())
        self.reads_in_thread = False  # set by the worker, which then reads the file when it changes
        self.time = ChargedClock(ledger, clock, round(tick_s * 1000))
        self.charging = ChargeWriter(ledger, self.time)
        ledger.charges.before_change = self.update_banks
        self.update_banks()

    @property
    def tree(self) -> QueueTree | None:
        return self.file.tree

    def apply_board(self, board: Board, observed: ObservedFleet) -> None:
        """Apply a new board to the charges, and read the queue file if it has changed."""
        self.charging.apply_board(board, observed, self.tree, self.clock.now_ms())
        if self.file.has_changed() and not self.reads_in_thread:
            self._apply_file(self.file.read(count_installed_gpus(observed.view.topology.nodes)))

    async def read_in_thread(self, observed: ObservedFleet | None) -> bool:
        """Read a changed queue file in a thread. Returns whether the new file is in use.

        A thread is needed because reading a large file takes a second.
        """
        if observed is None or not self.file.has_changed() or not self.file.is_file_stable():
            return False
        capacity = count_installed_gpus(observed.view.topology.nodes)
        found = await asyncio.to_thread(self.file.read, capacity)
        self._apply_file(found)
        return found.found is not None

    def _apply_file(self, found: QueueFileContents) -> None:
        self.update_banks()
        self.file.apply_contents(found, self.clock.now_ms())
        self.update_banks()

    def withdraw_tree(self, why: str) -> None:
        """Use the previous queue tree again, unless a pass has succeeded with the present one."""
        self.update_banks()
        self.file.withdraw_tree(self.clock.now_ms(), why)
        self.update_banks()

    def update_banks(self) -> None:
        """Compute the present banks of queues with credits, before their inputs change."""
        self.time.apply_clock_step()
        tree, now_ms, known = self.tree, self.clock.now_ms(), self.ledger.charges.get_banks()
        if tree is None:
            return
        changed = [
            (name, bank) for name, bank in self._compute_banks(tree, now_ms).items() if bank is not known.get(name)
        ]
        if changed:
            self.ledger.charges.write_banks(changed)

    def _compute_banks(self, tree: QueueTree, now_ms: int) -> dict[str, Bank]:
        """Return queue → its bank at `now_ms`."""
        charges = self.ledger.charges
        return compute_banks(tree, charges.get_banks(), charges.list_open_charges().values(), now_ms)

    def make_turns(self, observed: ObservedFleet) -> QueueTurns:
        """Return the queue order and quotas for one pass. GPUs that the view holds for growth count as held."""
        if self.tree is None:
            return ONE_LINE
        now_ms = self.clock.now_ms()
        use, banked = self.compute_leaf_use(now_ms), self.read_banked_gpu_s(now_ms)
        opened = self.ledger.charges.list_open_charges().values()
        jobs = {charge.job: QueueHold(charge.leaf, charge.amounts) for charge in opened if charge.leaf}
        count_growths(list_growths(self.ledger), observed.view, use, jobs)
        return TreeTurns(self.tree, use, observed.view, observed.run_times, now_ms, banked, jobs)

    def read_banked_gpu_s(self, now_ms: int) -> dict[str, float]:
        """Return queue → the GPU-seconds in its bank."""
        assert self.tree is not None
        return {name: bank.banked for name, bank in self._compute_banks(self.tree, now_ms).items()}

    def compute_leaf_use(self, now_ms: int) -> dict[str, LeafUse]:
        assert self.tree is not None
        charges = self.ledger.charges
        return compute_leaf_use(
            charges.list_open_charges().values(), charges.read_past_use(self.tree.policy.half_life_s, now_ms), now_ms
        )

    def find_leaf(self, request: PlacementRequest) -> str:
        """Return the leaf queue in which a new request waits.

        Raises RequestError if the tree does not accept the request, or can never serve it.
        """
        if self.tree is None:
            return find_charged_leaf(request, None)
        leaf = self.tree.find_request_leaf(request)
        if why := explain_never_fits(self.tree, leaf, request):
            raise RequestError(f"{why}: it could wait for ever", "gang")
        return leaf

    def describe_charged_queue(self, request: PlacementRequest) -> str:
        """Describe which queue is charged if the request names an unknown one, as the end of a sentence.

        Returns "" if the queue file has the request's queue.
        """
        if self.tree is None or not (unknown := self.tree.find_unknown_path(request)):
            return ""
        return f"; there is no queue {unknown!r}, so queue {self.tree.find_request_leaf(request)!r} is charged"

    def explain_full_queue(self, request: PlacementRequest) -> str:
        """Explain why the request's queue is full.

        Returns "" if the request may wait, already waits, or was decided before.
        """
        if self.tree is None or self.ledger.find_reply(request.request_id) is not None:
            return ""
        leaf = self.tree.find_request_leaf(request)
        for node in self.tree.list_path(leaf):
            if node.max_waiting is not None:
                waiting = [self.tree.find_known_leaf(entry.request) for entry in self.ledger.list_queue_entries()]
                count = sum(not node.name or is_at_or_below(name, node.name) for name in waiting)
                if count >= node.max_waiting:
                    said = f"{format_count(count, 'request')} waiting, at most {node.max_waiting:,}"
                    return f"queue {node.name!r} has {said}: ask again when some have started"
        return ""

    def explain_missing_queue(self, request: PlacementRequest) -> str:
        """Explain why a request cannot start: its queue is missing from the queue file.

        Returns "" if the file has the queue.
        """
        if self.tree is None or self.tree.find_known_leaf(request):
            return ""
        return f"queue {request.queue!r} takes no requests any more: it waits until the file names it again"
