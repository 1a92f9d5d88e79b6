"""Judges public trainings as they are, on made samples, and writes what was said.

    python benchmarks/relations/public/run.py --clones FOLDER --out RECORD.json [PART_OF_A_NAME ...]

FOLDER has, or is given, a clone of each repository, `OWNER+NAME`. A training that a record has is not run again.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from lit_cifar.checks.relations.judging import RELATIONS, judged
from lit_cifar.checks.relations.plan import LIMIT_S, Limits, Target
from lit_cifar.checks.verdict import summary
from lit_cifar.tools.terminal import about, exit_orderly_when_terminated, say, write_json

TABLE = Path(__file__).with_name("trainings.toml")


def trainings() -> Iterator[tuple[str, str, str]]:
    """Repository, commit, and the script with its arguments."""
    for repository, each in tomllib.loads(TABLE.read_text()).items():
        for script in each["scripts"]:
            yield repository, each["commit"], script


def clone(repository: str, commit: str, clones: Path) -> Path:
    """The folder of the clone, at the commit."""
    folder = clones / repository.replace("/", "+")
    if not folder.is_dir():
        subprocess.run(["git", "clone", "--quiet", f"https://github.com/{repository}", folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "--quiet", commit], check=True)
    found = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    if found.stdout.strip() != commit:
        raise SystemExit(f"{folder} is at {found.stdout.strip()}, and not at {commit}")
    return folder


def record(root: Path, script: str, limit_s: float, most_s: float) -> dict[str, Any]:
    """The verdicts about a script, until the next one would begin after `most_s`."""
    program, *arguments = shlex.split(script)
    path = root / program
    os.environ["PYTHONPATH"] = str(root)
    target = Target(program=path.name, arguments=tuple(arguments), folder=str(path.parent))
    started, verdicts = perf_counter(), []
    for verdict in judged(target, RELATIONS, limits=Limits(), limit_s=limit_s, made_data=True):
        verdicts.append(verdict)
        say(str(verdict))
        if perf_counter() - started > most_s:
            break
    say(summary(verdicts))
    return {"seconds": perf_counter() - started, "verdicts": [asdict(verdict) for verdict in verdicts]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PART_OF_A_NAME", help="Only trainings that have one of them.")
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="The record, written anew after each training.")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="Seconds of a run.")
    parser.add_argument("--most", type=float, default=600, metavar="S", help="Seconds of a training, about.")
    options = parser.parse_args()
    exit_orderly_when_terminated()
    content = json.loads(options.out.read_text()) if options.out.exists() else about() | {"trainings": []}
    known = {(each["repository"], each["script"]) for each in content["trainings"]}
    for repository, commit, script in trainings():
        name = f"{repository} {script}"
        is_asked = not options.names or any(part in name for part in options.names)
        if (repository, script) in known or not is_asked:
            continue
        say(f"\n{name}")
        one = {"repository": repository, "commit": commit, "script": script}
        one |= record(clone(repository, commit, options.clones.resolve()), script, options.limit, options.most)
        content["trainings"].append(one)
        write_json(options.out, content)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
