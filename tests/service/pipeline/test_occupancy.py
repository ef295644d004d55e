import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.events import Finished, Started, Step, Submitted
from fleetcast.fleet.held_gpus import count_held_milli
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.service.pipeline.occupancy import Occupancy, OccupancyCache, compute_occupancy, count_milli_by_node
from tests.fuzz.bounds import examples

TOPOLOGY = Topology.build([NodeSpec("a", gpus=4), NodeSpec("b", gpus=2)])
INDEX = {"a": 0, "b": 1}
Change = tuple[str, str, list[str], list[bool], bool]


def attempt(job: str, started: Started, gpus_per_node: int = 1, cpus: int | None = None) -> JobAttempt:
    row = JobAttempt(job, 1)
    row.fold(Submitted(job=job, sequence=0, time_ms=0, gpus_per_node=gpus_per_node, cpus=cpus))
    row.fold(started)
    return row


def test_ranks_hold_the_gpus_they_name() -> None:
    ranks = (RankPlacement(0, "a", (1, 3)), RankPlacement(1, "b", (0,)))
    seen = compute_occupancy([attempt("j", Started(job="j", sequence=1, time_ms=1, ranks=ranks))], TOPOLOGY, INDEX)
    assert seen.holder.tolist() == [[-1, 0, -1, 0], [0, -1, -1, -1]]
    assert seen.node_jobs == {0: ["j"], 1: ["j"]}


def test_a_job_that_names_nodes_only_takes_free_gpus_there() -> None:
    first = attempt("x", Started(job="x", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (0,)),)))
    second = attempt("y", Started(job="y", sequence=1, time_ms=1, nodes=("a",)), gpus_per_node=2)
    assert compute_occupancy([first, second], TOPOLOGY, INDEX).holder[0].tolist() == [0, 1, 1, -1]


def test_unknown_nodes_are_ignored_and_gpus_beyond_the_node_hold_as_many_others() -> None:
    """A launcher may count GPUs in its own way: what it names runs there, so that as many GPUs are not free."""
    ranks = (RankPlacement(0, "nowhere", (0,)), RankPlacement(1, "a", (0, 99)))
    seen = compute_occupancy([attempt("j", Started(job="j", sequence=1, time_ms=1, ranks=ranks))], TOPOLOGY, INDEX)
    assert np.flatnonzero(seen.holder.ravel() >= 0).tolist() == [0, 1]


def test_gpus_that_are_counted_beyond_the_node_are_not_free() -> None:
    """A job on all GPUs of its node, numbered through the gang: otherwise its GPUs would be given twice."""
    ranks = (RankPlacement(1, "a", (4, 5, 6, 7)),)
    seen = compute_occupancy([attempt("j", Started(job="j", sequence=1, time_ms=1, ranks=ranks))], TOPOLOGY, INDEX)
    assert seen.holder[0].tolist() == [0, 0, 0, 0]


def test_cpus_count_once_a_node() -> None:
    ranks = (RankPlacement(0, "a", (0,)), RankPlacement(1, "a", (1,)))
    started = Started(job="j", sequence=1, time_ms=1, ranks=ranks)
    assert compute_occupancy([attempt("j", started, cpus=8)], TOPOLOGY, INDEX).used_cpus.tolist() == [8, 0]


def test_no_gpu_beyond_a_smaller_node_is_held() -> None:
    started = Started(job="j", sequence=1, time_ms=1, ranks=(RankPlacement(0, "b", (1, 2, 3)),))
    assert compute_occupancy([attempt("j", started)], TOPOLOGY, INDEX).holder[1].tolist() == [0, 0, -1, -1]


def test_jobs_that_take_parts_share_a_gpu_and_a_whole_one_is_nobody_elses() -> None:
    told = (RankPlacement(0, "a", (0,), 300), RankPlacement(1, "a", (1,), 300))
    by_ranks = attempt("x", Started(job="x", sequence=1, time_ms=1, ranks=told))
    by_submission = attempt("y", Started(job="y", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (0,)),)))
    assert by_submission.submission is not None
    by_submission.submission = msgspec.structs.replace(by_submission.submission, gpu_share=500)
    whole = attempt("z", Started(job="z", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (1,)),)))
    seen = compute_occupancy([by_ranks, by_submission, whole], TOPOLOGY, INDEX)
    assert seen.holder[0].tolist() == [0, 2, -1, -1]
    assert seen.parts.tolist() == [[0, 0, 0, 300], [1, 0, 0, 500]]


def test_gpus_that_somebody_names_are_not_guessed_for_another() -> None:
    guessed = attempt("x", Started(job="x", sequence=1, time_ms=1, nodes=("a",)), gpus_per_node=2)
    named = attempt("y", Started(job="y", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (0, 1)),)))
    assert compute_occupancy([guessed, named], TOPOLOGY, INDEX).holder[0].tolist() == [1, 1, 0, 0]


def test_parts_of_jobs_without_gpu_indices_share_the_fullest_gpu_with_room() -> None:
    def part(job: str, milli: int) -> JobAttempt:
        row = JobAttempt(job, 1)
        row.fold(Submitted(job=job, sequence=0, time_ms=0, gpu_share=milli))
        row.fold(Started(job=job, sequence=1, time_ms=1, nodes=("a",)))
        return row

    seen = compute_occupancy([part("x", 600), part("y", 500), part("z", 400)], TOPOLOGY, INDEX)
    assert seen.parts.tolist() == [[0, 0, 0, 600], [1, 0, 1, 500], [2, 0, 0, 400]]
    assert seen.holder[0].tolist() == [0, 1, -1, -1]


members = st.lists(
    st.tuples(
        st.sampled_from("ab"), st.sampled_from([0, 1, 2]), st.sampled_from([None, 1, 250, 999]), st.sampled_from([0, 8])
    ),
    min_size=1,
    max_size=3,
)


@given(members, st.sampled_from([None, 333]), st.integers(0, 2), st.booleans(), st.booleans())
def test_what_an_attempt_holds_is_what_its_gpus_are_occupied_by(
    drawn: list[tuple[str, int, int | None, int]],
    share: int | None,
    per_node: int,
    by_nodes: bool,
    has_submission: bool,
) -> None:
    """Charges (`count_held_milli`) and free GPUs (`compute_occupancy`) agree, however an attempt says what it holds."""
    row, ranks = JobAttempt("j", 1), []
    free = {"a": [0, 1, 2, 3, 4, 5, 6, 7], "b": [0, 1, 2, 3, 4, 5, 6, 7]}
    for rank, (node, gpus, part, beyond) in enumerate(drawn):
        named = tuple(free[node].pop() + beyond for _ in range(gpus))
        ranks.append(RankPlacement(rank, node, named, part if part and gpus == 1 else msgspec.UNSET))
    if has_submission:
        row.fold(Submitted(job="j", sequence=0, time_ms=0, gpus_per_node=per_node, gpu_share=share))
    where = {"nodes": tuple({node for node, *_ in drawn})} if by_nodes else {"ranks": tuple(ranks)}
    row.fold(Started(job="j", sequence=1, time_ms=1, **where))
    if not has_submission and any(not rank.gpus for rank in ranks) and not by_nodes:
        return  # a member that states nothing takes what is left of its node, which the others share
    topology = Topology.build([NodeSpec("a", gpus=8), NodeSpec("b", gpus=8)])
    seen, found = compute_occupancy([row], topology, INDEX), {"a": 0, "b": 0}
    shared = {(node, gpu) for _, node, gpu, _ in seen.parts.tolist()}
    for node, gpu in np.argwhere(seen.holder == 0).tolist():
        found["ab"[node]] += 0 if (node, gpu) in shared else 1000
    for _, node, _, milli in seen.parts.tolist():
        found["ab"[node]] += milli
    assert {"a": 0, "b": 0} | count_held_milli(row, {"a": 8, "b": 8}) == found


def test_jobs_hold_what_the_occupancy_has_and_add_up_with_it() -> None:
    """Two jobs name the same GPU, one names a GPU beyond its node, and one runs on a node outside the fleet."""
    rows = [
        attempt("x", Started(job="x", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (0, 1)),))),
        attempt("y", Started(job="y", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (1,)),))),
        attempt("z", Started(job="z", sequence=1, time_ms=1, ranks=(RankPlacement(0, "b", (1, 9)),))),
        attempt("w", Started(job="w", sequence=1, time_ms=1, ranks=(RankPlacement(0, "elsewhere", (0, 1, 2)),))),
    ]
    held = count_milli_by_node(compute_occupancy(rows, TOPOLOGY, INDEX), rows, TOPOLOGY)
    assert held == [{"a": 1000}, {"a": 1000}, {"b": 2000}, {"elsewhere": 3000}]


def test_a_part_counts_as_a_part_and_a_node_without_known_gpus_as_events_say() -> None:
    topology = Topology.build([NodeSpec("a", gpus=4), NodeSpec("b", gpus=0)])
    rows = [
        attempt("x", Started(job="x", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (0,), 250),))),
        attempt("y", Started(job="y", sequence=1, time_ms=1, ranks=(RankPlacement(0, "b", (0, 1)),))),
    ]
    assert count_milli_by_node(compute_occupancy(rows, topology, INDEX), rows, topology) == [{"a": 250}, {"b": 2000}]


def test_gpus_that_each_member_names_again_count_once() -> None:
    """A launcher gives each of its processes the whole list of GPUs of the node."""
    ranks = tuple(RankPlacement(rank, "a", (0, 1, 2, 3)) for rank in range(4))
    row = attempt("x", Started(job="x", sequence=1, time_ms=1, ranks=ranks))
    assert (row.gpus, compute_occupancy([row], TOPOLOGY, INDEX).sizes) == (16, {0: 4})


def test_a_gpu_that_a_later_job_names_is_held_by_that_job_alone() -> None:
    rows = [
        attempt(job, Started(job=job, sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", gpus),)))
        for job, gpus in (("x", (0, 1)), ("y", (1, 2)))
    ]
    assert compute_occupancy(rows, TOPOLOGY, INDEX).sizes == {0: 1}


def hosts_of(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=2, unique=True))


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """What happens between two ticks to one of three jobs, and which GPUs telemetry shows at work then."""
    kinds = ["named", "unnamed", "nodes", "shared", "too many", "step", "finish", "nothing"]
    works = draw(st.lists(st.booleans(), min_size=8, max_size=8))
    return draw(st.sampled_from(kinds)), draw(st.sampled_from("xyz")), hosts_of(draw), works, draw(st.booleans())


@given(st.lists(changes(), max_size=12))
@examples(300)
def test_a_remembered_occupancy_is_that_observed_anew(
    ticks: list[tuple[str, str, list[str], list[bool], bool]],
) -> None:
    table, memory, placements = JobTable(), OccupancyCache(), RunningPlaces(())
    for sequence, (kind, job, hosts, works, is_given) in enumerate(ticks):
        about = {"job": job, "sequence": sequence, "time_ms": 1 + sequence}
        gpus = {"named": (0, 1), "shared": (0,), "too many": (2, 3, 9)}.get(kind, ())
        share = 300 if kind == "shared" else msgspec.UNSET
        ranks = tuple(RankPlacement(rank, node, gpus, share) for rank, node in enumerate(hosts))
        if kind == "step":
            table.apply(Step(**about, step=sequence, duration_s=1.0, rank=0, node=hosts[0]))
        elif kind == "finish":
            table.apply(Finished(**about))
        elif kind == "nodes":
            table.apply(Started(**about, nodes=tuple(hosts)))
        elif kind != "nothing":
            table.apply(Started(**about, ranks=ranks))
        running = [row.copy() for row in table.list_running()]
        placements = RunningPlaces.from_running(running, placements)
        given = {("x", 1): (RankPlacement(0, "a", (3,)),)} if is_given else {}
        at_work = np.array(works).reshape(2, 4)
        found = memory.get_occupancy(running, placements, TOPOLOGY, INDEX, at_work, given)
        assert plain_values(found) == plain_values(compute_occupancy(running, TOPOLOGY, INDEX, at_work, given))


def plain_values(seen: Occupancy) -> tuple[object, ...]:
    arrays = (seen.holder, seen.used_cpus, seen.used_host_memory_gib, seen.parts)
    return [array.tolist() for array in arrays], seen.jobs, seen.node_jobs, dict(seen.sizes)
