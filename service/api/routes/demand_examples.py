"""Example answers of the demand routes, for OpenAPI."""

NOW_MS = 1_760_000_000_000

DEMAND: dict[str, object] = {
    "as_of_ms": NOW_MS,
    "series": [
        {
            "queue": "all",
            "pool": "all",
            "class": "all",
            "group": "all",
            "target": "running",
            "now": 812.0,
            "model": "persistence+trees",
            "models": ["persistence", "trees"],
            "issued_ms": NOW_MS,
            "horizons_s": [600, 3600],
            "quantiles": [0.1, 0.5, 0.9],
            "values": [[796.0, 760.0], [812.0, 808.0], [824.0, 872.0]],
            "record": {"wql_vs_best_naive": 0.97, "coverage_80": 0.81, "origins": 3400},
            "capacity": 1024.0,
        },
        {
            "queue": "serve",
            "pool": "all",
            "class": "inference",
            "group": "llama-70b",
            "target": "request_rate",
            "now": 21.5,
            "model": "persistence",
            "models": ["persistence", "persistence"],
            "issued_ms": NOW_MS,
            "horizons_s": [300, 3600],
            "quantiles": [0.1, 0.5, 0.9],
            "values": [[19.2, 15.0], [21.5, 21.5], [24.4, 33.0]],
            "record": {"wql_vs_best_naive": 1.0, "coverage_80": 0.79, "origins": 900},
            "prescale": {
                "instances": 2,
                "serves_per_s": 30.0,
                "passes_ms": NOW_MS + 2_449_000,
                "lead_s": 240.0,
                "scale_ms": NOW_MS + 2_209_000,
                "reason": None,
            },
        },
    ],
}
RECORD: dict[str, object] = {
    "as_of_ms": NOW_MS,
    "queue": "all",
    "pool": "all",
    "target": "running",
    "class": "all",
    "history": [[1759999400000, 808.0], [NOW_MS, 812.0]],
    "forecast": [[1760000600000, 780.0, 804.0, 812.0, 816.0, 832.0]],
    "old": [[NOW_MS, 760.0, 800.0, 848.0]],
}
MODEL: dict[str, object] = {
    "as_of_ms": NOW_MS,
    "rows": [
        {
            "queue": "serve",
            "pool": "all",
            "class": "inference",
            "window_s": 3_024_000,
            "stood_still_s": 0,
            "floor_gpus": 48.0,
            "bands": [{"share_of_time": 0.95, "gpus": 56.0}, {"share_of_time": 0.05, "gpus": 160.0}],
            "burst": {"ceiling_gpus": 192.0, "shortest_s": 420.0, "noise_share": 0.11},
            "mix": {"inference": 0.38},
            "residency": {"loaded_share": 0.97, "active_share": 0.41},
            "duration_s": {"p50": 7200.0, "p90": 61_000.0, "p99": 250_000.0, "cv": 1.9},
            "tolerated_wait": None,
            "cold_start_s": {"p50": 180.0, "p90": 240.0},
            "reasons": {"tolerated_wait": "requests do not say, and fewer than 10 were cancelled while they waited"},
        }
    ],
}
