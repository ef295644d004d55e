"""The adapter that writes each node and its risk band to a file (`fleetcast.service.ports.band_file`)."""

from collections.abc import Iterator, Mapping

import numpy as np

from fleetcast.fleet.node_names import is_node_name
from fleetcast.schedulers.adapter import Seen, Verb, Write, withdraw_fields
from fleetcast.schedulers.bands import LEVELS
from fleetcast.schedulers.weather import Outlook, Weather

BAND = "band"


class BandFile:
    """The adapter `band_file`, which writes the risk band of each node to a file.

    A key is a node, and its one field is the band. Nodes of unknown risk keep their band.
    """

    verbs: Mapping[str, Verb] = {}
    fields = frozenset({BAND})

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterator[Write]:
        if weather is None or weather.nodes is None:
            return withdraw_fields(seen, self.fields, "the bands are not known now" if weather else "withdrawn")
        return self._write_bands(weather.nodes, seen)

    def _write_bands(self, nodes: Outlook, seen: Seen) -> Iterator[Write]:
        hour = nodes.risk[0]
        for name, row in nodes.rows.items():
            band, held = LEVELS[nodes.level[row]], seen.get(name, {}).get(BAND)
            if band != held and not np.isnan(hour[row]) and is_node_name(name):
                why = nodes.reasons.get(name, "")
                yield Write(name, BAND, band, held, why, int(1000 * hour[row]))
        gone = {name: values for name, values in seen.items() if name not in nodes.rows or " " in name}
        yield from withdraw_fields(gone, self.fields, "the fleet has no such node")
