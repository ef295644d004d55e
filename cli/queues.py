"""`fleetcast queues`: checks a `queues.toml`, shows its tree, and imports another scheduler's queues."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli import queues_import
from fleetcast.cli.kit.screen import echo, echo_text

if TYPE_CHECKING:
    from fleetcast.placement.queues.tree import Amounts, QueueNode, QueueTree

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Queues with shares, guarantees, limits and credits (docs/queues.md).\n\n"
    "Example:  fleetcast queues check queues.toml --topology topology.toml",
)

app.add_typer(queues_import.app, name="import")

QueuesPath = Annotated[Path, typer.Argument(help="The file of queues.", metavar="queues.toml")]
TopologyPath = Annotated[
    Path | None, typer.Option("--topology", help="Compare guarantees with the GPUs of this topology.", metavar="PATH")
]
MOST_WORDS = 60


@app.command("check")
def check_queue_file(path: QueuesPath, topology: TopologyPath = None) -> None:
    """Check a file of queues, as the placer does. Errors name the line, the field and the fix.

    Example:  fleetcast queues check queues.toml
    """
    from fleetcast.placement.queues.tree import list_unused_settings

    tree = _read_checked_tree(path, topology)
    leaves = sum(1 for _ in tree.list_leaves())
    echo(f"{path}: fine")
    echo(f"{len(tree.nodes) - 1:,} queues, {leaves:,} of them take requests")
    for note in list_unused_settings(tree):
        echo(f"note: {note}")


@app.command("show")
def show_queue_tree(
    path: QueuesPath,
    topology: TopologyPath = None,
    json_path: Annotated[str | None, typer.Option("--json", help="Write it as JSON here; - is stdout.")] = None,
) -> None:
    """Show the queue tree of a file: weights, guarantees, limits, lending, classes, credits.

    Example:  fleetcast queues show queues.toml
    """
    tree = _read_checked_tree(path, topology)
    if json_path is not None:
        document = json.dumps({"digest": tree.digest, "queues": [make_row(tree, node) for node in tree.nodes[1:]]})
        if json_path == "-":
            echo_text(document)
        else:
            Path(json_path).write_text(document + "\n", encoding="utf-8")
        return
    for node in _list_descendants(tree, 0):
        name = "  " * node.name.count("/") + node.name.rpartition("/")[2]
        echo(f"{name:<30} weight {node.weight:<6g} {_describe_queue(node)}".rstrip())
    for window in tree.windows:
        who = f"reserved for {window.queue}" if window.queue else "maintenance"
        nodes = [*window.nodes, *(f"{level.value} {domain}" for level, domain in window.domains)]
        when = f"{_format_time(window.from_ms)} to {_format_time(window.to_ms)}"
        echo(f"{window.name}: {who}, {', '.join(nodes)[:MOST_WORDS]}, {when}")


def _read_checked_tree(path: Path, topology: Path | None) -> "QueueTree":
    """Read the queue tree of a file, and check it against the topology's GPUs if a topology is given.

    Raises ConfigError if the file is invalid.
    """
    from fleetcast.ingest.topology.load import load_topology
    from fleetcast.placement.queues.queues_file import count_installed_gpus

    return read_tree(path, None if topology is None else count_installed_gpus(load_topology(topology).nodes))


def read_tree(path: Path, capacity: "Amounts | None" = None) -> "QueueTree":
    """Read the queue tree of a file.

    Raises ConfigError if the file is invalid or guarantees more than `capacity`.
    """
    from fleetcast.fleet.errors import ConfigError, RequestError
    from fleetcast.placement.ahead.queue_trial import try_tree
    from fleetcast.placement.queues.queues_file import check_capacity, read_queues

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8: {error}") from None
    try:
        tree = read_queues(text)
        try_tree(tree)
        if capacity is not None:
            check_capacity(tree, capacity, text)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}") from None
    return tree


def make_row(tree: "QueueTree", node: "QueueNode") -> dict[str, Any]:
    return {
        "queue": node.name,
        "parent": tree.nodes[node.parent].name or None,
        "weight": node.weight,
        "guaranteed": dict(node.guaranteed),
        "limit": dict(node.limit),
        "lend": dict(node.lend),
        "borrow": dict(node.borrow),
        "class": node.class_name or None,
        "priority": node.priority,
        "order": node.order,
        "max_wait_s": node.max_wait_s,
        "per_user": node.per_user,
        "preemptible": node.preemptible,
        "credits": {"rate": node.credits.rate, "cap_gpu_s": node.credits.cap_gpu_s} if node.credits else None,
    }


def _list_descendants(tree: "QueueTree", row: int) -> list["QueueNode"]:
    found = []
    for child in tree.nodes[row].children:
        found += [tree.nodes[child], *_list_descendants(tree, child)]
    return found


def _describe_queue(node: "QueueNode") -> str:
    words = [f"{name} {_format_amounts(amounts)}" for name, amounts in _list_named_amounts(node) if amounts]
    words += [f"class {node.class_name} ({node.priority})"] if node.class_name else []
    words += ["shared by its users"] if node.per_user else []
    words += [f"preemptible: {node.preemptible}"] if node.preemptible != "borrowed" else []
    if node.credits:
        words += [f"banks {node.credits.rate:.0%}, at most {node.credits.cap_gpu_s / 3600:g} GPU-hours"]
    return ", ".join(words)


def _list_named_amounts(node: "QueueNode") -> list[tuple[str, "Amounts"]]:
    return [("guaranteed", node.guaranteed), ("limit", node.limit), ("lends", node.lend), ("borrows", node.borrow)]


def _format_amounts(amounts: "Amounts") -> str:
    return " + ".join(f"{amount:g} {'GPUs' if name == 'gpu' else name}" for name, amount in amounts.items())


def _format_time(ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
