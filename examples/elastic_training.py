"""A training loop under torchrun that answers actions: it writes a checkpoint, accepts, and ends if it is preempted.

    torchrun --nnodes=2:3 --nproc_per_node=1 ... examples/elastic_training.py FOLDER STEPS

It goes on from the checkpoint in FOLDER at any number of ranks.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from fleetcast_client import Reporter
from torch.nn.parallel import DistributedDataParallel

STEP_S = 0.2  # a real model needs no pause


def main(folder: Path, steps: int) -> None:
    """Train until `steps`, or until the job is preempted."""
    dist.init_process_group("gloo")
    path, is_first = folder / "checkpoint.pt", dist.get_rank() == 0
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    if path.exists():
        stored = torch.load(path)
        model.load_state_dict(stored["model"])
        step = stored["step"]
    print(f"begins at step {step} with {dist.get_world_size()} ranks", flush=True)
    with Reporter() as report:

        def save() -> None:
            with report.checkpoint(str(path)):
                torch.save({"model": model.state_dict(), "step": step}, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)

        while step < steps:
            with report.step(step):
                optimizer.zero_grad()
                model(torch.ones(4, 8)).square().mean().backward()
                optimizer.step()
                time.sleep(STEP_S)
            step += 1
            ends = torch.tensor(int(is_first and answer_actions(report, save)))
            dist.broadcast(ends, 0)  # all ranks end after the same step
            if ends:
                print(f"ends at step {step} for an action", flush=True)
                return
        if is_first:
            save()


def answer_actions(report, save) -> bool:
    """Write a checkpoint for each new action, and accept it. Returns whether the job has to end now."""
    for action in report.pending_actions():
        save()
        if report.accept(action) and action["kind"] == "preempt":
            return True
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
