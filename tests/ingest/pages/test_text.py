import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.text import MAX_BAD_LINES
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import Desk, dcgm_page, labels, page, reasons

POWER = "DCGM_FI_DEV_POWER_USAGE"


def test_a_page_becomes_columns_in_our_units() -> None:
    desk = Desk()
    batch = desk.decoder.decode(dcgm_page(gpus=2), 1000)
    assert desk.words(batch) == {
        "power_w n001/0": 400.0,
        "power_w n001/1": 401.0,
        "gpu_temp_c n001/0": 50.0,
        "gpu_temp_c n001/1": 51.0,
    }
    assert batch.samples[0].time_ms.tolist() == [1000] * 4
    assert batch.bad == ()


def test_the_second_scrape_reads_new_numbers_by_the_template() -> None:
    desk = Desk()
    desk.decoder.decode(dcgm_page(power_w=400.0), 1000)
    batch = desk.decoder.decode(dcgm_page(power_w=1234.5), 16_000)
    assert desk.words(batch)["power_w n001/1"] == 1235.5
    assert batch.samples[0].time_ms.tolist() == [16_000] * 4


def test_a_gpu_that_vanishes_is_gone_from_the_batch_and_from_the_count() -> None:
    desk = Desk()
    desk.decoder.decode(dcgm_page(gpus=8), 1000)
    assert desk.decoder.reported[0].gpus == 8
    batch = desk.decoder.decode(dcgm_page(gpus=7), 2000)
    assert desk.decoder.reported[0].gpus == 7
    assert "power_w n001/7" not in desk.words(batch)
    assert desk.words(desk.decoder.decode(dcgm_page(gpus=8), 3000))["power_w n001/7"] == 407.0


def test_a_broken_line_loses_nothing_but_itself_at_every_scrape() -> None:
    desk = Desk()
    lines = [f"{POWER}{labels(0)} 400", f"{POWER}{labels(1)} broken", f"{POWER}{labels(2)} 402"]
    for now_ms in (1000, 2000, 3000):
        batch = desk.decoder.decode(page(*lines), now_ms)
        assert desk.words(batch) == {"power_w n001/0": 400.0, "power_w n001/2": 402.0}
        assert reasons(batch) == ["bad_value"]


def test_a_line_that_breaks_after_a_clean_scrape_is_counted() -> None:
    desk = Desk()
    desk.decode(f"{POWER}{labels(0)} 400", f"{POWER}{labels(1)} 401")
    for broken in ("", "4 0 0", "1_0", "400,1", "nought", "NaN"):
        batch = desk.decoder.decode(page(f"{POWER}{labels(0)} {broken}", f"{POWER}{labels(1)} 401"), 2000)
        assert desk.words(batch) == {"power_w n001/1": 401.0}, broken
        assert len(batch.bad) == 1, broken


def test_nan_and_infinity_are_counted_and_skipped() -> None:
    desk = Desk()
    for _ in range(2):
        batch = desk.decoder.decode(
            page(f"{POWER}{labels(0)} NaN", f"{POWER}{labels(1)} +Inf", f"{POWER}{labels(2)} 1"), 1000
        )
        assert reasons(batch) == ["not_finite", "not_finite"]
        assert desk.words(batch) == {"power_w n001/2": 1.0}


def test_nan_in_families_of_others_is_no_bad_record() -> None:
    desk = Desk()
    batch = desk.decoder.decode(page('go_gc_duration_seconds{quantile="0.5"} NaN', "up 1"), 1000)
    assert batch.bad == ()
    assert batch.samples == ()


def test_a_duplicate_line_is_bad_and_the_first_one_counts() -> None:
    desk = Desk()
    for _ in range(2):
        batch = desk.decoder.decode(page(f"{POWER}{labels(0)} 400", f"{POWER}{labels(0)} 500"), 1000)
        assert desk.words(batch) == {"power_w n001/0": 400.0}
        assert reasons(batch) == ["duplicate"]


def test_one_gpu_under_two_pods_is_one_series() -> None:
    desk = Desk()
    lines = [f"{POWER}{labels(0, pod='a')} 400", f"{POWER}{labels(0, pod='b')} 400"]
    for _ in range(2):
        batch = desk.decoder.decode(page(*lines), 1000)
        assert desk.words(batch) == {"power_w n001/0": 400.0}
        assert batch.bad == ()
    assert desk.decoder.noted["folded"] == 1


def test_timestamps_win_over_the_arrival_time() -> None:
    desk = Desk()
    for _ in range(2):
        batch = desk.decoder.decode(page(f"{POWER}{labels(0)} 400 900", f"{POWER}{labels(1)} 401"), 1000)
        assert batch.samples[0].time_ms.tolist() == [900, 1000]
        assert batch.bad == ()


def test_a_timestamp_that_appears_later_is_read() -> None:
    desk = Desk()
    desk.decode(f"{POWER}{labels(0)} 400")
    batch = desk.decoder.decode(page(f"{POWER}{labels(0)} 410 1500"), 2000)
    assert batch.samples[0].time_ms.tolist() == [1500]
    assert batch.samples[0].value.tolist() == [410.0]


def test_a_second_blank_before_a_value_that_appears_later_is_no_timestamp() -> None:
    desk = Desk()
    desk.decode(f"{POWER}{labels(0)} 400 900", f"{POWER}{labels(1)} 401 900")
    batch = desk.decoder.decode(page(f"{POWER}{labels(0)}  410", f"{POWER}{labels(1)} 411 1500"), 2000)
    assert desk.words(batch) == {"power_w n001/0": 410.0, "power_w n001/1": 411.0}


def test_a_clock_that_runs_ahead_is_a_bad_record() -> None:
    desk = Desk()
    batch = desk.decoder.decode(page(f"{POWER}{labels(0)} 400 61001", f"{POWER}{labels(1)} 401 61000"), 1000)
    assert reasons(batch) == ["future"]
    assert desk.words(batch) == {"power_w n001/1": 401.0}


def test_a_bad_timestamp_loses_its_line_only() -> None:
    desk = Desk()
    batch = desk.decoder.decode(page(f"{POWER}{labels(0)} 400 soon", f"{POWER}{labels(1)} 401"), 1000)
    assert reasons(batch) == ["bad_timestamp"]
    assert desk.words(batch) == {"power_w n001/1": 401.0}


def test_a_last_line_without_its_end_is_truncated() -> None:
    desk = Desk()
    whole = dcgm_page(gpus=2)
    desk.decoder.decode(whole, 1000)
    batch = desk.decoder.decode(whole[:-2], 2000)  # 51 has become 5
    assert reasons(batch) == ["truncated"]
    assert "gpu_temp_c n001/1" not in desk.words(batch)
    assert len(desk.words(batch)) == 3


def test_windows_line_ends_are_read() -> None:
    desk = Desk()
    text = dcgm_page(gpus=2).replace(b"\n", b"\r\n")
    for _ in range(2):
        batch = desk.decoder.decode(text, 1000)
        assert len(desk.words(batch)) == 4
        assert batch.bad == ()


def test_blank_lines_and_comments_are_nothing() -> None:
    desk = Desk()
    for _ in range(2):
        batch = desk.decoder.decode(page("", "# hello", "  ", f"{POWER}{labels(0)} 400", "#"), 1000)
        assert desk.words(batch) == {"power_w n001/0": 400.0}
        assert batch.bad == ()


def test_a_sample_in_place_of_a_blank_line_is_seen() -> None:
    desk = Desk()
    desk.decode(f"{POWER}{labels(0)} 400", "")
    assert len(desk.decode(f"{POWER}{labels(0)} 400", f"{POWER}{labels(1)} 401")) == 2


def test_unknown_labels_change_nothing_and_unknown_metrics_are_unread() -> None:
    desk = Desk()
    for _ in range(2):
        values = desk.decode(f"{POWER}{labels(0, colour='red')} 400", f"DCGM_FI_DEV_NEW_FIELD{labels(0)} 1")
    assert values == {"power_w n001/0": 400.0}
    assert (desk.tally.unread, desk.tally.names) == (1, ("DCGM_FI_DEV_NEW_FIELD",))


def test_wrong_types_of_labels_are_bad_labels() -> None:
    desk = Desk()
    batch = desk.decoder.decode(
        page(
            f'{POWER}{{gpu="zero",Hostname="n1"}} 1',
            f'{POWER}{{gpu="-1",Hostname="n1"}} 1',
            f'{POWER}{{gpu="99999",Hostname="n1"}} 1',
            f'{POWER}{{gpu="0",Hostname="a/b"}} 1',
            f'{POWER}{{gpu="0",GPU_I_ID="x",Hostname="n1"}} 1',
            'DCGM_FI_DEV_FB_USED{gpu="0",GPU_I_ID="x",Hostname="n1"} 1',
        ),
        1000,
    )
    assert reasons(batch) == ["bad_label"] * 5
    assert desk.words(batch) == {"power_w n1/0": 1.0}


def test_a_page_that_is_no_exporter_page_is_abandoned() -> None:
    desk = Desk()
    batch = desk.decoder.decode(b"<p>not found</p>\n" * 50_000, 1000)
    assert reasons(batch) == ["bad_line"] * MAX_BAD_LINES + ["page_abandoned"]


def test_more_series_than_allowed_are_refused_with_a_reason() -> None:
    desk = Desk(max_series=3)
    batch = desk.decoder.decode(page(*(f"{POWER}{labels(gpu)} 1" for gpu in range(5))), 1000)
    assert len(desk.words(batch)) == 3
    assert reasons(batch) == ["too_many_series"] * 2


def test_labels_that_change_at_every_scrape_do_not_fill_the_memory() -> None:
    desk = Desk()

    def scrape(number: int) -> None:
        lines = (f"{POWER}{labels(gpu, pod=f'pod-{number}')} 400" for gpu in range(8))
        desk.decoder.decode(page(*lines), number)

    for number in range(50):
        scrape(number)
    tracemalloc.start()
    for number in range(50, 150):
        scrape(number)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert desk.names(EntityKind.GPU) == [f"n001/{gpu}" for gpu in range(8)]
    assert grown < 1_300_000


@examples(125)
@given(st.lists(st.sampled_from(range(6)), max_size=8), st.lists(st.sampled_from(range(6)), max_size=8))
def test_a_warm_decoder_reads_a_page_like_a_fresh_one(first: list[int], second: list[int]) -> None:
    variants = [
        f"{POWER}{labels(0)} 400.5",
        f"{POWER}{labels(1)} 7e2",
        f"DCGM_FI_DEV_GPU_UTIL{labels(0)} 97",
        f"{POWER}{labels(2)} oops",
        "# a comment",
        f"DCGM_FI_DEV_FB_USED{labels(1)} 9223372036854775794",
    ]
    warm, fresh = Desk(), Desk()
    warm.decode(*(variants[index] for index in first))
    lines = page(*(variants[index] for index in second))
    batches = warm.decoder.decode(lines, 5), fresh.decoder.decode(lines, 5)
    assert warm.words(batches[0]) == fresh.words(batches[1])
    assert sorted(reasons(batches[0])) == sorted(reasons(batches[1]))


@pytest.mark.parametrize("text", [b"", b"\n", b"\n\n\n", b"#"])
def test_an_empty_page_is_an_empty_batch(text: bytes) -> None:
    batch = Desk().decoder.decode(text, 1000)
    assert len(batch) == 0


def test_of_a_page_of_very_many_lines_the_first_are_read() -> None:
    desk = Desk()
    batch = desk.decoder.decode(dcgm_page() + b"up 1\n" * 300_000 + dcgm_page(node="n002"), 1000)
    assert reasons(batch) == ["too_many_lines"]
    assert desk.names(EntityKind.GPU) == ["n001/0", "n001/1"]


def test_a_broken_line_does_not_make_a_duplicate_of_the_next() -> None:
    desk, line = Desk(), f"DCGM_FI_DEV_GPU_TEMP{labels(0)} "
    for _ in range(2):  # whether the series is known or not
        batch = desk.decoder.decode(page(line, line + "61"), 1000)
        assert reasons(batch) == ["bad_line"] or reasons(batch) == ["bad_value"]
        assert desk.words(batch) == {"gpu_temp_c n001/0": 61.0}


def test_a_known_series_may_have_a_tab_before_its_timestamp() -> None:
    desk = Desk()
    for _ in range(2):
        batch = desk.decoder.decode(page(f"DCGM_FI_DEV_GPU_TEMP{labels(0)} 61\t900"), 1000)
        assert not batch.bad
        assert batch.samples[0].time_ms.tolist() == [900]
