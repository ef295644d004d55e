"""`fleetcast queues import`: what is written passes `queues check`; what has no counterpart is told."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError

ASSOC = """x|root|||1||||
x|lab|root||3|gres/gpu:nvidia_h100_80gb_hbm3=8,cpu=4|||
x|lab||ada|1||||
x|lab||bob|1||||
"""
QUEUE = "apiVersion: {group}\nkind: Queue\nmetadata: {{name: lab}}\nspec: {{weight: 3}}\n"
KUEUE = "apiVersion: kueue.x-k8s.io/v1beta2\nkind: ClusterQueue\nmetadata: {name: lab}\nspec: {}\n"
TEXTS = {
    "slurm": ASSOC,
    "kueue": KUEUE,
    "kai": QUEUE.format(group="scheduling.run.ai/v2"),
    "volcano": QUEUE.format(group="scheduling.volcano.sh/v1beta1"),
}


def run(*words: object, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("source", sorted(TEXTS))
def test_what_is_written_passes_the_check(source: str, tmp_path: Path) -> None:
    text, out = tmp_path / "export.txt", tmp_path / "queues.toml"
    text.write_text(TEXTS[source])
    result = run("queues", "import", source, text, "--out", out)
    assert "1 queues" in result.stderr
    assert f"next: fleetcast queues check {out}" in result.stderr
    assert "fine" in run("queues", "check", out).stdout
    assert "lab" in run("queues", "show", out).stdout
    with pytest.raises(ConfigError, match="is there: name another file"):
        run("queues", "import", source, text, "--out", out)


def test_stdin_to_stdout_and_what_has_no_counterpart() -> None:
    result = run("queues", "import", "slurm", "-", stdin=ASSOC)
    assert "note: GrpTRES of other than GPUs: lab (cpu=4)" in result.stderr
    assert "# - GrpTRES of other than GPUs: lab (cpu=4)" in result.stdout
    assert "limit = {H100 = 8}" in result.stdout  # as telemetry names it


def test_models_are_spelt_as_in_a_topology(tmp_path: Path) -> None:
    topology = tmp_path / "topology.toml"
    topology.write_text('[[rack]]\nname = "r1"\nnodes = "n[1-2]"\ngpus = 2\ngpu_model = "h100"\n')
    result = run("queues", "import", "slurm", "-", "--topology", topology, stdin=ASSOC)
    assert "limit = {h100 = 8}" in result.stdout


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read none\.txt: No such file"):
        run("queues", "import", "slurm", "none.txt")
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"a|b\n\xff")
    with pytest.raises(ConfigError, match="line 2: no text in UTF-8"):
        run("queues", "import", "slurm", bad)


@pytest.mark.parametrize("source", sorted(TEXTS))
def test_help_shows_how_to_export(source: str) -> None:
    text = run("queues", "import", source, "--help").stdout
    assert ("sacctmgr show assoc" if source == "slurm" else "kubectl get") in text
    assert f"fleetcast queues import {source}" in text
