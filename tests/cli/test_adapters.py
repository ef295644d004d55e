import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleetcast.cli import adapters
from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError
from fleetcast.schedulers.adapter import Write
from fleetcast.service.adapter_records import AdapterRecords, AdaptersStatus, AdapterStatus
from fleetcast.service.config import GRPC_SERVICES, load_config
from fleetcast.service.doors import ANSWERERS, open_doors
from fleetcast.service.state_folder import lock_role

OWN_PORTS = {"external_metrics", *GRPC_SERVICES}  # they are closed
ALWAYS = [name for name in ANSWERERS if name not in OWN_PORTS]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    row = f'{{use = "band_file", mode = "write", options = {{path = "{tmp_path / "bands"}"}}}}'
    path.write_text(f'state = "{tmp_path / "var"}"\n[adapters]\nadapter = [{row}]\n')
    return path


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["adapters", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def marked(config: Path) -> Path:
    """The file of bands, with a node in it."""
    (opened,) = open_doors(load_config(config).adapters)
    asyncio.run(opened.door.port.write([Write("n1", "band", "high", None, "")]))
    return config.with_name("bands")


def test_list_names_who_answers_and_who_writes(config: Path) -> None:
    rows = json.loads(run("list", "--config", config, "--json"))
    assert [(row["name"], row["mode"], row["kind"]) for row in rows] == [
        *((name, "answer", "answerer") for name in ALWAYS),
        ("band_file", "write", "writer"),
    ]
    kube, *_, file = run("list", "--config", config).splitlines()
    assert kube.endswith("asked at /v1/adapters/kube")
    assert file.endswith("has not run yet")


def test_an_executor_is_listed_and_a_withdrawn_one_stays_withdrawn_until_undone(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"state = '{tmp_path}'\n[[adapters.executor]]\nuse = 'slurm'\nname = 'jobs'\n")
    line = run("list", "--config", config).splitlines()[-1]
    assert line.split() == ["jobs", "executor", "observe", "0", "actions,", "0", "begun,", "0", "under", "way"]
    records = AdapterRecords(tmp_path)
    assert "refuses new actions" in run("withdraw", "jobs", "--config", config)
    assert records.is_withdrawn("jobs")
    run("withdraw", "jobs", "--config", config, "--undo")
    assert not records.is_withdrawn("jobs")


def test_list_needs_no_configuration() -> None:
    assert [row["name"] for row in json.loads(run("list", "--json"))] == ALWAYS


def test_a_door_with_a_port_of_its_own_is_listed_where_it_is_open(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    files = "tls_cert = 'a'\ntls_key = 'a'\nclient_ca = 'a'\n"
    config.write_text(f"state = '{tmp_path}'\n[external_metrics]\nport = 6443\n{files}")
    lines = run("list", "--config", config).splitlines()
    assert any(line.split()[0] == "external_metrics" and line.endswith("a Kubernetes API server") for line in lines)


def test_doors_by_grpc_are_listed_where_its_port_is_open(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"state = '{tmp_path}'\n[api]\ngrpc_port = 9443\n")
    lines = run("list", "--config", config).splitlines()
    assert [line.split()[0] for line in lines if line.endswith("asked by gRPC")] == ["expander", "keda"]


def test_withdraw_takes_back_without_a_service_and_show_tells_why(config: Path) -> None:
    path = marked(config)
    assert "is withdrawn and writes no more" in run("withdraw", "band_file", "--config", config)
    assert not path.exists()
    assert run("list", "--config", config).splitlines()[-1].endswith("1 written, 0 held back, withdrawn")
    shown = json.loads(run("show", "band_file", "--config", config, "--json"))
    assert (shown["withdrawn"], shown["audit"][0]["why"]) == (True, "withdrawn")
    assert "n1 band: high -> -  withdrawn" in run("show", "band_file", "--config", config)
    assert "writes again" in run("withdraw", "band_file", "--undo", "--config", config)
    assert not AdapterRecords(load_config(config).folder).is_withdrawn("band_file")


def test_withdraw_all_takes_back_every_writer_and_wants_no_name(config: Path) -> None:
    path = marked(config)
    text = config.read_text()
    other = config.with_name("others")
    row = f'{{use = "band_file", name = "second", options = {{path = "{other}"}}}}'
    config.write_text(text.replace("}}]", f"}}}}, {row}]"))
    other.write_text("n1 high\n")
    assert run("withdraw", "--all", "--config", config).count("is withdrawn") == 2
    assert not path.exists()
    assert not other.exists()
    assert run("withdraw", "--all", "--undo", "--config", config).count("writes again") == 2
    assert "NAME" in run("withdraw", "--config", config, code=2)
    assert "--all" in run("withdraw", "second", "--all", "--config", config, code=2)


def test_withdraw_says_when_not_all_is_taken_back(config: Path) -> None:
    path = config.with_name("bands")
    path.mkdir()
    output = run("withdraw", "band_file", "--config", config, code=1)
    assert "band_file is not all withdrawn yet: " in output
    assert "Is a directory" in output


def test_withdraw_leaves_it_to_a_service_that_runs(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, loaded = marked(config), load_config(config)
    records = AdapterRecords(loaded.folder)
    with lock_role(loaded, "adapters"):
        monkeypatch.setattr(adapters, "TAKES_S", 0.0)
        row = AdapterStatus(name="band_file", use="band_file", mode="write", withdrawn=True)
        records.write_status(AdaptersStatus(1, adapters=[row]))  # an earlier withdrawal, undone since
        assert "not all withdrawn" in run("withdraw", "band_file", "--config", config, code=1)
        assert records.is_withdrawn("band_file")
        assert path.exists()
        row.board = 7
        records.write_status(AdaptersStatus(2, adapters=[row]))  # for want of a fresh board
        assert "not all withdrawn" in run("withdraw", "band_file", "--config", config, code=1)
        row.board = None
        records.write_status(AdaptersStatus(3, adapters=[row]))
        assert "is withdrawn" in run("withdraw", "band_file", "--config", config)


def test_what_only_answers_has_nothing_to_take_back_and_strangers_are_named(config: Path) -> None:
    assert "only answers" in run("withdraw", "kube", "--config", config)
    with pytest.raises(ConfigError, match=f"no adapter 'lamp': there are {', '.join(ALWAYS)}, band_file"):
        run("show", "lamp", "--config", config)
