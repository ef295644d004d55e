"""Every listening socket of the product is in the table of docs/operating.md, and is bounded by a pool."""

import ast
import re
from pathlib import Path

from tests.service.test_floods import PORTS
from tests.sources import list_nodes

ROOT = Path(__file__).parents[2]
PARTS = (
    "benchmarks",
    "cli",
    "clients",
    "fleet",
    "ingest",
    "models",
    "placement",
    "schedulers",
    "sdk",
    "service",
    "simulator",
)
ENTRANCES = {
    *("listen", "bind_socket", "create_server", "start_server", "create_unix_server", "start_unix_server"),
    *("add_insecure_port", "add_secure_port", "HTTPServer", "ThreadingHTTPServer", "TCPServer", "make_server"),
    *("start_http_server", "uvicorn.run", "uvicorn.Server"),
}
ALLOWED = {
    ("service/http/door.py", "listen"): "the only place that accepts connections for a role",
    ("service/api/role.py", "bind_socket"): "api.port",
    ("service/api/grpc_door.py", "bind_socket"): "api.grpc_port",
    ("service/api/grpc_door.py", "add_insecure_port"): "a socket file in the state folder, behind api.grpc_port",
    ("service/api/external_metrics.py", "bind_socket"): "external_metrics.port",
    ("service/placer/role.py", "bind_socket"): "placer.port",
    ("service/start_checks.py", "bind_socket"): "a check of the ports before the start: it accepts nothing",
    ("simulator/hardware/exporters.py", "create_server"): "simulated exporters",
    ("benchmarks/kit/exporters.py", "create_server"): "simulated exporters",
    ("benchmarks/answers/http.py", "uvicorn.run"): "what a benchmark compares us with",
    ("benchmarks/answers/extender.py", "uvicorn.run"): "what a benchmark compares us with",
    ("benchmarks/ticks/urgent.py", "ThreadingHTTPServer"): "simulated exporters",
}
"""(file, function) → the port of the table, or why it needs none."""


def entrances() -> set[tuple[str, str]]:
    """Calls that open a listening socket, in all code of the product."""
    found = set()
    for part in PARTS:
        for path in (ROOT / part).rglob("*.py"):
            for node in list_nodes(path):
                if isinstance(node, ast.Call):
                    whole = ast.unparse(node.func)
                    name = whole if whole.startswith("uvicorn.") else whole.rpartition(".")[2]
                    if name in ENTRANCES:
                        found.add((path.relative_to(ROOT).as_posix(), name))
    return found


def table() -> dict[str, list[str]]:
    """Port → its bounds, as the page says."""
    text = (ROOT / "docs/operating.md").read_text()
    lines = text[text.index("Every port and its bounds:") :].split("\n\n")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in (rows[0], *rows[2:])}


def test_no_listener_is_unknown() -> None:
    assert entrances() == set(ALLOWED)


def test_the_table_has_every_port_and_a_reason_for_each_bound_that_is_missing() -> None:
    header, *rows = table().items()
    ports = {port for name, _ in rows for port in re.findall(r"`(\w+\.\w+)`", name)}
    assert ports == {port for port in ALLOWED.values() if re.fullmatch(r"\w+\.\w+", port)}
    for name, bounds in rows:
        assert len(bounds) == len(header[1]), name
        assert all(bound and (not bound.startswith("no") or ":" in bound) for bound in bounds), name


def test_every_port_of_a_role_is_flooded_in_a_test() -> None:
    ports = {port for name in table() for port in re.findall(r"`(\w+\.\w+)`", name)}
    assert set(PORTS.values()) == ports
