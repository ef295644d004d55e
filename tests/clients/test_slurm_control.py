"""What versions of Slurm print, and commands that hang, fail or print what nobody expects."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.clients.slurm_control import (
    ControlledJob,
    ControlledNode,
    NodeChange,
    ScontrolCommands,
    SlurmRefused,
    format_hostlists,
    join_job_rows,
    parse_node_lines,
)
from fleetcast.fleet.errors import SourceError
from fleetcast.ingest.slurm.jobs import expand_node_list
from fleetcast.schedulers.slurm import SlurmMarks, SlurmSettings
from fleetcast.service.ports.slurm import SlurmPort
from tests.clients.squeue_in_files import SqueueFolder, queued

V22_05 = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUTot=16 AvailableFeatures=a,b,risk_low \
ActiveFeatures=a,risk_low Gres=gpu:h100:4 OS=Linux 6.1 #1 SMP @0  RealMemory=4000 State=IDLE+DRAIN Partitions=train \
AllocTRES= CapWatts=n/a ExtSensorsTemp=n/s Reason=[fleetcast] p_fail_1h=0.81 cause=ecc_ue [root@2026-11-24T13:14:39] \
Comment=rack State=DOWN Extra={"risk_level": 2, "x": 1}
NodeName=n2 Arch=x86_64 CPUTot=16 AvailableFeatures=(null) ActiveFeatures= Gres=(null) State=MIXED* Weight=1 \
ExtSensorsTemp=n/s Comment=State=DRAIN
"""
V24_05 = """\
NodeName=gpu01 Arch=x86_64 CoresPerSocket=32 CPUAlloc=0 CPUTot=64 AvailableFeatures=h100 ActiveFeatures=h100 \
Gres=gpu:8 NodeAddr=gpu01 Version=24.05.4 OS=Linux 5.14 RealMemory=1000 State=IDLE+DRAIN+NOT_RESPONDING Weight=1 \
CurrentWatts=0 AveWatts=0  Reason=NHC: GPU 3 fell [off] the bus [slurm@2026-11-24T10:00:00] Extra={"rack":7} \
ResvName=maint
NodeName=gpu02 State=DOWN+CLOUD AvailableFeatures=(null) ActiveFeatures=(null) \
Reason=Not responding [slurm@2026-11-24T10:00:00]
"""


def test_nodes_of_each_version_are_read_whatever_people_write_into_them() -> None:
    assert parse_node_lines(V22_05) == [
        ControlledNode(
            "n1",
            True,
            "[fleetcast] p_fail_1h=0.81 cause=ecc_ue",
            ("a", "b", "risk_low"),
            ("a", "risk_low"),
            '{"risk_level": 2, "x": 1}',
        ),
        ControlledNode("n2", False),
    ]
    assert parse_node_lines(V24_05) == [
        ControlledNode("gpu01", True, "NHC: GPU 3 fell [off] the bus", ("h100",), ("h100",), '{"rack":7}'),
        ControlledNode("gpu02", False, "Not responding"),
    ]
    assert parse_node_lines("Node n9 not found\n\nNodeName=\n") == []


def test_jobs_are_read_and_lines_of_another_form_skipped() -> None:
    facts = "7|PENDING|0|0|1|1||ada|r7|\n8_3|RUNNING|x|429|1|0|n[1-2]|bob|(null)|\n9|odd\n\n10|PENDING|0|0|1|1|||\n"
    texts = "7~(null)~a = b, c~\n8_3~[fleetcast] requeue off n2~~\n9~~~\n"
    assert join_job_rows(facts, texts, "~") == [
        ControlledJob("7", "PENDING", 0, True, True, "a = b, c", is_batch=True, user="ada", reservation="r7"),
        ControlledJob("8_3", "RUNNING", 0, False, False, "", "[fleetcast] requeue off n2", nodes="n[1-2]", user="bob"),
    ]


def test_lists_of_nodes_are_short_and_name_the_same_nodes() -> None:
    names = [f"gpu{n:04}" for n in range(1, 1001)] + ["login", "n9", "n10", "n12", "rack1-n1"]
    (text,) = format_hostlists(names)
    assert len(text) < 80
    assert sorted(expand_node_list(text)) == sorted(names)
    scattered = [f"host{n * 7 % 99_991:05}" for n in range(0, 40_000, 2)]
    parts = format_hostlists(scattered)
    assert max(map(len, parts)) <= 60_000
    assert sorted(name for part in parts for name in expand_node_list(part)) == sorted(scattered)
    assert format_hostlists([]) == []


class Script:
    """A folder of programs that stand in for Slurm's, by `env PATH=…` as the shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def control(self, text: str, timeout_s: float = 20.0) -> ScontrolCommands:
        for name in ("scontrol", "squeue"):
            (self.folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (self.folder / name).chmod(0o755)
        return ScontrolCommands(["env", f"PATH={self.folder}:/usr/bin:/bin"], timeout_s)


def test_a_command_that_hangs_is_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(SourceError, match=r"scontrol did not end within 0\.3 s"):
        asyncio.run(Script(tmp_path).control("exec sleep 120", 0.3).read_nodes())
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("slurm_load_node error: Unable to contact slurm controller (connect failure)", SourceError),
        ("slurm_update error: Socket timed out on send/recv operation", SourceError),
        ("slurm_update error: Access/permission denied", SlurmRefused),
        ("slurm_update error: Invalid node name specified", SlurmRefused),
        ("", SlurmRefused),
    ],
)
def test_slurm_that_is_away_is_told_from_one_that_says_no(tmp_path: Path, said: str, kind: type[Exception]) -> None:
    control = Script(tmp_path).control(f"echo '{said}' >&2; exit 1")
    with pytest.raises(kind, match="scontrol update"):
        asyncio.run(control.change_nodes(["n1"], NodeChange(drain="[fleetcast] p")))


def test_a_column_that_squeue_does_not_know_is_no_empty_one(tmp_path: Path) -> None:
    control = Script(tmp_path).control("echo 'squeue: error: Invalid job format specification: x' >&2; exit 0")
    with pytest.raises(SlurmRefused, match="squeue"):
        asyncio.run(control.read_jobs())


def test_changes_are_words_of_scontrol(tmp_path: Path) -> None:
    log = tmp_path / "log"
    control = Script(tmp_path).control(f"""printf '<%s>' "$@" >> {log}; echo >> {log}""")

    async def changes() -> None:
        await control.change_nodes(["n1", "n2"], NodeChange(drain="[fleetcast] a\nb", extra=""))
        await control.change_nodes(["n1"], NodeChange(drain="", available=("a", "risk_low"), active=()))
        await control.change_job("7", comment="[fleetcast] start", admin_comment="")

    asyncio.run(changes())
    assert log.read_text().splitlines() == [
        "<update><NodeName=n[1-2]><Extra=><State=DRAIN><Reason=[fleetcast] a b>",
        "<update><NodeName=n1><AvailableFeatures=a,risk_low><ActiveFeatures=><State=UNDRAIN>",
        "<update><JobId=7><Comment=[fleetcast] start><AdminComment=>",
    ]


def forged(ends: tuple[str, ...], *fields: str) -> str:
    """A comment that goes on with whole rows, one for each way in which a table may end its fields."""
    return "hello" + "".join("\n" + "".join(field + end for field in fields) for end in ends)


FORGED = ("7", "PENDING", "1", "0", "1", "1", "[fleetcast] requeue off n2", "")
ENDS = ("\x1f", "|", "|#", ",", "\t", "")
HELD = queued("7", RestartCnt="1", PriorityLong="0", Comment="mine")


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_a_row_inside_a_comment_releases_no_job_of_another_user(tmp_path: Path, order: slice) -> None:
    attacker = queued("6", Comment=forged(ENDS, *FORGED), Name="ExcNodeList=n3 \n7")
    slurm = SqueueFolder(tmp_path, [HELD, attacker][order])

    async def pass_over_the_queue() -> list[ControlledJob]:
        port = SlurmPort(slurm.control, with_jobs=True)
        for write in SlurmMarks(SlurmSettings(comments=True)).wishes(None, await port.read()):
            await port.write([write])
        return await slurm.control.read_jobs()

    found = {one.id: one for one in asyncio.run(pass_over_the_queue())}
    assert found["7"] == ControlledJob("7", "PENDING", 1, True, True, "mine", is_batch=True)
    assert set(found) == {"6", "7"}
    assert [words for words in slurm.calls("scontrol") if words[0] != "show"] == []


def test_a_release_excludes_further_nodes_by_a_reading_of_the_job_alone(tmp_path: Path) -> None:
    ours = queued("7", RestartCnt="1", PriorityLong="0", excluded="n[4-5]")
    slurm = SqueueFolder(tmp_path, [ours, queued("8", Name="x ExcNodeList=n9 \n")])
    asyncio.run(slurm.control.release_excluding_node("7", "n2"))
    assert slurm.calls("scontrol") == [
        ["update", "JobId=7", "ReqNodeList=", "ExcNodeList=n[4-5],n2"],
        ["release", "7"],
    ]
    assert ["-j", "7"] in [words[2:4] for words in slurm.calls("squeue")]


def test_an_id_that_comes_twice_is_left_alone(tmp_path: Path) -> None:
    ours = queued("7", RestartCnt="1", PriorityLong="0", admin_comment="[fleetcast] requeue off n2")
    slurm = SqueueFolder(tmp_path, [ours, {**ours, "State": "RUNNING"}, queued("8")])
    assert [one.id for one in asyncio.run(slurm.control.read_jobs())] == ["8"]
    assert asyncio.run(slurm.control.find_job("7")) is None
    assert asyncio.run(slurm.control.find_job("9")) is None


PARTS = st.sampled_from([*FORGED, *ENDS, "\n", "\r", "\x85", "\u2028", "8", "|0|", " ", "[fleetcast] start"])


@given(st.lists(PARTS, max_size=40).map("".join), st.lists(PARTS, max_size=40).map("".join))
def test_whatever_a_user_writes_the_other_jobs_are_read_as_they_are(comment: str, admin: str) -> None:
    end = "|0123456789abcdef|"
    rows = [("7", "mine", "(null)"), ("6", admin, comment), ("8_1", "(null)", "")]
    facts = "".join(f"{name}|RUNNING|0|9|1|1|n3|ada|(null)|\n" for name, _, _ in rows)
    texts = "".join("".join(part + end for part in row) + "\n" for row in rows)
    found = {one.id: one for one in join_job_rows(facts, texts, end)}
    assert list(found) == ["7", "6", "8_1"]
    runs = ControlledJob("8_1", "RUNNING", 0, False, True, is_batch=True, nodes="n3", user="ada")
    assert found["7"] == replace(runs, id="7", admin_comment="mine")
    assert found["8_1"] == runs
