"""Optional logging of trained versions to MLflow.

The card's numbers become parameters and metrics, and the version's files become artifacts. `uri` is
a server (http://…), a folder (file:///…) or anything else that MLflow accepts. MLflow's own usage
reports are off.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.models.versions.card import Card, CardMetric
from fleetcast.training.reports.contests import OURS, format_lead, select_pooled_rows
from fleetcast.training.reports.results import ResultRow

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # who names a folder gets one: a database backend needs all of MLflow
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # MLflow's own 7 take minutes to say that nobody is there
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
BATCH_METRICS, BATCH_PARAMS, LONGEST_VALUE = 1000, 100, 500  # MLflow's own limits
NO_NAME = re.compile(r"[^\w./ -]")


def log_version_to_mlflow(uri: str, card: Card, folder: Path) -> str:
    """Log a version to the experiment `fleetcast-KIND`, and return the run's id.

    Raises ConfigError without MLflow, and FleetcastError if MLflow does not accept the run.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise ConfigError(f"mlflow {uri}: MLflow is not installed: pip install 'fleetcast[mlflow]'") from None
    try:
        client = MlflowClient(tracking_uri=uri)
        experiment = _find_or_create_experiment(client, f"fleetcast-{card.kind}")
        run = client.create_run(experiment, tags=_make_tags(card), run_name=f"{card.kind} {card.version}").info.run_id
        try:
            _log_run(client, run, card, folder)
        except (MlflowException, OSError):
            client.set_terminated(run, "FAILED")
            raise
        client.set_terminated(run, "FINISHED")
    except (MlflowException, OSError, ImportError) as error:
        raise FleetcastError(f"mlflow {uri} does not take the run: {error}") from None
    return str(run)


def _find_or_create_experiment(client: Any, name: str) -> str:
    """Return the id of the experiment. Create it if it does not exist.

    This works even if another process creates it at the same moment.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _log_run(client: Any, run: str, card: Card, folder: Path) -> None:
    from mlflow.entities import Metric as Logged
    from mlflow.entities import Param

    params = [Param(NO_NAME.sub("_", name), value[:LONGEST_VALUE]) for name, value in make_mlflow_params(card).items()]
    metrics = [Logged(name, value, card.created_ms, 0) for name, value in list_card_metrics(card)]
    for first in range(0, len(params), BATCH_PARAMS):
        client.log_batch(run, params=params[first : first + BATCH_PARAMS])
    for first in range(0, len(metrics), BATCH_METRICS):
        client.log_batch(run, metrics=metrics[first : first + BATCH_METRICS])
    client.log_artifacts(run, str(folder))


def _make_tags(card: Card) -> dict[str, str]:
    sentence = card.gate.sentence if card.gate else ""
    return {"fleetcast.gate": card.state, "fleetcast.made_by": card.made_by, "mlflow.note.content": sentence}


def make_mlflow_params(card: Card) -> dict[str, str]:
    """Return the seed, settings, data and packages of a version as MLflow parameters."""
    return {
        "version": card.version,
        "seed": str(card.seed),
        "fitted_until_ms": str(card.fitted_until_ms),
        "features": str(len(card.features)),
        **{f"setting.{name}": str(value) for name, value in card.settings.items()},
        **{f"data.{span.dataset}": f"{span.rows} rows, {span.first_ms} to {span.last_ms} ms" for span in card.data},
        **{f"package.{name}": version for name, version in card.dependencies.items()},
    }


def list_card_metrics(card: Card) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of the card's pooled metrics, with names such as `venus/running/wql/1 h/ours`.

    Our own numbers also have the ends of their intervals.
    """
    for row in select_pooled_rows(_make_result_row(metric) for metric in card.metrics):
        parts = (row.dataset, row.target, row.metric, format_lead(row.horizon_s), row.method)
        name = NO_NAME.sub("_", "/".join(part for part in parts if part))
        ends = ((" low", row.low), (" high", row.high)) if row.method == OURS else ()
        for end, value in (("", row.value), *ends):
            if value is not None and math.isfinite(value):
                yield f"{name}{end}", value


def _make_result_row(metric: CardMetric) -> ResultRow:
    return ResultRow(**{name: getattr(metric, name) for name in ResultRow.__struct_fields__})
