"""Routes for queues and charges. They forward requests and answers unchanged to and from the placer."""

from typing import Any

from fleetcast.service.answers.queues import Charges, QueueChange, QueuesAnswer, WhyWaiting
from fleetcast.service.api.routes.placements import forward_to_placer
from fleetcast.service.http.access import Scope
from fleetcast.service.http.table import Row

AS_OF = {"as_of_ms": 1760000000000}
START_MS = {"p10": 1760000600000, "p50": 1760004200000, "p90": 1760011400000}
QUEUE = {
    "queue": "research/nlp",
    "parent": "research",
    "weight": 50.0,
    "class": None,
    "priority": 0,
    "per_user": True,
    "held": {"gpu": 72.0, "H100": 72.0},
    "guaranteed": {"gpu": 64.0},
    "limit": {"gpu": 128.0},
    "borrowed": {"gpu": 8.0},
    "lent": {},
    "share": 0.21,
    "share_7d": 0.38,
    "share_days": [0.31, 0.33, 0.4, 0.42, 0.41, 0.38, 0.39],
    "decayed": 18230400.0,
    "banked": None,
    "waiting": 4,
    "waiting_gpus": 32.0,
    "running": 9,
    "wait_s": {"p50": 340.0, "p90": 5200.0},
}
WHY = {
    **AS_OF,
    "request_id": "train-43-1",
    "queue": "research/nlp",
    "position": 3,
    "position_in_queue": 1,
    "share": 0.21,
    "sentence": "starts in 70 min (p90 3 h)",
    "ladder": [
        {
            "code": "before",
            "sentence": "2 requests before it from queues with no larger share: 'vision' (share 0.12); "
            "its own, 'research', has 0.21 with it",
            "requests": ["vision-9", "vision-8"],
        },
        {
            "code": "room",
            "sentence": "waits for 64 GPUs (8 x 8 GPUs); 40 fit; vision-9 is next",
            "requests": [],
        },
        {
            "code": "ends",
            "sentence": "starts once 'train-7' on n014, 'train-9' on n021 have ended: in 70 min (p90 3 h)",
            "requests": [],
        },
        {"code": "start", "sentence": "starts in 70 min (p90 3 h)", "requests": []},
    ],
    "start_ms": START_MS,
}
CHARGE = {
    "name": "research/nlp",
    "jobs": 12,
    "granted_gpu_s": 1843200.0,
    "promised_gpu_s": 640.0,
    "used_gpu_s": 1382400.0,
    "idle_gpu_s": 276480.0,
    "lost_gpu_s": 5400.0,
    "waited_gpu_s": 92160.0,
    "money": 1280.0,
    "unseen": "telemetry saw 90% of what was granted",
}
CHANGE: dict[str, Any] = {
    "applied": True,
    "generation": "5d1f0c2b9a3e4f60",
    "added": ["research/speech"],
    "removed": [],
    "changed": ["research/nlp"],
    "notes": [],
}
FILE = '[queue.research]\nweight = 40\n[queue."research/nlp"]\nper_user = true\n'


def _make_row(method: str, path: str, summary: str, problems: tuple[int, ...], **more: Any) -> Row:
    return Row(method, path, forward_to_placer, summary, "placement", params=None, problems=problems, **more)


ROWS = (
    _make_row(
        "GET",
        "/v1/queues",
        "How the queues stand: held, guaranteed, borrowed, lent, share, credits, waits",
        (503,),
        by_queue=True,
        answer=QueuesAnswer,
        example={
            **AS_OF,
            "generation": "5d1f0c2b9a3e4f60",
            "rows": [QUEUE],
            "capacity": {"gpu": 256.0, "H100": 256.0},
            "notes": [],
            "refused": "",
        },
    ),
    _make_row(
        "PUT",
        "/v1/queues",
        "Serve another file of queues (If-Match: the generation; dry_run=true: only say what would change)",
        (409, 413, 422, 503),
        scope=Scope.ADMIN,
        body=(str,),
        body_example=FILE,
        takes=("application/toml",),
        answer=QueueChange,
        example=CHANGE,
    ),
    _make_row(
        "GET",
        "/v1/queue/{request_id:path}/why",
        "Why a request waits: who is before it, what is short, and when it starts",
        (404, 422, 503),
        by_queue=True,
        answer=WhyWaiting,
        example=WHY,
    ),
    _make_row(
        "GET",
        "/v1/charges",
        "GPU-seconds granted, used, lost and waited for, by queue, user, class or pool (by, from, to, format)",
        (422, 503),
        by_queue=True,
        answer=Charges,
        example={
            **AS_OF,
            "from_ms": 1759395200000,
            "to_ms": 1760000000000,
            "by": "queue",
            "rows": [CHARGE],
            "currency": "EUR",
        },
    ),
)
