"""Every file of queues that the reader accepts computes finite numbers, whatever numbers it holds."""

from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import RecordError, RequestError
from fleetcast.fleet.requests import PlacementRequest, check_request
from fleetcast.ingest.inbox.job_events import decode_event
from fleetcast.placement.ahead.queue_trial import try_tree
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.tree import QueueNode, QueueTree, TreePolicy
from tests.placement.conftest import MakeView

INTEGERS = ("0", "1", "-1", "8", "1000", "2147483648", "9007199254740992", "-9007199254740992", "9223372036854775807")
HUGE = ("99999999999999999999", "-99999999999999999999", "0x" + "f" * 40, "0x" + "f" * 5000)
FLOATS = ("5e-324", "1e-320", "1e-300", "1e-7", "1e-6", "0.001", "0.5", "2.5", "1e6", "1e9", "1e12", "1e300", "-0.0")
ODD = ("nan", "inf", "-inf", "1e400", "true", '"x"', "2026-01-01", "[1]")
TIMES = ("0001-01-01T00:00:00Z", "1970-01-01T00:00:00Z", "2030-01-01T00:00:00", "9999-12-31T23:59:59-14:00")
odd = st.sampled_from(INTEGERS + HUGE + FLOATS + ODD)


def number(*usual: str) -> st.SearchStrategy[str]:
    """Mostly numbers at the bounds of a key, sometimes any other."""
    return st.integers(0, 24).flatmap(lambda roll: odd if roll == 0 else st.sampled_from(usual))


def amounts(*usual: str) -> st.SearchStrategy[str]:
    """GPUs of no, one or several resources."""
    found = st.dictionaries(st.sampled_from(("gpu", "H100", "A100")), number(*usual), max_size=2)
    return found.map(lambda named: "{" + ", ".join(f"{name} = {value}" for name, value in named.items()) + "}")


hours = number("0.001", "1e6", "24")
queue_keys = st.fixed_dictionaries(
    {"guaranteed": amounts("8", "1e-6", "1e9")},
    optional={
        "weight": number("1e-6", "1e9", "40"),
        "max_wait_h": hours,
        "max_waiting": number("0", "9007199254740992", "10"),
        "limit": amounts("1e9"),
        "lend": amounts("0"),
        "borrow": amounts("0", "1e-6", "1e9"),
        "credits": st.builds(
            "{{rate = {}, cap_gpu_h = {}}}".format, number("1e-6", "1", "0.5"), number("0", "1e12", "100")
        ),
        "order": st.sampled_from(('"fifo"', '"shortest"', '"attained"')),
        "class": st.just('"c"'),
        "per_user": st.booleans().map(lambda yes: str(yes).lower()),
    },
)
policy_keys = st.fixed_dictionaries(
    {},
    optional={
        "half_life_h": hours,
        "max_wait_h": hours,
        "claims": number("0", "1000"),
        "preempt_gpu_h_per_h": number("0", "1e9"),
        "reclaim": st.sampled_from(('"off"', '"advise"')),
        "preempt_after_s": number("0", "1e6"),
        "grace_s": number("0", "1e5"),
        "min_run_s": number("0", "1e6"),
        "dwell_s": number("0", "1e6"),
        "stops_a_day": number("0", "1000"),
        "overcommit": st.just("true"),
    },
)
priorities = number("9007199254740992", "-9007199254740992", "100")
prices = st.dictionaries(st.sampled_from(("gpu", "H100")), number("0", "1e9", "2.5"), max_size=2)
windows: st.SearchStrategy[list[tuple[str, str]]] = st.lists(
    st.tuples(st.sampled_from(TIMES), st.sampled_from(TIMES)), max_size=1
) | st.just([])


@st.composite
def files(draw: st.DrawFn) -> str:
    """Files of queues with numbers of every size, about half of which are accepted."""
    tables = {"policy": draw(policy_keys), "class.c": {"priority": draw(priorities)}}
    for name in draw(st.lists(st.sampled_from(("a", "b", "c")), min_size=1, max_size=3, unique=True)):
        tables[f"queue.{name}"] = draw(queue_keys)
        if draw(st.integers(0, 3)) == 0:
            tables[f'queue."{name}/x"'] = draw(queue_keys)
    tables["prices"] = draw(prices)
    text = "".join(
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items()) for name, keys in tables.items()
    )
    for begin, end in draw(windows):
        text += f'[[maintenance]]\nnodes = ["n1"]\nfrom = {begin}\nto = {end}\n'
    return text


@given(files())
def test_every_accepted_file_computes_finite_numbers(text: str) -> None:
    with suppress(RequestError):
        tree = read_queues(text)
        msgspec.json.encode((tree.nodes, tree.classes, tree.prices, tree.windows))
        try:
            try_tree(tree)
        except RequestError as error:
            raise AssertionError(str(error)) from error


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[class.c]\npriority = 99999999999999999999\n[queue.a]\nclass = 'c'", "has 67 bits"),
        (
            "[class.c]\npriority = 9223372036854775807\n[queue.a]\nclass = 'c'",
            "class.c.priority: is 92233720368",
        ),
        ("[queue.a]\nweight = 5e-324", "queue.a.weight: is 5e-324, must be above 0"),
        ("[policy]\nhalf_life_h = 5e-324\n[queue.a]", "policy.half_life_h: is 5e-324, must be above 0"),
        ("[queue.a]\nmax_wait_h = 5e-324", "queue.a.max_wait_h: is 5e-324"),
        ("[queue.a]\nmax_waiting = 9223372036854775807", "queue.a.max_waiting: is 9223372036854775807"),
        ("[queue.a]\nguaranteed = {gpu = 5e-324}", "queue.a.guaranteed: gpu is 5e-324"),
        ("[queue.a]\nguaranteed = {gpu = 1}\ncredits = {rate = 5e-324, cap_gpu_h = 1}", "credits: rate is 5e-324"),
        (f"[prices]\ngpu = 0x{'f' * 5000}\n[queue.a]", "an integer has 20000 bits"),
        ("[prices]\ngpu = 1e308\n[queue.a]", "prices.gpu: is 1e+308"),
        (f"policy = 0x{'f' * 5000}\n[queue.a]", "an integer has 20000 bits"),
        ("[queue.a]\nguaranteed = {'' = 1}", "queue.a.guaranteed: '' is no name"),
        ('["class"."\\u0007"]\n[queue.a]', "is no name"),
        (
            "[queue.a]\n[[maintenance]]\nnodes=['n']\nfrom=2026-01-01T00:00:00Z\nto=9999-12-31T23:59:59-14:00",
            "maintenance[0].to: must lie between 1970 and 9999-12-31",
        ),
        (
            "[queue.a]\n[[maintenance]]\nnodes=['n']\nfrom=0001-01-01T00:00:00+14:00\nto=2026-01-01T00:00:00Z",
            "maintenance[0].from: must lie between 1970 and 9999-12-31",
        ),
        ("".join(f"[queue.q{at}]\nlimit = {{m{at} = 1}}\n" for at in range(400)), "400 queues times 400 GPU models"),
    ],
)
def test_numbers_that_nothing_can_compute_with_are_refused(text: str, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_queues(text)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("node", "half_life_s"),
    [
        (QueueNode("a", 0, weight=5e-324), 3600.0),
        (QueueNode("a", 0, priority=99999999999999999999), 3600.0),
        (QueueNode("a", 0, guaranteed={"gpu": float("nan")}), 3600.0),
        (QueueNode("a", 0), 5e-324),
    ],
)
def test_the_trial_finds_what_bounds_would_let_through(node: QueueNode, half_life_s: float) -> None:
    tree = QueueTree((QueueNode("", children=(1,)), node), TreePolicy(half_life_s))
    with pytest.raises(RequestError, match="choose numbers of usual size"):
        try_tree(tree)


def test_a_chain_of_parents_and_names_without_end_are_refused_in_linear_time() -> None:
    chain = "[queue.q0]\n" + "".join(f"[queue.q{at}]\nparent = 'q{at - 1}'\n" for at in range(1, 10_000))
    with pytest.raises(RequestError, match="levels deep, at most 8"):
        read_queues(chain)
    names = ", ".join(f"'gone{at}'" for at in range(100_000))
    with pytest.raises(RequestError, match="is no class and no queue"):
        read_queues(f"[class.c]\npreempts = [{names}]\n" + "".join(f"[queue.q{at}]\n" for at in range(10_000)))


@pytest.mark.parametrize("name", ["host_memory_gib", "gpu_memory_gib", "limit_s"])
def test_a_request_names_no_amount_that_quotients_overflow_with(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is 5e-324, it must be greater than 0, at least 1e-06"):
        check_request(PlacementRequest(request_id="r", **{name: 5e-324}))  # type: ignore[arg-type]


def test_a_stored_request_of_almost_no_memory_fits_as_often_as_gpus_allow(make_view: MakeView) -> None:
    view = make_view({"r1": [8, 4]})
    with np.errstate(all="raise", under="ignore"):
        room = screen(PlacementRequest(request_id="r", host_memory_gib=5e-324), view, Options()).room
    assert room.tolist() == [8, 4]


def test_a_step_of_almost_no_time_is_counted_and_skipped() -> None:
    body = b'{"job": "a", "sequence": 1, "time_ms": 5, "type": "step", "step": 1, "duration_s": 5e-324}'
    with pytest.raises(RecordError, match="duration_s 5e-324, 0 or at least 1e-06"):
        decode_event(body, now_ms=10)
