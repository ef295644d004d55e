"""Bytes that are no text, in every answer of Slurm: they cost themselves and no record."""

import asyncio
import json
from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.ingest.slurm.jobcomp import read_completions
from fleetcast.ingest.slurm.json import decode_accounted_jobs, decode_queued_jobs, read_nodes
from fleetcast.ingest.slurm.text import read_jobs
from tests.fuzz.bounds import examples
from tests.ingest.slurm.test_changing_records import FIELD_MS, NOW_MS, Polled, field
from tests.ingest.slurm_outputs import T, account, accounts, new_job, node, nodes, old_job, queue


def test_a_name_in_latin_1_costs_no_job() -> None:
    polled = Polled([field("25-slurm-latin1-name.json")], FIELD_MS)
    polled.poll()
    job = polled.job("206")
    assert job.submission is not None
    assert (job.state, job.hosts, job.submission.name) == ("running", ("g09",), "caf\ufffd")
    assert polled.source.health()["noted"]["text_replaced"] == 1


@pytest.mark.parametrize("dirt", [b"\xe9", b"\xff\xfe", b"\xc3", b"\x07", b"\n", b"\\ud800", b"\xed\xa0\x80"])
@pytest.mark.parametrize("key", ["name", "comment", "account", "admin_comment"])
def test_dirt_in_any_text_of_a_job_costs_nothing_else(dirt: bytes, key: str) -> None:
    body = queue(old_job(7), new_job(8, **{key: "DIRT"}), old_job(9)).replace(b"DIRT", dirt)
    read = decode_queued_jobs(body)
    assert ([job.id for job in read.rows], read.bad, read.replaced) == (["7", "8", "9"], [], 1)


def test_dirt_in_accounts_nodes_and_pushed_jobs_costs_nothing() -> None:
    listed = {"job_id": 7, "state": {"current": ["FAILED"]}, "comment": {"administrator": "DIRT"}, "name": "x"}
    accounted = decode_accounted_jobs(queue(listed).replace(b"DIRT", b"\xfc"))
    assert ([job.id for job in accounted.rows], accounted.replaced) == (["7"], 1)
    found = read_nodes(nodes(node("n1", "idle", "DRAIN", reason="DIRT", at=T)).replace(b"DIRT", b"L\xfcfter"))
    assert ([(row.name, row.reason) for row in found.rows], found.replaced) == ([("n1", "L\ufffdfter")], 1)
    pushed = json.dumps({"jobid": 7, "state": "COMPLETED", "job_name": "DIRT"}).encode().replace(b"DIRT", b"\xe9")
    completed = read_completions(pushed, NOW_MS)
    assert ([job.name for job in completed.rows], completed.replaced) == (["\ufffd"], 1)
    lines = read_jobs(accounts(account("7"), account("8")).replace(b"llama", b"\xe9", 1), UTC)
    assert ([job.id for job in lines.rows], lines.replaced) == (["7", "8"], 1)


def test_dirt_beside_the_jobs_costs_no_job() -> None:
    read = decode_queued_jobs(queue(old_job(7)).replace(b'"errors": []', b'"errors": [{"description": "\xe9"}]'))
    assert [job.id for job in read.rows] == ["7"]


def test_a_record_that_is_wrong_stays_a_bad_record_with_its_own_reason() -> None:
    body = queue(old_job(7), {"job_id": "x", "name": "DIRT"}).replace(b"DIRT", b"\xe9")
    read = decode_queued_jobs(body)
    assert ([job.id for job in read.rows], len(read.bad), read.replaced) == (["7"], 1, 0)


@given(st.binary(max_size=12))
@examples(200)
def test_whatever_bytes_a_name_holds_no_other_job_is_lost(dirt: bytes) -> None:
    body = queue(old_job(7), old_job(8, name="DIRT"), old_job(9)).replace(
        b"DIRT", dirt.replace(b'"', b"").replace(b"\\", b"")
    )
    assert [job.id for job in decode_queued_jobs(body).rows] == ["7", "8", "9"]


def test_what_became_of_every_record_adds_up() -> None:
    without = old_job(9, tres_req_str="cpu=1", tres_alloc_str="cpu=1", tres_per_node="", gres_detail=[])
    polled = Polled([queue(old_job(7), without, {"job_id": "x"})])
    polled.fake.rows = [nodes(node("n1"), node("n2"))]
    batch = asyncio.run(polled.source.next())
    tally = batch.get_tally()
    assert (tally.read, tally.refused, sum(tally.ignored.values()), tally.unread, tally.all) == (3, 1, 1, 0, 5)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
@pytest.mark.parametrize("key", ["billable_tres", "priority"])
def test_a_number_that_is_no_json_is_unknown_and_costs_no_job(number: bytes, key: str) -> None:
    read = decode_queued_jobs(queue(old_job(7), old_job(8, **{key: 123_456}), old_job(9)).replace(b"123456", number))
    assert ([job.id for job in read.rows], read.bad, read.replaced) == (["7", "8", "9"], [], 1)
    found = read_nodes(nodes(node("n1") | {"free_mem": 123_456}, node("n2")).replace(b"123456", number))
    assert ([row.name for row in found.rows], found.bad) == (["n1", "n2"], [])


@pytest.mark.parametrize(
    ("written", "name"), [(rb"a\xb", r"a\xb"), (rb"C:\data", r"C:\data"), (rb"a\u12", r"a\u12"), (rb"a\\\d", r"a\\d")]
)
def test_a_backslash_that_escapes_nothing_stands_for_itself(written: bytes, name: str) -> None:
    read = decode_queued_jobs(queue(old_job(7), new_job(8, name="DIRT")).replace(b"DIRT", written))
    assert ([job.name for job in read.rows], read.bad, read.replaced) == (["llama|7b", name], [], 1)
