"""Decoding of the body of a placement request, for the api and the placer."""

import msgspec

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.service.http.request_body import decode_json_body

_decoder = msgspec.json.Decoder(PlacementRequest)


def decode_placement_body(body: bytes) -> PlacementRequest:
    """Decode a placement request. Raises a 400 or 422 problem that names every wrong key."""
    return decode_json_body(body, _decoder)
