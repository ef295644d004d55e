"""The token that a client of ours shows to an API: from the environment, where no list of processes tells it."""

import os

VARIABLE = "FLEETCAST_TOKEN"


def bearer() -> dict[str, str]:
    """The headers of a request; none where no token is set."""
    token = os.environ.get(VARIABLE, "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}
