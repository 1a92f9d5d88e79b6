"""Judges each training of a folder by all relations, and writes what was said.

    python benchmarks/relations/run.py --out RECORD.json [TRAINING ...]

All trainings are right, so a failure is false, but for two of Lightning 2.6.6: it resumes `ReduceLROnPlateau` an update
late, and it divides the loss of an epoch's last, shorter window by all of `accumulate_grad_batches`.
"""

import argparse
import contextlib
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from lit_cifar.checks.relations.judging import RELATIONS, judged
from lit_cifar.checks.relations.plan import LIMIT_S, Limits, Target
from lit_cifar.tools.terminal import about, exit_orderly_when_terminated, say, write_json

FOLDER = Path(__file__).parent / "trainings"
ARGUMENTS = {  # of scripts that cannot be called without
    "lightning_cli": ("fit", "--model.width=24", "--data.batch_size=16"),
    "plain_images_on_disk": ("--data", "images", "--epochs", "3"),
}


def record(name: str) -> dict[str, Any]:
    """What is said about a training: its outcomes by relation, seconds, and the number of lines it has for the checker.

    An import of `relations` is such a line too.
    """
    source = (FOLDER / f"{name}.py").read_text()
    lines = [line for line in source.splitlines() if "relations." in line or "import relations" in line]
    target = Target(program=f"{name}.py", arguments=ARGUMENTS.get(name, ()), folder=str(FOLDER))
    started = perf_counter()
    verdicts = [asdict(verdict) for verdict in judged(target, RELATIONS, limits=Limits(), limit_s=LIMIT_S)]
    return {
        "training": name,
        "arguments": list(target.arguments),
        "added_lines": len(lines),
        "seconds": perf_counter() - started,
        "verdicts": verdicts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainings", nargs="*", default=sorted(file.stem for file in FOLDER.glob("*.py")))
    parser.add_argument("--out", type=Path, required=True, help="The record, written anew after each training.")
    options = parser.parse_args()
    exit_orderly_when_terminated()
    content = about() | {"trainings": []}
    for name in options.trainings:
        one = record(name)
        content["trainings"].append(one)
        write_json(options.out, content)
        counts: dict[str, list[str]] = {}
        for verdict in one["verdicts"]:
            counts.setdefault(verdict["outcome"], []).append(verdict["relation"])
        passed = len(counts.pop("pass", []))
        others = [f"{outcome}: {', '.join(relations)}" for outcome, relations in counts.items()]
        say(f"{name:32} {one['seconds']:4.0f} s  {passed} pass  {'; '.join(others)}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
