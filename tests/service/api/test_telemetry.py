"""The pipeline's numbers as exposition text."""

from prometheus_client.parser import text_string_to_metric_families

from fleetcast.service.api.telemetry import format_pipeline_page


def series(page: str) -> dict[str, float]:
    return {
        f"{sample.name} {sample.labels.get('source', '')}".strip(): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_every_source_tells_whether_it_answers_and_how_far_behind_it_is() -> None:
    rows = [
        {"name": "kafka", "kind": "kafka", "up": False, "lag_s": 12.5, "lag_records": 40, "bad": 3, "errors": 4},
        {"name": "scrape", "kind": "scrape", "up": 7, "down": 1, "lag_s": None, "bad": 0},
        {"name": "replay"},
    ]
    told = series(format_pipeline_page({"sources": rows}, 1.0, 1))
    assert told["fleetcast_source_up kafka"] == 0
    assert told["fleetcast_source_up scrape"] == 1
    assert told["fleetcast_source_lag_seconds kafka"] == 12.5
    assert told["fleetcast_source_lag_records kafka"] == 40
    assert told["fleetcast_source_bad_records_total kafka"] == 3
    assert told["fleetcast_source_errors_total kafka"] == 4
    assert "fleetcast_source_lag_seconds scrape" not in told
    assert not [name for name in told if name.endswith(" replay")]


def test_what_became_of_records_is_counted_by_source() -> None:
    counts = {"all": 10, "read": 4, "refused": 3, "ignored": 2, "unread": 1, "unknown_fields": 7}
    rows = [
        {"name": "scrape", "kind": "scrape", "records": counts, "targets_unread": 2, "targets_refusing": 3},
        {"name": "outside", "records": "any"},
    ]
    page = format_pipeline_page({"sources": rows}, 1.0, 1)
    told = series(page)
    assert told["fleetcast_source_unknown_fields_total scrape"] == 7
    assert told["fleetcast_source_unread_targets scrape"] == 2
    assert told["fleetcast_source_refusing_targets scrape"] == 3
    for outcome in ("read", "refused", "ignored", "unread"):
        line = (
            f'fleetcast_source_records_total{{kind="scrape",outcome="{outcome}",source="scrape"}} {counts[outcome]}.0'
        )
        assert line in page
    assert "fleetcast_source_unknown_fields_total outside" not in told


def test_the_archive_tells_what_waits_and_whether_its_disk_takes_it() -> None:
    health = {"rows": 7, "events": 1, "files": 2, "bytes": 900, "repeats": 3, "too_old": 0, "waiting_bytes": 46}
    told = format_pipeline_page({"archive": {**health, "full": True, "failing": "No space left on device"}}, 1.0, 1)
    for line in ("rows_total 7.0", "repeats_total 3.0", "waiting_bytes 46.0", "full 1.0", "failing 1.0"):
        assert f"\nfleetcast_archive_{line}\n" in told
    assert "fleetcast_archive" not in format_pipeline_page({"archive": None}, 1.0, 1)
