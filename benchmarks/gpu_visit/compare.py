"""Compares runs, in a process of its own: `python -m gpu_visit.compare FOUND EXPECTED [FOUND EXPECTED ...]`.

Prints as JSON, for each pair, what is wrong, and the largest difference of each kind.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.tools.verify.checkpoint_check import checkpoint_problems
from lit_cifar.tools.verify.comparison import EXACT_BOUND, KINDS, differences, first_excess, largest
from lit_cifar.tools.verify.record import Record


def of_steps(found: Path, expected: Path) -> dict[str, Any]:
    """Two runs with a `Trace`: every step, the samples, what the processes hold, counts, and the checkpoint."""
    record, reference = Record(found), Record(expected)
    worst = dict.fromkeys(KINDS, 0.0)
    problems = []
    for number in range(1, reference.num_steps + 1):
        gaps = differences(record.step(number), reference.step(number))
        worst = {kind: max(worst[kind], gap) for kind, gap in largest(gaps).items()}
        excess = first_excess(gaps, dict.fromkeys(KINDS, EXACT_BOUND), step=number)
        problems += [str(excess)] if excess else []
    config = yaml.safe_load((found / "run" / "config.yaml").read_text())
    problems += [
        *record.sample_problems(reference),
        *record.own_problems(),
        *record.count_problems(),
        *checkpoint_problems(record.checkpoint, record.step(reference.num_steps), config=config),
    ]
    if record.counts[1] != reference.counts[1]:
        problems.append(f"evaluation: {record.counts[1]} samples, not {reference.counts[1]}")
    return {"problems": problems, "differences": worst, "processes": record.about["world_size"]}


def of_checkpoints(found: Path, expected: Path) -> dict[str, Any]:
    """Two checkpoints: weights, buffers and optimizer state, which must be on the CPU."""
    problems: list[str] = []
    steps = []
    for path in (found, expected):
        content = read_checkpoint(path)
        state, optimizer = content["state_dict"], content["optimizer_states"][0]
        tensors = [*state.values(), *(v for s in optimizer["state"].values() for v in s.values())]
        elsewhere = {str(t.device) for t in tensors if isinstance(t, torch.Tensor) and t.device.type != "cpu"}
        problems += [f"{path.name} holds tensors of {elsewhere}"] if elsewhere else []
        buffers = [name for name in state if "running_" in name or "num_batches" in name]
        steps.append({"loss": 0.0, "state": state, "buffers": buffers, "optimizer": optimizer})
    gaps = differences(steps[0], steps[1])
    excess = first_excess(gaps, dict.fromkeys(KINDS, EXACT_BOUND), step=content["global_step"])
    problems += [str(excess)] if excess else []
    return {"problems": problems, "differences": largest(gaps)}


def main(args: list[str]) -> None:
    """Compare every second folder or file with the one after it."""
    results = {}
    for found, expected in zip(map(Path, args[::2]), map(Path, args[1::2]), strict=True):
        compare = of_checkpoints if found.is_file() else of_steps
        try:
            results[str(found)] = compare(found, expected)
        except Exception as error:  # what one run has left must not hide what the others have
            traceback.print_exc()
            results[str(found)] = {"problems": [f"{type(error).__name__}: {error}"], "differences": {}}
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
