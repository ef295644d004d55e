import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fleetcast.fleet.clock import ScaledClock
from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.topology.load import load_topology
from fleetcast.simulator.days.traces import DEFAULT_AT, parse_time_ms, shift_start_ms
from fleetcast.simulator.faults.faults import DEMO
from fleetcast.simulator.hardware.cluster import FleetSpec
from fleetcast.simulator.run import SimulationOptions, load_fault_settings, run_simulation


def options(out: Path, api: str, **more: object) -> SimulationOptions:
    wall_ms = time.time_ns() // 1_000_000
    clock = ScaledClock(shift_start_ms(parse_time_ms(DEFAULT_AT), wall_ms), wall_ms, 15.0)
    given = {"story": False, "spec": FleetSpec(nodes=4), "weeks": 1} | more
    return SimulationOptions(out, api, clock, Path("/nowhere"), **given)  # type: ignore[arg-type]


async def product() -> tuple[TestServer, list[bytes]]:
    """An API that takes everything, knows at once what runs, and places nothing."""
    posted: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        posted.append(await request.read())
        return web.json_response({"rejected": []}, status=202)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"rows": [], "gpus": {"running": 32}})

    app = web.Application()
    app.router.add_post("/{path:.*}", take)
    app.router.add_get("/{path:.*}", answer)
    server = TestServer(app)
    await server.start_server()
    return server, posted


async def until_exists(path: Path) -> None:
    for _ in range(6000):
        if path.exists():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"no {path}")


def test_the_run_folder_fills_pages_are_served_and_sigterm_ends_it(tmp_path):
    async def scene() -> None:
        server, posted = await product()
        work = asyncio.create_task(run_simulation(options(tmp_path, str(server.make_url("")))))
        await until_exists(tmp_path / "targets.txt")
        urls = (tmp_path / "targets.txt").read_text().split()
        assert len(urls) == 4 * 2
        async with aiohttp.ClientSession() as session, session.get(urls[0]) as response:
            assert b"DCGM_FI_DEV_SM_CLOCK" in await response.read()
        while b"submitted" not in b"".join(posted):
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(work, 60)
        await server.close()

    asyncio.run(scene())
    status = msgspec.json.decode((tmp_path / "sim.json").read_bytes())
    assert status["source"] == "generator"
    assert status["note"].startswith("FLEETCAST_DATA not found at ")
    assert status["pages_served"] >= 1
    assert status["jobs"]["running"] > 0
    assert len(load_topology(tmp_path / "topology.toml")) == 4


def test_an_error_in_a_work_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr("fleetcast.simulator.driver.Driver.run", None)
    with pytest.raises(TypeError), suppress(asyncio.CancelledError):
        asyncio.run(run_simulation(options(tmp_path, "http://127.0.0.1:9")))


def test_fault_settings_come_from_a_file_and_a_wrong_key_is_named(tmp_path):
    assert load_fault_settings(None) is DEMO
    path = tmp_path / "faults.toml"
    path.write_text('kinds = ["slow_nic"]\nevery_s = 60.0\n')
    assert load_fault_settings(path).kinds == ("slow_nic",)
    path.write_text("evry_s = 60.0\n")
    with pytest.raises(ConfigError, match="evry_s"):
        load_fault_settings(path)
    with pytest.raises(ConfigError, match="cannot read faults"):
        load_fault_settings(tmp_path / "missing.toml")


def test_recorded_runs_need_their_recordings(tmp_path):
    with pytest.raises(ConfigError, match="no recorded H100 runs"):
        asyncio.run(run_simulation(options(tmp_path, "http://127.0.0.1:9", input="h100")))
