import re
from pathlib import Path

import pytest

from fleetcast.fleet.clock import ScaledClock, SystemClock
from fleetcast.fleet.errors import ConfigError
from fleetcast.service.config import Config, load_config, override_config, save_config

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_file_equals_the_defaults_of_the_code() -> None:
    assert load_config(ROOT / "config.toml") == Config()


def test_no_file_means_the_defaults() -> None:
    assert load_config(None) == Config()
    assert isinstance(Config().make_clock(), SystemClock)


def test_a_written_configuration_reads_back(tmp_path: Path) -> None:
    config = override_config(Config(), scrape_targets=("http://127.0.0.1:1/metrics",), api_port=9000, state="here")
    save_config(config, tmp_path / "c.toml")
    assert load_config(tmp_path / "c.toml") == config
    assert config.placer.port == 9001


def test_a_scaled_clock_comes_from_the_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "[clock]\nepoch_ms = 5\nwall_ms = 0\nspeed = 15.0\n"))
    assert config.make_clock() == ScaledClock(5, 0, 15.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[scrape]\nintervall_s = 15\n",
            "config.toml: line 2: scrape.intervall_s: no such key; did you mean interval_s?",
        ),
        ("[scrape]\ninterval_s = 'fast'\n", "config.toml: line 2: scrape.interval_s: is 'fast', must be a number"),
        ("[scrap]\n", "config.toml: line 1: scrap: no such key; did you mean scrape?"),
        (
            "[api]\nport = 1\n\n[adapters]\n[[adapters.adapter]]\nmode = 'write'\n",
            "line 5: adapters.adapter[0].use: is",
        ),
        ("[api]\n\nport = '80'\n", "line 3: api.port: is '80', must be a whole number"),
        ("[placer]\nfilters = 'a:b'\n", "line 2: placer.filters: is 'a:b', must be a list of texts"),
        ("fleet = 'x'\n", "line 1: fleet: is 'x', must be a table"),
        ("[placer]\n\nmax_risk = 3.0\n", "config.toml: line 3: placer.max_risk = 3.0: must lie in"),
        ("[scrape]\ninterval_s = 0.0\n", "scrape.interval_s = 0.0"),
        ("[api]\nport = 70000\n", "api.port = 70000"),
        ("[api]\nboard = 'http://control:8080/'\n", "must be like http://HOST:8080/v1/board"),
        ("[api]\nboard = 'http://me:secret@control:8080/v1/board'\n", "api.board = 'control:8080/v1/board'"),
        ("[api]\nheader_timeout_s = 0.0\n", "api.header_timeout_s = 0.0"),
        ("[api]\nport = 8081\n", "api.port and placer.port"),
        ("[api]\nbody_budget_bytes = 30_000_000\n", "api.body_budget_bytes = 30000000: must hold a body of"),
        ("[api]\nmax_connections_per_address = 0\n", "api.max_connections_per_address = 0: must lie in 1..1000000"),
        (
            "[api]\ntls_cert = 'a.crt'\n",
            "api.tls_cert is set, and api.tls_key is not: set api.tls_key, or leave api.tls_cert out",
        ),
        ("[api]\nclient_ca = 'a.crt'\n", "set api.tls_cert, or leave api.client_ca out"),
        (
            "[external_metrics]\nport = 6443\n",
            "external_metrics.port is set, and external_metrics.tls_cert is not: name",
        ),
        ("[external_metrics]\nnames = ['a']\n", "external_metrics.port is 0, so nothing is served: set it, or leave"),
        (
            "[external_metrics]\nport = 8080\ntls_cert = 'a'\ntls_key = 'a'\nclient_ca = 'a'\n",
            "api.port and external_metrics.port are both 8080: they must differ",
        ),
        ("[api]\ngrpc_port = 8081", "placer.port and api.grpc_port are both 8081: they must differ"),
        ("[api]\ngrpc_port = 70000", "api.grpc_port = 70000: must lie in 0..65535"),
        ('[api]\ngrpc_open = ["kedda"]', "api.grpc_open holds 'kedda': expected some of keda, expander"),
        ('[api]\ngrpc_open = ["keda", "expander"]', "the cluster-autoscaler asks by TLS alone; set api.tls_cert"),
        ("[clock]\nspeed = 0.0\n", "must lie in 0.001..1000000"),
        ("[api]\ntrusted_proxies = ['proxy']\n", "api.trusted_proxies: 'proxy' does not appear to be"),
        ("[placer]\nmax_risk = 2.0\n", "placer.max_risk = 2.0"),
        ("[adapters]\nmax_share = 2.0\n", "adapters.max_share = 2.0: must lie in 0..1"),
        ("[adapters]\nelevated = 0.5\n", "adapters.elevated = 0.5: must not be above adapters.high = 0.3"),
        (
            '[adapters]\nadapter = [{use = "band_file", mode = "try"}]\n',
            "mode = 'try' (band_file): must be observe or write",
        ),
        ('[placer]\nunknown_use = "maybe"\n', "placer.unknown_use = 'maybe': must be avoid or ignore"),
        ("[fleet]\ntopology = 'nowhere.toml'\n", "nowhere.toml"),
        ("[fleet\n", "not valid TOML"),
        ("[clock]\nspeed = inf\n", "clock.speed = inf"),
        ("[clock]\nepoch_ms = 9223372036854775807\n", "clock.epoch_ms"),
        ("[pipeline]\ntick_s = nan\n", "pipeline.tick_s = nan"),
        ("state = 'a\\u0000b'\n".replace("'", '"'), "a path holds no NUL"),
        ("x = " + "[" * 9000, "not valid TOML"),
        ("x = " + "9" * 9000, "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_with_the_offending_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(write(tmp_path, text))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"state = '\xff'\n")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        load_config(tmp_path / "c.toml")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml")


def test_a_board_is_not_stale_within_fifteen_seconds_of_the_machine() -> None:
    assert Config().compute_stale_after_s(SystemClock()) == 60.0
    assert Config().compute_stale_after_s(ScaledClock(0, 0, 15.0)) == 225.0


def test_fitted_models_lie_in_the_state_folder_unless_told_otherwise(tmp_path: Path) -> None:
    assert override_config(Config(), state="here").models_folder == Path("here/models")
    assert load_config(write(tmp_path, "[models]\nfolder = '/srv/models'\n")).models_folder == Path("/srv/models")
    with pytest.raises(ConfigError, match=r"models\.keep_versions = 0"):
        load_config(write(tmp_path, "[models]\nkeep_versions = 0\n"))
