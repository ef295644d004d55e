"""Slurm's commands that stop or resize one running job, and keep nodes for a job that waits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fleetcast.clients.slurm_control import UNKNOWN_JOB, ScontrolCommands, SlurmRefused, format_hostlists

PREFIX = "fleetcast-"  # of reservations, before the id of the job that gets the nodes
_PREEMPT_TYPE = re.compile(r"^PreemptType\s*=\s*(\S+)", re.MULTILINE)
_RESERVATION = re.compile(r"^ReservationName=(\S+).*? Nodes=(\S+)", re.MULTILINE)
_ENDED = re.compile(r"invalid job id|already completing or completed|already finished", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NodeHold:
    """A reservation of nodes for one job. minutes: how long Slurm holds the nodes at most."""

    payer: str
    user: str
    nodes: Sequence[str]
    minutes: int

    @property
    def name(self) -> str:
        return PREFIX + self.payer


class SlurmJobCommands(ScontrolCommands):
    """A client that changes single jobs. It needs the level Operator, as all commands of scontrol do."""

    async def read_preempt_type(self) -> str:
        """Return Slurm's `PreemptType`, such as `preempt/none`. Raises SourceError and SlurmRefused."""
        found = _PREEMPT_TYPE.search(await self._run_command("scontrol", "show", "config"))
        return found[1] if found else ""

    async def has_ended(self, job: str) -> bool:
        """Return whether Slurm knows a job that neither waits nor runs. It forgets jobs after its `MinJobAge`.

        Raises SourceError and SlurmRefused.
        """
        try:
            return not await self._list_jobs("-j", job)
        except SlurmRefused as error:
            if UNKNOWN_JOB.search(str(error)):
                return False
            raise

    async def signal_job(self, job: str, signal: str, *, is_batch: bool) -> bool:
        """Send a signal to the script of a job, or to its steps if it has no script.

        Returns False if the job has ended.
        """
        return await self._run_unless_ended("scancel", *(["--batch"] if is_batch else []), f"--signal={signal}", job)

    async def cancel_job(self, job: str) -> bool:
        return await self._run_unless_ended("scancel", job)

    async def requeue_held(self, job: str) -> bool:
        """Put a job back into the queue, where it waits until it is released. Returns False if it has ended."""
        return await self._run_unless_ended("scontrol", "requeuehold", job)

    async def release_job(self, job: str) -> None:
        await self._run_command("scontrol", "release", job)

    async def shrink_job(self, job: str, nodes: Sequence[str]) -> None:
        """Let a running job keep only these of its nodes."""
        await self._run_command("scontrol", "update", f"JobId={job}", _format_nodes("NodeList", nodes))

    async def resize_job(self, job: str, nodes: int) -> None:
        """Ask for another number of nodes for a running job."""
        await self._run_command("scontrol", "update", f"JobId={job}", f"NumNodes={nodes}")

    async def list_holds(self) -> dict[str, str]:
        """Return name → nodes of our reservations. The nodes are a list as Slurm writes it."""
        shown = await self._run_command("scontrol", "show", "reservation", "-o")
        return {name: nodes for name, nodes in _RESERVATION.findall(shown) if name.startswith(PREFIX)}

    async def hold_nodes(self, hold: NodeHold) -> None:
        """Reserve nodes for a waiting job, although other jobs still run there.

        `FLEX` lets the job use other nodes as well, and run on after the reservation's end.
        """
        await self._run_command(
            *("scontrol", "create", "reservation", f"ReservationName={hold.name}", _format_nodes("Nodes", hold.nodes)),
            *("StartTime=now", f"Duration={hold.minutes}", f"Users={hold.user}", "Flags=IGNORE_JOBS,FLEX"),
        )

    async def change_held_nodes(self, name: str, nodes: Sequence[str]) -> None:
        await self._run_command("scontrol", "update", f"ReservationName={name}", _format_nodes("Nodes", nodes))

    async def set_reservation(self, job: str, name: str) -> None:
        """Let a job use only a reservation. With an empty name it uses none."""
        await self._run_command("scontrol", "update", f"JobId={job}", f"ReservationName={name}")

    async def delete_hold(self, name: str) -> None:
        await self._run_command("scontrol", "delete", f"ReservationName={name}")

    async def _run_unless_ended(self, *command: str) -> bool:
        try:
            await self._run_command(*command)
        except SlurmRefused as error:
            if not _ENDED.search(str(error)):
                raise
            return False
        return True


def _format_nodes(key: str, nodes: Sequence[str]) -> str:
    return f"{key}={','.join(format_hostlists(nodes))}"
