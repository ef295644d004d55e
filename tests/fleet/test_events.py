import msgspec
import pytest

from fleetcast.fleet.events import JobEvent, NodeEvent, Started, Step, StepParts, Submitted, type_names
from fleetcast.fleet.requests import Gang, RankPlacement

decode = msgspec.json.Decoder(JobEvent).decode

EXAMPLES = {
    "submitted": '"queue":"train","class":"fine_tuning","gang":{"min":2,"desired":4,"step":2},"gpus_per_node":8,'
    '"limit_s":3600,"labels":{"team":"a"}',
    "queued": '"reason":"no free GPUs"',
    "started": '"ranks":[{"rank":0,"node":"n1","gpus":[0,1]},{"rank":1,"node":"n2","gpus":[0,1]}]',
    "phase": '"name":"warmup","rank":3',
    "step": '"step":12,"duration_s":1.5,"parts":{"compute":1.0,"communication":0.5},"tokens":4096',
    "checkpoint": '"edge":"begin","bytes":1000000000,"target":"s3://bucket"',
    "resized": '"nodes":["n1","n2"]',
    "preempted": '"by":"train-9","reason":"priority"',
    "failed": '"category":"hardware","node":"n1","message":"XID 79"',
    "finished": "",
    "node_lost": '"node":"n1","reason":"no heartbeat"',
}


def record(type_: str, fields: str) -> str:
    return f'{{"job":"a","attempt":2,"sequence":7,"time_ms":1000,"type":"{type_}"{"," if fields else ""}{fields}}}'


@pytest.mark.parametrize("type_", sorted(type_names))
def test_every_type_survives_a_round_trip(type_: str) -> None:
    event = decode(record(type_, EXAMPLES[type_]))
    assert (event.job, event.attempt, event.sequence, event.time_ms) == ("a", 2, 7, 1000)
    assert decode(msgspec.json.encode(event)) == event
    assert msgspec.json.decode(msgspec.json.encode(event))["type"] == type_


def test_a_submission_says_what_is_wanted() -> None:
    event = decode(record("submitted", EXAMPLES["submitted"]))
    assert isinstance(event, Submitted)
    assert (event.class_, event.gang, event.limit_s) == ("fine_tuning", Gang(2, 4, 2), 3600)


def test_a_gang_may_be_a_number() -> None:
    assert decode(record("submitted", '"gang":8')).gang == 8


def test_ranks_and_parts_are_typed() -> None:
    started, step = (decode(record(name, EXAMPLES[name])) for name in ("started", "step"))
    assert isinstance(started, Started)
    assert started.ranks[1] == RankPlacement(1, "n2", (0, 1))
    assert isinstance(step, Step)
    assert step.parts == StepParts(compute=1.0, communication=0.5)


def test_the_attempt_is_one_unless_said() -> None:
    assert decode('{"job":"a","sequence":1,"time_ms":5,"type":"finished"}').attempt == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (record("finished", '"colour":"red"'), "unknown field `colour`"),
        (record("submitted", '"gang":{"min":1,"desired":2,"width":3}'), "unknown field `width`"),
        (record("exploded", ""), "Invalid value 'exploded'"),
        (record("failed", '"category":"gremlins"'), "Invalid enum value 'gremlins'"),
        (record("failed", ""), "missing required field `category`"),
        (record("step", '"step":"twelve","duration_s":1'), "Expected `int`, got `str`"),
        ('{"job":"a","sequence":1.5,"time_ms":5,"type":"finished"}', "Expected `int`"),
        ('{"job":"a","time_ms":5,"type":"finished"}', "missing required field `sequence`"),
        ("[]", "Expected `object`, got `array`"),
    ],
)
def test_a_bad_record_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=reason):
        decode(text)


def test_a_node_event_survives_a_round_trip() -> None:
    event = NodeEvent(node="n1", source="slurm", sequence=3, time_ms=9, type="xid", gpu=2, code=79, message="gone")
    assert msgspec.json.decode(msgspec.json.encode(event), type=NodeEvent) == event


def test_a_node_event_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'sleepy'"):
        msgspec.json.decode(b'{"node":"n","source":"s","sequence":1,"time_ms":1,"type":"sleepy"}', type=NodeEvent)
