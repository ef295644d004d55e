"""Names of nodes: Slurm's node lists (`n[001-019,021],login1`), and several spellings of one machine."""

import re
from collections.abc import Iterator

from fleetcast.fleet.entities import MAX_NAME_LENGTH, Entities, EntityTable
from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.fleet.node_names import explain_node_name_fault, is_node_name
from fleetcast.fleet.samples import EntityKind

MAX_NODES = 200_000
_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([^\[\]]*)\[([^\[\]]*)\]([^\[\]]*)")
_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_nodes(text: str) -> list[str]:
    """Expand a node list into names, in the order of the list. Raises ConfigError that quotes the wrong part.

    >>> expand_nodes("n[08-10],login1")
    ['n08', 'n09', 'n10', 'login1']
    """
    names: list[str] = []
    for entry in split_name_list(text):
        for name in _expand_entry(entry):
            names.append(check_name(name))
            if len(names) > MAX_NODES:
                raise make_too_many_error(text)
    return names


def make_too_many_error(text: str) -> ConfigError:
    return ConfigError(f"node list {_quote(text)}: more than {MAX_NODES:,} nodes are named")


def _quote(text: str) -> str:
    """Return a text in quotes for an error message, shortened to 80 characters if it is longer."""
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}… ({len(text):,} characters)"


def split_name_list(text: str) -> list[str]:
    """Split a list of names at the commas outside brackets. Raises ConfigError if a bracket is wrong.

    >>> split_name_list("a[1,2],b")
    ['a[1,2]', 'b']
    """
    entries: list[str] = _ENTRY.findall(text)
    if ",".join(entries) != text:
        raise ConfigError(
            f"node list {_quote(text)}: expected names and ranges such as n[001-019], separated by commas"
        )
    return [entry.strip() for entry in entries]


def check_name(name: str) -> str:
    """Return the name of a node unchanged. Raises ConfigError if it is invalid."""
    if fault := explain_node_name_fault(name):
        raise ConfigError(fault)
    return name


def check_name_part(name: str) -> str:
    """Return the name of a rack, a block or a device unchanged. Raises ConfigError if it is invalid.

    It must not contain '/', which joins the parts of names.
    """
    if not name or "/" in name or len(name) > MAX_NAME_LENGTH or not name.isprintable() or " " in name:
        raise ConfigError(
            f"{_quote(name)} is no name: 1 to {MAX_NAME_LENGTH} printable characters without '/' and spaces"
        )
    return name


def _expand_entry(entry: str) -> Iterator[str]:
    if "[" not in entry:
        yield entry
        return
    match = _RANGE.fullmatch(entry)
    if match is None:
        raise ConfigError(f"node range {_quote(entry)}: expected one bracket, as in n[001-019]")
    prefix, spans, suffix = match.groups()
    for span in spans.split(","):
        for number in _expand_numbers(span.strip(), entry):
            yield f"{prefix}{number}{suffix}"


def _expand_numbers(span: str, entry: str) -> Iterator[str]:
    """Yield the numbers of a range such as 001-019, padded with zeros to the width of the first number."""
    match = _SPAN.fullmatch(span)
    if match is None:
        raise ConfigError(f"node range {_quote(entry)}: {_quote(span)} is neither a number nor first-last")
    first, last = match.group(1), match.group(2) or match.group(1)
    if int(last) < int(first):
        raise ConfigError(f"node range {_quote(entry)}: {span!r} ends before it begins")
    if int(last) - int(first) >= MAX_NODES:
        raise ConfigError(f"node range {_quote(entry)} names more than {MAX_NODES:,} nodes")
    for number in range(int(first), int(last) + 1):
        yield str(number).zfill(len(first))


_IP = re.compile(r"[\d.]+|.*:.*")


def find_or_register_node(stated: str, entities: Entities, *, is_listed: bool = False) -> str:
    """Return the fleet's name for `stated`, as `find_known_name` finds it, and register an unknown node.

    is_listed: the operator lists the node, so no limit applies to it. Raises RecordError `bad_label` if the name
    is invalid, or `unknown_nodes` if there are too many nodes.

    >>> fleet = Entities()
    >>> _ = fleet.find_or_add_node("n1")
    >>> find_or_register_node("n1.cluster.example", fleet)
    'n1'
    """
    nodes = entities[EntityKind.NODE]
    stated = nodes.resolve_name(stated)
    if stated not in nodes:
        if not is_node_name(stated):
            raise RecordError("bad_label", explain_node_name_fault(stated))
        stated = find_known_name(stated, nodes)
    if is_listed:
        entities.record_listed_node(stated)
    if stated in nodes:
        return stated
    if len(nodes) >= entities.most_nodes:
        raise RecordError("unknown_nodes", f"{len(nodes):,} nodes are known, the limit; not added: {stated[:80]!r}")
    entities.find_or_add_node(stated)
    return stated


def find_known_name(stated: str, nodes: EntityTable) -> str:
    """Return the known node name that `stated` means, or `stated` unchanged if there is none.

    The known name may be `stated`, its first part, or the only full name that begins with it. Registers nothing.
    Exporters print the output of `hostname`, which is a short name on one machine and a full name on another. A name
    that a scheduler reports for a node has priority. Case does not matter, because Kubernetes writes hosts in lower
    case.
    """
    stated = nodes.resolve_name(stated)
    if stated in nodes or _IP.fullmatch(stated):
        return stated
    if (same := nodes.find_ignoring_case(stated)) is not None:
        return same
    short, dot, _ = stated.rstrip(".").partition(".")
    if dot:
        short = nodes.resolve_name(short)
        return short if short in nodes else nodes.find_ignoring_case(short) or stated
    return nodes.find_by_short_name(stated) or stated
