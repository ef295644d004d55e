"""Serves the console with a made-up fleet behind it: `python -m tests.service.console_fixture --state warming`.

Used to work on the console without a running service, and by the browser tests. The headers are as strict as a
proxy in front of the real service may make them: nothing inline, nothing from elsewhere.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.service import console_pages as pages
from tests.service.console_actions import Actions
from tests.service.console_queues import queues, why
from tests.service.console_scene import STATES, Scene

CONSOLE = Path(__file__).parents[2] / "service" / "console"
POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class StrictHeaders:
    """Adds the content security policy to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", POLICY.encode()),
                    (b"cache-control", b"no-cache"),
                ]
            await send(message)

        await self.app(scope, receive, with_policy if scope["type"] == "http" else send)


class Answers:
    """The routes. `override` maps a path to a body that is sent instead; `token` asks for a bearer token."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.override: dict[str, Any] = {}
        self.token = ""
        self.actions = Actions(scene)
        self.closing = False
        self.period_s = 0.7

    def admits(self, request: Request) -> bool:
        return not self.token or request.headers.get("authorization") == f"Bearer {self.token}"

    def reply(self, request: Request, body: Any) -> Response:
        if self.scene.state == "broken":
            return Response("upstream is away", 502)
        if not self.admits(request):
            return JSONResponse({"title": "Unauthorized", "status": 401, "detail": "no such token is known here"}, 401)
        body = self.override.get(request.url.path, body)
        if body is None:
            return JSONResponse({"title": "Not Found", "status": 404, "detail": "no such thing"}, 404)
        as_of_ms = body.get("as_of_ms") if isinstance(body, dict) else None
        age_s = max(0, self.scene.now_ms() - as_of_ms) // 1000 if isinstance(as_of_ms, int) else 0
        return Response(json.dumps(body), media_type="application/json", headers={"age": str(age_s)})

    async def fleet(self, request: Request) -> Response:
        return self.reply(request, self.scene.fleet())

    async def risk(self, request: Request) -> Response:
        limit, horizon_s = request.query_params.get("limit", 50), request.query_params.get("horizon_s", 3600)
        return self.reply(request, self.scene.risk(int(limit), int(horizon_s)))

    async def node(self, request: Request) -> Response:
        return self.reply(request, self.scene.node(request.path_params["node"]))

    async def timeline(self, request: Request) -> Response:
        minutes = int(request.query_params.get("minutes", 60))
        return self.reply(request, pages.timeline(self.scene, request.path_params["node"], minutes))

    async def drain(self, request: Request) -> Response:
        return self.reply(request, pages.drain(self.scene, request.path_params["node"]))

    async def job(self, request: Request) -> Response:
        return self.reply(request, pages.job(self.scene, request.path_params["job"]))

    async def fingerprint(self, request: Request) -> Response:
        return self.reply(request, pages.fingerprint(self.scene, request.path_params["job"]))

    async def checkpoint(self, request: Request) -> Response:
        return self.reply(request, pages.checkpoint(self.scene, request.path_params["job"]))

    async def spikes(self, request: Request) -> Response:
        return self.reply(request, pages.spikes(self.scene))

    async def utilisation(self, request: Request) -> Response:
        return self.reply(request, pages.utilisation(self.scene))

    async def interference(self, request: Request) -> Response:
        return self.reply(request, pages.interference(await request.json()))

    async def demand(self, request: Request) -> Response:
        asked = request.query_params
        return self.reply(request, self.scene.demand(asked.get("queue"), asked.get("target"), asked.get("class")))

    async def record(self, request: Request) -> Response:
        return self.reply(request, self.scene.record(request.query_params["queue"], request.query_params["target"]))

    async def queue(self, request: Request) -> Response:
        return self.reply(request, self.scene.queue())

    async def list_actions(self, request: Request) -> Response:
        return self.reply(request, self.actions.list_newest(request.query_params.get("job")))

    async def switch_actions(self, request: Request) -> Response:
        return self.reply(request, self.actions.use(request.path_params["verb"]))

    async def queues(self, request: Request) -> Response:
        return self.reply(request, queues(self.scene))

    async def why(self, request: Request) -> Response:
        return self.reply(request, why(self.scene, request.path_params["request_id"]))

    async def jobs(self, request: Request) -> Response:
        return self.reply(request, self.scene.job_rows())

    async def stragglers(self, request: Request) -> Response:
        return self.reply(request, self.scene.stragglers(request.path_params["job"]))

    async def placements(self, request: Request) -> Response:
        after, limit = request.query_params.get("after"), int(request.query_params.get("limit", 50))
        return self.reply(request, self.scene.placements(int(after) if after else None, limit))

    async def ingestion(self, request: Request) -> Response:
        return self.reply(request, self.scene.ingestion())

    async def adapters(self, request: Request) -> Response:
        return self.reply(request, self.scene.adapters())

    async def stream(self, request: Request) -> Response:
        if self.scene.state == "broken" or not self.admits(request):
            return Response("upstream is away", 502 if self.admits(request) else 401)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        sent, sequence = 0, 0
        while not self.closing and self.scene.state != "broken":
            sequence += 1
            yield f"event: board\ndata: {json.dumps({'as_of_ms': self.scene.as_of_ms(), 'sequence': sequence})}\n\n"
            if len(self.scene.signals) > sent:
                yield f"event: hard\ndata: {json.dumps(self.scene.signals[sent:])}\n\n"
                sent = len(self.scene.signals)
            await asyncio.sleep(self.period_s)

    async def switch(self, request: Request) -> Response:
        """POST {"state": …}: change the scene by hand."""
        body = await request.json()
        self.scene.state = body.get("state", self.scene.state)
        return JSONResponse({"state": self.scene.state})


def make_app(answers: Answers) -> Starlette:
    routes = [
        Route("/v1/fleet", answers.fleet),
        Route("/v1/risk/nodes", answers.risk),
        Route("/v1/nodes/{node}", answers.node),
        Route("/v1/nodes/{node}/timeline", answers.timeline),
        Route("/v1/nodes/{node}/drain", answers.drain),
        Route("/v1/demand", answers.demand),
        Route("/v1/demand/record", answers.record),
        Route("/v1/queue", answers.queue),
        Route("/v1/queue/{request_id:path}/why", answers.why),
        Route("/v1/queues", answers.queues),
        Route("/v1/actions", answers.list_actions),
        Route("/v1/actions/{verb}", answers.switch_actions, methods=["POST"]),
        Route("/v1/jobs", answers.jobs),
        Route("/v1/jobs/{job}/stragglers", answers.stragglers),
        Route("/v1/jobs/{job}/fingerprint", answers.fingerprint),
        Route("/v1/jobs/{job}/checkpoint", answers.checkpoint),
        Route("/v1/jobs/{job}", answers.job),
        Route("/v1/spikes", answers.spikes),
        Route("/v1/utilisation", answers.utilisation),
        Route("/v1/interference", answers.interference, methods=["POST"]),
        Route("/v1/placements", answers.placements),
        Route("/v1/adapters", answers.adapters),
        Route("/v1/ingestion", answers.ingestion),
        Route("/v1/stream", answers.stream),
        Route("/fixture/switch", answers.switch, methods=["POST"]),
        Mount("/", StaticFiles(directory=CONSOLE, html=True)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(StrictHeaders)])


@contextlib.contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """The fixture on a free loopback port in a thread; yields its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(answers), log_level="warning", timeout_graceful_shutdown=1, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        answers.closing = True
        server.should_exit = True
        thread.join(10)
        listener.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--state", choices=STATES, default="live")
    parser.add_argument("--nodes", type=int, default=133)
    parser.add_argument("--speed", type=float, default=15.0)
    args = parser.parse_args()
    answers = Answers(Scene(nodes=args.nodes, state=args.state, speed=args.speed))
    uvicorn.run(make_app(answers), host="127.0.0.1", port=args.port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
