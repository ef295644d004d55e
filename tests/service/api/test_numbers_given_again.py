"""A number of Slurm that was given again: it stands for its newest job, and every job can be asked for."""

from fleetcast.service.api.routes.jobs import JobRowHead, _index_latest_attempts


def test_a_number_stands_for_its_newest_job() -> None:
    rows = [
        ("7", 1_795_640_000),
        ("7@1795645000", 1_795_645_000),
        ("7@1795649000", 1_795_649_000),
        ("8", 1_795_640_001),
    ]
    heads = [JobRowHead(job, 1, "running", submitted_ms=submit_s * 1000) for job, submit_s in rows]
    latest = _index_latest_attempts(heads)
    assert {name: heads[at].job for name, at in latest.items()} == {
        "7": "7@1795649000",
        "7@1795640000": "7",
        "7@1795645000": "7@1795645000",
        "7@1795649000": "7@1795649000",
        "8": "8",
    }


def test_a_job_that_is_long_over_leaves_its_number_to_the_newest() -> None:
    heads = [JobRowHead("7@1795645000", 1, "running", submitted_ms=1_795_645_000_000)]
    assert _index_latest_attempts(heads) == {"7": 0, "7@1795645000": 0}


def test_names_of_other_schedulers_stay_what_they_are() -> None:
    heads = [JobRowHead("mail@5", 1, "running"), JobRowHead("mail", 1, "running"), JobRowHead("a/b@host", 1, "running")]
    assert _index_latest_attempts(heads) == {"mail@5": 0, "mail": 1, "a/b@host": 2}
