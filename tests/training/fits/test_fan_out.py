"""Pieces of work come back the same from this process, from others, and from Dask."""

import os
from collections.abc import Iterator

import pytest

from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.training.fits.fan_out import map_items


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """The address of a real scheduler on loopback, with a worker in a thread of this process."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address=":0"
    ) as cluster:
        yield cluster.scheduler_address


def square(number: int) -> int:
    if number < 0:
        raise ConfigError(f"number {number}: expected one that is not negative")
    return number * number


def whose(number: int) -> int:
    return os.getpid()


def test_here_and_on_dask_are_the_same(scheduler: str) -> None:
    said: list[str] = []
    expected = [0, 1, 4, 9, 16]
    assert map_items(square, range(5), None, said.append) == expected
    assert said[-1] == "5 of 5 done"
    assert map_items(square, range(5), scheduler, said.append) == expected
    assert f"workers of {scheduler}" in " ".join(said)
    assert map_items(square, [], scheduler) == map_items(square, []) == []


def test_what_a_piece_raises_reaches_the_caller(scheduler: str) -> None:
    for address in (None, scheduler):
        with pytest.raises(ConfigError, match="number -1"):
            map_items(square, [1, -1], address)


@pytest.mark.integration
def test_processes_of_this_machine() -> None:
    assert map_items(square, range(4), processes=2) == [0, 1, 4, 9]
    assert os.getpid() not in map_items(whose, range(2), processes=2)
    with pytest.raises(ConfigError, match="number -1"):
        map_items(square, [1, -1], processes=2)


def test_a_scheduler_that_is_not_there_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetcast.training.fits.fan_out.CONNECT_S", 0.2)
    with pytest.raises(FleetcastError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1"):
        map_items(square, [1], "tcp://127.0.0.1:1")
