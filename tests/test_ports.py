"""Ports of tests: different ones for different workers, and no port twice in a row."""

import pytest

from tests.ports import FIRST, LAST, WORKERS, free_ports, worker_range


def test_workers_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    for worker in range(WORKERS):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        ports = set(worker_range())
        assert not ports & seen
        seen |= ports
    assert seen == set(range(FIRST, LAST))


def test_servers_that_are_not_started_yet_do_not_get_the_same_port() -> None:
    ports = free_ports(50)
    assert len({*ports, *(port + 1 for port in ports)}) == 100
