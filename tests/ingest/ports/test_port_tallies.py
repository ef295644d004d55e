"""Each file below a port's folder, and each number of perfquery, is read, refused, left out or unread."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.ports.perfquery import PerfquerySource
from fleetcast.ingest.ports.rows import PortRows
from fleetcast.ingest.ports.sysfs import read_tree
from fleetcast.ingest.tally import SkipRule
from tests.fuzz.bounds import examples

NAMES = ["port_rcv_data", "port_rcv_data_64", "symbol_error", "VL15_dropped", "lifespan", "made_up"]
TEXTS = ["1", "65535", "N/A (no PMA)", "broken", ""]


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TEXTS), min_size=1))
@examples(60)
def test_files_of_sysfs(tmp_path_factory: "object", files: dict[str, str]) -> None:
    folder = tmp_path_factory.mktemp("tree")  # type: ignore[attr-defined]
    counters = Path(folder) / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    for name, text in files.items():
        (counters / name).write_text(text)
    for name in ("state", "phys_state", "rate"):
        (counters.parent / name).write_text("4: ACTIVE")
    rows = PortRows(Entities())
    for device, port, readings in read_tree(Path(folder), rows):
        rows.add_port("n1", device, port, readings, 1000)
    tally = rows.pop_batch().get_tally()
    assert tally.all == len(files) + 3
    assert tally.unread == ("made_up" in files)
    assert tally.names == (("made_up",) if "made_up" in files else ())
    assert rows.pop_batch().get_tally().all == 0, "a round begins anew"


def test_numbers_of_perfquery() -> None:
    text = (
        "# Port counters: Lid 7 port 1 (CapMask: 0x1400)\n"
        "PortSelect:......................1\nCounterSelect:...................0x0000\n"
        "PortXmitData:....................5\nSymbolErrorCounter:..............65535\nNewCounter:......................3\n"
        "PortRcvData:.....................soon\n"
    )
    source = PerfquerySource(Entities(), ManualClock(1000), {"files": ["x"]})
    source.add_text(text, 1000, "n1", "mlx5_0")
    tally = source._rows.pop_batch().get_tally()
    assert (tally.read, tally.refused, tally.unread, tally.names) == (1, 1, 1, ("NewCounter",))
    assert tally.ignored == {SkipRule.NO_DATA: 1, SkipRule.NOT_USED: 1}
    source.add_text(text, 1000)
    assert source._rows.pop_batch().get_tally().ignored[SkipRule.OTHER_PART] == 4, "a port of no node"
