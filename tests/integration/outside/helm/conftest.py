"""One Helm a session, built first where it is not there."""

from pathlib import Path

import pytest

from tests.integration.built import needed
from tests.integration.outside.helm.build import build
from tests.integration.outside.helm.chart import HelmChart


@pytest.fixture(scope="session")
def helm_binary(request: pytest.FixtureRequest) -> Path:
    return needed(build, request)


@pytest.fixture
def chart(helm_binary: Path, tmp_path: Path) -> HelmChart:
    return HelmChart(helm_binary, tmp_path)
