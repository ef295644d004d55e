"""The name of a node: exporters, topology files and URLs spell one machine differently."""

import re

from fleet.entities import MAX_NAME_LENGTH, Entities, EntityTable
from fleet.errors import RecordError
from fleet.samples import EntityKind

_IP = re.compile(r"[\d.]+|.*:.*")


def node_name(stated: str, entities: Entities) -> str:
    """The name under which the fleet knows `stated`: as it is, or as `known_name` finds it.

    Registers a new node. Raises RecordError: bad_label (no name), unknown_nodes (there are too many of them).

    >>> fleet = Entities()
    >>> _ = fleet.node("n1")
    >>> node_name("n1.cluster.example", fleet)
    'n1'
    """
    nodes = entities[EntityKind.NODE]
    if stated in nodes:
        return stated
    if not stated or "/" in stated or len(stated) > MAX_NAME_LENGTH or not stated.isprintable():
        raise RecordError("bad_label", f"{stated[:80]!r} is no node name")
    if (known := known_name(stated, nodes)) != stated:
        return known
    if len(nodes) >= entities.most_nodes:
        raise RecordError("unknown_nodes", f"{len(nodes):,} nodes are known, no more are taken: {stated[:80]!r}")
    entities.node(stated)
    return stated


def known_name(stated: str, nodes: EntityTable) -> str:
    """`stated`, or its first part, or the only full name that it is the first part of: which of them is known.

    Registers nothing. Exporters print what `hostname` says, which is short on one machine and full on the next.
    """
    if stated in nodes or _IP.fullmatch(stated):
        return stated
    short, dot, _ = stated.partition(".")
    if dot:
        return short if short in nodes else stated
    return nodes.of_host(stated) or stated
