from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import Level
from fleetcast.placement.queues.queues_file import MOST_BYTES, check_capacity, find_preemption_cycle, read_queues
from fleetcast.placement.queues.tree import QueueTree, list_unused_settings

TEAMS = """
[policy]
half_life_h = 24

[class.production]
priority = 100
preempts = ["research"]

[class.inference]
priority = 7

[queue.production]
[queue.research]
weight = 40
limit = {gpu = 800, H100 = 300}
max_wait_h = 2
[queue."research/nlp"]
guaranteed = {gpu = 100}
lend = {gpu = 60}
per_user = true
[queue."research/vision"]
guaranteed = {gpu = 50}
credits = {rate = 0.5, cap_gpu_h = 10}

[[reservation]]
queue = "production"
nodes = {rack = "r12"}
from = 2026-12-01T08:00:00Z
to = 2026-12-03T08:00:00

[[maintenance]]
name = "fans"
nodes = ["n001"]
from = 2026-12-05T06:00:00+01:00
to = 2026-12-05T10:00:00Z

[prices]
currency = "EUR"
gpu = 1
H100 = 2.5
"""


@pytest.fixture(scope="module")
def teams() -> QueueTree:
    return read_queues(TEAMS)


def request(**fields: object) -> PlacementRequest:
    return PlacementRequest(request_id="a", **fields)  # type: ignore[arg-type]


def refused(text: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read_queues(text)
    return caught.value


def test_a_file_is_a_tree_with_parents_first(teams: QueueTree) -> None:
    assert [node.name for node in teams.nodes] == ["", "production", "research", "research/nlp", "research/vision"]
    assert [node.name for node in teams.list_path("research/nlp/ada")] == ["research/nlp", "research", ""]
    assert teams.resources == ("gpu", "H100")


def test_a_parent_is_guaranteed_what_its_children_are(teams: QueueTree) -> None:
    assert teams.find_node("research").guaranteed == {"gpu": 150.0}
    assert teams.find_node("research/nlp").find_unlent_guarantee("gpu") == 40.0


def test_a_queue_inherits_its_wait_and_class_by_name(teams: QueueTree) -> None:
    assert teams.find_node("research/vision").max_wait_s == 7200.0
    assert (teams.find_node("production").priority, teams.find_node("research").priority) == (100, 0)


def test_a_queue_inherits_which_jobs_may_be_stopped() -> None:
    tree = read_queues('[queue.a]\npreemptible = "none"\n[queue."a/b"]\n[queue."a/c"]\npreemptible = "all"\n[queue.d]')
    assert {node.name: node.preemptible for node in tree.nodes[1:]} == {
        **{"a": "none", "a/b": "none", "a/c": "all"},
        "d": "borrowed",
    }
    assert list_unused_settings(tree) == ['preemptible has no effect: reclaim is "off" in [policy]']
    error = refused('[queue.a]\nweight = 2\npreemptible = "sometimes"')
    assert (error.field, str(error).partition(": ")[0]) == ("queue.a.preemptible", "line 3")
    assert "borrowed" in str(error)


def test_windows_are_in_utc(teams: QueueTree) -> None:
    reserved, fans = teams.windows
    assert (reserved.queue, reserved.domains) == ("production", ((Level.RACK, "r12"),))
    assert reserved.to_ms == 1_796_284_800_000
    assert (fans.queue, fans.nodes, fans.name) == (None, ("n001",), "fans")
    assert fans.to_ms - fans.from_ms == 5 * 3_600_000


def test_prices_fall_back_to_those_of_any_gpu(teams: QueueTree) -> None:
    assert (teams.prices.find_price("H100"), teams.prices.find_price("A100"), teams.prices.currency) == (
        2.5,
        1.0,
        "EUR",
    )


def test_what_has_no_effect_yet_is_told(teams: QueueTree) -> None:
    assert [note.partition(" ")[0] for note in list_unused_settings(teams)] == ["preempts"]
    assert list_unused_settings(read_queues("[queue.a]")) == []
    policy = '[policy]\npreempt_gpu_h_per_h = 50\norder = "attained"\n[queue.a]'
    words = ["order attained", "preempt_gpu_h_per_h"]
    assert [
        note.partition(" has ")[0].partition(" is ")[0] for note in list_unused_settings(read_queues(policy))
    ] == words
    advised = '[policy]\nreclaim = "advise"\npreempt_gpu_h_per_h = 50\n[class.a]\npreempts = ["q"]\n[queue.q]'
    assert list_unused_settings(read_queues(advised)) == []


@pytest.mark.parametrize(
    ("text", "line", "field", "why"),
    [
        ("[queue.a]\nweigth = 1", 2, "queue.a.weigth", "did you mean weight?"),
        ("[queue.a]\nweight = -1", 2, "queue.a.weight", "above 0"),
        ("[queue.a]\nweight = 0", 2, "queue.a.weight", "closes a queue"),
        ("[queue.a]\n\nweight = nan", 3, "queue.a.weight", "is nan"),
        ("[queue.a]\nlimit = {gpu = inf}", 2, "queue.a.limit", "gpu is inf"),
        ("[queue.a]\nguaranteed = {gpu = 9}\nlimit = {gpu = 8}", 2, "queue.a.guaranteed", "above its limit, 8"),
        ("[queue.a]\nguaranteed = {gpu = 9}\nlend = {gpu = 10}", 3, "queue.a.lend", "of 9 guaranteed"),
        ('[queue.a]\nparent = "b"\n[queue.b]\nparent = "a"', 4, "queue.b.parent", "cycle: a → b → a"),
        ('[queue.a]\nparent = "b"', 2, "queue.a.parent", "'b' is no queue"),
        ('[queue.a]\n[queue.b]\n[queue."b/c"]\nparent = "a"', 4, 'queue."b/c".parent', "two parents"),
        ('[queue."a/b"]', 1, 'queue."a/b"', "has no parent: write [queue.a]"),
        ('[queue.a]\n[queue."a/c"]\n[queue.c]\nparent = "a"', 3, "queue.c", "'a/c' is there twice"),
        ('[queue.a]\nper_user = true\n[queue."a/b"]', 3, 'queue."a/b"', "is per_user"),
        ('[queue."a//b"]', 1, 'queue."a//b"', "is no name"),
        ('[queue.a]\nclass = "best"', 2, "queue.a.class", "there is no [class.best]"),
        ('[class.x]\npreempts = ["y"]\n[queue.a]', 2, "class.x.preempts", "'y' is no class and no queue"),
        ('[class.x]\npreempts = ["x"]\n[queue.a]', 2, "class.x.preempts", "is a cycle: x → x"),
        ('[class.x]\npreempts = ["y"]\n[class.y]\npreempts = ["x"]\n[queue.a]', 2, "class.x.preempts", "x → y → x"),
        ('[class.x]\npreempts = ["a"]\n[queue.a]\n[queue."a/b"]\nclass = "x"', 2, "class.x.preempts", "x → x"),
        ('[policy]\nreclaim = "all"\n[queue.a]', 2, "policy.reclaim", "must be one of"),
        ('[policy]\nreclaim = "act"\nact_in = ["b"]\n[queue.a]', 3, "policy.act_in", "'b' is no queue; there are a"),
        ('[policy]\nreclaim = "act"\nact_in = []\n[queue.a]', 3, "policy.act_in", "names no queue"),
        ("[policy]\npreempt_after_s = nan\n[queue.a]", 2, "policy.preempt_after_s", "is nan"),
        ("[policy]\npreempt_gpu_h_per_h = -1\n[queue.a]", 2, "policy.preempt_gpu_h_per_h", "is -1"),
        ("[policy]\ndwell_s = -1\n[queue.a]", 2, "policy.dwell_s", "is -1"),
        ("[policy]\nclaims = 0\n[queue.a]", 2, "policy.claims", "1..32 requests"),
        ("[policy]\nclaims = 33\n[queue.a]", 2, "policy.claims", "1..32 requests"),
        ("[policy]\nclaims = 2.5\n[queue.a]", 2, "policy.claims", "must be a whole number"),
        ("[policy]\nstops_a_day = 1.5\n[queue.a]", 2, "policy.stops_a_day", ""),
        ("[queue.a]\ncredits = {rate = 2, cap_gpu_h = 1}", 2, "queue.a.credits", "rate is 2"),
        ("[queue.a]\ncredits = {rate = 1, cap_gpu_h = 1}", 2, "queue.a.credits", "it has none: set guaranteed"),
        ("[queue.a]\n[carbon]\nworth = 0.1", 2, "carbon", "not honoured yet"),
        ("[queue.a]\n[spares]\nlevel = 'rack'", 2, "spares", "either epsilon or count"),
        ("[queue.a]\n[moves]\nmode = 'act'", 3, "moves.mode", "must"),
        ("[queue.a]\n[moves]\nmode = nan", 3, "moves.mode", "must"),
        ("[queue.a]\n[moves]\nmod = 'advise'", 3, "moves.mod", ""),
        ("[queue.a]\n[spares]\nlevel = 'rack'\ncount = -1", 4, "spares.count", "must"),
        ("[queue.a]\n[spares]\nlevel = 'rack'\nepsilon = 2.0", 4, "spares.epsilon", "must"),
        ("[queue.a]\n[[power]]\nwatts = 1", 2, "power", "not honoured yet"),
        ("[queue.a]\n[carbon]", 2, "carbon", "not honoured yet"),
        ("[queue.a]\n[share]", 2, "share", "not honoured yet"),
        ("[queue.a]\n[polcy]", 2, "polcy", "did you mean policy?"),
        ("[policy]\nhalf_life_h = 0\n[queue.a]", 2, "policy.half_life_h", "above 0"),
        ('[policy]\nunknown_queue = "b"\n[queue.a]', 2, "policy.unknown_queue", "'b' is no queue"),
        ('[policy]\norder = "random"\n[queue.a]', 2, "policy.order", "is 'random', must be one of"),
        ("[prices]\nH100 = -1\n[queue.a]", 2, "prices.H100", "is -1"),
        ("[policy]", 1, "queue", "there is none"),
        ("queue = 3", 1, "queue", "write [queue.NAME]"),
        ('[queue.a]\nguaranteed = {gpu = 1}\n[queue."a/b"]\nguaranteed = {gpu = 2}', 2, "queue.a.guaranteed", "has 1"),
        ("[queue.a]\n[[maintenance]]\nnodes = []\nfrom = 2026-01-01\nto = 3", 4, "maintenance[0].from", "date"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_line_field_and_fix(text: str, line: int, field: str, why: str) -> None:
    error = refused(text)
    assert str(error).startswith(f"line {line}: {field}: ")
    assert why in str(error)
    assert error.field == field


def test_classes_may_preempt_along_many_paths_without_a_cycle() -> None:
    tree = read_queues('[class.a]\npreempts = ["b", "c"]\n[class.b]\npreempts = ["c", "q"]\n[class.c]\n[queue.q]')
    assert tree.classes["a"].preempts == ("b", "c")
    assert find_preemption_cycle(tree) == []


def test_windows_are_checked() -> None:
    times = "from = 2026-12-01T08:00:00Z\nto = 2026-12-01T07:00:00Z"
    assert "not after its begin" in str(refused(f'[queue.a]\n[[maintenance]]\nnodes = ["n"]\n{times}'))
    times = times.replace("07:", "09:")
    assert "is empty" in str(refused(f"[queue.a]\n[[maintenance]]\nnodes = []\n{times}"))
    assert "is no key here: must be one of block, nvlink_domain, rack, rail_group; did you mean rack?" in str(
        refused(f'[queue.a]\n[[maintenance]]\nnodes = {{rak = "r"}}\n{times}')
    )
    assert "there are a1" in str(refused(f'[queue.a1]\n[[reservation]]\nqueue = "a2"\nnodes = ["n"]\n{times}'))


def test_a_million_queues_are_refused_before_they_are_read() -> None:
    assert "at most 10,000" in str(refused("".join(f"[queue.q{number}]\n" for number in range(10_001))))
    assert "fits into that" in str(refused("[queue.a]\n" * (MOST_BYTES // 8)))


def test_guarantees_above_the_fleet_are_refused_unless_overcommitted() -> None:
    text = "[queue.a]\nguaranteed = {gpu = 60}\n[queue.b]\nguaranteed = {gpu = 60}\n"
    with pytest.raises(RequestError, match=r"line 2: queue.a.guaranteed: .* 120 GPUs, the fleet has 100"):
        check_capacity(read_queues(text), {"gpu": 100.0}, text)
    check_capacity(read_queues(f"[policy]\novercommit = true\n{text}"), {"gpu": 100.0})
    with pytest.raises(RequestError, match="GPUs of model H100"):
        check_capacity(read_queues("[queue.a]\nguaranteed = {H100 = 1}"), {"gpu": 100.0})


def test_requests_find_their_leaf(teams: QueueTree) -> None:
    assert teams.find_request_leaf(request(queue="production")) == "production"
    assert teams.find_request_leaf(request(queue="research/nlp", user="ada/eva")) == "research/nlp/ada|eva"
    assert teams.find_request_leaf(request(queue="vision", tenant="research")) == "research/vision"
    assert teams.find_request_leaf(request(queue="research/vision", tenant="research")) == "research/vision"
    assert teams.find_request_leaf(request(tenant="production")) == "production"


@pytest.mark.parametrize(
    ("fields", "field", "why"),
    [
        ({"queue": "research/nlq"}, "queue", "the nearest are 'research/nlp'"),
        ({"queue": "nlp"}, "queue", "research/nlp"),
        ({}, "queue", "there are 'production', 'research/nlp', 'research/vision'"),
        ({"queue": "research"}, "queue", "name one of them, such as 'research/nlp'"),
        ({"queue": "research/nlp"}, "user", "name the user"),
        ({"queue": "vision", "tenant": "production"}, "tenant", "no queue 'production/vision'"),
        ({"queue": ""}, "queue", "no queue ''"),
    ],
)
def test_requests_of_no_leaf_are_refused_with_the_field(
    teams: QueueTree, fields: dict[str, str], field: str, why: str
) -> None:
    with pytest.raises(RequestError) as caught:
        teams.find_request_leaf(request(**fields))
    assert caught.value.field == field
    assert why in str(caught.value)


def test_unknown_queues_may_have_a_home() -> None:
    tree = read_queues('[policy]\nunknown_queue = "b"\n[queue.a]\n[queue.b]')
    assert tree.find_request_leaf(request(queue="x")) == "b"


def test_a_class_of_requests_raises_their_priority(teams: QueueTree) -> None:
    assert teams.compute_priority(request(class_="inference", priority=2)) == 9
    assert teams.compute_priority(request()) == 0


@given(st.text(alphabet="[]{}=\"'.,#\n abq1-\\", max_size=80))
def test_any_text_is_a_tree_or_refused(text: str) -> None:
    with suppress(RequestError):
        read_queues(text)
