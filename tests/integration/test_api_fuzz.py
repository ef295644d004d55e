"""Schemathesis asks a running Fleetcast all that its OpenAPI document allows, and much that it does not.

No answer may be a server's error (503 says that somebody is away, and is documented),
none undocumented in its status, its type or its schema; methods that are not there are refused.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.simulated_fleet import SimulatedFleet
from tests.programs import needed

pytestmark = pytest.mark.integration

CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
CONFIGURATION = f"""
hooks = "hooks.py"
[checks]
enabled = false
not_a_server_error = {{ enabled = true, expected-statuses = ["2xx", "3xx", "4xx", 501, 503] }}
{"".join(f"{check}.enabled = true{chr(10)}" for check in CHECKS)}
[[operations]]  # of a batch, each record is taken or refused by itself, with its index in the answer
include-tag = "events"
checks.negative_data_rejection.enabled = false
"""

HOOKS = """import schemathesis
@schemathesis.serializer("application/toml")
def toml(context, value):
    return str(value).encode(errors="replace")
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedFleet]:
    started = SimulatedFleet(tmp_path_factory.mktemp("fuzzed"), 4)
    try:
        for path in ("/v1/risk/nodes", "/v1/jobs"):
            started.service.until(path, lambda path=path: (started.service.get(path) or {}).get("rows"), 60)
        yield started
    finally:
        started.stop()


def asked(fleet: SimulatedFleet, folder: Path, *more: str) -> int:
    """How many requests were made, all answered as they should be; else fails with all that schemathesis found."""
    (folder / "schemathesis.toml").write_text(CONFIGURATION, encoding="utf-8")
    (folder / "hooks.py").write_text(HOOKS, encoding="utf-8")
    document = f"http://127.0.0.1:{fleet.service.port}/openapi.json"
    command = [needed("schemathesis"), "--config-file", "schemathesis.toml", "run", document, "--no-color"]
    command += ["--generation-database", "none", "--seed", "1", "--request-timeout", "10"]
    command += ["--exclude-path", "/v1/stream"]  # it never ends
    command += ["--exclude-path", "/api/v1/write", "--continue-on-failure", "--max-failures", "100"]  # protobuf
    ended = subprocess.run([*command, *more], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-12_000:] + ended.stderr[-2_000:]
    made = re.search(r"(\d+) generated, \1 passed", ended.stdout)
    assert made, ended.stdout[-12_000:]
    return int(made[1])


def test_every_kind_of_request_gets_a_documented_answer(fleet: SimulatedFleet, tmp_path: Path) -> None:
    """Each parameter and field at its bounds, of the wrong type, missing, twice."""
    assert asked(fleet, tmp_path, "--phases", "examples,coverage") > 1000


def test_random_requests_get_a_documented_answer(fleet: SimulatedFleet, tmp_path: Path) -> None:
    assert asked(fleet, tmp_path, "--phases", "fuzzing", "--max-examples", "15") > 100
