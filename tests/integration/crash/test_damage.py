"""What a crash or a disk may leave behind: each is said, costs only itself, and mends where it can."""

import os
import time

import pytest

from fleetcast.ingest.inbox.segments import HEADER, RecordKind, encode_record, list_segments
from fleetcast.service.board.board import BoardReader
from tests.integration.crash.outages import bad_records, gone, life, nobody_restarts, now_ms, states
from tests.integration.service_process import Service

pytestmark = pytest.mark.integration


def test_a_board_grows_old_while_the_pipeline_is_away_and_is_served(service: Service) -> None:
    with nobody_restarts(service):
        gone(service, "pipeline")
        looks = []
        for _ in range(4):
            status, answer, headers = service.request("GET", "/v1/nodes/n1")
            assert status == 200
            looks.append((answer["as_of_ms"], int(headers["age"])))
            time.sleep(0.4)
        assert len({as_of_ms for as_of_ms, _ in looks}) == 1
        assert [age for _, age in looks] == sorted({age for _, age in looks})
        events = life("meanwhile", looks[0][0])
        assert service.request("POST", "/v1/events", events)[1]["accepted"] == 2
    service.until("a new board", lambda: service.get("/v1/nodes/n1")["as_of_ms"] > looks[0][0], 60)
    service.until("what was posted", lambda: states(service).get("meanwhile") == "running")


def test_a_broken_record_and_a_torn_tail_cost_themselves(service: Service) -> None:
    events = life("first", now_ms(service)) + life("broken", now_ms(service)) + life("last", now_ms(service))
    with nobody_restarts(service):
        gone(service, "pipeline")
        for event in events:
            assert service.request("POST", "/v1/events", event)[1]["accepted"] == 1
        gone(service, "api")
        ((_, segment),) = list_segments(service.folder / "state" / "inbox")["api"]
        data = bytearray(segment.read_bytes())
        data[data.index(b'"broken"') + 3] ^= 1
        torn = encode_record(RecordKind.EVENT, 1, b"{}")[:-1]
        segment.write_bytes(bytes(data) + torn)
    service.until("the whole records", lambda: service.get("/v1/jobs") and "last" in states(service), 60)
    assert states(service)["first"] == states(service)["last"] == "running"
    assert bad_records(service) == {"torn": 1}
    answer = service.request("POST", "/v1/events", events)[1]
    assert answer["accepted"] + answer["duplicates"] == len(events)
    service.until("the broken one, sent again", lambda: states(service).get("broken") == "running")
    service.until("the tail, which nobody goes on with", lambda: bad_records(service) == {"torn": 2})


def test_a_segment_of_nonsense_is_passed(service: Service) -> None:
    inbox = service.folder / "state" / "inbox"
    (inbox / "foreign-000000000001.seg").write_bytes(b"something else entirely")
    (inbox / "foreign-000000000002.seg").write_bytes(HEADER + os.urandom(3_000_000))
    service.request("POST", "/v1/events", life("after", now_ms(service)))
    service.until("the job", lambda: states(service).get("after") == "running")
    assert bad_records(service) == {"torn": 1}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_torn_board_is_replaced_by_the_next(service: Service, in_place: bool) -> None:
    path = service.folder / "state" / "board" / "board"
    with nobody_restarts(service):
        gone(service, "pipeline")
        before = service.get("/v1/nodes/n1")
        if in_place:  # what an api has mapped is gone: it answers nonsense or is killed by SIGBUS, until the next tick
            os.truncate(path, 5000)
        else:
            (path.parent / "cut").write_bytes(path.read_bytes()[:5000])
            (path.parent / "cut").replace(path)
            assert service.get("/v1/nodes/n1") == before
            gone(service, "api")
        assert BoardReader(path.parent).latest() is None
    service.until("a whole board", lambda: _as_of_ms(service) > before["as_of_ms"], 60)


def _as_of_ms(service: Service) -> int:
    answer = service.get("/v1/nodes/n1")
    return int(answer["as_of_ms"]) if isinstance(answer, dict) else 0


def test_a_broken_page_of_the_ledger_is_said_left_alone_and_mended_by_a_copy(service: Service) -> None:
    for number in range(40):
        request = {"request_id": f"r{number}", "gang": 999}
        status, first, _ = service.request("POST", "/v1/placements", request)
        assert status == 200
    ledger = service.folder / "state" / "ledger.sqlite"
    with nobody_restarts(service):
        gone(service, "placer")
        copy = {path: path.read_bytes() for path in ledger.parent.glob("ledger.sqlite*")}
        _fold_in_wal(ledger)
        scribbled = bytearray(ledger.read_bytes())
        scribbled[8192:16384] = os.urandom(8192)
        ledger.write_bytes(scribbled)
    service.until("the reason", lambda: "ledger.sqlite is damaged" in service.log(), 60)
    status, answer, _ = service.request("POST", "/v1/placements", {"request_id": "new"})
    assert status == 503
    assert "the placer cannot start" in answer["detail"]
    assert "ledger.sqlite is damaged" in answer["detail"]
    assert service.request("GET", "/v1/nodes/n1")[0] == 200
    assert service.process.poll() is None
    assert ledger.read_bytes() == scribbled
    for path in ledger.parent.glob("ledger.sqlite*"):
        path.unlink()
    for path, data in copy.items():
        path.write_bytes(data)
    again = service.until("the placer", lambda: _decided(service, request), 60)
    assert again == first


def _fold_in_wal(ledger: "os.PathLike[str]") -> None:
    import sqlite3

    with sqlite3.connect(ledger) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def _decided(service: Service, request: object) -> object:
    status, answer, _ = service.request("POST", "/v1/placements", request)
    return answer if status == 200 else None
