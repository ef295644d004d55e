"""Decoding of the body of a placement request, with errors that say what is wrong."""

import msgspec

from fleet.requests import PlacementRequest
from service.http.request_body import decoded

_decoder = msgspec.json.Decoder(PlacementRequest)


def decode(body: bytes) -> PlacementRequest:
    """Decode the request. Raises a 400 or 422 problem that names every wrong key."""
    return decoded(body, _decoder)
