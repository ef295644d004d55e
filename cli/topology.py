"""`fleetcast topology`: shows how Fleetcast understands a topology file, or a folder of them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.kit.screen import echo, echo_text

if TYPE_CHECKING:
    from fleetcast.fleet.topology import Topology

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Where nodes lie and how they are wired: our TOML, topology.conf and topology.yaml, node labels,\n"
    "ibnetdiscover, NetQ, NCCL's XML and `nvidia-smi topo -m`.\n\nExample:  fleetcast topology show topology.conf",
)


@app.callback()
def define_group() -> None:
    """Make `show` a subcommand. With a single command and no callback, Typer would drop its name."""


@app.command("show")
def show_topology(
    path: Annotated[Path, typer.Argument(help="A file of any known format, or a folder of them.", metavar="PATH")],
    node: Annotated[str, typer.Option(help="Only this node, with its adapters.")] = "",
    limit: Annotated[int, typer.Option(help="At most this many nodes.", min=1)] = 20,
    json_path: Annotated[str | None, typer.Option("--json", help="Write it as JSON here; - is stdout.")] = None,
) -> None:
    """Read a topology as `[fleet] topology` would, and print what it means.

    Examples:

      ibnetdiscover > fabric.txt; fleetcast topology show fabric.txt

      mkdir topology; ibnetdiscover > topology/fabric.txt; nvidia-smi topo -m > topology/H100.txt

      fleetcast topology show topology --node n001
    """
    from fleetcast.fleet.errors import UnknownEntity
    from fleetcast.ingest.topology.load import load_topology

    topology = load_topology(path)
    if json_path is None and path.is_file():
        _print_host_count(path)
    if node and node not in topology.names:
        raise UnknownEntity(f"no node {node!r} in {path}")
    rows = [_make_row(topology, at) for at, name in enumerate(topology.names) if not node or name == node]
    if json_path is not None:
        document = json.dumps(
            {"nodes": rows, "levels": _count_domains(topology), "hosts": _list_host_wirings(topology)}
        )
        if json_path == "-":
            echo_text(document)
        else:
            Path(json_path).write_text(document + "\n", encoding="utf-8")
        return
    _echo_topology(topology, rows, limit, bool(node))


def _print_host_count(path: Path) -> None:
    """Print a note if a dump of NCCL contains several hosts: they share one wiring."""
    from fleetcast.ingest.topology.host_wiring import count_hosts, is_nccl_xml

    text = path.read_text(encoding="utf-8")
    if is_nccl_xml(text) and (hosts := count_hosts(text)) > 1:
        echo(f"{hosts} hosts in this file, distinguished by host_hash; all are wired alike")


def _make_row(topology: "Topology", at: int) -> dict[str, Any]:
    spec = topology.nodes[at]
    return {
        "node": spec.name,
        "gpus": spec.gpus,
        "gpu_model": spec.gpu_model,
        "domains": {level.value: name for level, name in spec.domains.items() if name},
        "devices": [_describe_device(device) for device in topology.find_devices(at)],
    }


def _describe_device(device: Any) -> dict[str, Any]:
    return {
        "name": device.name,
        "gpus": list(device.gpus),
        "rail": device.rail if device.rail >= 0 else None,
        "gbit_per_s": round(device.bytes_per_s * 8e-9, 1) or None,
    }


def _count_domains(topology: "Topology") -> dict[str, int]:
    """Return level -> its number of named domains. Levels without names are left out."""
    return {level.value: len(names) for level, names in topology.domain_names.items() if names}


def _list_host_wirings(topology: "Topology") -> dict[str, list[dict[str, Any]]]:
    return {
        name or "all others": [_describe_device(device) for device in devices]
        for name, devices in topology.hosts.items()
    }


def _echo_topology(topology: "Topology", rows: list[dict[str, Any]], limit: int, whole: bool) -> None:
    echo(f"{len(topology):,} nodes, {int(topology.gpus.sum()):,} GPUs")
    for level, count in _count_domains(topology).items():
        echo(f"  {level:<14}{count:>7,}")
    for name, devices in _list_host_wirings(topology).items():
        echo(f"wiring of {name}: {'; '.join(map(_format_device, devices)) or 'no adapter'}")
    for row in rows[:limit]:
        domains = ", ".join(f"{level} {name}" for level, name in row["domains"].items() if level != "nvlink_domain")
        echo(f"{row['node']:<24}{row['gpus']:>3} {row['gpu_model'] or 'GPUs':<8} {domains or 'unplaced'}")
        for device in row["devices"] if whole else ():
            echo(f"    {_format_device(device)}")
    if len(rows) > limit:
        echo(f"… and {len(rows) - limit:,} more; --limit shows them, --json writes all")


def _format_device(device: dict[str, Any]) -> str:
    parts = [] if device["rail"] is None else [f"rail {device['rail']}"]
    parts += [f"GPU {gpu}" for gpu in device["gpus"]]
    parts += [f"{device['gbit_per_s']:g} Gbit/s"] if device["gbit_per_s"] else []
    return f"{device['name']} ({', '.join(parts) or 'no GPU near it'})"
