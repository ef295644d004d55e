"""Labels that state the place of Kubernetes nodes in our topology. A Kueue `Topology` uses them as levels."""

import re
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache

from fleetcast.schedulers.adapter import Seen, Verb, Write, withdraw_fields
from fleetcast.schedulers.nodes import THEIRS
from fleetcast.schedulers.weather import Outlook, Weather

LABELS = {"block": "fleetcast.io/block", "rack": "fleetcast.io/rack", "nvlink_domain": "fleetcast.io/nvlink-domain"}
LONGEST = 63  # characters of a label's value


def make_label_field(key: str) -> str:
    """Return the field name for the key of a label."""
    return f"label {key}"


class TopologyLabels:
    """The adapter `topology`, which labels the cluster's nodes with their place in the topology.

    A key is a node of the cluster. A field is the label of one level of the topology. Labels restrict
    nothing, so they stay if there is no forecast, and on nodes that Fleetcast does not know.
    """

    verbs: Mapping[str, Verb] = {}

    def __init__(self, labels: Mapping[str, str] = LABELS) -> None:
        """Create the adapter. labels: level of the topology → key of its label."""
        self._fields = {level: make_label_field(key) for level, key in labels.items()}
        self.fields = frozenset(self._fields.values())

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterator[Write]:
        if weather is None:
            yield from withdraw_fields(seen, self.fields, "withdrawn")
        elif weather.nodes is not None:
            for name in seen.keys() & weather.nodes.rows.keys():
                yield from self._label_node(name, seen[name], weather.nodes)

    def _label_node(self, name: str, values: Mapping[str, str], nodes: Outlook) -> Iterator[Write]:
        for level, field in self._fields.items():
            domains = nodes.domains.get(level)
            if domains is None or THEIRS + field in values:
                continue
            at = int(domains.of[nodes.rows[name]])
            value, held = make_label_value(domains.names[at]) if at >= 0 else None, values.get(field)
            if value != held:
                why = f"{level} {domains.names[at]}" if at >= 0 else f"the topology names no {level} of this node"
                yield Write(name, field, value, held, why)


@lru_cache(maxsize=100_000)
def make_label_value(name: str) -> str:
    """Return a name as a valid value of a label.

    An invalid name is changed, and its checksum is appended. So two different names stay different.

    >>> make_label_value("rack-7"), make_label_value("row 3/rack 7")
    ('rack-7', 'row-3-rack-7-76cbb5e5')
    """
    value = re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("-_.")
    if value == name and len(value) <= LONGEST:
        return value
    return f"{value[: LONGEST - 9].rstrip('-_.')}-{zlib.crc32(name.encode()):08x}".lstrip("-")
