"""A page with refused lines is read as quickly as any other, and says the same of them at every scrape."""

import asyncio
import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.store import WindowStore
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.gpu_labels import ObservedJobLabels
from fleetcast.ingest.kafka.node_records import make_node_records
from fleetcast.ingest.pages import refusals
from fleetcast.ingest.pages.refusals import LASTING_ROUNDS, MAX_LOGGED, LastingRefusals
from fleetcast.ingest.pages.text import MAX_BAD_LINES, PageDecoder
from fleetcast.ingest.source import Batch
from fleetcast.ingest.tally import RecordTally, SkipRule
from fleetcast.service.pipeline.state import FleetState
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import Desk, dcgm_page, labels, page
from tests.ingest.pages.test_page_tally import NAMES, sample_lines
from tests.ingest.pages.test_scrape import Round, answers, exporter

POWER = "DCGM_FI_DEV_POWER_USAGE"
TEMP = "DCGM_FI_DEV_GPU_TEMP"
NOW_MS = 1_795_648_400_000


class CountingDesk(Desk):
    """A desk that counts the pages that are read line by line."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.line_by_line = 0
        original = PageDecoder._decode_lines

        def counted(decoder: PageDecoder, text: bytes, arrival_ms: int, open_metrics: bool) -> Batch:
            self.line_by_line += decoder is self.decoder
            return original(decoder, text, arrival_ms, open_metrics)

        patch.setattr(PageDecoder, "_decode_lines", counted)


def bad(batch: Batch) -> Counter[str]:
    return sum((Counter({error.reason: error.count}) for error in batch.bad), Counter())


REFUSED = {
    "an index that is none": TEMP + '{gpu="x"} {value}',
    "a node that is none": f"{TEMP}{labels(0, node='a/b')} {{value}}",
    "no GPU": TEMP + '{UUID="GPU-nowhere"} {value}',
    "labels that are none": TEMP + "{gpu=} 3",
    "no line": "<html>",
    "no value": f"{POWER}{labels(7)} N/A",
    "a value that is none, of a known series": f"{POWER}{labels(1)} [N/A]",
    "twice": f"{POWER}{labels(0)} {{value}}",
    "a byte that is no text": 'up{a="\udcff"} 1',
    "a time that is none": f"{POWER}{labels(5)} 4 soon",
}


@pytest.mark.parametrize("line", REFUSED.values(), ids=REFUSED)
def test_a_page_with_a_refused_line_is_parsed_once(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = CountingDesk(monkeypatch)
    seen = []
    for scrape in range(8):
        text = (
            line.replace("{value}", str(scrape))
            .replace("{{", "{")
            .replace("}}", "}")
            .encode("utf-8", "surrogateescape")
        )
        batch = desk.decoder.decode(dcgm_page(power_w=400.0 + scrape) + text + b"\n", NOW_MS + 15_000 * scrape)
        seen.append((desk.words(batch), bad(batch), batch.get_tally()))
        assert batch.get_tally().all == sample_lines(dcgm_page()) + 1
    assert desk.line_by_line <= 2
    assert all(row[1:] == seen[0][1:] for row in seen), "the same refusal at every scrape"
    assert [row[0]["power_w n001/0"] for row in seen] == [400.0 + scrape for scrape in range(8)]
    assert sum(seen[0][1].values()) == 1


def test_broken_lines_that_differ_from_page_to_page_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = CountingDesk(monkeypatch)
    for scrape in range(5):
        batch = desk.decoder.decode(dcgm_page() + f"broken-{scrape}\n".encode(), NOW_MS)
        assert bad(batch) == {"bad_line": 1}
        assert desk.decoder._shape is None


def test_a_page_beyond_the_bound_is_parsed_once_and_read_as_soon_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = CountingDesk(monkeypatch)
    desk.entities.set_limits({}, 10, 1)
    for scrape in range(6):
        batch = desk.decoder.decode(dcgm_page(gpus=4, power_w=400.0 + scrape), NOW_MS + scrape)
        assert desk.words(batch) == {"power_w n001/0": 400.0 + scrape, "gpu_temp_c n001/0": 50.0}
        assert (bad(batch), batch.get_tally()) == ({"unknown_gpus": 6}, RecordTally(2, 6))
    assert desk.line_by_line <= 2
    desk.entities.set_limits({"n001": 8}, 10, 1)
    batch = desk.decoder.decode(dcgm_page(gpus=4), NOW_MS + 10)
    assert (len(batch), batch.bad) == (8, ())


def test_a_large_page_beyond_the_bound_is_read_in_parts_and_then_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIG instances and many fields: more lines than one page may add."""
    desk = CountingDesk(monkeypatch)
    desk.entities.set_limits({}, 10, 0)
    lines = [f"{TEMP}{labels(gpu % 8, x=str(gpu))} 40" for gpu in range(2 * MAX_BAD_LINES + 400)]
    for scrape in range(6):
        batch = desk.decoder.decode(page(*lines), NOW_MS + scrape)
        assert batch.get_tally().all == batch.get_tally().refused == len(lines)
        assert ("page_abandoned" in bad(batch)) == (scrape < 2)
    assert desk.line_by_line == 3
    assert bad(batch) == {"unknown_gpus": len(lines)}
    assert len(batch.bad) == 1, "one error with its count"


@pytest.mark.parametrize("forgets", [False, True])
def test_a_page_of_many_refused_lines_is_read_whole_after_a_change_of_the_fleet(forgets: bool) -> None:
    """Its good lines come last. The refused lines are resolved again, but they are not new."""
    desk = Desk()
    desk.entities.set_limits({"n001": 8}, 10, 0)
    refused = (f"{TEMP}{labels(gpu % 8, node='other', x=str(gpu))} 40" for gpu in range(2 * MAX_BAD_LINES + 400))
    text = page(*refused, f"{TEMP}{labels(0)} 40")
    for scrape in range(8):
        batch = desk.decoder.decode(text, NOW_MS + scrape)
        assert ("page_abandoned" in bad(batch)) == (scrape < 2)
        assert len(batch) == (scrape >= 2)
        if scrape in (3, 5, 6):
            desk.decoder.target.forgets = forgets
            desk.entities.find_or_add_node(f"new-{scrape}")


def test_a_board_that_another_page_names_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = CountingDesk(monkeypatch)
    text = page(TEMP + '{gpu_uuid="GPU-00000000-n001-0"} 5', f"{TEMP}{labels(1)} 4")
    for scrape in range(3):
        batch = desk.decoder.decode(text, NOW_MS + scrape)
        assert bad(batch) == {"bad_label": 1}
    other = PageDecoder(desk.resolver, desk.decoder.target)
    other.decode(dcgm_page(), NOW_MS)
    batch = desk.decoder.decode(text, NOW_MS + 9)
    assert desk.words(batch)["gpu_temp_c n001/0"] == 5.0
    assert not batch.bad


def test_a_line_that_names_its_board_by_a_later_line_of_the_page_is_read_from_the_second_page_on() -> None:
    desk = Desk()
    lines = (f'{TEMP}{{UUID="GPU-00000000-n001-0"}} 5', f"{POWER}{labels(0)} 400")
    assert desk.decode(*lines) == {"power_w n001/0": 400.0}
    for _ in range(3):
        assert desk.decode(*lines) == {"power_w n001/0": 400.0, "gpu_temp_c n001/0": 5.0}


def test_a_sum_whose_part_is_refused_is_left_out_until_the_page_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = CountingDesk(monkeypatch)
    lines = [f'node_cpu_seconds_total{{cpu="{cpu}",mode="steal"}} {cpu}' for cpu in range(3)]
    more = "node_memory_MemAvailable_bytes 9"
    assert desk.decode(*lines, more) == {"cpu_steal_s host": 1.0, "memory_available_bytes host": 9.0}
    broken = [lines[0], 'node_cpu_seconds_total{cpu="1",mode="steal"} x', lines[2], more]
    for scrape in range(5):
        assert desk.decode(*broken) == {"memory_available_bytes host": 9.0}
        assert desk.tally == RecordTally(1, 1, {SkipRule.INCOMPLETE: 2})
        assert desk.decoder.noted["partial"] == scrape + 1
    assert desk.line_by_line <= 3
    assert desk.decode(*lines, more) == {"cpu_steal_s host": 1.0, "memory_available_bytes host": 9.0}


def test_a_time_ahead_of_the_clock_is_judged_at_every_scrape() -> None:
    desk = Desk()
    ahead = f"{POWER}{labels(1)} 401 {NOW_MS + 90_000}"
    for scrape in range(8):
        batch = desk.decoder.decode(dcgm_page(gpus=1) + page(ahead), NOW_MS + 15_000 * scrape)
        assert bad(batch) == ({"future": 1} if scrape < 2 else {})


GOOD = st.sampled_from([name for name in NAMES if "{" in name and name[-1] == "}"])
VALUED = st.builds("{} {}".format, GOOD, st.sampled_from(["{v}", "{v}.5"]))
ODD = st.sampled_from(
    [
        *(
            f'{TEMP}{{{{gpu="{gpu}",Hostname="{node}"}}}} {{v}}'
            for gpu in ("0", "x", "999")
            for node in ("n1", "n2", "a/b")
        ),
        *("what?", "0name 1", "up N/A", 'open{{label="', f"{POWER}{{{{gpu=}}}} 1", "# TYPE a b", "", "made:up 1"),
    ]
)


@examples(150)
@given(st.lists(st.one_of(VALUED, ODD), min_size=1, max_size=20), st.lists(st.one_of(VALUED, ODD), max_size=20))
def test_a_decoder_that_remembers_refusals_says_what_a_new_one_says(first: list[str], second: list[str]) -> None:
    """Samples, tallies, reasons and labels of each page, in any order of pages."""
    desk = Desk()
    desk.entities.set_limits({"n1": 8}, 1, 1)
    for moment, lines in enumerate([first, first, second, second, first, first, second, second]):
        text = "".join(
            f"{line.replace('{v}', str(moment + 1)).replace('{{', '{').replace('}}', '}')}\n" for line in lines
        )
        warm = desk.decoder.decode(text.encode(), NOW_MS + 15_000 * moment)
        cold = PageDecoder(desk.resolver, desk.decoder.target).decode(text.encode(), NOW_MS + 15_000 * moment)
        again = PageDecoder(desk.resolver, desk.decoder.target).decode(text.encode(), NOW_MS + 15_000 * moment)
        assert warm.get_tally().all == sample_lines(text.encode())
        if moment % 2 and _steady(cold) == _steady(again):
            assert _steady(warm) == _steady(cold)


def _steady(batch: Batch) -> tuple[object, ...]:
    """What a page says apart from rates, which need an earlier page, and lines that nothing reads."""
    samples = [
        (row.kind, row.metric.tolist(), row.entity.tolist(), row.value.tolist(), row.time_ms.tolist())
        for row in batch.samples
        if row.kind is not EntityKind.SERVED_MODEL
    ]
    sights: list[ObservedJobLabels] = list(batch.labels)
    return samples, bad(batch), batch.get_tally().refused, sights


def batch_of(refused: int) -> Batch:
    return Desk().decoder.decode(page(*[f"{TEMP}{labels(0)} 4", *["what?"] * refused]), NOW_MS)


def test_a_refusal_that_lasts_is_logged_once_and_shown_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lasting = LastingRefusals()
    for _ in range(LASTING_ROUNDS - 1):
        lasting.record_page("http://u:secret@n1:9400/metrics", batch_of(2))
    assert (lasting.health(), caplog.text) == ({"targets_refusing": 0, "targets_refused": []}, "")
    for _ in range(5):
        lasting.record_page("http://u:secret@n1:9400/metrics", batch_of(2))
    shown = lasting.health()["targets_refused"]
    assert [(row["target"], row["lines"], row["reason"]) for row in shown] == [
        ("http://***@n1:9400/metrics", 2, "bad_line: what?")
    ]
    assert caplog.text.count("2 lines are refused at every scrape: bad_line: what?") == 1
    assert "secret" not in caplog.text
    lasting.record_page("http://u:secret@n1:9400/metrics", batch_of(0))
    assert lasting.health()["targets_refusing"] == 0
    assert "no line is refused any more" in caplog.text


def test_the_log_names_some_targets_and_then_the_place_that_has_all(caplog: pytest.LogCaptureFixture) -> None:
    lasting = LastingRefusals()
    bad_page = batch_of(1)
    for number in range(3 * MAX_LOGGED):
        for _ in range(LASTING_ROUNDS + 2):
            lasting.record_page(f"http://n{number}:9400/metrics", bad_page)
    assert caplog.text.count("refused at every scrape") == MAX_LOGGED + 1
    assert lasting.health()["targets_refusing"] == 3 * MAX_LOGGED
    lasting.forget_target("http://n0:9400/metrics")
    assert lasting.health()["targets_refusing"] == 3 * MAX_LOGGED - 1


def test_a_scraper_shows_targets_with_lasting_refusals_and_reads_hosts_beyond_the_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "LASTING_ROUNDS", 3)

    async def scenario() -> Round:
        async with exporter(good=answers(dcgm_page()), bad=answers(dcgm_page(node="n002") + b"what?\n")) as url:
            work = Round([f"{url}/good", f"{url}/bad"])
            work.entities.set_limits({}, 0, 0)
            await work.until(lambda: work.scraper.health()["targets_refusing"] == 1)
            await work.until(lambda: bool(work.values("power_w", "n001/1") and work.values("power_w", "n002/1")))
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    health = work.scraper.health()
    assert [(row["target"].rpartition("/")[2], row["lines"]) for row in health["targets_refused"]] == [("bad", 1)]
    assert health["bad"] == sum(error.count for batch in work.batches for error in batch.bad) >= 3
    assert (health["targets_up"], health["targets_down"]) == (2, 0)


def test_what_a_page_refuses_is_counted_line_by_line_wherever_it_goes() -> None:
    """A remembered page has one error a reason: a relay to Kafka and the pipeline's counts know of every line."""
    desk = Desk()
    text = dcgm_page() + b"what?\n" * 7
    batches = [desk.decoder.decode(text, NOW_MS + 15_000 * scrape) for scrape in range(4)]
    assert [len(batch.bad) for batch in batches] == [7, 7, 1, 1]
    for batch in batches:
        records = make_node_records(batch, desk.entities, {})
        assert records[0].header.bad == {"bad_line": 7}
        store = WindowStore(desk.entities)
        folded = FleetState(desk.entities, store, Topology.build([]))
        folded.apply(batch, NOW_MS + 60_000)
        assert folded.counts.bad == {"bad_line": 7}
