"""For every test: how hard properties are tried, which files begin first, and that contract suites say what failed."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # what a property holds has nothing to do with how busy the machine is
pytest.register_assert_rewrite("fleetcast_checks")

ROOT = Path(__file__).parent
HANGS_S = 900.0
LONGEST = (
    *("integration/crash/test_failpoints.py", "integration/slurm", "integration/test_prometheus.py"),
    *("integration/kubernetes", "integration/crash/test_kills.py", "integration/kafka", "integration/crash"),
    *("integration/console", "integration/test_demo.py", "integration/test_door.py", "integration/test_soak.py"),
    *("simulation", "fuzz/test_decoders.py", "service/pipeline/test_lost_parts.py", "laws"),
    *(
        "cli/test_private_files.py",
        "service/http",
        "cli/test_train.py",
        "cli/test_bench.py",
        "models/demand",
        "service",
    ),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first, so that no worker is left with one at the end. Within a file nothing moves.

    A limit of time ends a test that hangs. It says nothing of a machine that has others to serve, so it is generous.
    """
    for item in items:
        if item.get_closest_marker("integration") or item.get_closest_marker("outside"):
            limit = item.get_closest_marker("timeout")
            item.add_marker(pytest.mark.timeout(max([HANGS_S, *(limit.args if limit else ())])), append=False)
    items.sort(key=lambda item: _rank(item.path.relative_to(ROOT).as_posix() if ROOT in item.path.parents else ""))


def _rank(path: str) -> int:
    return next((rank for rank, start in enumerate(LONGEST) if path.startswith(start)), len(LONGEST))
