"""Writes the table of a record of `run.py`, in which each failure and note is classed by `classes.toml`.

    python benchmarks/relations/public/classes.py RECORD.json TABLE.tsv

A failure or note that no rule is for, or a rule that is for none, ends it.
"""

import argparse
import csv
import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from lit_cifar.tools.terminal import say

RULES = tomllib.loads(Path(__file__).with_name("classes.toml").read_text())["rule"]
_PARTS = ("script", "relation", "outcome", "text")


def rule_of(row: dict[str, Any], verdict: dict[str, Any]) -> dict[str, str]:
    """The first rule whose patterns all are found."""
    script = f"{row['repository']} {row['script']}"
    said = {"script": script, **{part: verdict[part] for part in _PARTS[1:]}}
    for rule in RULES:
        if all(re.search(rule.get(part, ""), said[part]) for part in _PARTS):
            return rule
    raise SystemExit(f"no rule for {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("table", type=Path)
    options = parser.parse_args()
    used, classes = set(), Counter[tuple[str, str]]()
    lines = [("repository", "commit", "script", "seconds", "relation", "outcome", "class", "said", "why")]
    for row in json.loads(options.record.read_text())["trainings"]:
        begin = (row["repository"], row["commit"][:7], row["script"], f"{row['seconds']:.0f}")
        for verdict in row["verdicts"]:
            is_classed = verdict["outcome"] in ("fail", "note", "crash")
            rule = rule_of(row, verdict) if is_classed else {"is": "", "why": ""}
            if is_classed:
                used.add(rule["why"])
                classes[verdict["outcome"], rule["is"]] += 1
            said = (verdict["relation"], verdict["outcome"], rule["is"], verdict["text"], rule["why"])
            lines.append((*begin, *said))
    if unused := [rule["why"] for rule in RULES if rule["why"] not in used]:
        raise SystemExit(f"rules for nothing: {unused}")
    with options.table.open("w", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(lines)
    for (outcome, kind), number in sorted(classes.items()):
        say(f"{outcome:8} {kind:24} {number}")


if __name__ == "__main__":
    main()
