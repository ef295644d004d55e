"""Decode the body of a placement request, or say what is wrong with it."""

import msgspec

from fleet.requests import PlacementRequest
from service.http.request_body import decoded

_decoder = msgspec.json.Decoder(PlacementRequest)


def decode(body: bytes) -> PlacementRequest:
    """Return the request. Raises a 400 or 422 problem that names every wrong key."""
    return decoded(body, _decoder)
