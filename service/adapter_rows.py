"""The state of every adapter, for the api and the command line."""

from fleetcast.service.adapter_records import AdapterRecords, AdapterStatus
from fleetcast.service.config import GRPC_SERVICES, Config
from fleetcast.service.doors import ANSWERERS


def read_adapter_rows(config: Config) -> list[AdapterStatus]:
    """Return the status of each answering adapter, then of each configured writer and executor.

    The status of a writer or an executor is the last one that the adapters process recorded.
    """
    known = {row.name: row for row in AdapterRecords(config.folder).read_status().adapters}
    closed = {
        *(() if config.external_metrics.port else ("external_metrics",)),
        *(() if config.api.grpc_port else GRPC_SERVICES),
    }
    names = [name for name in ANSWERERS if name not in closed]
    rows = [AdapterStatus(name=name, use=name, mode="answer", kind="answerer") for name in names]
    for kind, configured in (("writer", config.adapters.adapter), ("executor", config.adapters.executor)):
        for row in configured:
            name = row.name or row.use
            status = known.get(name) or AdapterStatus(name=name, use=row.use, mode=row.mode, kind=kind)
            status.use, status.mode = row.use, row.mode
            rows.append(status)
    return rows
