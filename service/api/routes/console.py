"""The console's files at /, and a plain list of routes at /docs.

The content security policy forbids assets from other sites.
"""

import hashlib
import html
from collections.abc import Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from fleetcast.service.api.routes.context import Context
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.table import ANY_FILE, Handler, Query, Row

FOLDER = Path(__file__).parents[2] / "console"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; worker-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
SAFE = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}


async def answer_file(request: Request, context: Context, query: Query) -> Response:
    """Answer with a file of the console. Browsers revalidate it, and get 304 if it has not changed."""
    name = request.path_params.get("file", "") or "index.html"
    path = _list_files().get(name)
    kind = TYPES.get(path.suffix) if path else None
    if path is None or kind is None:
        raise Problem(404, "not_found", f"there is nothing at {request.scope['path'][:200]!r}; /docs lists the routes")
    data = path.read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
    headers = {**SAFE, "cache-control": "no-cache", "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, 200, {**headers, "content-type": kind})


def _list_files() -> dict[str, Path]:
    """Return path below the console's folder → file, for the files to serve.

    No request can reach a file outside the folder.
    """
    return {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.is_file()}


def make_docs_handler(rows: Sequence[Row]) -> Handler:
    """Make the handler of a page that lists the routes. /openapi.json has the details."""
    lines = "\n".join(
        f"<tr><td>{row.method}</td><td><code>{html.escape(row.path.replace(':path', ''))}</code></td>"
        f"<td>{html.escape(row.summary)}</td><td>{'anybody' if row.is_open else row.required_scope}</td></tr>"
        for row in rows
    )
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        "<title>Fleetcast API</title><style>body{font:16px system-ui;margin:2rem;color-scheme:light dark}"
        "td{padding:.2rem .8rem .2rem 0;vertical-align:top}</style><h1>Fleetcast API</h1>"
        "<p>Schemas and examples: <a href='/openapi.json'>/openapi.json</a></p>"
        f"<table>{lines}</table></html>"
    ).encode()

    async def answer_docs(request: Request, context: Context, query: Query) -> Response:
        return Response(page, 200, {**SAFE, "content-type": TYPES[".html"], "cache-control": "no-cache"})

    return answer_docs


ROWS = (
    Row(
        *("GET", "/", answer_file, "The console", "console"),
        params=None,
        answer=str,
        media_type="text/html",
        problems=(404,),
        is_open=True,
    ),
    Row("GET", ANY_FILE, answer_file, "The console's files", "console", params=None, is_open=True),
)
