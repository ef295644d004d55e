"""Import texts as the command does."""

from collections.abc import Callable, Mapping

from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.tree import QueueNode, QueueTree
from fleetcast.schedulers.imports.agreement import correct_draft
from fleetcast.schedulers.imports.draft import Draft
from fleetcast.schedulers.imports.toml_text import format_draft

Make = Callable[..., Draft]


def imported(make: Make, *texts: str) -> tuple[QueueTree, Mapping[str, list[str]]]:
    """The tree that the placer reads of the written file, and the notes."""
    draft = make({f"file{number}": text for number, text in enumerate(texts)}, str.upper)
    correct_draft(draft)
    return read_queues(format_draft(draft, ["file0"])), draft.notes


def nodes(tree: QueueTree) -> dict[str, QueueNode]:
    return {node.name: node for node in tree.nodes[1:]}


def named(notes: Mapping[str, list[str]], begin: str) -> list[str]:
    """Whose it is what a note says that begins so."""
    return next((whose for what, whose in notes.items() if what.startswith(begin)), [])
