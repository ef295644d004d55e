"""Runs of the simulation: episodes of a seed, what came of them, and the command line over them."""

import argparse
import contextlib
import functools
import json
import logging
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EPISODE_STEPS = 10_000
ACTION_STEPS = 1000
NO_SUMS = ("seed", "steps_per_s")
DESCRIPTION = "Run episodes of a seed; exit status 1 where a law is broken. One JSON line a seed."


@dataclass(slots=True)
class Summary:
    """The outcome of some episodes. `digest`: a hash of all that happened, the same whenever a seed is run."""

    steps: int = 0
    episodes: int = 0
    digest: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    failure: dict[str, Any] | None = None


def open_world(name: str, seed: str) -> tuple[Any, Any, Mapping[str, Any]]:
    """Return the world of an episode, the context that it runs in, and the defects that it must find."""
    if name == "actions":
        from tests.simulation.actions.mutations import ACTION_MUTATIONS
        from tests.simulation.actions.world import ActionWorld, limit_search

        return ActionWorld(seed), limit_search(), ACTION_MUTATIONS
    from tests.simulation.mutations import MUTATIONS
    from tests.simulation.patches import simulated
    from tests.simulation.world import World

    world = World(seed)
    return world, simulated(world), MUTATIONS


def run_episode(
    seed: int, episode: int, steps: int, summary: Summary, mutation: str = "", world_name: str = "service"
) -> None:
    from tests.simulation.oracle import Broken

    world, simulation, mutations = open_world(world_name, f"{seed}/{episode}")
    with simulation, mutations[mutation].made() if mutation else contextlib.nullcontext():
        try:
            while world.steps < steps:
                world.step()
            world.calm()
        except Exception as error:
            defect = f" --mutation {mutation}" if mutation else ""
            defect += f" --world {world_name}" if world_name != "service" else ""
            law = error.law if isinstance(error, Broken) else "no end"
            summary.failure = {
                "seed": seed,
                "episode": episode,
                "step": world.steps,
                "law": law,
                "why": str(error),
                "trace": list(world.trace),
                "cause": traceback.format_exception(error.__cause__ or error)[-12:],
                "replay": f"python -m tests.simulation --seed {seed} --episode {episode}{defect} --steps {steps}",
            }
        world.close()
    summary.steps += world.steps
    summary.episodes += 1
    summary.counts += world.counts
    summary.counts["simulated_s"] += world.steady_ms // 1000
    summary.digest = world.digest.hexdigest()


def run(
    seed: int,
    steps: int,
    episode: int | None = None,
    progress: bool = False,
    mutation: str = "",
    world_name: str = "service",
    ends_s: float = math.inf,
) -> Summary:
    """Run episodes until `steps` were made, or the one of that number. Stop at the first failure.

    No episode begins after `ends_s` of the system's clock.
    """
    summary, number = Summary(), 0 if episode is None else episode
    while summary.failure is None and (summary.steps < steps if episode is None else not summary.episodes):
        if time.time() >= ends_s:
            break
        longest = EPISODE_STEPS if world_name == "service" else ACTION_STEPS
        run_episode(seed, number, min(longest, steps - summary.steps), summary, mutation, world_name)
        number += 1
        if progress and number % 10 == 0:
            print(f"seed {seed}: {summary.steps:,} steps", file=sys.stderr, flush=True)
    return summary


def told(summary: Summary, seed: int, took_s: float) -> dict[str, Any]:
    rate = round(summary.steps / took_s) if took_s else 0
    about = {"seed": seed, "steps": summary.steps, "episodes": summary.episodes, "steps_per_s": rate}
    return {**about, "digest": summary.digest, **dict(sorted(summary.counts.items())), "failure": summary.failure}


def main() -> int:
    """Run each command line between `--then` in a fork of its own, so that modules are imported once for all."""
    lines: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        if word == "--then":
            lines.append([])
        else:
            lines[-1].append(word)
    if len(lines) == 1:
        return run_line(lines[0])
    open_world("actions" if "actions" in lines[0] else "service", "0")  # imports
    ends = [os.waitstatus_to_exitcode(os.waitpid(fork_line(words), 0)[1]) for words in lines]
    return max(ends, key=abs)


def fork_line(words: Sequence[str]) -> int:
    """Start a child that runs one command line. Returns its process ID."""
    if child := os.fork():
        return child
    status = 2
    try:
        status = run_line(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def run_line(words: Sequence[str]) -> int:
    """Run the seeds of one command line. Returns 1 if one of them broke a law."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=DESCRIPTION)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from --seed on")
    parser.add_argument("--steps", type=int, default=EPISODE_STEPS, help="of each seed")
    parser.add_argument("--episode", type=int, help="this one alone")
    parser.add_argument("--mutation", default="", help="a defect to find, see tests/simulation/mutations.py")
    parser.add_argument("--world", choices=("service", "actions"), default="service", help="what is simulated")
    parser.add_argument("--log", action="store_true", help="what the processes log")
    parser.add_argument("--processes", type=int, default=1, help="how many seeds at once")
    parser.add_argument("--for-s", type=float, default=math.inf, help="begin no episode after so many seconds")
    options = parser.parse_args(words)
    options.ends_s = time.time() + options.for_s
    seeds = range(options.seed, options.seed + options.seeds)
    if options.processes == 1:
        rows = [tell(row) for row in (one(options, seed) for seed in seeds) if row["episodes"]]
    else:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            found = pool.imap_unordered(functools.partial(one, options), seeds)
            rows = [tell(row) for row in found if row["episodes"]]
    if options.for_s < math.inf:
        print(json.dumps(add_up(rows)), file=sys.stderr)
    return int(any(row["failure"] for row in rows))


def add_up(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over seeds: of steps, of episodes, and of all that was counted. Failures come by seed."""
    total: Counter[str] = Counter()
    for row in rows:
        total += Counter({name: count for name, count in row.items() if isinstance(count, int) and name not in NO_SUMS})
    failures = {row["seed"]: row["failure"]["law"] for row in rows if row["failure"]}
    return {"seeds": len(rows), **dict(sorted(total.items())), "failures": failures}


def one(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The line of one seed."""
    logging.basicConfig(level=logging.INFO if options.log else logging.CRITICAL)
    began = time.perf_counter()
    summary = run(seed, options.steps, options.episode, True, options.mutation, options.world, options.ends_s)
    return told(summary, seed, time.perf_counter() - began)


def tell(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    failure = row["failure"]
    if failure is not None:
        print(*failure["trace"], "".join(failure["cause"]), failure["why"], sep="\n", file=sys.stderr)
        print(f"replay: {failure['replay']}", file=sys.stderr, flush=True)
    return row
