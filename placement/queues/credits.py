"""Credits: queues save unused guaranteed GPU time and spend it later.

A queue earns a share of its unused guarantee, and pays with it for the GPUs that it borrows. With
the rate e earned (or s spent) a second, the half-life h and λ = ln 2/h, in closed form between two
changes:

    b(t) = (b₀ − e/λ) · 2^(−t/h) + e/λ, at most the cap     b(t) = (b₀ + s/λ) · 2^(−t/h) − s/λ, at least 0

At any time banked = earned − spent − expired. Credits expire by the half-life and above the cap.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fleetcast.placement.queues.charges import LN2, Charge, list_leaf_ancestors
from fleetcast.placement.queues.tree import ANY, Credits, QueueTree


@dataclass(frozen=True, slots=True)
class Bank:
    """A queue's credits at one time: the GPU-seconds earned, spent and expired so far."""

    as_of_ms: int
    earned: float = 0.0
    spent: float = 0.0
    expired: float = 0.0

    @property
    def banked(self) -> float:
        return max(0.0, self.earned - self.spent - self.expired)

    def advance_to(self, now_ms: int, held: float, guaranteed: float, credits: Credits, half_life_s: float) -> "Bank":
        """Return the bank at a later time, if the queue held `held` GPUs all that time.

        If the clock was set back, the bank is returned unchanged.
        """
        after_s = (now_ms - self.as_of_ms) / 1000
        if after_s <= 0:
            return self
        if held <= guaranteed:
            return self._earn_credits(
                now_ms, after_s, credits.rate * (guaranteed - held), credits.cap_gpu_s, half_life_s
            )
        return self._spend_credits(now_ms, after_s, held - guaranteed, half_life_s)

    def _earn_credits(self, now_ms: int, after_s: float, rate: float, cap: float, half_life_s: float) -> "Bank":
        left = math.exp2(-after_s / half_life_s)
        most = rate * half_life_s / LN2
        banked = min(cap, (self.banked - most) * left + most)
        earned = rate * after_s
        return replace(
            self,
            as_of_ms=now_ms,
            earned=self.earned + earned,
            expired=self.expired + max(0.0, self.banked + earned - banked),
        )

    def _spend_credits(self, now_ms: int, after_s: float, rate: float, half_life_s: float) -> "Bank":
        worth = rate * half_life_s / LN2
        lasts_s = half_life_s * math.log2((self.banked + worth) / worth)
        within_s = min(after_s, lasts_s)
        banked = max(0.0, (self.banked + worth) * math.exp2(-within_s / half_life_s) - worth)
        spent = min(rate * within_s, self.banked - banked)
        gone = max(0.0, self.banked - banked - spent)
        return replace(self, as_of_ms=now_ms, spent=self.spent + spent, expired=self.expired + gone)


def compute_banks(tree: QueueTree, known: Mapping[str, Bank], opened: Iterable[Charge], now_ms: int) -> dict[str, Bank]:
    """Return queue → its bank at `now_ms`, for all queues with credits.

    known: the banks at an earlier time. The open charges count as held since then.
    """
    with_credits = [node for node in tree.nodes if node.credits is not None]
    if not with_credits:
        return {}
    held: dict[str, float] = {}
    for charge in opened:
        for name in list_leaf_ancestors(charge.leaf):
            held[name] = held.get(name, 0.0) + charge.gpus
    found = {}
    for node in with_credits:
        bank, guaranteed = known.get(node.name) or Bank(now_ms), node.guaranteed.get(ANY, 0.0)
        assert node.credits is not None
        mine = held.get(node.name, 0.0)
        found[node.name] = bank.advance_to(now_ms, mine, guaranteed, node.credits, tree.policy.half_life_s)
    return found
