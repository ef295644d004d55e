"""1,700 idle connections at the default limits keep nobody out, without TLS and with it."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.test_floods import SAID, flood, running

pytestmark = pytest.mark.integration

CONNECTIONS = 1700
OUR_FILES = 4096


@pytest.fixture(autouse=True)
def enough_files() -> Iterator[None]:
    """Let this process hold its ends of the connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, OUR_FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_1700_idle_connections_keep_nobody_out_of_any_port(tmp_path: Path) -> None:
    with running(tmp_path, OUR_FILES) as site:
        for port, said in (("gRPC", "nothing"), ("external metrics", "half a TLS hello"), ("api", "half a head")):
            with flood(site.ports[port], SAID[said], CONNECTIONS):
                site.check()
                assert site.ask("api", "/metrics")[0] == 200
        assert site.counted()["displaced"] > CONNECTIONS
