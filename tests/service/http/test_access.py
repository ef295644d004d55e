"""The door: who may ask for what, and what the environment must say for it."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import ConfigError
from fleetcast.service.api.app import create_app
from fleetcast.service.api.routes.all import ROWS
from fleetcast.service.http.access import ANYBODY, Access, Caller, Scope, load_access, parse_tokens
from fleetcast.service.http.problems import Problem
from fleetcast.service.placer.http import make_app
from tests.service.api_world import NOW_MS, Client, FakePlacer, config, publish, running
from tests.service.placer_world import World

SECRETS = {scope: f"{scope}-{'0123456789abcdef'}" for scope in Scope}
TOKENS = "\n".join(f"{scope}er {scope} {token}" for scope, token in SECRETS.items())
ACCESS = Access(parse_tokens(TOKENS, "test"))
READER = {"authorization": f"Bearer {SECRETS[Scope.READ]}"}


def bearer(scope: Scope) -> dict[str, str]:
    return {"authorization": f"Bearer {SECRETS[scope]}"}


def raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


# -- what the environment says


def test_loopback_needs_no_token_and_anything_else_does() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        assert load_access(host, {}).is_open
    for host in ("0.0.0.0", "::", "10.0.0.1", ""):
        with pytest.raises(ConfigError, match=r"beyond loopback.*FLEETCAST_TOKENS"):
            load_access(host, {})
        assert not load_access(host, {"FLEETCAST_TOKENS": TOKENS}).is_open


def test_tokens_close_loopback_too() -> None:
    assert not load_access("127.0.0.1", {"FLEETCAST_TOKENS": TOKENS}).is_open


def test_tokens_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# who may ask\n\n{TOKENS}\n")
    access = load_access("0.0.0.0", {"FLEETCAST_TOKENS_FILE": str(path)})
    assert access.authorize("GET", raw(READER), Scope.READ).name == "reader"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ada read", "line 1: 2 words"),
        ("ada read secretsecretsecret queues=a more", "line 1: 5 words"),
        ("ada read secretsecretsecret more", "line 1: behind the token only queues=NAME[,NAME] may stand"),
        ("ada read secretsecretsecret queues=", "line 1: behind the token only queues=NAME[,NAME] may stand"),
        ("ada read secretsecretsecret queues=a//b", "line 1: behind the token only queues=NAME[,NAME] may stand"),
        ("ada read,place secretsecretsecret queues=a", "line 1: bound to queues, so its scope can only be read"),
        ("ada write secretsecretsecret", "line 1: unknown scope; scopes are read, events, place, admin"),
        ("secretsecretsecret ada read", "line 1: unknown scope"),
        ("ada read, secretsecretsecret", "line 1: unknown scope"),
        ("ada read secret", "line 1: the token has 6 characters, at least 16"),
        ("ada read secretsecretsecret:x", "line 1: a token is made of"),
        ("a\tread secretsecretsecret\nb read secretsecretsecret", "line 2: this token was given"),
        ("a read secretsecretsecret\na place secretsecretsecret2", "line 2: this name has a token already"),
        ("a;b read secretsecretsecret", "line 1: the name must be"),
        ("# nobody\n", "there is no token in it"),
    ],
)
def test_bad_tokens_are_refused_by_line_and_never_printed(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_access("127.0.0.1", {"FLEETCAST_TOKENS": text})
    assert says in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_an_unreadable_or_empty_file_does_not_open_the_door(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, says in (("none", "cannot be read"), ("empty", "no token in it"), ("binary", "no text")):
        with pytest.raises(ConfigError, match=says):
            load_access("127.0.0.1", {"FLEETCAST_TOKENS_FILE": str(tmp_path / name)})
    with pytest.raises(ConfigError, match="both set"):
        load_access("127.0.0.1", {"FLEETCAST_TOKENS": TOKENS, "FLEETCAST_TOKENS_FILE": str(tmp_path / "empty")})


# -- who may do what


@pytest.mark.parametrize("has", list(Scope))
@pytest.mark.parametrize("needs", list(Scope))
def test_a_token_opens_its_own_scope_and_admin_opens_all(has: Scope, needs: Scope) -> None:
    if has in (needs, Scope.ADMIN):
        assert ACCESS.authorize("GET", raw(bearer(has)), needs) == Caller(f"{has}er", frozenset({has}))
    else:
        with pytest.raises(Problem, match=f"scope {needs}; that of {has}er has {has}") as refusal:
            ACCESS.authorize("GET", raw(bearer(has)), needs)
        assert refusal.value.status == 403


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


SECRET = SECRETS[Scope.READ]


@pytest.mark.parametrize(
    "header", [f"Bearer {SECRET}", f"bearer  {SECRET} ", basic(f"scheduler:{SECRET}"), basic(f":{SECRET}")]
)
def test_the_token_comes_as_bearer_or_as_a_password(header: str) -> None:
    assert ACCESS.authorize("GET", raw({"authorization": header}), Scope.READ).name == "reader"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", SECRET)],
        [("authorization", f"Bearer {SECRET}x")],
        [("authorization", f"Bearer {SECRET[:-1]}")],
        [("authorization", f"Digest {SECRET}")],
        [("authorization", "Basic ====")],
        [("authorization", "Basic \xff")],
        [("authorization", basic(SECRET))],
        [("authorization", basic(f"{SECRET}:"))],
        [("authorization", f"Bearer {SECRET}"), ("authorization", f"Bearer {SECRET}")],
    ],
)
def test_anything_else_is_a_401_that_says_how_to_ask(headers: list[tuple[str, str]]) -> None:
    given = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    with pytest.raises(Problem) as refusal:
        ACCESS.authorize("GET", given, Scope.READ)
    assert refusal.value.status == 401
    assert refusal.value.headers["www-authenticate"].startswith('Bearer realm="fleetcast"')
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({}, True),
        ({"host": "127.0.0.1:8080", "origin": "http://127.0.0.1:8080"}, True),
        ({"host": "127.0.0.1:8080", "origin": "http://127.0.0.1:3000"}, False),
        ({"host": "127.0.0.1:8080", "origin": "https://evil.example"}, False),
        ({"host": "127.0.0.1:8080", "origin": "null"}, False),
        ({"host": "[::1]:8080"}, True),
        ({"host": "LOCALHOST"}, True),
        ({"host": "127.0.0.1.evil.example", "origin": "http://127.0.0.1.evil.example"}, False),
        ({"host": "evil.example:8080", "sec-fetch-site": "same-origin"}, False),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
    ],
)
def test_a_page_of_another_site_changes_nothing(headers: dict[str, str], taken: bool) -> None:
    if taken:
        assert Access().authorize("POST", raw(headers), Scope.PLACE) is ANYBODY
    else:
        with pytest.raises(Problem, match=r"another site|a loopback address"):
            Access().authorize("POST", raw(headers), Scope.PLACE)


OTHER_NAMES = ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "[::1].x", "")


@pytest.mark.parametrize("host", OTHER_NAMES)
def test_a_page_whose_name_leads_here_reads_nothing(host: str) -> None:
    with pytest.raises(Problem, match=r"such as http://127\.0\.0\.1:8080/.*set FLEETCAST_TOKENS") as refusal:
        Access().authorize("GET", raw({"host": host, "sec-fetch-site": "same-origin"}), Scope.READ)
    assert refusal.value.status == 403
    with pytest.raises(Problem, match="an IP address"):
        Access().authorize("GET", [(b"host", b"localhost"), (b"host", host.encode())], Scope.READ)


@pytest.mark.parametrize(
    "host", ["localhost:8080", "127.0.0.1", "127.9.9.9:1", "[::1]:8080", "10.0.0.7:8080", "[fe80::1]"]
)
def test_health_checks_and_scrapes_by_address_read_without_tokens(host: str) -> None:
    assert Access().authorize("GET", raw({"host": host}), Scope.READ) is ANYBODY
    assert Access().authorize("GET", [], Scope.READ) is ANYBODY


def test_with_tokens_the_door_may_be_called_by_any_name() -> None:
    headers = {"host": "fleet.example", "origin": "https://fleet.example", **bearer(Scope.PLACE)}
    assert ACCESS.authorize("POST", raw(headers), Scope.PLACE).name == "placeer"
    with pytest.raises(Problem, match="another site"):
        ACCESS.authorize("POST", raw(headers | {"origin": "https://evil.example"}), Scope.PLACE)


# -- the API with tokens


@pytest.fixture
def closed(tmp_path: Path) -> Any:
    publish(tmp_path)
    with (
        running(FakePlacer()) as placer,
        Client(create_app(config(tmp_path, placer.port), ManualClock(NOW_MS), access=ACCESS)) as client,
    ):
        yield client, placer


@pytest.fixture(scope="module")
def unlocked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("unlocked")
    publish(folder)
    with Client(create_app(config(folder), ManualClock(NOW_MS), access=Access())) as client:
        yield client


OPEN = {"/healthz", "/readyz"}
ENDLESS = {"/v1/stream"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method} {row.path}")
def test_every_route_but_the_health_is_closed(closed: Any, row: Any) -> None:
    client, placer = closed
    path = row.path.replace(":path", "").replace("{", "").replace("}", "")
    response = client.request(row.method, path, content=b"{}" if row.method == "POST" else None)
    if row.path in OPEN:
        assert response.status_code == 200
    else:
        assert response.status_code == 401
        assert response.json()["type"] == "urn:fleetcast:problem:unauthorized"
        assert response.headers["www-authenticate"].startswith("Bearer")
        wrong = next(scope for scope in Scope if scope not in (row.required_scope, Scope.ADMIN))
        refused = client.request(row.method, path, content=b"{}", headers=bearer(wrong))
        assert refused.status_code == 403
        assert f"scope {row.required_scope}" in refused.json()["detail"]
        assert placer.asked == []


@pytest.mark.parametrize(
    "path", sorted({row.path for row in ROWS if row.method == "GET"} | {"/", "/app.js", "/docs", "/x"})
)
def test_no_route_is_read_under_another_name_without_tokens(unlocked: Client, path: str) -> None:
    path = path.replace(":path", "").replace("{", "").replace("}", "")
    refused = unlocked.get(path, headers={"host": "evil.example:8080"})
    assert (refused.status_code, refused.json()["type"]) == (403, "urn:fleetcast:problem:other_site")
    assert "call this service by localhost or an IP address" in refused.json()["detail"]
    if path not in ENDLESS:
        assert unlocked.get(path, headers={"host": "10.0.0.7:8080"}).status_code != 403


def test_the_console_and_nothing_else_is_served_to_strangers(closed: Any) -> None:
    client, _ = closed
    assert client.get("/").status_code == client.get("/app.js").status_code == 200
    for path in ("/openapi.json", "/docs"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=READER).status_code == 200
    assert client.request("PUT", "/v1/placements").status_code == 401
    assert client.request("PUT", "/v1/placements", headers=READER).status_code == 405


def test_a_route_added_with_the_decorators_of_fastapi_is_closed_too(tmp_path: Path) -> None:
    app = create_app(config(tmp_path), ManualClock(NOW_MS), access=ACCESS)
    app.get("/v1/extra")(lambda: {"fine": True})
    app.router.routes.insert(0, app.router.routes.pop())
    with Client(app) as client:
        assert client.get("/v1/extra").status_code == 401
        assert client.get("/v1/extra", headers=READER).json() == {"fine": True}


def test_the_placer_is_asked_with_the_token_of_the_caller(closed: Any) -> None:
    client, placer = closed
    assert client.post("/v1/placements", json={"request_id": "a"}, headers=bearer(Scope.PLACE)).status_code == 200
    assert placer.headers["authorization"] == bearer(Scope.PLACE)["authorization"]
    assert client.get("/metrics", headers=READER).status_code == 200
    assert placer.headers["authorization"] == READER["authorization"]


def test_a_placer_with_other_tokens_is_not_the_callers_fault(closed: Any) -> None:
    client, placer = closed
    placer.status = 401
    response = client.get("/v1/queue", headers=READER)
    assert response.status_code == 503
    assert "start both with the same" in response.json()["detail"]


def test_the_document_tells_the_scopes_and_no_token(closed: Any, tmp_path: Path) -> None:
    client, _ = closed
    text = client.get("/openapi.json", headers=READER).text
    document = json.loads(text)
    assert document["paths"]["/v1/events"]["post"]["security"] == [{"bearer": ["events"]}, {"basic": ["events"]}]
    assert document["paths"]["/v1/audit"]["get"]["security"] == [{"bearer": ["admin"]}, {"basic": ["admin"]}]
    assert document["paths"]["/healthz"]["get"]["security"] == []
    assert {"401", "403"} <= set(document["paths"]["/v1/fleet"]["get"]["responses"])
    assert not any(token in text for token in SECRETS.values())
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as anybody:
        assert {} in anybody.get("/openapi.json").json()["paths"]["/v1/fleet"]["get"]["security"]


# -- callers of some queues

LINES = """
lead read 0123456789abcdefgh queues=research,teaching/one
trainer read 123456789abcdefghi queues=train
"""
BOUND = Access(parse_tokens(LINES, "test"))
TRAINER = {"authorization": "Bearer 123456789abcdefghi"}
LEAD = {"authorization": "Bearer 0123456789abcdefgh"}


def test_a_caller_of_some_queues_sees_these_and_what_is_below() -> None:
    caller = BOUND.authorize("GET", raw(LEAD), Scope.READ, by_queue=True)
    seen = [
        name
        for name in ("research", "research/nlp", "researchers", "teaching", "teaching/one", "")
        if caller.may_read_queue(name)
    ]
    assert seen == ["research", "research/nlp", "teaching/one"]
    assert ANYBODY.may_read_queue("")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method} {row.path}")
def test_he_reads_what_is_answered_by_queue_and_nothing_else(bound: Any, row: Any) -> None:
    path = row.path.replace(":path", "").replace("{", "").replace("}", "")
    if row.path in OPEN | ENDLESS:
        return  # test_action_stream.py opens the stream
    response = bound.request(row.method, path, content=b"{}" if row.method == "POST" else None, headers=LEAD)
    if row.by_queue:
        assert row.method == "GET"
        assert response.status_code in (200, 404, 503)  # there is no placer here
    else:
        assert response.status_code == 403
        said = response.json()["detail"]
        lacks = f"this needs a token with the scope {row.scope}; that of lead has read"
        assert said == lacks if row.scope not in (None, Scope.READ) else "research, teaching/one alone" in said


def test_he_sees_jobs_of_his_queues_alone(bound: Any) -> None:
    own = bound.get("/v1/jobs", headers=TRAINER).json()["rows"]
    assert [(row["job"], row["queue"]) for row in own] == [("team/a", "train"), ("b", "train"), ("c", "train")]
    assert [row["job"] for row in bound.get("/v1/jobs?state=queued", headers=TRAINER).json()["rows"]] == ["b"]
    assert bound.get("/v1/jobs/b", headers=TRAINER).json()["queue"] == "train"
    assert bound.get("/v1/jobs", headers=LEAD).json()["rows"] == []
    missing = bound.get("/v1/jobs/b", headers=LEAD)
    assert missing.status_code == 404
    assert missing.json()["detail"] == "no job 'b' of your queues runs, waits or ended within the last hour"


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bound")
    publish(folder)
    with Client(create_app(config(folder), ManualClock(NOW_MS), access=BOUND)) as client:
        yield client


# -- the placer with tokens


def test_the_placer_answers_only_those_who_may_and_audits_by_the_name_of_the_token(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.board.publish()
    world.app = make_app(world.service, access=ACCESS)
    wanted = {"request_id": "a", "user": "ada"}
    assert world.ask("POST", "/placements", wanted).status_code == 401
    assert world.ask("POST", "/placements", wanted, headers=READER).status_code == 403
    assert world.ask("GET", "/metrics").status_code == 401
    assert world.ask("GET", "/healthz").status_code == 200
    assert world.ask("POST", "/placements", wanted, headers=bearer(Scope.PLACE)).status_code == 200
    assert world.ask("DELETE", "/placements/a", headers=bearer(Scope.ADMIN)).status_code == 200
    assert world.ask("GET", "/audit", headers=READER).status_code == 403
    rows = world.ask("GET", "/audit", headers=bearer(Scope.ADMIN)).json()["rows"]
    assert [(row["caller"], row["action"]) for row in rows] == [("adminer", "cancelled"), ("placeer", "place")]
    world.close()


@pytest.mark.parametrize("path", ["/queue", "/healthz", "/metrics"])
def test_the_placer_is_read_under_no_other_name_without_tokens(tmp_path: Path, path: str) -> None:
    world = World(tmp_path)
    assert world.ask("GET", path, headers={"host": "evil.example:8081"}).status_code == 403
    assert world.ask("GET", path, headers={"host": "127.0.0.1:8081"}).status_code == 200
    world.close()
