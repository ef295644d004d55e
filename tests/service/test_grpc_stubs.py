"""The checked-in messages of gRPC are those of their .proto texts."""

from pathlib import Path

import pytest

from tests.service.grpc_stubs import FOLDER, ROOT, generate

WRITTEN = sorted(path.name for path in (ROOT / FOLDER).glob("*_pb2.py*"))


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    generate(folder)
    return folder / FOLDER


@pytest.mark.parametrize("name", WRITTEN)
def test_a_stub_is_what_its_text_generates(generated: Path, name: str) -> None:
    assert (ROOT / FOLDER / name).read_text() == (generated / name).read_text(), "python -m tests.service.grpc_stubs"


def test_every_text_has_its_stubs(generated: Path) -> None:
    assert sorted(path.name for path in generated.iterdir()) == WRITTEN
    assert len(WRITTEN) == 4
