"""Import of Slurm's accounts, users and QOS as queues.

Fair Tree (slurm.schedmd.com/fair_tree.html) ranks the siblings of each level, accounts and users alike,
by their shares divided by decayed use. The queue order here ranks them by use divided by weight, which gives
the same order. An account with the share `parent` is left out of its level. Its children count as children
of its parent (sacctmgr(1), Fairshare).

`GrpTRES` becomes a limit. `GrpTRESMins` bounds decayed use and becomes a guarantee. With a half-life h, a
bound of M GPU-minutes equals the use of M · 60 · ln 2 / h GPUs held forever. So the queue is guaranteed
that number of GPUs. An idle queue saves unused GPU time as credits at rate 1, up to M. At the bound Slurm
holds jobs back. Fleetcast only ranks them later.
"""

import math
from dataclasses import dataclass, field

from fleetcast.schedulers.imports.draft import (
    ANY,
    LONGEST_H,
    MOST_PRIORITY,
    Draft,
    DraftClass,
    DraftQueue,
    SourceLine,
    Spell,
    is_name,
    make_path_part,
    make_queue_paths,
    parse_number,
)
from fleetcast.schedulers.imports.slurm_tables import EXPORTS, SlurmFiles, parse_seconds, parse_tres_gpus

ROOT = "root"
PARENT = "parent"
WEEK_S = 7 * 86400.0
NOT_HERE = (
    ("prioritytype", ("priority/multifactor",), "PriorityType: without multifactor Slurm has no fair shares"),
    ("priorityflags", (), "PriorityFlags"),
    ("priorityusageresetperiod", ("none",), "PriorityUsageResetPeriod: use is forgotten by the half-life alone"),
    ("preempttype", ("preempt/none",), "PreemptType: no running job is stopped yet"),
    ("preemptmode", ("off",), "PreemptMode: no running job is stopped yet"),
    ("include", (), "Include: that file was not read"),
)
WEIGHED = ("age", "assoc", "fairshare", "jobsize", "partition", "tres")


@dataclass(slots=True)
class _Account:
    line: SourceLine
    row: dict[str, str]
    users: list[tuple[SourceLine, dict[str, str]]] = field(default_factory=list)


def draft_slurm(files: dict[str, str], spell: Spell) -> Draft:
    """Make a draft from these files (name → text). The columns of a file show what it contains.

    Raises ConfigError if a file is wrong.
    """
    found = SlurmFiles()
    for file, text in files.items():
        found.add_file(file, text)
    if not found.associations:
        raise SourceLine(next(iter(files))).make_error(
            f"there are no associations; they are what this prints:\n{EXPORTS}"
        )
    draft = Draft("Slurm")
    half_life_s = _set_policy(draft, found)
    accounts = _read_accounts(draft, found)
    _QueueTreeBuilder(draft, accounts, spell, half_life_s).build_queues()
    for line, row in found.qos:
        _add_class(draft, line, row)
    return draft


def _set_policy(draft: Draft, found: SlurmFiles) -> float:
    """Set the draft's policy, and return the half-life of use in seconds.

    Without `slurm.conf`, Slurm's defaults apply.
    """
    line, text = found.settings.get("prioritydecayhalflife", (SourceLine("slurm.conf"), "7-0"))
    half_life_s = parse_seconds(line, text)
    if not found.has_settings:
        draft.add_remark("no slurm.conf among the files: half-life and longest wait are Slurm's defaults, 7 days")
    if half_life_s == 0:
        draft.add_remark(f"PriorityDecayHalfLife is 0, use is never forgotten: half_life_h is {LONGEST_H:.0f}")
        half_life_s = LONGEST_H * 3600
    draft.policy["half_life_h"] = min(half_life_s / 3600, LONGEST_H)
    line, text = found.settings.get("prioritymaxage", (SourceLine("slurm.conf"), "7-0"))
    if (longest_s := parse_seconds(line, text)) > 0:
        draft.policy["max_wait_h"] = min(longest_s / 3600, LONGEST_H)
        draft.add_remark(
            "PriorityMaxAge is max_wait_h: from then on a job's age counts no more there, and goes first here"
        )
    for key, usual, what in NOT_HERE:
        if key in found.settings and found.settings[key][1].lower() not in usual:
            draft.add_remark(what, found.settings[key][1])
    weights = [
        f"{name} {found.settings[key][1]}" for name in WEIGHED if (key := f"priorityweight{name}") in found.settings
    ]
    if weights:
        draft.add_remark(
            "PriorityWeight…: queues go by share here, then jobs by wait; no sum of factors", ", ".join(weights)
        )
    if found.has_settings and parse_number(found.settings.get("priorityweightqos", (line, "0"))[1]) == 0:
        draft.add_remark("PriorityWeightQOS is 0, so QOS order no jobs there; here a request's class does")
    if "partitionname" in found.settings:
        draft.add_remark("partitions: their nodes, limits and tiers were not read")
    return half_life_s


def _read_accounts(draft: Draft, found: SlurmFiles) -> dict[str, _Account]:
    clusters = sorted({row["cluster"] for _, row in found.associations})
    if len(clusters) > 1:
        line = next(line for line, row in found.associations if row["cluster"] != clusters[0])
        raise line.make_error(
            f"there are several clusters, {', '.join(clusters[:3])}: export one, with cluster={clusters[0]}"
        )
    accounts: dict[str, _Account] = {}
    for line, row in found.associations:
        if not row["user"]:
            if row["account"] in accounts:
                raise line.make_error(
                    f"account {row['account']!r} is there twice, first in {accounts[row['account']].line}"
                )
            accounts[row["account"]] = _Account(line, row)
    for line, row in found.associations:
        if row["user"]:
            if row["account"] not in accounts:
                raise line.make_error(
                    f"user {row['user']!r} is in account {row['account']!r}, which has no row of its own"
                )
            _add_user(draft, accounts[row["account"]], line, row)
    return accounts


def _add_user(draft: Draft, account: _Account, line: SourceLine, row: dict[str, str]) -> None:
    """Add a user's association. If the user has several in one account, the first one counts."""
    if any(row["user"] == known["user"] for _, known in account.users):
        draft.add_remark("a second association of a user in an account", f"{row['user']} of {row['account']}")
    else:
        account.users.append((line, row))


class _QueueTreeBuilder:
    """A builder of the draft's queues from accounts and users."""

    def __init__(self, draft: Draft, accounts: dict[str, _Account], spell: Spell, half_life_s: float) -> None:
        self.draft, self.accounts, self.spell, self.half_life_s = draft, accounts, spell, half_life_s

    def build_queues(self) -> None:
        parents, lines = self._find_parents()
        paths = make_queue_paths(parents, lines)
        for name, path in paths.items():
            account = self.accounts[name]
            self._fill_queue(self.draft.add_queue(path, DraftQueue(account.line)), path, account.line, account.row)
        users: dict[str, list[tuple[SourceLine, dict[str, str]]]] = {}
        for name, account in self.accounts.items():
            users.setdefault(self._find_counted_account(name), []).extend(account.users)
        for name, rows in users.items():
            if name in paths and name not in parents.values() and self._has_equal_shares(rows):
                self.draft.queues[paths[name]].per_user = bool(rows) and rows[0][1]["share"] != PARENT
                continue
            for line, row in rows:
                self._add_user_queue(paths.get(name, ""), line, row)

    def _find_parents(self) -> tuple[dict[str, str], dict[str, SourceLine]]:
        """Return account → parent for accounts that become queues, and account → line.

        The parent is the nearest account above that becomes a queue, "" for the root. Raises ConfigError.
        """
        for name, account in self.accounts.items():
            above = account.row["parentname"]
            if above and above not in self.accounts and above != ROOT:
                raise account.line.make_error(f"account {name!r} is below {above!r}, which has no row of its own")
        lines = {name: account.line for name, account in self.accounts.items()}
        make_queue_paths({name: self._get_parent(name) for name in self.accounts}, lines)  # refuses cycles
        counted = [name for name in self.accounts if self._find_counted_account(name) == name and name != ROOT]
        for name, account in self.accounts.items():
            if name not in counted:
                self._record_omitted_account(name, account)
        return {name: self._find_counted_account(self._get_parent(name)) for name in counted}, lines

    def _get_parent(self, name: str) -> str:
        above = self.accounts[name].row["parentname"] if name in self.accounts else ""
        return "" if above == name else above if above in self.accounts else ""

    def _find_counted_account(self, name: str) -> str:
        """Return the account whose queue an account uses: itself, or the nearest above without a share `parent`.

        Returns "" for the root.
        """
        while name and name != ROOT and self.accounts[name].row["share"] == PARENT:
            name = self._get_parent(name)
        return "" if name == ROOT else name

    def _record_omitted_account(self, name: str, account: _Account) -> None:
        if name != ROOT:
            self.draft.add_remark(
                "share parent: the account is no level of its own, what is below it is its parent's", name
            )
        for key in ("grptres", "grptresmins", "maxtres"):
            if account.row[key]:
                self.draft.add_remark(f"{key} of an account that is no queue here", f"{name} ({account.row[key]})")

    def _has_equal_shares(self, users: list[tuple[SourceLine, dict[str, str]]]) -> bool:
        shares = {row["share"] for _, row in users}
        return len(shares) < 2 and not any(row["grptres"] or row["grptresmins"] for _, row in users)

    def _add_user_queue(self, path: str, line: SourceLine, row: dict[str, str]) -> None:
        """Add a queue for a user with shares or limits of their own, below the queue `path` of their account."""
        name = make_path_part(row["user"])
        while (own := f"{path}/{name}" if path else name) in self.draft.queues:
            name += "-user"
        if row["share"] == PARENT:
            self.draft.add_remark("share parent of a user among others with shares: weight 1", own)
        self.draft.add_remark("users that are queues, for their shares or limits differ: requests name them so", own)
        self._fill_queue(self.draft.add_queue(own, DraftQueue(line)), own, line, row)

    def _fill_queue(self, queue: DraftQueue, path: str, line: SourceLine, row: dict[str, str]) -> None:
        share = 1.0 if row["share"] == PARENT else parse_number(row["share"] or "1")
        if math.isnan(share):
            raise line.make_error(f"share {row['share']!r} is neither a number nor parent")
        queue.weight = line.check_amount("share", share)
        queue.limit, rest = parse_tres_gpus(line, row["grptres"], self.spell)
        for gpus in queue.limit.values():
            line.check_amount("GrpTRES", gpus)
        if rest:
            self.draft.add_remark("GrpTRES of other than GPUs", f"{path} ({rest})")
        self._set_budget(queue, path, line, row["grptresmins"])
        if row["maxtres"]:
            self.draft.add_remark("MaxTRES, the most of one job", f"{path} ({row['maxtres']})")
        if row["qos"] not in ("", "normal"):
            self.draft.add_remark("which QOS may be used: here any class may be asked for", f"{path} ({row['qos']})")

    def _set_budget(self, queue: DraftQueue, path: str, line: SourceLine, text: str) -> None:
        minutes, rest = parse_tres_gpus(line, text, self.spell)
        rest = ",".join([*filter(None, [rest]), *(f"{name}={gpus:g}" for name, gpus in minutes.items() if name != ANY)])
        if rest:
            self.draft.add_remark("GrpTRESMins of other than GPUs of any model", f"{path} ({rest})")
        if not minutes.get(ANY):
            if ANY in minutes:
                self.draft.add_remark("GrpTRESMins of 0 GPU-minutes", path)
            return
        steady = minutes[ANY] * 60 * math.log(2) / self.half_life_s
        queue.guaranteed = {
            ANY: line.check_amount("GrpTRESMins, as GPUs held for ever,", math.floor(steady * 1e6) / 1e6)
        }
        queue.credits = (1.0, minutes[ANY] / 60)
        self.draft.add_remark(
            "GrpTRESMins is a guarantee with credits here: it holds no job back", f"{path} ({minutes[ANY]:g})"
        )


def _add_class(draft: Draft, line: SourceLine, row: dict[str, str]) -> None:
    name = row["name"]
    priority = parse_number(row["priority"] or "0")
    if not (priority == int(priority) if math.isfinite(priority) else False) or not 0 <= priority < 2 * MOST_PRIORITY:
        raise line.make_error(f"priority {row['priority']!r} of QOS {name!r} is no whole number from 0 on")
    if not is_name(name) or name in draft.classes:
        raise line.make_error(f"QOS {name[:60]!r} is there twice, or has no name")
    draft.classes[name] = DraftClass(int(priority), tuple(filter(None, row["preempt"].split(","))))
    usual = {"gracetime": ("", "00:00:00"), "usagefactor": ("", "1", "1.000000")}
    for key in ("gracetime", "grptres", "maxtrespu", "usagefactor", "flags"):
        if row[key] not in usual.get(key, ("",)):
            draft.add_remark(f"{key} of a QOS", f"{name} ({row[key]})")
