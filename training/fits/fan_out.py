"""A parallel map of a function over independent items, on Dask workers or on this machine.

Every item carries its own seed, and results are in the order of the items. So the results are the same on
any machine.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from fleetcast.fleet.errors import ConfigError, FleetcastError

Item = TypeVar("Item")
Result = TypeVar("Result")
Say = Callable[[str], None]

CONNECT_S = 10.0


def map_items(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    address: str | None = None,
    say: Say = lambda line: None,
    processes: int = 1,
) -> list[Result]:
    """Return function(item) for each item, in order. Raises the error of an item that fails.

    Workers import `function` by its name in a module. address: a Dask scheduler (tcp://host:8786) whose
    workers have Fleetcast. Without it, `processes` processes on this machine do the work.
    """
    if address is not None:
        return _run_on_dask(function, items, address, say)
    if processes < 2 or len(items) < 2:
        return [_report_progress(function(item), say, at + 1, len(items)) for at, item in enumerate(items)]
    return _run_in_processes(function, items, min(processes, len(items)), say)


def _report_progress(result: Result, say: Say, done: int, of: int) -> Result:
    say(f"{done} of {of} done")
    return result


def _run_in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], processes: int, say: Say
) -> list[Result]:
    """Run the items in new processes.

    They are not forked, because a fork of a process with LightGBM threads may hang for ever.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for done, future in enumerate(as_completed(futures)):
                _report_progress(future.result(), say, done + 1, len(items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _run_on_dask(function: Callable[[Item], Result], items: Sequence[Item], address: str, say: Say) -> list[Result]:
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise ConfigError(f"--dask {address}: needs the package distributed: pip install 'fleetcast[dask]'") from None
    try:
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise FleetcastError(f"no Dask scheduler answers at {address}: {error}") from None
    with client:
        workers = len(client.nthreads())
        if not workers:
            raise FleetcastError(f"the Dask scheduler at {address} has no workers: start some with `dask worker`")
        say(f"{len(items)} pieces for {workers} workers of {address}")
        futures = [client.submit(function, item, pure=False) for item in items]
        for done, future in enumerate(as_completed(futures, loop=client.loop)):
            _report_progress(future.result(), say, done + 1, len(items))
        return [future.result() for future in futures]
