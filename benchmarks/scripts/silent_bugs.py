"""What `Replay` and other tools say of the cases of `benchmarks/silent_bugs`: read, counted, drawn."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RECORD = Path(__file__).parents[1] / "silent_bugs" / "2026-11-25"
BLIND = "written after the checks"
COLORS = {"found": "#0072b2", "noted": "#56b4e9", "missed": "#d9d9d9", "no answer": "#f0e442"}  # Okabe and Ito's
WORDS = {"fail": "found", "note": "noted", "": "missed"}
Rows = list[dict[str, Any]]


def read(record: Path, name: str) -> Rows:
    """What one file says, if it is there; what fails on the mended twin too finds nothing.

    A tool that a run ends under, by a crash or its limit of time, gives no answer.
    """
    if not (file := record / name).exists():
        return []
    rows: Rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        row["word"] = WORDS["" if row["false_alarm"] else row["found"]]
        if any(row["exit_status"]) and not row["said"] and not row["false_alarm"]:
            row["word"] = "no answer"
    return rows


def tools(record: Path = RECORD) -> dict[str, Rows]:
    """Each tool's rows, with the class of their case; those of the blind test are a class of their own."""
    seen = read(record, "results.json")
    ours = seen + [row | {"class": BLIND} for row in read(record, "unseen.json")]
    kinds = {row["case"]: row["class"] for row in ours}
    losses = [row | {"word": "found" if row["beyond_seed_noise"] else "missed", "false_alarm": []} for row in seen]
    found = {"Replay": ours, "loss curves": losses}
    for tool, name in {"torch's own checks": "torch_checks.json", "TrainCheck": "traincheck.json"}.items():
        if rows := [row | {"class": kinds[row["case"]]} for row in read(record, name) if row["case"] in kinds]:
            found[tool] = rows
    return found


def count(rows: Rows, word: str) -> int:
    return sum(row["word"] == word for row in rows)


def drawn(record: Path) -> Figure:
    """For each tool a panel, for each class a row, for each case a mark."""
    found = tools(record)
    sizes = Counter(row["class"] for row in found["Replay"])
    kinds = sorted(sizes, key=lambda kind: (kind == BLIND, kind))
    figure = Figure(figsize=(2.1 + 1.5 * len(found), 4.2), layout="constrained")
    for axes, (tool, rows) in zip(figure.subplots(1, len(found), sharey=True), found.items(), strict=True):
        for y, kind in enumerate(kinds):
            words = sorted((row["word"] for row in rows if row["class"] == kind), key=list(COLORS).index)
            axes.barh([y] * len(words), 0.85, left=range(len(words)), color=[COLORS[word] for word in words])
        title = f"{tool}\n{count(rows, 'found')} of {len(rows)} found\n+ {count(rows, 'noted')} noted"
        if tool == "loss curves":  # outside of the range of the seeds, as one more seed is by chance
            by_chance = round(len(rows) * 2 / (json.loads((record / "results.json").read_text())["seeds"] + 1))
            title = f"{tool}\n{count(rows, 'found')} of {len(rows)} show it\nby chance: {by_chance}"
        axes.set_title(title, fontsize=9)
        axes.set(xlim=(0, max(sizes.values())), ylim=(len(kinds) - 0.5, -0.5), xticks=[])
        axes.set_yticks(range(len(kinds)), [f"{kind} ({sizes[kind]})" for kind in kinds], fontsize=9)
        axes.tick_params(left=False)
        axes.spines[:].set_visible(False)
    words = [word for word in COLORS if any(count(rows, word) for rows in found.values())]
    bars = [figure.axes[0].barh(0, 0, color=COLORS[word], label=word) for word in words]
    figure.legend(handles=bars, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    rows = found["Replay"]
    figure.suptitle(f"Of {len(rows)} real bugs that raise no error, Replay misses {count(rows, 'missed')}", fontsize=11)
    return figure
