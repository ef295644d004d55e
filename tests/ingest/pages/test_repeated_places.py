"""The fields of one GPU share their labels, so that a page asks once where a GPU is."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.ingest.machines import Target
from fleetcast.ingest.pages.dcgm import FIELD_IDS, DcgmResolver
from fleetcast.ingest.pages.exporters import LabelFacts
from fleetcast.ingest.pages.exposition import LineParser
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import Desk, labels, page, reasons

NAMES = ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_UTIL")
BOARDS = [
    labels(0),
    labels(1),
    labels(1, UUID="GPU-other"),
    labels(1, UUID=""),
    labels(0, node="n002"),
    labels(0, node="localhost"),
    labels(0, modelName="NVIDIA A100"),
    labels(0, pci_bus_id="00000000:9B:00.0"),
    labels(1, pci_bus_id="00000000:9B:00.0"),
    labels(2, pod="worker-0", namespace="soperator", container="slurmd"),
    labels(0, node="worker-0"),
    labels(0).replace('gpu="0",', ""),
]


@examples(300)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(BOARDS)), max_size=14), min_size=1, max_size=4)
)
def test_a_place_that_is_remembered_for_a_page_is_the_place_of_each_line(pages: list[list[tuple[str, str]]]) -> None:
    remembering, plain = Desk(), Desk()
    dcgm = plain.resolver._resolvers[0]
    assert isinstance(dcgm, DcgmResolver)

    dcgm._find_cached_place = dcgm._make_place  # type: ignore[method-assign]
    plain.resolver._derive_label_facts = lambda labels, target: LabelFacts.from_labels(labels)  # type: ignore[method-assign]
    dcgm.inventory.machines.is_repeated_line = lambda *line: False  # type: ignore[method-assign]
    for number, lines in enumerate(pages):
        one = page(*(f"{name}{board} {number + 40}" for name, board in lines))
        batches = [remembering.decoder.decode(one, 1000 + 15_000 * number)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LineParser, "combine", lambda *line: None)
            batches.append(plain.decoder.decode(one, 1000 + 15_000 * number))
        assert remembering.words(batches[0]) == plain.words(batches[1])
        assert reasons(batches[0]) == reasons(batches[1])
        assert remembering.entities.dump() == plain.entities.dump()
        assert remembering.resolver.inventory.nodes == plain.resolver.inventory.nodes
        assert remembering.decoder.target == plain.decoder.target
        for device in ("0000:9b:00", "GPU-other"):
            assert remembering.entities.devices.find_gpu("n001", device) == plain.entities.devices.find_gpu(
                "n001", device
            )


def test_a_page_asks_once_for_each_gpu_after_its_first_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    locate = DcgmResolver._locate_gpu

    def counting(self: DcgmResolver, labels: Mapping[str, str], target: Target) -> tuple[str, int]:
        asked.append(labels["gpu"])
        return locate(self, labels, target)

    monkeypatch.setattr(DcgmResolver, "_locate_gpu", counting)
    names = sorted(FIELD_IDS)[:30]
    assert len(Desk().decode(*(f"{name}{labels(gpu)} 5" for name in names for gpu in range(8)))) > 100
    assert len(asked) == 16  # on the first metric boards are new, and the second one confirms them
