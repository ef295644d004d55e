"""The api and a real placer, each on a loopback port, for clients of other processes and threads."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from fleetcast.service.api.app import create_app
from fleetcast.service.config import PlacerConfig
from fleetcast.service.http.access import Access
from fleetcast.service.placer.http import make_app
from tests.service.placer_world import World


@dataclass
class ServedPlacer:
    url: str
    world: World


@contextmanager
def serve_placer(folder: Path, world: World | None = None, access: Access | None = None) -> Iterator[ServedPlacer]:
    """Serve both over a board of sixteen nodes, or over the board of another world. access: of both."""
    world = world or World(folder)
    if access is not None:
        world.app = make_app(world.service, access=access)
    world.board.publish()
    world.service.view.observe_fleet()
    with serve_app(world.app) as port:
        placer: PlacerConfig = msgspec.structs.replace(world.config.placer, port=port)
        api = create_app(msgspec.structs.replace(world.config, placer=placer), world.clock, access=access)
        with serve_app(api) as api_port:
            yield ServedPlacer(f"http://127.0.0.1:{api_port}", world)
    world.close()


@contextmanager
def serve_app(app: Any) -> Iterator[int]:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)
