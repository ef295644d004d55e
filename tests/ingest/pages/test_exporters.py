"""The table of exporters: each name belongs to one of them, whichever way a line comes in."""

from collections.abc import Mapping

import pytest

from fleetcast.clients.prometheus import MatrixRow
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages import exporters
from fleetcast.ingest.pages.amd import READINGS
from fleetcast.ingest.pages.dcgm import FIELD_IDS
from fleetcast.ingest.pages.exporters import RESOLVERS
from fleetcast.ingest.pages.host import HOST_NAMES
from fleetcast.ingest.pages.infiniband import PORT_READINGS
from fleetcast.ingest.pages.resolver import Resolver
from fleetcast.ingest.pages.text import Target
from fleetcast.ingest.remote_write.backfill import BackfillRequest, find_known_names, make_write_request
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.series import Series
from fleetcast.ingest.tally import SkipRule
from tests.ingest.exporter_pages import Desk, labels

NAMES = [
    *FIELD_IDS,
    *sorted(HOST_NAMES),
    *PORT_READINGS,
    "vllm:num_requests_running",
    *READINGS,
    "amd_gpu_clock",
    "DCGM_EXP_XID_ERRORS_COUNT",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_claimed_by_one_exporter(name: str) -> None:
    assert [resolver.claims(name) for resolver in RESOLVERS].count(True) == 1


def test_what_is_read_is_claimed_and_asked_of_prometheus() -> None:
    read = [name for name in NAMES if any(resolver.reads(name) for resolver in RESOLVERS)]
    assert read == NAMES[:-1], "windowed counts of the exporter itself are not read"
    assert all(resolver.claims(name) for name in read for resolver in RESOLVERS if resolver.reads(name))
    asked = find_known_names(["go_threads", *NAMES, "node_uname_info"])
    assert asked[0] == "node_uname_info"
    assert sorted(name for names in asked[1:] for name in names.split("|")) == sorted(read)


def test_names_that_make_one_sample_are_asked_for_together() -> None:
    """One after the other, the sum of each would be taken for the whole."""
    errors = ["node_network_receive_errs_total", "node_network_transmit_errs_total"]
    hot = [f"gpu_violation_{part}_thermal_residency_percentage" for part in ("hbm", "socket")]
    asked = find_known_names([errors[0], hot[0], "gpu_power_usage", errors[1], hot[1]])
    assert asked == ["|".join(errors), "|".join(hot), "gpu_power_usage"]
    wish = BackfillRequest("http://p", 0, 1, 'cluster="a"')
    assert [wish.make_selector(name) for name in asked[1:]] == [
        f'{{__name__=~"{hot[0]}|{hot[1]}",cluster="a"}}',
        '{__name__="gpu_power_usage",cluster="a"}',
    ]


def test_names_that_nothing_reads_are_counted_apart_from_the_exporters_process() -> None:
    desk = Desk()
    desk.decode(f"DCGM_FI_DEV_NEW_FIELD{labels(0)} 1", f"DCGM_FI_DEV_NEW_FIELD{labels(1)} 1", "go_threads 7")
    assert (desk.tally.unread, desk.tally.names) == (2, ("DCGM_FI_DEV_NEW_FIELD",))
    assert desk.tally.ignored == {SkipRule.EXPORTER: 1}


class FanResolver(Resolver):
    """What somebody writes who adds an exporter."""

    @classmethod
    def claims(cls, name: str) -> bool:
        return name.startswith("fan_")

    @classmethod
    def reads(cls, name: str) -> bool:
        return name == "fan_watts"

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Series | None:
        if not self.reads(name):
            return None
        node = self.entities.find_or_add_node(self.find_node(labels, target))
        return Series(EntityKind.NODE, find_metric_row(EntityKind.NODE, "bmc_power_w"), node, node)


def test_a_new_exporter_needs_a_class_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scraping, remote writes and backfill then read it."""
    monkeypatch.setattr(exporters, "RESOLVERS", (*RESOLVERS, FanResolver))
    desk = Desk()
    assert desk.decode('fan_watts{hostname="n1"} 40', "fan_rpm 9") == {"bmc_power_w n1": 40.0}
    assert desk.tally.names == ("fan_rpm",)
    assert find_known_names(["fan_rpm", "fan_watts"]) == ["fan_watts"]
    row = MatrixRow({"__name__": "fan_watts", "instance": "n2:9"}, [(1.0, 41.0)])
    written = WriteDecoder(exporters.ExporterResolver(Entities())).decode_request(make_write_request([row]), 2000)
    assert [samples.value.tolist() for samples in written.samples] == [[41.0]]
