"""The whole way from pages of AMD's exporter to what is said of a node, in words that fit."""

import re
from collections.abc import Mapping

import pytest

from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.training.replay.dataset import ExporterPage, PageObserver
from tests.ingest.amd_pages import amd_page

START_MS = 1_789_000_000_000
SCRAPE_MS = 15_000
NODES = ("m001", "m002", "m003")
WORDS_OF_OTHERS = re.compile(r"XID|DCGM|NVLink|NVIDIA", re.IGNORECASE)
HOT = {"gpu_violation_socket_thermal_residency_percentage": 80.0}
Numbers = Mapping[str, float]


def watched(faulty: Mapping[int, Numbers], rounds: int = 40, begins: int = 30) -> tuple[PageObserver, ScoredFleet]:
    """Three nodes at work; from a round on GPU 2 of the second shows `faulty`: rounds since then → its numbers."""
    observer = PageObserver(Topology.build([NodeSpec(name, gpus=4) for name in NODES]))
    for number in range(rounds):
        now_ms = START_MS + number * SCRAPE_MS
        wrong = next((numbers for at, numbers in sorted(faulty.items(), reverse=True) if number - begins >= at), {})
        pages = []
        for node in NODES:
            moving = {gpu: {"link": 1e9 + 4e6 * number, "gpu_energy_consumed": 8e12 + 9e9 * number} for gpu in range(4)}
            if node == "m002":
                moving[2] |= wrong
            pages.append(ExporterPage(node, "amd", amd_page(moving, node)))
        fleet = observer.watch.score(observer.apply_pages(pages, (), now_ms))
    return observer, fleet


@pytest.mark.parametrize(
    ("faulty", "says", "action"),
    [
        (
            {0: {"clock": 900.0, **HOT}},
            "GPU 2: SM clock 905 MHz, usual 2,105; thermal slowdown since",
            "drain_at_job_end",
        ),
        (
            {0: {"clock": 900.0, "gpu_violation_hbm_thermal_residency_percentage": 30.0}},
            "GPU 2: SM clock 905 MHz, usual 2,105; thermal slowdown since",
            "drain_at_job_end",
        ),
        ({0: {"gpu_ecc_uncorrect_total": 2.0}}, "GPU 2: 2 uncorrectable ECC errors in 30 min", "drain_now"),
        ({at: {"gpu_ecc_correct_total": 3.0 + 40 * (at + 1)} for at in range(9)}, "corrected ECC errors in 10 min", ""),
        ({0: {"gpu_junction_temperature": 101.0}}, "GPU 2: 101 °C, its node's other GPUs 71", "watch"),
        ({at: {"pcie_replay_count": 2.0 + 400 * (at + 1)} for at in range(9)}, "PCIe replays in 10 min", "avoid"),
    ],
)
def test_a_faulty_gpu_is_said_in_words_that_fit(faulty: dict[int, Numbers], says: str, action: str) -> None:
    observer, fleet = watched(faulty)
    row = observer.topology.names.index("m002")
    sentences = [reason.sentence for reason in fleet.risk.reasons[row]]
    assert any(says in sentence for sentence in sentences), sentences
    assert fleet.risk.actions[row].code == action or not action
    said = [*sentences, *(action.sentence for action in fleet.risk.actions.values())]
    assert not [text for text in said if WORDS_OF_OTHERS.search(text)]
    assert {observer.topology.names[at] for at in fleet.risk.reasons} == {"m002"}


def test_a_healthy_fleet_and_one_at_its_power_limit_say_nothing() -> None:
    _, fleet = watched({0: {"gpu_violation_ppt_residency_percentage": 60.0, "clock": 1990.0}})
    assert fleet.risk.reasons == {}


def test_links_are_read_as_a_rate() -> None:
    observer, _ = watched({})
    ring = observer.watch.store.rings[EntityKind.GPU]
    rates = ring.find_newest_values(ring.layout.metrics.index("nvlink_tx_bytes_per_s"))
    assert rates.tolist() == pytest.approx([3 * 4e6 * 1024 / 15] * 12)
