import json
from pathlib import Path

from typer.testing import CliRunner

from fleetcast.cli.main import app
from tests.ingest.topology.test_fabric_topology import fabric
from tests.ingest.topology.test_host_wiring import MATRIX


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["topology", "show", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_folder_is_said_in_words_and_as_json(tmp_path: Path) -> None:
    (tmp_path / "fabric.txt").write_text(fabric({"n1 mlx5_0": "1", "n2 mlx5_0": "2"}))
    (tmp_path / "hosts.txt").write_text(MATRIX)
    text = shown(str(tmp_path))
    assert "2 nodes, 0 GPUs" in text
    assert "wiring of all others: mlx5_0 (rail 0, GPU 0); mlx5_4 (rail 1, GPU 1); mlx5_bond_0 (no GPU near it)" in text
    assert "rack leaf-1, block spine-1" in text
    assert "… and 1 more" in shown(str(tmp_path), "--limit", "1")
    assert "    mlx5_0 (rail 0, GPU 0, 400 Gbit/s)" in shown(str(tmp_path), "--node", "n1")
    document = json.loads(shown(str(tmp_path), "--json", "-"))
    assert document["levels"] == {"nvlink_domain": 2, "rack": 2, "block": 1}
    assert document["nodes"][0]["devices"][0] == {"name": "mlx5_0", "gpus": [0], "rail": 0, "gbit_per_s": 400.0}
