"""Problem details: the class of an error decides its answer."""

import json

import pytest

from fleetcast.fleet.errors import (
    ConfigError,
    ConflictError,
    FleetcastError,
    RecordError,
    RequestError,
    SourceError,
    StaleError,
    UnknownEntity,
)
from fleetcast.service.http.problems import (
    FieldError,
    Problem,
    convert_to_problem,
    make_unprocessable_problem,
    make_warming_problem,
)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("gang = 0", "gang"), 422),
        (RecordError("future", "61 s"), 422),
        (UnknownEntity("no node 'x'"), 404),
        (ConflictError("lost the race"), 409),
        (StaleError("too old"), 503),
        (SourceError("away", 3.0), 503),
        (make_warming_problem(), 503),
    ],
)
def test_a_class_of_error_has_one_status(error: FleetcastError, status: int) -> None:
    response = convert_to_problem(error).make_response("/v1/x")
    body = json.loads(bytes(response.body))
    assert response.status_code == body["status"] == status
    assert response.media_type == "application/problem+json"
    assert body["instance"] == "/v1/x"
    assert body["detail"] == str(error)


def test_a_request_error_names_its_field() -> None:
    assert convert_to_problem(RequestError("gang = 0: expected at least 1", "gang")).errors[0].field == "gang"


def test_a_source_that_is_away_says_when_to_ask_again() -> None:
    assert convert_to_problem(SourceError("away", 3.0)).headers["retry-after"] == "3"


def test_a_bad_value_is_shown_with_what_is_expected() -> None:
    body = make_unprocessable_problem("limit", "x" * 500, "a whole number").make_body("/v1/jobs")
    assert len(body["detail"]) < 200
    assert body["errors"][0].expected == "a whole number"


def test_further_members_are_part_of_the_body() -> None:
    assert Problem(503, "not_ready", "no board", extra={"missing": ["board"]}).make_body("/readyz")["missing"] == [
        "board"
    ]


def test_an_error_that_no_request_can_cause_is_a_bug() -> None:
    with pytest.raises(ConfigError):
        convert_to_problem(ConfigError("port"))


def test_a_problem_is_no_copy_of_what_was_sent() -> None:
    long = "x" * 100_000
    many = [FieldError(long, long, long) for _ in range(1000)]
    response = Problem(422, "bad_request", long, errors=many).make_response("/" + long)
    body = json.loads(bytes(response.body))
    assert len(body["detail"]) == len(body["instance"]) == len(body["errors"][0]["field"]) == 2001
    assert body["detail"].endswith("x…")
    assert len(body["errors"]) == 50
