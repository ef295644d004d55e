"""A real Slurm's accounts as queues: the tree is the same, and its own Fair Tree is the oracle of our order."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.standing import QueueStanding
from fleetcast.placement.queues.tree import QueueTree
from fleetcast.schedulers.imports.agreement import correct_draft
from fleetcast.schedulers.imports.slurm import draft_slurm
from fleetcast.schedulers.imports.slurm_tables import ASSOCIATIONS, QOS
from fleetcast.schedulers.imports.toml_text import format_draft
from tests.integration.slurm.cluster import GPUS, NODES, SlurmCluster

# account, parent, shares, limits, {user: shares}
ACCOUNTS = (
    ("science", "root", 40, ("GrpTRES=gres/gpu=12,cpu=64",), {}),
    ("nlp", "science", 3, (), {"daemon": 1, "bin": 1}),
    ("vision", "science", 1, ("GrpTRESMins=gres/gpu=60000",), {"sys": 2, "games": 1}),
    ("teaching", "root", 20, ("GrpTRES=gres/gpu:h100=4",), {"man": 1}),
)
# what each user has been running for as long as everybody, GPUs
PAST = {"daemon": 2, "bin": 1, "sys": 3, "games": 4, "man": 2}
SETTINGS = (
    *("PriorityType=priority/multifactor", "PriorityWeightFairshare=100000", "PriorityDecayHalfLife=2-0"),
    *("PriorityMaxAge=1-0", "PriorityCalcPeriod=1", "AccountingStorageEnforce=associations"),
    "AccountingStorageTRES=gres/gpu,gres/gpu:h100",
)
LONG = 1e4  # as if all had run for days: Fair Tree goes by ratios of use alone, here what is asked for counts, too
RUN_S = 300  # longer than Slurm needs to count it, which it does once a minute, and of running jobs alone
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A cluster with these accounts, in a folder that their users may look into: jobs run as them."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        Path(folder).chmod(0o755)
        yield from with_accounts(SlurmCluster(Path(folder) / "cluster", settings=SETTINGS, billing="GRES/gpu=1.0"))


def with_accounts(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    try:
        for account, parent, share, limits, users in ACCOUNTS:
            cluster.run("sacctmgr", "-i", "add", "account", account, f"parent={parent}", f"fairshare={share}", *limits)
            for user, own in users.items():
                cluster.run("sacctmgr", "-i", "add", "user", user, f"account={account}", f"fairshare={own}")
        cluster.run("sacctmgr", "-i", "add", "qos", "urgent", "priority=100", "flags=DenyOnLimit")
        yield cluster
        for account, *_ in ACCOUNTS:
            cluster.run("scancel", f"--account={account}")
    finally:
        cluster.stop()


def export(slurm: SlurmCluster) -> dict[str, str]:
    """As the manual says."""
    associations = slurm.run("sacctmgr", "show", "assoc", "-nP", f"format={','.join(ASSOCIATIONS)}")
    qos = slurm.run("sacctmgr", "show", "qos", "-nP", f"format={','.join(QOS)}")
    return {"assoc": associations, "qos": qos, "slurm.conf": (slurm.folder / "slurm.conf").read_text()}


@pytest.fixture(scope="module")
def tree(slurm: SlurmCluster) -> QueueTree:
    draft = draft_slurm(export(slurm), str.upper)
    correct_draft(draft)
    return read_queues(format_draft(draft, ["slurm"]))


def test_the_tree_is_that_of_sacctmgr(tree: QueueTree) -> None:
    found = {node.name: node for node in tree.nodes[1:]}
    assert {name: node.weight for name, node in found.items() if not name.startswith("re")} == {
        **{"science": 40, "teaching": 20, "science/nlp": 3, "science/vision": 1, "root": 1},
        **{"science/vision/sys": 2, "science/vision/games": 1},
    }
    assert (found["science"].limit, found["teaching"].limit) == ({"gpu": 12}, {"H100": 4})
    assert [name for name, node in found.items() if node.per_user] == ["research", "teaching", "science/nlp"]
    assert (tree.policy.half_life_s, tree.policy.max_wait_s) == (2 * 86400, 86400)
    assert (tree.classes["urgent"].priority, tree.classes["normal"].priority) == (100, 0)
    credit = found["science/vision"].credits
    assert credit is not None
    assert credit.cap_gpu_s == 60_000 * 60


@pytest.fixture(scope="module")
def shares(slurm: SlurmCluster) -> dict[str, tuple[float, float]]:
    """User → GPU-seconds used, and the rank of Fair Tree, once Slurm has counted that all run."""
    for account, _, _, _, users in ACCOUNTS:
        for user in users:
            slurm.run("sbatch", f"--uid={user}", f"--account={account}", f"--gres=gpu:{PAST[user]}", *BATCH)

    def counted() -> dict[str, tuple[float, float]]:
        rows = [line.strip().split("|") for line in slurm.run(*SSHARE).splitlines()]
        found = {user: (float(used), float(rank)) for user, used, rank in rows if user in PAST}
        return found if all(used > 0 for used, _ in found.values()) else {}

    found: dict[str, tuple[float, float]] = slurm.until("use of all", counted, 180.0)
    return found


BATCH = ("--output=/dev/null", "--chdir=/tmp", "-N1", "--time=10", f"--wrap=sleep {RUN_S}")
SSHARE = ("sshare", "-anP", "--format=User,RawUsage,FairShare")


def test_users_go_in_the_order_of_fair_tree(
    slurm: SlurmCluster, tree: QueueTree, shares: dict[str, tuple[float, float]]
) -> None:
    slurm.run("scontrol", "update", f"nodename=n[1-{NODES}]", "state=drain", "reason=all wait")
    leaves = {user: leaf_of(tree, user) for user in PAST}
    use = {leaves[user]: LeafUse({}, LONG * used) for user, (used, _) in shares.items()}
    standing = QueueStanding(without_guarantees(tree), use, {"gpu": float(NODES * GPUS)})
    waiting = [
        WaitingEntry(
            PlacementRequest(request_id=user, queue=queue_of(tree, leaves[user]), user=user, gpus_per_node=1), 0
        )
        for user in PAST
    ]
    ours = [
        entry.request.request_id for entry in standing.sort_entries(waiting, lambda waiters, _: waiters.rank_rows())
    ]
    assert ours == sorted(PAST, key=lambda user: -shares[user][1])
    assert ours == jobs_in_order(slurm)


def jobs_in_order(slurm: SlurmCluster) -> list[str]:
    """Users by the priority of a job of each, as sprio has it."""
    for account, _, _, _, users in ACCOUNTS:
        for user in users:
            slurm.run("sbatch", f"--uid={user}", f"--account={account}", "--gres=gpu:1", *BATCH)

    def rows() -> list[list[str]]:
        found = [line.split() for line in slurm.run("sprio", "-h", "-o", "%u %Y").splitlines()]
        return found if {user for user, _ in found} == set(PAST) and all(int(of) > 0 for _, of in found) else []

    return [user for user, of in sorted(slurm.until("priorities", rows, 90.0), key=lambda row: -int(row[1]))]


def leaf_of(tree: QueueTree, user: str) -> str:
    account = next(account for account, _, _, _, users in ACCOUNTS if user in users)
    path = next(node.name for node in tree.nodes if node.name.rpartition("/")[2] == account)
    return f"{path}/{user}"


def queue_of(tree: QueueTree, leaf: str) -> str:
    return leaf if leaf in tree.row else leaf.rpartition("/")[0]


def without_guarantees(tree: QueueTree) -> QueueTree:
    """Fair Tree knows no guarantee: the one that stands for GrpTRESMins is left out."""
    nodes = tuple(replace(node, guaranteed={}, credits=None) for node in tree.nodes)
    return QueueTree(nodes, tree.policy, tree.classes)
