"""Handling of refused connections that may carry job starts.

A connection is refused if no place is left. Such a refusal pauses the expiry of promises
(`service/listening.py`). Only a caller that may send events can cause the pause. Refused connections of
others pause nothing, however many there are.
"""

from collections.abc import Sequence

from fleetcast.service.api.routes.all import ROWS
from fleetcast.service.api.routes.context import Context
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.request_head import RequestHead

EVENT_ROUTES = frozenset((row.method, row.path) for row in ROWS if row.scope is Scope.EVENTS)


def record_refused_event_request(context: Context, head: RequestHead, names: Sequence[str] = ()) -> None:
    """Record an interruption of listening if a refused request would have delivered events.

    A caller that may not send events causes no interruption. `names`: the names on the client's certificate.
    """
    if (head.method, head.path) not in EVENT_ROUTES:
        return
    try:
        context.access.authorize(head.method, head.headers, Scope.EVENTS, names)
    except Problem:
        return
    context.listening.record_interruption()
