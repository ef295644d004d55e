"""Members of gangs are remembered between ticks, and are those that a search finds anew."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.events import Finished, Resized, Started, Step
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import RankPlacement
from fleetcast.models.stragglers.gang import GangColumns, GangMemberCache, match_gangs
from tests.fuzz.bounds import examples

NODES = tuple(f"n{row}" for row in range(4))


def columns(nodes, gpus, owners=None):
    """Entities of `nodes`, as many each as `gpus` says. owners: their nodes' rows, where they moved."""
    names = tuple(f"{name}/{unit}" for name in nodes for unit in range(gpus))
    rows = np.repeat(np.arange(len(nodes), dtype=np.int32), gpus) if owners is None else owners
    return GangColumns(names, rows, {}, {})


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["start", "resize", "step", "finish", "one more GPU", "a port moves", "nothing"]),
        st.sampled_from(["a", "b", "c"]),
        st.lists(st.sampled_from(NODES), min_size=1, max_size=3, unique=True),
        st.booleans(),
    ),
    max_size=15,
)


@given(CHANGES)
@examples(300)
def test_remembered_members_are_those_found_anew(changes):
    table, memory, placements = JobTable(), GangMemberCache(), RunningPlaces(())
    gpus, owners = 2, np.repeat(np.arange(len(NODES), dtype=np.int32), 2)
    for sequence, (change, job, nodes, names_gpus) in enumerate(changes):
        about = {"job": job, "sequence": sequence, "time_ms": 1_000 + sequence}
        ranks = tuple(RankPlacement(rank, node, (0, 1) if names_gpus else ()) for rank, node in enumerate(nodes))
        if change == "start":
            table.apply(Started(**about, ranks=ranks))
        elif change == "resize":
            table.apply(Resized(**about, ranks=ranks))
        elif change == "step":
            table.apply(Step(**about, step=sequence, duration_s=1.0))
        elif change == "finish":
            table.apply(Finished(**about))
        elif change == "one more GPU":
            gpus += 1
        elif change == "a port moves":
            owners = owners.copy()
            owners[sequence % len(owners)] = NODES.index(nodes[0])
        running = [row.copy() for row in table.list_running()]
        placements = RunningPlaces.from_running(running, placements)
        gpu, port = columns(NODES, gpus), columns(NODES, 2, owners)
        found = memory.find_members(running, placements, gpu, port, NODES)
        rebuilt = match_gangs(running, RunningPlaces(running), gpu, port, NODES)
        assert found.attempts is running
        assert found.of_gpu.tolist() == rebuilt.of_gpu.tolist()
        assert found.of_port.tolist() == rebuilt.of_port.tolist()
        assert found.together.tolist() == rebuilt.together.tolist()


def test_a_tick_without_a_change_finds_the_same_arrays_and_the_attempts_of_now():
    table, memory = JobTable(), GangMemberCache()
    table.apply(Started(job="a", sequence=0, time_ms=1, ranks=(RankPlacement(0, "n0", (0, 1)),)))
    running = [row.copy() for row in table.list_running()]
    placements = RunningPlaces(running)
    first = memory.find_members(running, placements, columns(NODES, 2), columns(NODES, 2), NODES)
    later = [row.copy() for row in table.list_running()]
    second = memory.find_members(
        later, RunningPlaces.from_running(later, placements), columns(NODES, 2), columns(NODES, 2), NODES
    )
    assert second.of_gpu is first.of_gpu
    assert second.attempts is later
