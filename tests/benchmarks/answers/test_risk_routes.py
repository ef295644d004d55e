import json

import pytest

from fleetcast.benchmarks.answers.risk_routes import make_cases


def test_a_case_measures_a_whole_answer() -> None:
    asked = make_cases(20)
    gang = asked["POST risk/gang"]
    assert len(json.loads(gang.wire.partition(b"\r\n\r\n")[2])["nodes"]) == 16
    right = {
        "GET risk/nodes": ({"rows": [{}] * 20}, {"rows": [{}] * 19}),
        "POST risk/gang": ({"nodes": 16, "domains": [{}]}, {"nodes": 16, "domains": []}),
    }
    for name, (good, short) in right.items():
        check = asked[name].check
        assert check is not None
        check(b"", json.dumps(good).encode())
        with pytest.raises(AssertionError):
            check(b"", json.dumps(short).encode())
