"""Files of a topology that are cut anywhere, or whose lines are mixed up: read, or refused with a reason."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.topology.load import load_topology, parse_topology, parse_wiring
from tests.fuzz import infiniband_decoders as fabrics
from tests.fuzz import text_decoders as texts
from tests.ingest.topology.test_host_wiring import MATRIX

FILES = {
    "matrix": MATRIX,
    **{name: getattr(fabrics, name).decode() for name in ("MATRIX", "NCCL", "FABRIC", "REPORT", "NETQ", "COMPUTES")},
    **{name: getattr(texts, name).decode() for name in ("RACKS", "SLURM_TREE", "SLURM_BLOCKS", "LABELS", "KUBECTL")},
}
MIXES = 100


def damaged(text: str) -> Iterator[str]:
    yield from (text[:end] for end in range(len(text)))
    lines, chance = text.splitlines(keepends=True), random.Random(7)
    others = [line for other in FILES.values() for line in other.splitlines(keepends=True)]
    for _ in range(MIXES):
        mixed = [*lines, *chance.sample(others, 2)]
        mixed[chance.randrange(len(mixed))] = ""
        chance.shuffle(mixed)
        yield "".join(mixed)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    file = tmp_path / "topology"
    for text in damaged(FILES[name]):
        with contextlib.suppress(ConfigError):
            if parse_wiring(text) is None:
                parse_topology(text)
        file.write_text(text, encoding="utf-8")
        with contextlib.suppress(ConfigError):
            load_topology(file)


CUT = MATRIX.partition("NIC0\tPXB")[0]


@pytest.mark.parametrize("end", range(CUT.index("\n") + 1, CUT.rindex("SYS") + 3))
def test_a_matrix_that_is_cut_before_its_last_cell_is_no_wiring(end: int) -> None:
    with pytest.raises(ConfigError, match=r"nvidia-smi topo: .*(cut|expected one of)"):
        parse_wiring(MATRIX[:end])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (MATRIX.replace("\tGPU0\tGPU1", "\tGPU0\tGPU2"), "its header names"),
        (MATRIX.replace("GPU1\tNV18", "GPU7\tNV18"), "no row GPU1"),
        (MATRIX.replace("  NIC1: mlx5_4\n", ""), "does not name NIC1"),
        ("\tGPU0\tGPUS\n", "no row GPU0"),
        (" \n  GPU0 \tGPUX\n", "no row GPU0"),
    ],
)
def test_a_matrix_that_is_mixed_up_says_what_does_not_fit(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"nvidia-smi topo: .*{why}"):
        parse_wiring(text)
