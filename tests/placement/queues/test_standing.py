"""Who is next among queues, and how much each may take."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import Gang, PlacementRequest
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.queues.asks import WaitingColumns
from fleetcast.placement.queues.charges import LN2, LeafUse
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.standing import QueueStanding, compute_needed_gpus
from tests.fuzz.bounds import examples
from tests.placement.queues.slow_quota import limit_plainly

TEAMS = "[queue.a]\nweight = 40\n[queue.b]\nweight = 40\n[queue.c]\nweight = 20\n"
LENT = "[queue.a]\nguaranteed = {gpu = 60}\n[queue.b]\nguaranteed = {gpu = 40}\nlend = {gpu = 30}\n"


def waiting(queue: str, number: int = 0, gpus: int = 1, **fields: Any) -> WaitingEntry:
    request = PlacementRequest(request_id=f"{queue}-{number:04d}", queue=queue, gpus_per_node=gpus, **fields)
    return WaitingEntry(request, number)


def use(**held: float) -> dict[str, LeafUse]:
    return {name: LeafUse({"gpu": gpus}, 0.0) for name, gpus in held.items()}


def by_arrival(waiters: WaitingColumns, queues: Any) -> Any:
    """Places as in one line."""
    return waiters.rank_rows(np.array([-entry.request.priority for entry in waiters.entries], np.int64))


def ordered(standing: QueueStanding, queue: list[WaitingEntry]) -> list[str]:
    return [entry.request.request_id for entry in standing.sort_entries(queue, by_arrival)]


def first(standing: QueueStanding, queue: list[WaitingEntry], gpus: float) -> Counter[str]:
    """GPUs by queue of those who come first, until so many are given."""
    given = Counter[str]()
    for entry in standing.sort_entries(queue, by_arrival):
        if given.total() >= gpus:
            break
        given[entry.request.queue] += entry.request.gpus_per_node
    return given


def test_weights_divide_what_waits() -> None:
    queue = [waiting(name, number) for number in range(100) for name in "abc"]
    assert first(QueueStanding(read_queues(TEAMS), {}, {"gpu": 100.0}), queue, 100) == {"a": 40, "b": 40, "c": 20}


def test_who_holds_more_than_his_share_is_behind() -> None:
    standing = QueueStanding(read_queues(TEAMS), use(a=50), {"gpu": 100.0})
    assert ordered(standing, [waiting("a"), waiting("b", 5), waiting("c", 9)]) == ["b-0005", "c-0009", "a-0000"]


def test_past_use_counts_like_held_gpus() -> None:
    tree = read_queues(TEAMS)
    of_ten_gpus = 10 * tree.policy.half_life_s / LN2
    standing = QueueStanding(tree, {"a": LeafUse({}, of_ten_gpus), "b": LeafUse({"gpu": 10.0}, 0.0)}, {"gpu": 100.0})
    assert math.isclose(
        standing.compute_share(standing.find_or_add_leaf("a")), standing.compute_share(standing.find_or_add_leaf("b"))
    )


def test_guarantees_come_first_and_classes_before_them() -> None:
    text = "[class.c]\npriority = 1\n[queue.a]\nguaranteed = {gpu = 50}\n[queue.b]\n[queue.c]\n"
    standing = QueueStanding(read_queues(text), use(a=49), {"gpu": 100.0})
    queue = [waiting("b", 1), waiting("a", 2), waiting("a", 3), waiting("c", 4)]
    assert ordered(standing, queue) == ["c-0004", "a-0002", "b-0001", "a-0003"]


def test_a_tree_divides_level_by_level_and_users_alike() -> None:
    text = '[queue.r]\nweight = 3\n[queue."r/x"]\nper_user = true\n[queue."r/y"]\n[queue.p]\n'
    queue = [waiting("r/x", n, user=user) for n, user in enumerate(["ada"] * 60 + ["bob"] * 60)]
    queue += [waiting(name, n) for n in range(60) for name in ("r/y", "p")]
    standing = QueueStanding(read_queues(text), {}, {"gpu": 80.0})
    given = first(standing, queue, 80)
    assert given == {"r/x": 30, "r/y": 30, "p": 20}
    users = Counter(entry.request.user for entry in standing.sort_entries(queue, by_arrival)[:80])
    assert (users["ada"], users["bob"]) == (15, 15)


def test_the_dominant_resource_is_what_counts() -> None:
    text = "[queue.a]\nlimit = {H100 = 99}\n[queue.b]\n"
    use_ = {"a": LeafUse({"gpu": 10.0, "H100": 10.0}, 0.0), "b": LeafUse({"gpu": 40.0, "A100": 40.0}, 0.0)}
    standing = QueueStanding(read_queues(text), use_, {"gpu": 100.0, "H100": 10.0, "A100": 90.0})
    assert standing.compute_share(standing.find_or_add_leaf("a")) == 1.0
    assert math.isclose(standing.compute_share(standing.find_or_add_leaf("b")), 40 / 90)


def test_a_limit_on_the_path_says_so_and_bounds_an_elastic_gang() -> None:
    text = '[queue.a]\nlimit = {gpu = 10}\n[queue."a/b"]\n'
    standing = QueueStanding(read_queues(text), {"a/b": LeafUse({"gpu": 4.0}, 0.0)}, {"gpu": 100.0})
    said = standing.limit_to_quota(waiting("a/b", gpus=8).request)
    assert said == "queue 'a' is at its limit: 4 of 10 GPUs held, 8 wanted"
    elastic = PlacementRequest(request_id="e", queue="a/b", gang=Gang(1, 5, 2), gpus_per_node=2)
    allowed = standing.limit_to_quota(elastic)
    assert isinstance(allowed, PlacementRequest)
    assert allowed.members == Gang(1, 3, 2)
    assert "may hold 10 at most" in standing.explain_permanent_refusal(waiting("a/b", gpus=11).request)
    assert not standing.explain_permanent_refusal(elastic)


def test_who_is_over_a_limit_takes_no_place_from_others() -> None:
    text = '[queue.a]\n[queue."a/x"]\nlimit = {gpu = 0}\n[queue."a/y"]\n[queue.b]\n'
    queue = [waiting("a/x", n) for n in range(4)] + [waiting("a/y", 9), waiting("b", 5)]
    order = ordered(QueueStanding(read_queues(text), {}, {"gpu": 10.0}), queue)
    assert order.index("a/y-0009") == 5  # after b, as a's own are counted as if they took nothing
    assert order.index("b-0005") == 4


def test_what_idles_is_lent_but_not_what_is_kept() -> None:
    standing = QueueStanding(read_queues(LENT), use(a=60), {"gpu": 100.0})
    assert isinstance(standing.limit_to_quota(waiting("a", gpus=30).request), PlacementRequest)
    said = standing.limit_to_quota(waiting("a", gpus=31).request)
    assert said == "queue 'a' wants 31 GPUs more, and others leave it 30 now"


def test_a_lender_gets_its_own_back_as_jobs_end() -> None:
    standing = QueueStanding(read_queues(LENT), use(a=90), {"gpu": 100.0})
    standing.count_waiting(waiting("b", gpus=20).request)
    assert isinstance(standing.limit_to_quota(waiting("a", gpus=1).request), str)
    assert isinstance(standing.limit_to_quota(waiting("b", gpus=20).request), PlacementRequest)
    later = QueueStanding(read_queues(LENT), use(a=75, b=5), {"gpu": 100.0})
    later.count_waiting(waiting("b", gpus=20).request)
    assert isinstance(later.limit_to_quota(waiting("a", gpus=1).request), str)


def test_credits_raise_the_guarantee_while_they_last() -> None:
    tree = read_queues("[queue.a]\nguaranteed = {gpu = 10}\ncredits = {rate = 1, cap_gpu_h = 9}\n[queue.b]\n")
    queue = [waiting("b", 1), waiting("a", 2)]
    assert ordered(QueueStanding(tree, use(a=12, b=1), {"gpu": 100.0}), queue) == ["b-0001", "a-0002"]
    banked = {"a": 3 * tree.policy.half_life_s}
    assert ordered(QueueStanding(tree, use(a=12, b=1), {"gpu": 100.0}, banked), queue) == ["a-0002", "b-0001"]


def test_jobs_of_other_schedulers_and_of_queues_that_are_gone_are_counted_and_last() -> None:
    standing = QueueStanding(read_queues(TEAMS), {"old/x": LeafUse({"gpu": 90.0}, 0.0)}, {"gpu": 100.0})
    assert ordered(standing, [waiting("gone", 1), waiting("a", 2)]) == ["a-0002", "gone-0001"]
    assert standing.stands[""].held["gpu"] == 90.0


entries = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 16), st.integers(0, 3)), max_size=40)


@given(entries, st.randoms())
def test_the_order_is_total_and_independent_of_insertion(drawn: list[tuple[str, int, int]], random: Any) -> None:
    queue = [waiting(name, n, gpus, priority=p) for n, (name, gpus, p) in enumerate(drawn)]
    before = ordered(QueueStanding(read_queues(TEAMS), {}, {"gpu": 64.0}), queue)
    assert sorted(before) == sorted(entry.request.request_id for entry in queue)
    random.shuffle(queue)
    assert ordered(QueueStanding(read_queues(TEAMS), {}, {"gpu": 64.0}), queue) == before


@given(st.floats(1, 100), st.floats(0.1, 100), st.integers(1, 8), st.integers(1, 200))
def test_more_weight_is_never_less_share(weight: float, more: float, gpus: int, given_gpus: int) -> None:
    queue = [waiting(name, n, gpus if name == "b" else 1) for n in range(200) for name in "ab"]

    def got(weight: float) -> int:
        tree = read_queues(f"[queue.a]\nweight = {weight}\n[queue.b]\nweight = 10\n")
        return first(QueueStanding(tree, {}, {"gpu": 100.0}), queue, given_gpus)["a"]

    assert got(weight + more) >= got(weight)


TREE = """
[queue.x]
guaranteed = {gpu = 20}
limit = {gpu = 50}
lend = {gpu = 10}
[queue."x/1"]
guaranteed = {gpu = 8}
[queue."x/2"]
limit = {gpu = 30}
borrow = {gpu = 12}
[queue.y]
guaranteed = {gpu = 30}
[queue.z]
"""
LEAVES = ("x/1", "x/2", "y", "z")


def held_by_all(standing: QueueStanding) -> float:
    return standing.stands[""].held.get("gpu", 0.0)


@given(st.lists(st.tuples(st.sampled_from(LEAVES), st.integers(1, 20), st.booleans()), max_size=60))
def test_limits_hold_on_every_path_and_nothing_kept_is_borrowed(steps: list[tuple[str, int, bool]]) -> None:
    tree = read_queues(TREE)
    standing = QueueStanding(tree, {}, {"gpu": 64.0})
    for number, (leaf, gpus, only_wants) in enumerate(steps):
        request = waiting(leaf, number, gpus).request
        if only_wants:
            standing.count_waiting(request)
        elif isinstance(standing.limit_to_quota(request), PlacementRequest) and held_by_all(standing) + gpus <= 64:
            borrows = is_borrowed(standing, leaf, gpus)
            standing.record_placement(request, compute_needed_gpus(request, 1))
            assert not borrows or all(has_its_own(standing, name) for name in ("x", "y"))
        for node in tree.nodes:
            held = standing.stands[node.name].held.get("gpu", 0.0)
            assert held <= node.find_limit("gpu")


MODELS = TREE.replace("{gpu = 20}", "{gpu = 20, H100 = 16}").replace("{gpu = 12}", "{gpu = 12, H100 = 8}")
NARROW = """
[queue.x]
limit = {gpu = 12}
[queue."x/1"]
[queue."x/2"]
guaranteed = {gpu = 4}
borrow = {gpu = 2}
[queue.y]
guaranteed = {gpu = 40}
[queue.z]
"""
quota_steps = st.tuples(
    st.sampled_from(LEAVES),
    st.integers(1, 6),
    st.sampled_from(["hold", "wait", "release"]),
    st.sampled_from(["", "h100"]),
)


@examples(400)
@given(st.sampled_from([TREE, MODELS, NARROW]), st.lists(quota_steps, min_size=12, max_size=24), st.booleans())
def test_a_queue_may_have_what_the_definition_says(
    text: str, steps: list[tuple[str, int, str, str]], is_copied: bool
) -> None:
    standing = QueueStanding(read_queues(text), {}, {"gpu": 64.0, "H100": 32.0})
    held = []
    for number, (leaf, least, action, model) in enumerate(steps):
        gang = Gang(least, least + 3 * (number % 4), 3)
        request = PlacementRequest(request_id="q", gang=gang, gpus_per_node=2, queue=leaf, gpu_model=model)
        allowed, (size, why) = standing.limit_to_quota(request), limit_plainly(standing, request)
        assert (allowed if isinstance(allowed, str) else allowed.members.desired) == (why or size)
        amounts = standing.compute_amounts(request, size)
        if action == "hold" and size:
            standing.record_placement(request, amounts)
            held.append((leaf, amounts))
        elif action == "wait":
            standing.count_waiting(request)
        elif action == "release" and held:
            standing.add_held(*held.pop(), -1.0)
        standing = standing.copy() if is_copied else standing


def is_borrowed(standing: QueueStanding, leaf: str, gpus: int) -> bool:
    """Whether so many more pass a guarantee; who takes what he is guaranteed, and has lent, borrows nothing."""
    return any(
        stand.name and not stand.is_within_guarantee({"gpu": float(gpus)})
        for stand in standing.find_or_add_leaf(leaf).path
    )


def has_its_own(standing: QueueStanding, name: str) -> bool:
    """Whether what a queue keeps to itself is left for it."""
    stand = standing.stands[name]
    others = held_by_all(standing) - stand.held.get("gpu", 0.0)
    return others <= 64 - (stand.node.find_unlent_guarantee("gpu") if stand.node else 0.0)


def test_forty_forty_twenty_within_two_points_over_a_half_life() -> None:
    """QueueStanding demand on a full fleet: jobs of all sizes end at random, and who is next takes what is free."""
    rng = np.random.default_rng(3)
    tree = read_queues(f"[policy]\nhalf_life_h = 24\n{TEAMS}")
    half_life_s, fleet, now_s = tree.policy.half_life_s, 256.0, 0.0
    sizes = {"a": (1, 2), "b": (8, 16), "c": (1, 32)}  # who asks for more has no more of it
    held = dict.fromkeys(sizes, 0.0)
    used = dict.fromkeys(sizes, 0.0)
    served = dict.fromkeys(sizes, 0.0)
    ends: list[tuple[float, str, int]] = []
    while now_s < 3 * half_life_s:
        shares = {name: LeafUse({"gpu": held[name]}, used[name]) for name in sizes}
        standing = QueueStanding(tree, shares, {"gpu": fleet})
        queue = [waiting(name, n, int(rng.choice(sizes[name]))) for n in range(20) for name in sizes]
        for entry in standing.sort_entries(queue, by_arrival):
            name, gpus = entry.request.queue, entry.request.gpus_per_node
            if sum(held.values()) + gpus > fleet:
                break
            held[name] += gpus
            ends.append((now_s + rng.exponential(6 * 3600), name, gpus))
        ends.sort()
        later_s = ends[0][0]
        for name in sizes:
            left = 0.5 ** ((later_s - now_s) / half_life_s)
            used[name] = used[name] * left + held[name] * half_life_s / LN2 * (1 - left)
            if now_s > 2 * half_life_s:
                served[name] += held[name] * (later_s - now_s)
        now_s = later_s
        _, name, gpus = ends.pop(0)
        held[name] -= gpus
    shares_of = {name: gpu_s / sum(served.values()) for name, gpu_s in served.items()}
    assert shares_of == pytest.approx({"a": 0.4, "b": 0.4, "c": 0.2}, abs=0.02)
