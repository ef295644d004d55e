"""The configuration: structs that are decoded from config.toml and never change.

The config.toml at the root of the project explains the keys and contains the defaults.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import tomli_w

from fleetcast.fleet.clock import Clock, ScaledClock, SystemClock
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.toml_lines import decode_toml, prepend_line_number
from fleetcast.placement.ledger.chain import ChainHead
from fleetcast.service.config_checks import check_names, check_ports_differ, check_ranges
from fleetcast.service.http.addresses import LOOPBACK, Networks

STALE_WALL_S = 15.0
DEFAULT_FLEET = "fleet"
PLACER_HOST = "127.0.0.1"  # its callers are the api and the commands of its own host
BOARD_URL = re.compile(r"https?://[^/@?#\s]+(/[^@?#\s]*)?/v1/board")
WEBHOOK_URL = re.compile(r"https?://[^\s@/]+(?:/[^\s@]*)?")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class FleetConfig(_Section, frozen=True):
    """The settings of the fleet.

    `topology`: a file, or a folder of files, as `fleetcast topology show` reads it. Without a topology, no
    node has a place. `cluster`: further names of this fleet, one or a list. Requests that state another
    cluster are refused.
    """

    name: str = DEFAULT_FLEET
    cluster: str | tuple[str, ...] = ()
    topology: str = ""

    @property
    def clusters(self) -> tuple[str, ...]:
        """The names of this fleet that requests may state."""
        return (self.name, *((self.cluster,) if isinstance(self.cluster, str) else self.cluster))

    @property
    def is_unnamed(self) -> bool:
        """Return whether the operator has not named the fleet."""
        return self.clusters == (DEFAULT_FLEET,)


class ClockConfig(_Section, frozen=True):
    """The settings of fleet time.

    Fleet time was `epoch_ms` when the machine's clock read `wall_ms`. It runs `speed` times as fast.
    """

    epoch_ms: int = 0
    wall_ms: int = 0
    speed: float = 1.0


class ScrapeConfig(_Section, frozen=True):
    """The settings of scraping.

    `targets`: exporter URLs, and lists of them (see fleetcast.ingest.pages.targets). `timeout_s` is wall time.
    """

    targets: tuple[str, ...] = ()
    interval_s: float = 15.0
    timeout_s: float = 5.0
    max_body_bytes: int = 16_777_216
    concurrency: int = 64


class PluginConfig(_Section, frozen=True):
    """The configuration of one source.

    `use`: an import path or the name of a built-in source. `options`: the source's own options.
    """

    use: str
    options: dict[str, str | int | float | bool | list[str]] = {}


class PipelineConfig(_Section, frozen=True):
    """The settings of the pipelines.

    `sources` are made with (entities, clock, options), `forecasters` without arguments. `instances`: the
    number of processes.
    """

    instances: int = 1
    tick_s: float = 10.0
    snapshot_s: float = 60.0
    future_limit_s: float = 60.0
    history_days: int = 35
    models: str = ""  # folder of fitted models (node_risk.json); empty: the ones that ship
    sources: tuple[PluginConfig, ...] = ()
    forecasters: tuple[str, ...] = ()  # import paths of further forecasters


class ModelsConfig(_Section, frozen=True):
    """The settings for versions of fitted models.

    `retrain_*`: the conditions to fit a model in use again (fleetcast.models.versions.drift).
    """

    folder: str = "models"
    keep_versions: int = 10
    retrain_after_days: float = 30.0
    retrain_coverage_off: float = 0.1
    retrain_loss_ratio: float = 1.02


class ArchiveConfig(_Section, frozen=True):
    """The settings of the archive.

    `url`: a folder, or any URL that fsspec knows. If it is empty, the archive is the folder `archive` in the
    state folder. `look_s`: the longest search for an ended job, in seconds of wall time.
    """

    enabled: bool = True
    url: str = ""
    buffer_bytes: int = 134_217_728
    file_rows: int = 8_000_000
    keep_days: int = 90
    look_s: float = 2.0


class LimitsConfig(_Section, frozen=True):
    """The limits on the numbers of names, such as nodes and live jobs.

    Once a limit is reached, only new names are refused. `fleetcast.fleet.entities.DeviceRoom` limits GPUs.
    """

    live_jobs: int = 20_000
    unknown_nodes: int = 20_000
    unknown_gpus: int = 12_000
    names_per_minute: int = 1_000
    names_at_once: int = 20_000


class ApiConfig(_Section, frozen=True):
    """The settings of the API.

    `board`: the board of another api, for a replica without its own pipeline. PEM files are read again when
    they change. `grpc_port`: 0 for no port. `grpc_open`: gRPC services that require no token, because their
    callers have none.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    board: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    client_ca: str = ""
    max_body_bytes: int = 16_777_216
    max_backlog_bytes: int = 4_294_967_296
    body_budget_bytes: int = 268_435_456
    max_connections: int = 1024
    max_connections_per_address: int = 256
    trusted_proxies: tuple[str, ...] = LOOPBACK
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    stale_after_s: float = 60.0
    grpc_port: int = 0
    grpc_open: tuple[str, ...] = ()


class AccessConfig(_Section, frozen=True):
    """The settings of access by certificate.

    `subjects`: a common or alternative name of a client's certificate → the scopes that it grants.
    """

    subjects: dict[str, tuple[str, ...]] = {}


class ExternalMetricsConfig(_Section, frozen=True):
    """The settings of the aggregated API of external metrics, on its own port. 0 means no port.

    PEM files are read again when they change. `client_ca`: the cluster's request-header authority. `names`:
    the common names of allowed certificates. If it is empty, every name is allowed.
    """

    port: int = 0
    tls_cert: str = ""
    tls_key: str = ""
    client_ca: str = ""
    names: tuple[str, ...] = ()


class PlacerConfig(_Section, frozen=True):
    """The settings of the placer.

    `intent_expires_s`: if the job of a placement does not start, its GPUs become free after this time.
    `outage_pause_s`: the longest delay of this expiry while a source that reports starts is unreachable.
    `unknown_use`: avoid or ignore GPUs that are busy although no job holds them. `unheard`: avoid or ignore
    hosts without GPU telemetry, at a site with exporters. `taken_queue_share`, `taken_fleet_share`: the largest
    share of a queue's and of the fleet's GPUs that actions may take from running jobs within an hour. 1 is no limit.
    `webhook`: the URL that receives each change of an action that was sent.
    """

    port: int = 8081
    queue_period_s: float = 5.0
    intent_expires_s: float = 300.0
    outage_pause_s: float = 1800.0
    max_risk: float = 0.5
    unknown_use: str = "avoid"
    unheard: str = "avoid"
    taken_queue_share: float = 0.10
    taken_fleet_share: float = 0.05
    webhook: str = ""
    queues: str = ""  # the file of queues; empty: one line
    expect_head: str = ""  # a head of the audit that the ledger must contain, LINE:HASH; empty: any ledger serves
    filters: tuple[str, ...] = ()  # import paths of further filter functions
    scorers: tuple[str, ...] = ()  # import paths of further scorer functions


class AdapterConfig(_Section, frozen=True):
    """The configuration of one adapter that writes, or of one executor of actions.

    `use`: the name of a built-in one, or an import path. `options`: its own options. `name`: its name in lists,
    metrics, actions and the audit. If it is empty, `use` is the name.
    """

    use: str
    name: str = ""
    mode: str = "observe"
    options: dict[str, str | int | float | bool | list[str]] = {}


class AdaptersConfig(_Section, frozen=True):
    """The bands of node risk, and the limits on how much of the fleet adapters may change."""

    elevated: float = 0.05
    high: float = 0.3
    max_share: float = 0.1
    writes_per_minute: int = 30
    withdraw_after_s: float = 600.0
    adapter: tuple[AdapterConfig, ...] = ()
    executor: tuple[AdapterConfig, ...] = ()


class Config(_Section, frozen=True):
    """The whole configuration. `state`: the folder that contains inbox, board, snapshot and ledger."""

    state: str = "var"
    fleet: FleetConfig = FleetConfig()
    clock: ClockConfig = ClockConfig()
    scrape: ScrapeConfig = ScrapeConfig()
    pipeline: PipelineConfig = PipelineConfig()
    models: ModelsConfig = ModelsConfig()
    archive: ArchiveConfig = ArchiveConfig()
    limits: LimitsConfig = LimitsConfig()
    api: ApiConfig = ApiConfig()
    access: AccessConfig = AccessConfig()
    external_metrics: ExternalMetricsConfig = ExternalMetricsConfig()
    placer: PlacerConfig = PlacerConfig()
    adapters: AdaptersConfig = AdaptersConfig()

    @property
    def folder(self) -> Path:
        return Path(self.state)

    @property
    def inbox(self) -> Path:
        return self.folder / "inbox"

    @property
    def board(self) -> Path:
        """The folder of the board. A replica has a separate folder for its copy."""
        return self.folder / ("mirror" if self.api.board else "board")

    @property
    def url(self) -> str:
        """The URL of the api, for a browser on its host."""
        return f"http{'s' if self.api.tls_cert else ''}://{self.api.host}:{self.api.port}/"

    @property
    def archive_url(self) -> str:
        return self.archive.url or str(self.folder / "archive")

    @property
    def models_folder(self) -> Path:
        """The root folder of `fleetcast.models.versions.registry.Registry`."""
        return self.folder / self.models.folder

    def get_pipeline_folder(self, instance: int) -> Path:
        """Return the folder of one pipeline's snapshots and own board.

        For the first pipeline, this is the state folder.
        """
        return self.folder / f"pipeline-{instance}" if instance else self.folder

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.sqlite"

    def compute_stale_after_s(self, clock: Clock) -> float:
        """Return the age at which a board becomes stale, in seconds of fleet time.

        This is the configured value, but at least STALE_WALL_S of the machine's time.
        """
        per_second = clock.convert_to_wall_s(1.0)
        return max(self.api.stale_after_s, STALE_WALL_S / per_second if per_second else 0.0)

    def make_clock(self) -> Clock:
        if self.clock == ClockConfig():
            return SystemClock()
        return ScaledClock(self.clock.epoch_ms, self.clock.wall_ms, self.clock.speed)


def load_config(path: Path | None) -> Config:
    """Read the configuration file, or return the defaults.

    Raises ConfigError that names the key, the value and what was expected.
    """
    if path is None:
        return Config()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8: {error}") from None
    try:
        config = decode_toml(text, Config)
        check_config(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {prepend_line_number(text, str(error))}") from None
    return config


@contextlib.contextmanager
def add_lines_to_errors(path: Path | None) -> Iterator[None]:
    """Add the file and the line to a ConfigError from the context, if a key of the file caused the error."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        with_its_line = prepend_line_number(path.read_text(encoding="utf-8"), message) if path else message
        raise ConfigError(message if with_its_line == message else f"{path}: {with_its_line}") from None


UNKNOWN_USE = ("avoid", "ignore")
GRPC_SERVICES = ("keda", "expander")
ADAPTER_MODES = ("observe", "write")


def check_config(config: Config) -> None:
    """Check the configuration beyond its types. Raises ConfigError that says which value is wrong and why."""
    check_ranges(config)
    if not 0 < config.placer.max_risk <= 1:
        raise ConfigError(f"placer.max_risk = {config.placer.max_risk}: must lie in (0, 1]")
    for key in ("taken_queue_share", "taken_fleet_share"):
        if not 0 < getattr(config.placer, key) <= 1:
            raise ConfigError(f"placer.{key} = {getattr(config.placer, key)}: must lie in (0, 1]")
    if config.placer.expect_head and ChainHead.parse(config.placer.expect_head) is None:
        raise ConfigError(
            f"placer.expect_head = {config.placer.expect_head!r}: must be LINE:HASH, a number and 64 hexadecimal "
            "digits, as the placer logs the head of its audit; empty: any ledger serves"
        )
    for key, value in (("unknown_use", config.placer.unknown_use), ("unheard", config.placer.unheard)):
        if value not in UNKNOWN_USE:
            raise ConfigError(f"placer.{key} = {value!r}: must be {' or '.join(UNKNOWN_USE)}")
    if config.placer.webhook and not WEBHOOK_URL.fullmatch(config.placer.webhook):
        raise ConfigError(
            f"placer.webhook = {config.placer.webhook.rpartition('@')[2]!r}: must be like https://HOST/PATH; its token "
            "comes from the environment, FLEETCAST_WEBHOOK_TOKEN"
        )
    if config.api.board and not BOARD_URL.fullmatch(config.api.board):
        raise ConfigError(
            f"api.board = {config.api.board.rpartition('@')[2]!r}: must be like http://HOST:8080/v1/board; "
            "its token comes from the environment, FLEETCAST_BOARD_TOKEN"
        )
    if config.api.body_budget_bytes < 2 * config.api.max_body_bytes:
        raise ConfigError(
            f"api.body_budget_bytes = {config.api.body_budget_bytes}: must hold a body of api.max_body_bytes = "
            f"{config.api.max_body_bytes} as sent and unpacked, so at least {2 * config.api.max_body_bytes}"
        )
    _check_adapters(config.adapters)
    _check_tls(config.api, config.access)
    _check_external_metrics(config)
    Networks(config.api.trusted_proxies, "api.trusted_proxies")
    check_ports_differ(config)
    check_names("api.grpc_open", config.api.grpc_open, GRPC_SERVICES)
    for key, name in (
        ("state", config.state),
        ("fleet.topology", config.fleet.topology),
        ("models.folder", config.models.folder),
        ("archive.url", config.archive.url),
        ("placer.queues", config.placer.queues),
    ):
        if "\0" in name:
            raise ConfigError(f"{key} = {name!r}: a path holds no NUL")
    if config.placer.queues and not Path(config.placer.queues).is_file():
        raise ConfigError(f"placer.queues = {config.placer.queues!r}: no such file")
    if config.fleet.topology and not Path(config.fleet.topology).exists():
        raise ConfigError(f"fleet.topology = {config.fleet.topology!r}: no such file or folder")


def _check_adapters(adapters: AdaptersConfig) -> None:
    """Check the bands and limits of [adapters].

    `open_doors` and `open_executors` of `fleetcast.service.doors` check the keys of each row.
    """
    if adapters.elevated > adapters.high:
        raise ConfigError(f"adapters.elevated = {adapters.elevated}: must not be above adapters.high = {adapters.high}")
    for key, rows in (("adapter", adapters.adapter), ("executor", adapters.executor)):
        for number, row in enumerate(rows):
            if row.mode not in ADAPTER_MODES:
                modes = " or ".join(ADAPTER_MODES)
                raise ConfigError(f"adapters.{key}[{number}].mode = {row.mode!r} ({row.use}): must be {modes}")


def _check_tls(api: ApiConfig, access: AccessConfig) -> None:
    """Raise ConfigError if two keys need each other and one of them is missing.

    This does not read the files. A server checks them when it opens them.
    """
    for key, value, needed, other in (
        ("api.tls_cert", api.tls_cert, "api.tls_key", api.tls_key),
        ("api.tls_key", api.tls_key, "api.tls_cert", api.tls_cert),
        ("api.client_ca", api.client_ca, "api.tls_cert", api.tls_cert),
        ("api.client_ca", api.client_ca, "access.subjects", access.subjects),
        ("access.subjects", access.subjects, "api.client_ca", api.client_ca),
    ):
        if value and not other:
            raise ConfigError(f"{key} is set, and {needed} is not: set {needed}, or leave {key} out")
    if "expander" in api.grpc_open and not api.tls_cert:
        raise ConfigError(
            "api.grpc_open holds 'expander', and api.tls_cert is not set: the cluster-autoscaler asks by TLS alone; "
            "set api.tls_cert and api.tls_key, or leave 'expander' out"
        )


def _check_external_metrics(config: Config) -> None:
    """Raise ConfigError for a port without its files, or for files without a port.

    This does not read the files. A server checks them when it opens them.
    """
    given, why = config.external_metrics, "or set external_metrics.port = 0"
    for key in ("tls_cert", "tls_key", "client_ca"):
        if given.port and not getattr(given, key):
            raise ConfigError(f"external_metrics.port is set, and external_metrics.{key} is not: name the file, {why}")
    if not given.port and given != ExternalMetricsConfig():
        raise ConfigError("external_metrics.port is 0, so nothing is served: set it, or leave the section out")


def override_config(
    config: Config,
    *,
    scrape_targets: tuple[str, ...] | None = None,
    state: str | None = None,
    api_port: int | None = None,
    topology: str | None = None,
) -> Config:
    """Return the configuration with the values from the command line.

    If the api's port changes, the placer's port becomes the next one (port + 1).
    """
    replace = msgspec.structs.replace
    if scrape_targets is not None:
        config = replace(config, scrape=replace(config.scrape, targets=scrape_targets))
    if state is not None:
        config = replace(config, state=state)
    if api_port is not None:
        api, placer = replace(config.api, port=api_port), replace(config.placer, port=api_port + 1)
        config = replace(config, api=api, placer=placer)
    if topology is not None:
        config = replace(config, fleet=replace(config.fleet, topology=topology))
    return config


def save_config(config: Config, path: Path) -> None:
    """Write a file that `load_config` reads. Only our own user may read it, because it may contain passwords."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(tomli_w.dumps(msgspec.to_builtins(config)))
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
