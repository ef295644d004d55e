"""GPUs that Slurm grants in other ways: shards, MPS, MIG instances, numbers that are no GPU's, and every way to ask."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.events import Started, Submitted
from fleetcast.fleet.held_gpus import count_held_milli, count_wanted_milli
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.requests import RankPlacement
from fleetcast.ingest.slurm.gres import read_gres
from fleetcast.ingest.slurm.jobs import Site, make_job_events
from fleetcast.ingest.slurm.json import decode_accounted_jobs, decode_queued_jobs, read_nodes
from fleetcast.ingest.slurm.nodes import count_numbered_gpus, find_shares_per_gpu
from fleetcast.ingest.slurm.text import read_jobs
from tests.ingest.slurm.test_changing_records import FIELD_MS, Polled, field
from tests.ingest.slurm_outputs import account, accounts, new_job, node, nodes, old_job, queue


def held(polled: Polled, job: str) -> dict[str, int]:
    return dict(count_held_milli(polled.job(job)))


def submission(*jobs: dict[str, Any], site: Site = Site()) -> Submitted:  # noqa: B008
    (job,) = decode_queued_jobs(queue(*jobs)).rows
    event = make_job_events(job, site)[0]
    assert isinstance(event, Submitted)
    return event


def waiting(**fields: Any) -> dict[str, Any]:
    """A job that waits at a site whose accounts do not count GPUs."""
    plain = {"tres_req_str": "cpu=4,node=2", "tres_per_node": "", "node_count": 2}
    return old_job(7, "PENDING", **(plain | fields))


def test_a_job_of_shards_holds_a_part_of_its_gpu() -> None:
    polled = Polled([field("23-slurm-shard.json")], FIELD_MS)
    polled.poll()
    job = polled.job("201")
    assert job.ranks == (RankPlacement(0, "g02", (0,), 500),)
    assert (job.state, held(polled, "201")) == ("running", {"g02": 500})
    assert polled.source.health()["noted"]["jobs_without_gpus"] == 0


def test_shards_on_two_gpus_and_a_gpu_that_is_held_whole() -> None:
    shards = {"tres_per_node": "gres/shard:12", "tres_req_str": "gres/shard=12", "tres_alloc_str": "gres/shard=12"}
    polled = Polled([queue(old_job(7, nodes="n1", gres_detail=["shard:12(8/8,4/8)"], **shards))])
    polled.poll()
    assert polled.job("7").ranks == (RankPlacement(0, "n1", (0,), 1000), RankPlacement(1, "n1", (1,), 500))
    assert held(polled, "7") == {"n1": 1500}


def test_percentages_of_mps_are_parts_of_a_gpu() -> None:
    asked = submission(waiting(tres_per_node="gres/mps:25", node_count=1))
    assert (asked.gpus_per_node, asked.gpu_share) == (1, 250)
    assert submission(waiting(tres_per_node="gres/mps:100", node_count=1)).gpu_share is None


def test_shards_that_wait_are_as_large_as_the_nodes_divide_their_gpus() -> None:
    divided = read_nodes(nodes(node() | {"gres": "gpu:h100:8(S:0-1),shard:h100:64(S:0-1)"})).rows
    site = Site(shares_of_gpu=find_shares_per_gpu(divided))
    assert submission(waiting(tres_per_node="gres/shard:2", node_count=1), site=site).gpu_share == 250
    unknown = submission(waiting(tres_per_node="gres/shard:2", node_count=1))
    assert (unknown.gpus_per_node, unknown.gpu_share) == (1, None)


def test_accounts_and_plugins_name_shards_too() -> None:
    row = account().replace("gres/gpu=4", "gres/shard=4")
    (job,) = read_jobs(accounts(row)).rows
    assert (job.shares, job.unit, job.has_gpus) == (4, "shard", True)
    listed = {
        "job_id": 7,
        "state": {"current": ["COMPLETED"]},
        "tres": {"allocated": [{"type": "gres", "name": "shard", "count": 4}]},
    }
    assert decode_accounted_jobs(queue(listed)).rows[0].shares == 4


# -- MIG --------------------------------------------------------------------------------------------------------------


def test_numbers_of_mig_instances_are_no_gpus() -> None:
    polled = Polled([field("24-slurm-mig-idx.json")], FIELD_MS)
    polled.poll()
    job = polled.job("202")
    assert (job.hosts, [rank.gpus for rank in job.ranks]) == (("g03",), [])
    assert held(polled, "202") == {"g03": 858}
    assert job.submission is not None
    assert (job.submission.gpu_model, job.submission.gpu_share, job.submission.labels["mig"]) == (
        "A100",
        429,
        "3g.20gb",
    )


@pytest.mark.parametrize("kind", ["1g.5gb", "nvidia_h100_80gb_hbm3_1g.10gb", "a100_1c.2g.10gb", "h100_1g.10gb+me"])
def test_every_spelling_of_a_profile_is_one(kind: str) -> None:
    found = read_gres(f"gpu:{kind}:2(IDX:3,9)")
    assert (found.gpus, found.indices, found.has_mig) == (2, (), True)
    assert 0 < found.milli < 2000


def test_on_a_node_with_mig_instances_no_number_names_a_gpu() -> None:
    mixed = read_nodes(nodes(node() | {"gres": "gpu:a100:4(S:0),gpu:a100_1g.5gb:14(S:1)"})).rows
    site = Site(numbered_gpus=count_numbered_gpus(mixed))
    (job,) = decode_queued_jobs(queue(old_job(nodes="n1", gres_detail=["gpu:a100:2(IDX:0-1)"]))).rows
    started = make_job_events(job, site)[1]
    assert isinstance(started, Started)
    assert (started.ranks, started.nodes) == ((), ("n1",))
    assert mixed[0].gpus == 6


def test_numbers_beyond_the_gpus_of_a_node_name_none() -> None:
    site = Site(numbered_gpus={"n1": 8, "n2": 8})
    beyond = old_job(nodes="n1", gres_detail=["gpu:2(IDX:9-10)"])
    inside = old_job(nodes="n1", gres_detail=["gpu:2(IDX:6-7)"])
    ranks = [make_job_events(decode_queued_jobs(queue(row)).rows[0], site)[1] for row in (beyond, inside)]
    assert [len(event.ranks) for event in ranks if isinstance(event, Started)] == [0, 1]


# -- every way to ask -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"tres_per_node": "gres:gpu:4"}, (2, 4)),
        ({"tres_per_node": "gpu:4"}, (2, 4)),
        ({"tres_per_node": "gres/gpu:h100:4"}, (2, 4)),
        ({"tres_per_job": "gres/gpu:8"}, (2, 4)),
        ({"tres_per_job": "gres:gpu:a100:8"}, (2, 4)),
        ({"tres_per_task": "gres/gpu:1", "tasks": 16}, (2, 8)),
        ({"tres_per_task": "gres/gpu=1", "tasks": {"set": True, "infinite": False, "number": 16}}, (2, 8)),
        ({"tres_req_str": "cpu=4,node=2,gres/gpu:h100=16"}, (2, 8)),
    ],
)
def test_every_way_to_ask_for_gpus_is_seen(fields: dict[str, Any], shape: tuple[int, int]) -> None:
    asked = submission(waiting(**fields))
    assert (asked.gang, asked.gpus_per_node) == shape


def test_what_a_job_holds_counts_more_than_what_it_asked_for() -> None:
    (job,) = decode_queued_jobs(
        queue(new_job(gres_detail=[], tres_req_str="gres/gpu=8", tres_alloc_str="gres/gpu=4"))
    ).rows
    assert job.gpus == 4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:(null):2(IDX:0-1)", (2, (0, 1))),
        ("gpu(IDX:0-3)", (1, (0, 1, 2, 3))),
        ("gpu:tesla:no_consume:4", (4, ())),
        ("gpu:h100:8(S:0-1)", (8, ())),
        ("gpu:2(CNT:2)", (2, ())),
        ("craynetwork:4,gpu:1(IDX:7)", (1, (7,))),
        ("gpu:a100:4(S:0),gpu:v100:2(S:1)", (6, ())),
        ("gpumem:4", (0, ())),
        ("billing=4,gres/gpuutil=10", (0, ())),
    ],
)
def test_forms_of_gres(text: str, found: tuple[int, tuple[int, ...]]) -> None:
    assert (read_gres(text).gpus, read_gres(text).indices) == found


@given(st.text(alphabet="gpushardm:=/,()0123456789IDX-.a_", max_size=60))
def test_any_text_has_an_answer_within_bounds(text: str) -> None:
    found = read_gres(text)
    assert found.gpus >= 0
    assert 0 <= found.milli <= 1000 * found.gpus
    assert all(part.held <= part.size for part in found.parts)


def test_a_part_is_never_more_than_the_gpus_that_are_wanted() -> None:
    table = JobTable()
    for event in make_job_events(
        decode_queued_jobs(queue(waiting(tres_per_node="gres/mps:250", node_count=1))).rows[0], Site()
    ):
        table.apply(event)
    (row,) = table.list_queued()
    assert count_wanted_milli(row) == 2499


@pytest.mark.parametrize(
    "text", ["gpu:1g.5gb:7(S:0),gpu:a100:3", "gpu:a100:3,gpu:1g.5gb:7", "gpu:a100_1g.5gb:7,gpu:a100:3"]
)
def test_a_node_with_instances_and_boards_has_the_model_of_its_boards(text: str) -> None:
    (row,) = read_nodes(nodes(node("n1") | {"gres": text})).rows
    assert (row.make_spec().gpu_model, row.make_spec().gpus) == ("A100", 4)
