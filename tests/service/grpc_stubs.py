"""The stubs of clients/grpc_stubs, generated again.

python -m tests.service.grpc_stubs
"""

from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
FOLDER = Path("clients/grpc_stubs")


def generate(into: Path) -> None:
    """Below `into`, in the same folders as in the project."""
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*.proto"))
    theirs = files("grpc_tools") / "_proto"
    options = [f"-I{ROOT}", f"-I{theirs}", f"--python_out={into}", f"--pyi_out={into}"]
    status = protoc.main(["protoc", *options, *protos])
    assert status == 0, f"protoc ended with {status}"


if __name__ == "__main__":
    generate(ROOT)
