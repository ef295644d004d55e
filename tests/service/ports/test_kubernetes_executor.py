"""The executor `kubernetes` as a configuration names it, and its answers without a cluster."""

import asyncio

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.requests import RankPlacement
from fleetcast.schedulers.executor import ActionOrder, SendOutcome
from fleetcast.service.doors import make_executor
from tests.ports import free_port


def make_order(kind: str = "preempt", job: str = "east/default/train") -> ActionOrder:
    return ActionOrder("0f-1", kind, job, 1, 8.0, [RankPlacement(0, "a", (0,))], (), "", 5.0, 1)


@pytest.mark.parametrize("options", [{"server": "http://example.org"}, {"prefx": ""}, {"prefix": 1}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_executor("kubernetes", options)


def test_it_says_what_it_cannot_do_without_asking_the_cluster() -> None:
    executor = make_executor("kubernetes", {"prefix": "east/"})
    assert executor.explain_inability("preempt", "east/default/train") == ""
    assert (
        executor.explain_inability("preempt", "4711")
        == "'4711' is not named like east/NAMESPACE/NAME, as Jobs of Kubernetes are"
    )
    for kind in ("shrink", "replace"):
        assert executor.explain_inability(kind, "east/default/train") == ""
    for kind in ("grow", "move", "place"):
        assert executor.explain_inability(kind, "east/default/train") == f"the executor kubernetes cannot {kind} a Job"
        assert asyncio.run(executor.send(make_order(kind))).outcome is SendOutcome.REFUSED


def test_a_cluster_that_is_away_is_unreachable() -> None:
    executor = make_executor("kubernetes", {"prefix": "east/", "server": f"http://127.0.0.1:{free_port()}"})

    async def send_and_follow() -> list[SendOutcome]:
        order = make_order()
        replies = [await executor.send(order), *await executor.follow([order])]
        await executor.close()
        await executor.close()
        return [reply.outcome for reply in replies]

    assert asyncio.run(send_and_follow()) == [SendOutcome.UNREACHABLE] * 2
