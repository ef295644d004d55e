"""`fleetcast models`: the versions of fitted models, with their cards, promotion and rollback."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.kit.options import check_choice, load_site_config
from fleetcast.cli.kit.screen import echo, echo_text
from fleetcast.cli.lab.model_tables import print_card, print_versions

if TYPE_CHECKING:
    from fleetcast.models.versions.card import Card
    from fleetcast.models.versions.registry import Registry

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Versions of fitted models (kinds: demand, duration, risk, interference). `fleetcast train` adds one; it\n"
    "serves once it is promoted, and a version that lost to its baseline is not.\n\nExample:  fleetcast models list",
)

KindArgument = Annotated[str, typer.Argument(help="demand, duration, risk or interference.", metavar="KIND")]
VersionArgument = Annotated[str, typer.Argument(help="A version as `list` shows it; 3 is 0003.", metavar="VERSION")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Configuration file; its [models] folder.")]
StateOption = Annotated[str | None, typer.Option("--state", help="State folder that the models lie in [var].")]
FolderOption = Annotated[Path | None, typer.Option("--folder", help="The folder of the models itself.")]
JsonOption = Annotated[str | None, typer.Option("--json", help="Write it as JSON here; - is stdout.")]


@app.command("list")
def list_versions(
    kind: Annotated[
        str, typer.Argument(help="Only this kind: demand, duration, risk or interference.", metavar="[KIND]")
    ] = "",
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    json_path: JsonOption = None,
) -> None:
    """List all versions: which one serves, what the gate decided, and whether its files are intact.

    Examples:

      fleetcast models list

      fleetcast models list demand --json -
    """
    from fleetcast.models.versions.registry import KINDS

    registry = _open_registry(config, state, folder)
    kinds = (_check_kind(kind),) if kind else KINDS
    rows = [row for one in kinds for row in _make_rows(registry, one)]
    if json_path is not None:
        _write_json(json_path, {"folder": str(registry.root), "rows": rows})
        return
    if not rows:
        echo(f"{registry.root}: no {kind or 'fitted'} model yet; `fleetcast train demand` makes one")
        return
    print_versions(rows)


@app.command("show")
def show_version(
    kind: KindArgument,
    version: Annotated[
        str, typer.Argument(help="Which one [the one that serves, else the newest].", metavar="[VERSION]")
    ] = "",
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    html: Annotated[Path | None, typer.Option(help="Write the card as a page with plots here.")] = None,
    json_path: JsonOption = None,
) -> None:
    """Show the card of a version: verdict, metrics with baselines, calibration, data, settings, files.

    Examples:

      fleetcast models show demand

      fleetcast models show demand 0003 --html card.html
    """
    registry = _open_registry(config, state, folder)
    version = version or _choose_version(registry, _check_kind(kind))
    card = registry.read_version_card(_check_kind(kind), version)
    if html is not None:
        _write_page(card, html)
    if json_path is not None:
        _write_json(json_path, _make_card_document(registry, card))
    elif html is None:
        print_card(card, _make_card_document(registry, card))


@app.command("promote")
def promote_version(
    kind: KindArgument,
    version: VersionArgument,
    force: Annotated[bool, typer.Option("--force", help="In spite of the gate; it is recorded.")] = False,
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    json_path: JsonOption = None,
) -> None:
    """Make a version serve.

    The command refuses a version that lost to its baseline, was never evaluated or is damaged.

    Examples:

      fleetcast models promote demand 0003

      fleetcast models promote demand 0004 --force
    """
    registry = _open_registry(config, state, folder)
    before = registry.find_current_version(_check_kind(kind))
    registry.promote(kind, version, force=force)
    now = registry.find_current_version(kind)
    last = registry.list_promotions(kind)[-1:]
    forced = before != now and bool(last and last[0].forced)
    said = (
        f"{kind} {now} served already" if before == now else f"{kind} {now} serves now, {before or 'none'} did before"
    )
    _print_or_write(json_path, {"kind": kind, "version": now, "previous": before, "forced": forced}, said)


@app.command("rollback")
def roll_back_version(
    kind: KindArgument,
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    json_path: JsonOption = None,
) -> None:
    """Replace the version that serves by the one that served before it. Damaged versions are skipped.

    If no version served before, the model that ships with the program serves again.

    Example:  fleetcast models rollback demand
    """
    from fleetcast.models.versions.registry import SHIPPED

    registry = _open_registry(config, state, folder)
    before = registry.find_current_version(_check_kind(kind))
    now = registry.roll_back(kind)
    _print_or_write(
        json_path,
        {"kind": kind, "version": now, "previous": before},
        f"{kind} {'as shipped' if now == SHIPPED else now} serves again, {before} no longer",
    )


@app.command("shadow")
def choose_shadow_version(
    kind: Annotated[str, typer.Argument(help="demand or risk.", metavar="KIND")],
    version: Annotated[str, typer.Argument(help="A version, newest or off.", metavar="VERSION|newest|off")],
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    json_path: JsonOption = None,
) -> None:
    """Choose the shadow version: it is scored next to the version that serves, and never serves itself.

    A running pipeline applies the choice. Without a choice, the shadow is the newest version that does not serve.

    Examples:

      fleetcast models shadow demand 0002

      fleetcast models shadow demand off
    """
    from fleetcast.fleet.errors import ConfigError
    from fleetcast.models.versions.registry import SHADOWED

    if _check_kind(kind) not in SHADOWED:
        raise ConfigError(f"kind {kind!r}: only versions of {' and '.join(SHADOWED)} run in the shadow")
    registry = _open_registry(config, state, folder)
    registry.choose_shadow(kind, version)
    now = registry.find_challenger(kind)
    said = f"{kind} {now} runs in the shadow" if now else f"no version of {kind} runs in the shadow"
    _print_or_write(json_path, {"kind": kind, "version": now}, said)


@app.command("prune")
def prune_versions(
    kind: Annotated[
        str, typer.Argument(help="Only this kind: demand, duration, risk or interference.", metavar="[KIND]")
    ] = "",
    keep: Annotated[int | None, typer.Option(help="How many of the newest stay [keep_versions].", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
    config: ConfigOption = None,
    state: StateOption = None,
    folder: FolderOption = None,
    json_path: JsonOption = None,
) -> None:
    """Delete old versions.

    The version that serves, the one before it and the shadow version stay.

    Examples:

      fleetcast models prune --dry-run

      fleetcast models prune demand --keep 5
    """
    from fleetcast.models.versions.registry import KINDS

    registry = _open_registry(config, state, folder)
    most = keep or load_site_config(config, state).models.keep_versions
    run = registry.list_old_versions if dry_run else registry.prune
    gone = {one: run(one, most) for one in ((_check_kind(kind),) if kind else KINDS)}
    word = "would delete" if dry_run else "deleted"
    lines = [f"{one}: {word} {', '.join(versions) or 'nothing'}" for one, versions in gone.items()]
    _print_or_write(json_path, {"deleted": gone, "dry_run": dry_run}, "\n".join(lines))


# -- reading --------------------------------------------------------------------------------------------------------


def _open_registry(config: Path | None, state: str | None, folder: Path | None) -> "Registry":
    from fleetcast.fleet.errors import ConfigError
    from fleetcast.models.versions.registry import Registry

    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--folder {folder}: no such folder")
    return Registry(folder or load_site_config(config, state).models_folder)


def _check_kind(kind: str) -> str:
    from fleetcast.models.versions.registry import KINDS

    check_choice("kind", kind, KINDS)
    return kind


def _choose_version(registry: "Registry", kind: str) -> str:
    """Return the version that serves. If none serves, print that, and return the newest version.

    Raises UnknownEntity if there is no version.
    """
    from fleetcast.fleet.errors import UnknownEntity

    if (version := registry.find_current_version(kind)) is not None:
        return version
    if not (names := registry.list_names(kind)):
        raise UnknownEntity(f"no version of {kind} in {registry.root}; `fleetcast train {kind}` makes one")
    echo(f"no version of {kind} serves; this is the newest", err=True)
    return names[-1]


def _make_rows(registry: "Registry", kind: str) -> list[dict[str, Any]]:
    from fleetcast.models.versions.registry import SHADOWED

    current, shadow = registry.find_current_version(kind), registry.find_challenger(kind) if kind in SHADOWED else None
    damages = {name: registry.find_damage(kind, name) for name in registry.list_names(kind)}
    cards = {card.version: card for card in registry.list_cards(kind)}
    forced = {row.version: row.forced for row in registry.list_promotions(kind) if row.action == "promote"}
    return [
        _make_row(kind, name, cards.get(name), damage, name == current)
        | {"shadow": name == shadow, "forced": forced.get(name, False)}
        for name, damage in damages.items()
    ]


def _make_row(kind: str, name: str, card: "Card | None", damage: str | None, serves: bool) -> dict[str, Any]:
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


def _make_card_document(registry: "Registry", card: "Card") -> dict[str, Any]:
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(card)
    serves = registry.find_current_version(card.kind) == card.version
    served = [row for row in registry.list_promotions(card.kind) if card.version in (row.version, row.previous)]
    return document | {
        "serves": serves,
        "damage": registry.find_damage(card.kind, card.version),
        "promotions": msgspec.to_builtins(served),
    }


# -- telling --------------------------------------------------------------------------------------------------------


def _write_json(json_path: str, document: Any) -> None:
    text = json.dumps(document, ensure_ascii=False) + "\n"
    if json_path == "-":
        echo_text(text, nl=False)
    else:
        Path(json_path).write_text(text, encoding="utf-8")


def _print_or_write(json_path: str | None, document: Any, words: str) -> None:
    if json_path is None:
        echo_text(words)
    else:
        _write_json(json_path, document)


def _write_page(card: "Card", path: Path) -> None:
    from fleetcast.fleet.errors import FleetcastError
    from fleetcast.training.reports.card_page import render_card

    try:
        path.write_text(render_card(card), encoding="utf-8")
    except OSError as error:
        raise FleetcastError(f"cannot write {path}: {error.strerror}") from None
    echo(f"wrote {path}", err=True)
