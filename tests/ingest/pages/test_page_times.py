"""Timestamps of pages: milliseconds, seconds in OpenMetrics, and what is neither."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.ingest.source import Batch
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import Desk, labels, page, reasons
from tests.ingest.pages.test_scrape import Round, answers, exporter

FIELD = Path(__file__).parents[2] / "field"
POWER = "DCGM_FI_DEV_POWER_USAGE" + labels(0)
AT_S = 1_795_648_400
NOW_MS = 1000 * AT_S + 5000


def times(batch: Batch) -> list[int]:
    return [time_ms for samples in batch.samples for time_ms in samples.time_ms.tolist()]


def test_open_metrics_counts_seconds() -> None:
    batch = Desk().decoder.decode((FIELD / "11-openmetrics-integer-seconds.prom").read_bytes(), NOW_MS)
    assert times(batch) == [1000 * AT_S] * 24
    assert batch.get_tally().read == 24
    assert batch.bad == ()


@pytest.mark.parametrize("stamp", ["1795648400", "1795648400.0", "1.7956484e9", "1795648400.25"])
@pytest.mark.parametrize("end", ["# EOF\n", "# EOF", "# EOF\r\n"])
def test_seconds_may_have_fractions_and_the_last_line_no_end(stamp: str, end: str) -> None:
    desk = Desk()
    text = page(f"{POWER} 400 {stamp}", f'a_bucket{{le="1"}} 5 # {{trace_id="x"}} 0.5 {stamp}') + end.encode()
    for _ in range(2):
        batch = desk.decoder.decode(text, NOW_MS)
        assert times(batch) == [round(float(stamp) * 1000)]
        assert (batch.bad, batch.get_tally().all) == ((), 2)


def test_an_exemplar_hides_no_sample() -> None:
    desk = Desk()
    line = 'vllm:time_to_first_token_seconds_bucket{model_name="m # {",le="0.25"} 7 # {trace_id="x"} 0.2 1795648399.5'
    batch = desk.decoder.decode(page(line, "# EOF"), NOW_MS)
    assert [samples.value.tolist() for samples in batch.samples] == [[7.0]]
    assert reasons(desk.decoder.decode(page(line), NOW_MS)) == ["bad_label"], "the text format has none"


def test_the_content_type_says_it_where_the_page_does_not() -> None:
    body = page(f"{POWER} 400 {1_699_999_990}")

    async def scenario() -> Round:
        kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
        async with exporter(om=answers(body, **{"Content-Type": kind}), text=answers(body)) as url:
            work = Round([f"{url}/om om", f"{url}/text text"])
            await work.until(
                lambda: len(work.values("scrape_up", "om")) > 1 and len(work.values("scrape_up", "text")) > 1
            )
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert set(work.values("scrape_up", "om")) == {1.0}
    assert set(work.values("scrape_up", "text")) == {0.0}, "read as milliseconds, they are of 1970"
    assert {error.reason for batch in work.batches for error in batch.bad} == {"absurd_time"}


@pytest.mark.parametrize(
    ("stamp", "end", "reason"),
    [
        (AT_S, "", "absurd_time"),  # seconds where milliseconds belong
        (-5, "", "absurd_time"),
        (10_000_000_000_000, "", "future"),  # 2286
        (1000 * AT_S, "# EOF", "future"),  # milliseconds where seconds belong
        (3600, "# EOF", "absurd_time"),
        ("soon", "# EOF", "bad_timestamp"),
        ("NaN", "# EOF", "bad_timestamp"),
        ("1e300", "# EOF", "bad_timestamp"),
    ],
)
def test_an_absurd_time_is_a_bad_record_with_an_example(stamp: object, end: str, reason: str) -> None:
    batch = Desk().decoder.decode(page(f"{POWER} 400 {stamp}", *([end] if end else [])), NOW_MS)
    assert (batch.samples, reasons(batch)) == ((), [reason])
    assert str(stamp) in batch.bad[0].detail or POWER[:20] in batch.bad[0].detail


@given(st.lists(st.tuples(st.integers(0, 4_000_000_000_000), st.booleans()), min_size=1, max_size=8), st.booleans())
@examples(150)
def test_no_sample_is_of_a_time_that_cannot_be(stamps: list[tuple[int, bool]], open_metrics: bool) -> None:
    lines = [
        f"DCGM_FI_DEV_POWER_USAGE{labels(gpu)} 400 {stamp / 1000 if seconds else stamp}"
        for gpu, (stamp, seconds) in enumerate(stamps)
    ]
    batch = Desk().decoder.decode(page(*lines, *(["# EOF"] if open_metrics else [])), NOW_MS)
    read = np.array(times(batch), np.int64)
    assert np.all((read >= 946_684_800_000) & (read <= NOW_MS + 60_000))
    assert len(read) + len(batch.bad) == len(stamps)
