"""`fleetcast models`: the versions of fitted models: which serves, what its card says, promotion and rollback."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from models.card import Card
    from models.registry import Registry
    from service.config import Config

WIDTH = 200  # of a table that goes into a file or a pipe

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Versions of fitted models (kinds: demand, duration). `fleetcast train` adds one; it serves once it is\n"
    "promoted, and a version that lost to its baseline is not.\n\nExample:  fleetcast models list",
)

KindArgument = Annotated[str, typer.Argument(help="demand or duration.", metavar="KIND")]
VersionArgument = Annotated[str, typer.Argument(help="A version as `list` shows it; 3 is 0003.", metavar="VERSION")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Configuration file; its [models] folder.")]
StateOption = Annotated[str | None, typer.Option("--state", help="State folder that the models lie in [var].")]
FolderOption = Annotated[Path | None, typer.Option("--folder", help="The folder of the models itself.")]
JsonOption = Annotated[str | None, typer.Option("--json", help="Write it as JSON here; - is stdout.")]


@app.command("list")
def list_versions(
    kind: Annotated[str, typer.Argument(help="Only this kind: demand or duration.", metavar="[KIND]")] = "",
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    json_path: JsonOption = None,
) -> None:
    """All versions: which one serves, what the gate said, and whether its files are whole.

    Examples:

      fleetcast models list

      fleetcast models list demand --json -
    """
    from models.registry import KINDS

    registry = _registry(config, state, folder)
    kinds = (_known(kind),) if kind else KINDS
    rows = [row for one in kinds for row in _rows(registry, one)]
    if json_path is not None:
        _write(json_path, {"folder": str(registry.root), "rows": rows})
        return
    if not rows:
        typer.echo(f"{registry.root}: no {kind or 'fitted'} model yet; `fleetcast train demand` makes one")
        return
    _print_versions(rows)


@app.command("show")
def show(
    kind: KindArgument,
    version: Annotated[str, typer.Argument(help="Which one [the one that serves].", metavar="[VERSION]")] = "",
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    html: Annotated[Path | None, typer.Option(help="Write the card as a page with plots here.")] = None,
    json_path: JsonOption = None,
) -> None:
    """The card of a version: verdict, metrics beside baselines, calibration, data, settings, files.

    Examples:

      fleetcast models show demand

      fleetcast models show demand 0003 --html card.html
    """
    registry = _registry(config, state, folder)
    version = version or _serving(registry, _known(kind))
    card = registry.card(_known(kind), version)
    if html is not None:
        _write_page(card, html)
    if json_path is not None:
        _write(json_path, _card_document(registry, card))
    elif html is None:
        _print_card(registry, card)


@app.command("promote")
def promote(
    kind: KindArgument,
    version: VersionArgument,
    force: Annotated[bool, typer.Option("--force", help="In spite of the gate; it is recorded.")] = False,
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    json_path: JsonOption = None,
) -> None:
    """Let a version serve. One that lost to its baseline, was never judged or is damaged is refused.

    Examples:

      fleetcast models promote demand 0003

      fleetcast models promote demand 0004 --force
    """
    registry = _registry(config, state, folder)
    before = registry.current_version(_known(kind))
    registry.promote(kind, version, force=force)
    now = registry.current_version(kind)
    last = registry.promotions(kind)[-1:]
    forced = before != now and bool(last and last[0].forced)
    said = (
        f"{kind} {now} served already" if before == now else f"{kind} {now} serves now, {before or 'none'} did before"
    )
    _tell(json_path, {"kind": kind, "version": now, "previous": before, "forced": forced}, said)


@app.command("rollback")
def rollback(
    kind: KindArgument,
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    json_path: JsonOption = None,
) -> None:
    """Let the version serve again that served before the current one; a damaged one is passed over.

    Example:  fleetcast models rollback demand
    """
    registry = _registry(config, state, folder)
    before = registry.current_version(_known(kind))
    now = registry.rollback(kind)
    _tell(
        json_path, {"kind": kind, "version": now, "previous": before}, f"{kind} {now} serves again, {before} no longer"
    )


@app.command("prune")
def prune(
    kind: Annotated[str, typer.Argument(help="Only this kind: demand or duration.", metavar="[KIND]")] = "",
    keep: Annotated[int | None, typer.Option(help="How many of the newest stay [keep_versions].", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    json_path: JsonOption = None,
) -> None:
    """Delete old versions. The one that serves and the one before it always stay.

    Examples:

      fleetcast models prune --dry-run

      fleetcast models prune demand --keep 5
    """
    from models.registry import KINDS

    registry = _registry(config, state, folder)
    kept = keep or _config(config, state).models.keep_versions
    run = registry.old if dry_run else registry.prune
    gone = {one: run(one, kept) for one in ((_known(kind),) if kind else KINDS)}
    word = "would delete" if dry_run else "deleted"
    lines = [f"{one}: {word} {', '.join(versions) or 'nothing'}" for one, versions in gone.items()]
    _tell(json_path, {"deleted": gone, "dry_run": dry_run}, "\n".join(lines))


# -- reading --------------------------------------------------------------------------------------------------------


def _config(config: Path | None, state: str | None) -> "Config":
    from service.config import load_config, override

    return override(load_config(config), state=state)


def _registry(config: Path | None, state: str | None, folder: Path | None) -> "Registry":
    from fleet.errors import ConfigError
    from models.registry import Registry

    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--folder {folder}: no such folder")
    return Registry(folder or _config(config, state).models_folder)


def _known(kind: str) -> str:
    from fleet.errors import ConfigError
    from models.registry import KINDS

    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    return kind


def _serving(registry: "Registry", kind: str) -> str:
    from fleet.errors import UnknownEntity

    version = registry.current_version(kind)
    if version is None:
        known = ", ".join(registry.names(kind)[-5:]) or "none"
        raise UnknownEntity(f"no version of {kind} serves in {registry.root}: name one; the newest are: {known}")
    return version


def _rows(registry: "Registry", kind: str) -> list[dict[str, Any]]:
    current = registry.current_version(kind)
    damages = {name: registry.damage(kind, name) for name in registry.names(kind)}
    cards = {card.version: card for card in registry.versions(kind)}
    forced = {row.version: row.forced for row in registry.promotions(kind) if row.action == "promote"}
    return [
        _row(kind, name, cards.get(name), damage, name == current) | {"forced": forced.get(name, False)}
        for name, damage in damages.items()
    ]


def _row(kind: str, name: str, card: "Card | None", damage: str | None, serves: bool) -> dict[str, Any]:
    return {
        "kind": kind,
        "version": name,
        "serves": serves,
        "created_ms": card.created_ms if card else None,
        "fitted_until_ms": card.fitted_until_ms if card else None,
        "gate": card.state if card else None,
        "sentence": card.gate.sentence if card and card.gate else None,
        "bytes": sum(file.size_bytes for file in card.files) if card else None,
        "damage": damage,
    }


def _card_document(registry: "Registry", card: "Card") -> dict[str, Any]:
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(card)
    serves = registry.current_version(card.kind) == card.version
    served = [row for row in registry.promotions(card.kind) if card.version in (row.version, row.previous)]
    return document | {
        "serves": serves,
        "damage": registry.damage(card.kind, card.version),
        "promotions": msgspec.to_builtins(served),
    }


# -- showing --------------------------------------------------------------------------------------------------------


def _write(json_path: str, document: Any) -> None:
    text = json.dumps(document, ensure_ascii=False) + "\n"
    if json_path == "-":
        sys.stdout.write(text)
    else:
        Path(json_path).write_text(text, encoding="utf-8")


def _tell(json_path: str | None, document: Any, words: str) -> None:
    if json_path is None:
        typer.echo(words)
    else:
        _write(json_path, document)


def _write_page(card: "Card", path: Path) -> None:
    from fleet.errors import FleetcastError
    from training.card_page import card_html

    try:
        path.write_text(card_html(card), encoding="utf-8")
    except OSError as error:
        raise FleetcastError(f"cannot write {path}: {error.strerror}") from None
    typer.echo(f"wrote {path}", err=True)


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH, markup=False, highlight=False, emoji=False)


def _print_table(names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", show_header=any(names))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def _print_versions(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        said = f"damaged: {row['damage']}" if row["damage"] else row["sentence"] or ""
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1024:,.0f}"
        mark = "serves" if row["serves"] else ""
        times = [_moment(row["created_ms"]), _moment(row["fitted_until_ms"])]
        gate = f"{row['gate'] or ''}{', forced' if row['forced'] else ''}"
        lines.append((row["kind"], row["version"], mark, *times, gate, size, said))
    _print_table(("kind", "version", "", "made", "fitted until", "gate", "KiB", "verdict"), lines, right=("KiB",))


def _moment(time_ms: int | None) -> str:
    from training.card_page import moment

    return "" if time_ms is None else moment(time_ms).removesuffix(" UTC")


def _print_card(registry: "Registry", card: "Card") -> None:
    document = _card_document(registry, card)
    gate = card.gate.sentence if card.gate else "nobody has judged it against a baseline"
    facts = {
        "version": f"{card.kind} {card.version}{', serves' if document['serves'] else ''}",
        "gate": f"{card.state}: {gate}",
        "files": f"damaged: {document['damage']}" if document["damage"] else f"{len(card.files)}, whole",
        "made": f"{_moment(card.created_ms)} UTC by: {card.made_by}",
        "served": "; ".join(_promotion(row) for row in document["promotions"]),
        "fitted until": f"{_moment(card.fitted_until_ms)} UTC",
        "seed": str(card.seed),
        "settings": ", ".join(f"{name} {value}" for name, value in card.settings.items()),
        "features": ", ".join(card.features),
        "made with": ", ".join(f"{name} {version}" for name, version in card.dependencies.items()),
    }
    _print_table(("", ""), [(name, value) for name, value in facts.items() if value])
    typer.echo()
    if card.data:
        spans = [(s.dataset, _moment(s.first_ms), _moment(s.last_ms), f"{s.rows:,}") for s in card.data]
        _print_table(("data set", "from", "to", "rows"), spans, right=("rows",))
        typer.echo()
    _print_metrics(card)
    _print_calibration(card)


def _promotion(row: dict[str, Any]) -> str:
    """A change of what serves, in words."""
    words = "promoted" if row["action"] == "promote" else "rolled back to"
    forced = " by force" if row["forced"] else ""
    return f"{_moment(row['time_ms'])} UTC {words} {row['version']}{forced}"


def _print_metrics(card: "Card") -> None:
    """A line a number, a column a method; intervals in brackets; series pooled; coverage is told beside its promise."""
    from training.contests import OURS, lead, pooled, words_of
    from training.results import Row

    rows = pooled(Row(**{name: getattr(row, name) for name in Row.__struct_fields__}) for row in card.metrics)
    rows = [row for row in rows if row.value is not None and not row.metric.startswith("coverage")]
    rows.sort(key=lambda row: (row.dataset, row.target, row.metric, row.horizon_s or 0))
    methods = sorted({row.method for row in rows}, key=lambda method: (method != OURS, method))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        among = "" if row.low is None or row.high is None else f" [{row.low:.3g}, {row.high:.3g}]"
        key = (row.dataset, row.target, words_of(row.metric), lead(row.horizon_s))
        cells.setdefault(key, {})[row.method] = f"{row.value:.4g}{among}"
    if cells:
        lines = [(*key, *(values.get(method, "") for method in methods)) for key, values in cells.items()]
        heads = ("data set", "target", "metric", "horizon", *(method.replace("_", " ") for method in methods))
        _print_table(heads, lines, right=("horizon",))
        typer.echo()


def _print_calibration(card: "Card") -> None:
    from training.contests import lead

    rows = [
        (row.target, lead(row.horizon_s), f"{row.nominal:.0%}", f"{row.observed:.1%}", f"{row.n:,}")
        for row in card.calibration
    ]
    if rows:
        heads = ("calibration of", "horizon", "promised", "observed", "outcomes")
        _print_table(heads, rows, right=heads[1:])
