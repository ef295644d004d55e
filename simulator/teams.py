"""The demonstration's teams, and a `queues.toml` that shares the fleet 40/40/20 among them.

Language requests more than its share and borrows. Vision requests less and lends. Urgent jobs have a
queue with a class of its own. A trace has no teams, so a checksum of a job's name assigns it to a team.
Research has a few nodes of its own, which urgent jobs may use, too.
"""

import zlib
from dataclasses import dataclass, replace

from fleetcast.simulator.days.traces import JobTrace

URGENT = "urgent"
LENDER = "vision"
RESEARCH = "research"  # a queue, and the pool of its nodes
URGENT_GUARANTEE = 1 / 16  # of the fleet
LARGE_GPUS = 16  # from this size on a job of language is a pretraining


@dataclass(frozen=True, slots=True)
class Team:
    """A team of the demonstration.

    `weight`: its share of the fleet, in percent. `demand`: its share of the requests, in percent. people: its
    users.
    """

    name: str
    weight: int
    demand: int
    people: tuple[str, ...]


TEAMS = (
    Team("language", 40, 62, ("ada", "ben", "cleo", "dan")),
    Team(LENDER, 40, 18, ("eve", "finn", "gita")),
    Team("teaching", 20, 20, ("hana", "ivo", "jun", "kim", "lea")),
)


def assign_teams(trace: JobTrace, pool: str = "") -> JobTrace:
    """Return the trace with a queue and a user for each job, the same in every run. pool: of all jobs."""
    teams = [choose_team(job) for job in trace.job]
    queues = tuple(_choose_queue(team, gpus) for team, gpus in zip(teams, trace.gpus.tolist(), strict=True))
    users = tuple(_choose_person(team, job) for team, job in zip(teams, trace.job, strict=True))
    return replace(trace, queue=queues, user=users, pool=pool)


def choose_team(job: str) -> Team:
    """Choose the team of a job by a checksum of its name.

    >>> choose_team("g1-000007").name
    'teaching'
    """
    draw = zlib.crc32(f"team of {job}".encode()) % 100
    for team in TEAMS:
        draw -= team.demand
        if draw < 0:
            return team
    raise AssertionError("demands add up to 100")


def _choose_queue(team: Team, gpus: int) -> str:
    if team.name != "language":
        return team.name
    return "language/pretraining" if gpus >= LARGE_GPUS else "language/tuning"


def _choose_person(team: Team, job: str) -> str:
    return team.people[zlib.crc32(f"user of {job}".encode()) % len(team.people)]


def format_queues_toml(gpus: int, spares: int = 0, research: int = 0, reclaim: str = "act") -> str:
    """Return the text of `queues.toml` for a fleet of `gpus` GPUs.

    spares: nodes that are held ready for lost ones. research: GPUs of the research queue. reclaim: whether jobs stop
    for a team that is owed GPUs, as the key of the policy.
    """
    urgent = int(gpus * URGENT_GUARANTEE) // 8 * 8
    parts = {team.name: (gpus - urgent - research) * team.weight // 100 for team in TEAMS}
    text = f"""\
# Three teams share the fleet 40/40/20. Language asks for more than that and borrows; vision asks for less and lends.
[policy]
half_life_h = 24
max_wait_h = 12
reclaim = "{reclaim}" # the agents of jobs stop them for a team that is owed GPUs
preempt_after_s = 60
dwell_s = 180
unknown_queue = "{LENDER}" # a request that names no queue

[class.urgent]
priority = 100
{f'preempts = ["{RESEARCH}"]' if research else ""}

[queue.{URGENT}]
guaranteed = {{gpu = {urgent}}}

[queue.language]
weight = 40
guaranteed = {{gpu = {parts["language"]}}}

[queue."language/pretraining"]
weight = 70

[queue."language/tuning"]
weight = 30

[queue.vision]
weight = 40
guaranteed = {{gpu = {parts["vision"]}}}

[queue.teaching]
weight = 20
guaranteed = {{gpu = {parts["teaching"]}}}
limit = {{gpu = {2 * parts["teaching"]}}}
per_user = true

[prices]
currency = "EUR"
gpu = 2.0
"""
    if spares:
        text += f"""
# Free nodes that replace lost ones under a gang.
[spares]
level = "cluster"
count = {spares}
"""
    if research:
        text += f"""
# It has nodes of its own. Urgent jobs may use them, too.
[queue.{RESEARCH}]
guaranteed = {{gpu = {research}}}
preemptible = "all"
"""
    return text
