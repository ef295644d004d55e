"""Bodies of requests that were stored while `preemptible = false` was the default.

Such a body does not state the field. A client may send the same request again with `preemptible = false`
written out. It then gets the stored reply. The ledger recognises these bodies by their audit lines. The lines
up to the fact `SAID_AFTER` are from that time.
"""

import msgspec

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ledger.chain import encode

SAID_AFTER = "preemptible_said_after"  # the last audit line from the time of the default
FIND_OLD_LINE = "SELECT 1 FROM audit WHERE audit_id <= ? AND request_id = ? LIMIT 1"


def leaves_out_default(body: bytes, request: PlacementRequest) -> bool:
    """Return whether a body is that of a request with `preemptible = false`, but does not state this field."""
    return request.preemptible is False and body == encode(msgspec.structs.replace(request, preemptible=None))
