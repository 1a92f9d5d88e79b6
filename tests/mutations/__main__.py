"""`python -m tests.mutations [NAME ...]` in a clone of the repository: `verify` must find every planted mistake."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lit_cifar.reporting.output import without_banners
from lit_cifar.tools.terminal import about, console, exit_orderly_when_terminated, writable, write_json
from tests.mutations.catalogue import BY_NAME, on_python_path
from tests.mutations.self_test import NUM_PARTS, Finding, findings_table, self_test


def main(args: Sequence[str] | None = None) -> int:
    """Plant, print, and return the exit status: 0, or 1 if a mutation was not caught or a run without one failed."""
    options = parser().parse_args(args)
    target = writable(options.json)
    record = about()
    chosen = [BY_NAME[name] for name in dict.fromkeys(options.names)] or None
    findings = self_test(chosen, with_parts=options.virtual_replicas is not None)
    console().print(findings_table(findings))
    passed = all(finding.right for finding in findings)
    record |= {"virtual_replicas": options.virtual_replicas, "findings": [*map(_row, findings)], "passed": passed}
    write_json(target, record | {"exit_status": int(not passed)})
    return int(not passed)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description="Plant mistakes one by one in correct runs. verify must find each, and pass the runs without.",
    )
    found.add_argument("names", nargs="*", type=_known, metavar="NAME", help="Mutations (default: those of modes).")
    found.add_argument(
        "--virtual_replicas", type=int, choices=[NUM_PARTS], help="Compare runs with virtual replicas, bit for bit."
    )
    found.add_argument("--json", metavar="FILE", help="Write all findings to this file.")
    return found


def _known(name: str) -> str:
    if name not in BY_NAME:
        raise argparse.ArgumentTypeError(f"no mutation {name!r} in {Path(__file__).parent}")
    return name


def _row(finding: Finding) -> dict[str, Any]:
    mutation = finding.mutation
    named = {"mutation": mutation and mutation.name, "imitates": mutation and mutation.imitates}
    shown = ("mode", "problems", "finished", "acted", "caught_by", "right")
    return named | {name: getattr(finding, name) for name in shown}


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = on_python_path()
    exit_orderly_when_terminated()
    torch.set_num_threads(1)  # the other cores belong to the runs, beside which this process compares
    with without_banners():
        sys.exit(main())
