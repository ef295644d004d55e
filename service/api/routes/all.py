"""The list of all routes of the API, in the order of matching. The most frequent routes come first.

Add a new route to `ROWS`.
"""

from fleetcast.service.api.routes import (
    adapters,
    checkpoint,
    demand,
    doors,
    drain,
    estimate,
    events,
    fingerprints,
    fleet,
    gang_risk,
    health,
    interference,
    jobs,
    kernel_log,
    placements,
    queues,
    remote_write,
    risk,
    stream,
    timeline,
    webhooks_nvsentinel,
    webhooks_slurm,
    webhooks_torchelastic,
)
from fleetcast.service.http.table import Row

ROWS: tuple[Row, ...] = (
    *risk.ROWS,
    *timeline.ROWS,
    *drain.ROWS,
    *gang_risk.ROWS,
    *queues.ROWS,
    *placements.ROWS,
    *adapters.ROWS,
    *doors.ROWS,
    *events.ROWS,
    *remote_write.ROWS,
    *kernel_log.ROWS,
    *webhooks_nvsentinel.ROWS,
    *webhooks_slurm.ROWS,
    *webhooks_torchelastic.ROWS,
    *fleet.ROWS,
    *stream.ROWS,
    *demand.ROWS,
    *jobs.ROWS,
    *fingerprints.ROWS,
    *checkpoint.ROWS,
    *estimate.ROWS,
    *interference.ROWS,
    *jobs.JOB_ROWS,
    *health.ROWS,
)
