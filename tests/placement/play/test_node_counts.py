from fleetcast.placement.play.capacity import CountAsk
from fleetcast.placement.play.node_counts import NodeCounts
from fleetcast.placement.play.rows import RowEntry


def planned(ask: CountAsk, age_s: float) -> float:
    return ask.limit_s or 100.0


def at(now_s: float, backfills: bool = True) -> NodeCounts:
    machine = NodeCounts(2, 4, planned, backfills)
    machine.set_clock(now_s)
    return machine


def item(number: int) -> RowEntry:
    return RowEntry(str(number), 0.0, 0.0, number)


def test_a_job_takes_one_node_or_whole_ones() -> None:
    machine = at(0.0)
    assert machine.start(CountAsk(3, None), item(1))
    assert machine.start(CountAsk(3, None), item(2))
    assert not machine.fits(CountAsk(2, None))  # two are free, on two nodes
    machine.end_job(2)
    assert not machine.fits(CountAsk(5, None))  # two whole nodes
    machine.end_job(1)
    assert machine.fits(CountAsk(5, None))


def test_the_head_keeps_its_nodes_from_all_but_short_jobs() -> None:
    machine = at(0.0)
    machine.start(CountAsk(4, 50.0), item(1))
    assert machine.claim(CountAsk(8, None), item(2))
    assert not machine.start(CountAsk(1, 60.0), item(3))
    assert machine.start(CountAsk(1, 50.0), item(4))


def test_without_backfill_nobody_passes_the_head_and_what_never_fits_is_none() -> None:
    machine = at(0.0, backfills=False)
    assert not machine.claim(CountAsk(9, None), item(0))
    assert machine.claim(CountAsk(8, None), item(1))
    assert not machine.start(CountAsk(1, 1.0), item(2))


def test_a_job_that_should_have_ended_gets_a_new_end() -> None:
    machine = at(0.0)
    machine.start(CountAsk(8, 10.0), item(1))
    machine.set_clock(40.0)
    assert machine.claim(CountAsk(8, None), item(2))
    assert not machine.start(CountAsk(1, 10.0), item(3))
    machine.end_job(1)
    machine.set_clock(41.0)
    assert machine.start(CountAsk(8, None), item(2))
