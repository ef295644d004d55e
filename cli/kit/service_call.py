"""Questions of commands to a running service: the option of its address, and one function that asks."""

import os
from typing import Annotated, Any

import typer

from fleetcast.fleet.errors import ConfigError, FleetcastError, SourceError, UnknownEntity

DEFAULT_URL = "http://127.0.0.1:8080"
UrlOption = Annotated[
    str | None, typer.Option("--url", help=f"The service [FLEETCAST_URL, else {DEFAULT_URL}].", metavar="URL")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="As JSON.")]


def ask_service(
    method: str, url: str | None, path: str, query: dict[str, str] | None = None, body: object = None
) -> dict[str, Any]:
    """Send a request to the service, and return its answer. body: sent as JSON unless None.

    Raises ConfigError if the address is no HTTP address, SourceError if the service does not answer, UnknownEntity
    for a 404 and FleetcastError for any other problem that the service states.
    """
    import asyncio

    base = url or os.environ.get("FLEETCAST_URL") or DEFAULT_URL
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"{base} is no address of a service: give one like {DEFAULT_URL}")
    return asyncio.run(_send(method, base, path, query, body))


async def _send(method: str, base: str, path: str, query: dict[str, str] | None, sent: object) -> dict[str, Any]:
    import aiohttp
    from yarl import URL

    from fleetcast.fleet.process import make_token_headers

    address = URL(base.rstrip("/") + path, encoded=True).update_query(query or {})
    timeout = aiohttp.ClientTimeout(total=60)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=make_token_headers()) as session,
            session.request(method, address, allow_redirects=False, json=sent) as response,
        ):
            status, body = response.status, await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise SourceError(f"{base} does not answer ({str(error) or type(error).__name__})") from None
    if not isinstance(body, dict):
        raise SourceError(f"{base} answered {status} and no object: is it Fleetcast?")
    if status != 200:
        problem = UnknownEntity if status == 404 else FleetcastError
        raise problem(str(body.get("detail", f"{base} answered {status}")))
    return body


def format_utc(ms: int) -> str:
    """Return a time such as "2026-03-01 14:02:05 UTC"."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
