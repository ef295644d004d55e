"""What a scrape says of its nodes, without a network."""

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.scrape_samples import UNNAMED_ROUNDS, PageTarget, ScrapeSamples
from fleetcast.ingest.pages.text import PageDecoder, Target

LOAD = b"node_load1 2\n"


def gpus(count: int, node: str = "n1") -> bytes:
    rows = (f'DCGM_FI_DEV_GPU_TEMP{{gpu="{gpu}",UUID="GPU-{gpu}",Hostname="{node}"}} 40\n' for gpu in range(count))
    return "".join(rows).encode()


def ports(count: int) -> bytes:
    rows = (
        f'node_infiniband_port_data_received_bytes_total{{device="mlx5_{row}",port="1"}} 7\n' for row in range(count)
    )
    return "".join(rows).encode()


class Watched:
    """Two exporters of one node."""

    def __init__(self) -> None:
        self.entities = Entities()
        self.scrapes = ScrapeSamples(self.entities)
        self.resolver = ExporterResolver(self.entities)
        self.dcgm, self.host = self.target("dcgm.example"), self.target("n1")
        self.now_ms = 0

    def target(self, name: str) -> PageTarget:
        return PageTarget(decoder=PageDecoder(self.resolver, Target(name)))

    def scrape(self, target: PageTarget, page: bytes | None, took_s: float = 0.25) -> dict[str, float]:
        """What the scrape says of n1."""
        self.now_ms += 15_000
        batches = self.scrapes.decode(target, page, took_s, self.now_ms)
        row = self.entities[EntityKind.NODE].find_row("n1")
        found = [one for batch in batches if batch.kind is EntityKind.NODE for one in self.rows(batch, row)]
        return {name: value for name, value in found if name.startswith("scrape_") or name.endswith("_reported")}

    def rows(self, batch: SampleBatch, row: int | None) -> list[tuple[str, float]]:
        names = [METRICS[EntityKind.NODE][metric].name for metric in batch.metric.tolist()]
        entities, values = batch.entity.tolist(), batch.value.tolist()
        return [(name, value) for name, entity, value in zip(names, entities, values, strict=True) if entity == row]


def test_an_answer_says_how_long_it_took_and_how_many_devices_it_names() -> None:
    work = Watched()
    assert work.scrape(work.dcgm, gpus(2)) == {"scrape_up": 1, "scrape_duration_s": 0.25, "gpus_reported": 2}


def test_devices_that_vanish_are_counted_down_to_none() -> None:
    work = Watched()
    work.scrape(work.dcgm, gpus(2))
    assert work.scrape(work.dcgm, gpus(1))["gpus_reported"] == 1
    assert "gpus_reported" not in work.scrape(work.dcgm, None)


def test_the_exporter_of_the_gpus_speaks_for_its_node() -> None:
    work = Watched()
    work.scrape(work.dcgm, gpus(8))
    assert work.scrape(work.host, LOAD + ports(3)) == {"ports_reported": 3}
    assert work.scrape(work.host, None) == {}
    assert work.scrape(work.dcgm, None, 1.5) == {"scrape_up": 0, "scrape_duration_s": 1.5}
    work.scrapes.forget_target(work.dcgm)
    assert work.scrape(work.host, LOAD) == {"scrape_up": 1, "scrape_duration_s": 0.25, "ports_reported": 0}


def test_a_page_with_bad_lines_only_is_no_answer() -> None:
    work = Watched()
    work.scrape(work.dcgm, gpus(1))
    assert work.scrape(work.dcgm, b"\x00\xff no page\n")["scrape_up"] == 0


def test_an_exporter_that_never_answers_is_down_under_the_name_of_its_host() -> None:
    work = Watched()
    down = {"scrape_up": 0, "scrape_duration_s": 0.25}
    assert [work.scrape(work.host, None) for _ in range(UNNAMED_ROUNDS)] == [*[{}] * (UNNAMED_ROUNDS - 1), down]
