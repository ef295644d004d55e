"""`fleetcast queues import`: converts another scheduler's queues to `queues.toml`."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetcast.cli.kit.screen import echo, echo_text

if TYPE_CHECKING:
    from fleetcast.schedulers.imports.draft import Draft, Spell

MOST_BYTES = 64 * 2**20
NAMED = 3

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Write the queues of another scheduler as queues.toml. What has no counterpart is printed, and stands in "
    "comments of the file (docs/queues.md).\n\nExample:  fleetcast queues import kueue kueue.yaml --out queues.toml",
)

Files = Annotated[list[str], typer.Argument(help="What the commands above print; - is stdin.", metavar="FILES...")]
Out = Annotated[str, typer.Option("--out", help="Write it here; - is stdout. An existing file is not overwritten.")]
Topology = Annotated[
    Path | None, typer.Option("--topology", help="Spell GPU models as this topology does.", metavar="PATH")
]


@app.command("slurm")
def import_slurm_queues(files: Files, out: Out = "-", topology: Topology = None) -> None:
    """Convert accounts, users, shares, GrpTRES and QOS of Slurm to queues.toml.

    Export them with these commands. Any number of files is accepted, in any order, slurm.conf among them.

    sacctmgr show assoc -nP format=cluster,account,parentname,user,share,grptres,grptresmins,maxtres,qos > assoc.txt

    sacctmgr show qos -nP format=name,priority,preempt,gracetime,grptres,maxtrespu,usagefactor,flags > qos.txt

    Example:  fleetcast queues import slurm assoc.txt qos.txt /etc/slurm/slurm.conf --out queues.toml
    """
    from fleetcast.schedulers.imports.slurm import draft_slurm

    _import_queues(draft_slurm, files, out, topology)


@app.command("kueue")
def import_kueue_queues(files: Files, out: Out = "-", topology: Topology = None) -> None:
    """Convert ClusterQueues, Cohorts, LocalQueues, flavors and priority classes of Kueue.

    The versions are v1beta1 and v1beta2. Export them with:

    kubectl get clusterqueues,cohorts,localqueues,resourceflavors,workloadpriorityclasses -A -o yaml > kueue.yaml

    Kueue's own Configuration, if it is among the files, defines whether shares count, and the half-life of
    use.

    Example:  fleetcast queues import kueue kueue.yaml --out queues.toml
    """
    from fleetcast.schedulers.imports.kueue import draft_kueue

    _import_queues(draft_kueue, files, out, topology)


@app.command("kai")
def import_kai_queues(files: Files, out: Out = "-", topology: Topology = None) -> None:
    """Convert queues of the KAI Scheduler (scheduling.run.ai/v2).

    Export them with:

    kubectl get queues.scheduling.run.ai -o yaml > kai.yaml

    Example:  fleetcast queues import kai kai.yaml --out queues.toml
    """
    from fleetcast.schedulers.imports.kai import draft_kai

    _import_queues(draft_kai, files, out, topology)


@app.command("volcano")
def import_volcano_queues(files: Files, out: Out = "-", topology: Topology = None) -> None:
    """Convert queues of Volcano (scheduling.volcano.sh/v1beta1) to `queues.toml`.

    Export them with:

    kubectl get queues.scheduling.volcano.sh -o yaml > volcano.yaml

    Example:  fleetcast queues import volcano volcano.yaml --out queues.toml
    """
    from fleetcast.schedulers.imports.volcano import draft_volcano

    _import_queues(draft_volcano, files, out, topology)


def _import_queues(
    make: "Callable[[dict[str, str], Spell], Draft]", files: list[str], out: str, topology: Path | None
) -> None:
    from fleetcast.fleet.errors import ConfigError
    from fleetcast.placement.queues.queues_file import read_queues
    from fleetcast.schedulers.imports.agreement import correct_draft
    from fleetcast.schedulers.imports.toml_text import format_draft

    if out != "-" and Path(out).exists():
        raise ConfigError(f"{out} is there: name another file, or move it away")
    draft = make({name: _read_text(name) for name in files}, _make_speller(topology))
    correct_draft(draft)
    text = format_draft(draft, [Path(name).name for name in files])
    read_queues(text)  # what is written is never refused
    if out == "-":
        echo_text(text, nl=False)
    else:
        Path(out).write_text(text, encoding="utf-8")
    _print_unread_parts(draft, out)


def _print_unread_parts(draft: "Draft", out: str) -> None:
    """Print on stderr the parts of the input that have no counterpart, and the queues that they concern."""
    classes = f", {len(draft.classes):,} classes" if draft.classes else ""
    echo(f"{len(draft.queues):,} queues{classes}", err=True)
    for what, whose in draft.notes.items():
        more = f" and {len(whose) - NAMED:,} more" if len(whose) > NAMED else ""
        echo(f"note: {what}{': ' if whose else ''}{', '.join(whose[:NAMED])}{more}", err=True)
    if out != "-":
        echo(f"wrote {out}; next: fleetcast queues check {out} --topology topology.toml", err=True)


def _read_text(name: str) -> str:
    from fleetcast.fleet.errors import ConfigError

    try:
        raw = sys.stdin.buffer.read(MOST_BYTES + 1) if name == "-" else _read_bytes(Path(name))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{name} has more than {MOST_BYTES:,} bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}, line {line}: no text in UTF-8 (byte 0x{raw[error.start]:02x})") from None


def _read_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MOST_BYTES + 1)


def _make_speller(topology: Path | None) -> "Spell":
    """Return a function that spells GPU models as the topology does.

    Models that the topology does not have are spelled as telemetry does.
    """
    from fleetcast.ingest.gpus import shorten_model
    from fleetcast.ingest.topology.load import load_topology

    known = {node.gpu_model.casefold(): node.gpu_model for node in load_topology(topology).nodes} if topology else {}

    def spell(name: str) -> str:
        short = shorten_model(name.replace("_", " "))
        bare = short.upper() if re.fullmatch(r"[a-z]+\d[a-z\d]*", short) else short
        return known.get(bare.casefold(), bare) or name

    return spell
