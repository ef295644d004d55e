"""squeue and scontrol of a folder: they print a table of jobs as Slurm does, whatever users wrote into it."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fleetcast.clients.slurm_control import ScontrolCommands

_HEADINGS = {
    **{"JobArrayID": "JOBID", "RestartCnt": "RESTART_COUNT", "SubmitTime": "SUBMIT_TIME", "StartTime": "START_TIME"},
    **{"EndTime": "END_TIME", "NodeList": "NODELIST", "tres-alloc": "TRES_ALLOC", "Name": "NAME"},
}
_PROGRAM = """#!{python}
import json, re, sys
from pathlib import Path

HEADINGS = {headings}
folder, words = Path(__file__).parent, sys.argv[1:]
program = Path(__file__).name
with open(folder / "calls", "a") as log:
    print(json.dumps([program, *words]), file=log)
if program == "scontrol":
    sys.exit(0)
rows = json.loads((folder / "jobs.json").read_text())
if "-j" in words:
    rows = [row for row in rows if row["JobArrayID"] == words[words.index("-j") + 1]]
    if not rows:
        sys.exit("slurm_load_jobs error: Invalid job id specified")
if "-o" in words:
    columns = [("excluded", "")]
else:
    form = next(word for word in words if word.startswith("--Format=")).removeprefix("--Format=")
    columns = [tuple(part.split(":", 1)) for part in form.split(",")]
if not {{"-h", "--noheader"}} & set(words):
    print("".join(HEADINGS.get(name, name.upper()) + end for name, end in columns))
for row in rows:
    print("".join(row.get(name, "(null)") + end for name, end in columns))
"""


class SqueueFolder:
    """A folder of the two programs. `jobs`: rows by the names of squeue's columns; `excluded` is `%x`."""

    def __init__(self, folder: Path, jobs: Sequence[dict[str, str]]) -> None:
        self.folder = folder
        (folder / "jobs.json").write_text(json.dumps(jobs))
        for name in ("squeue", "scontrol"):
            (folder / name).write_text(_PROGRAM.format(python=sys.executable, headings=_HEADINGS))
            (folder / name).chmod(0o755)
        self.control = ScontrolCommands(["env", f"PATH={folder}:/usr/bin:/bin"], 60.0)

    def calls(self, program: str) -> list[list[str]]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [words for name, *words in map(json.loads, lines) if name == program]


def queued(name: str, **more: str) -> dict[str, str]:
    """A job as squeue has it, that waits unless `more` says otherwise."""
    facts = {"State": "PENDING", "RestartCnt": "0", "PriorityLong": "100", "Requeue": "1", "BatchFlag": "1"}
    return {"JobArrayID": name, **facts, **more}
