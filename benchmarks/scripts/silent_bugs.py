"""What `Replay` and other tools say of the cases of `benchmarks/silent_bugs`: read, counted, drawn."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

RECORD = Path(__file__).parents[1] / "silent_bugs" / "2026-11-25"
BLIND = "written after the checks"
COLORS = {"found": "#0072b2", "noted": "#56b4e9"}  # Okabe and Ito's
MEANS = {"found": "found: it fails", "noted": "noted: no failure, but a hint"}
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
    """A bar for each tool and set of cases; and one for what the losses of runs without a bug would show by chance."""
    ours, losses, *others = tools(record).values()
    fresh = [row for row in ours if row["class"] == BLIND]
    seen = [row for row in ours if row["class"] != BLIND]
    bars = {
        f"Replay, {len(seen)} bugs, some used\nto write its checks": seen,
        f"Replay, {len(fresh)} fresh bugs": fresh,
        f"loss curves, the {len(losses)} bugs": losses,
    }
    shares = {label: [count(rows, word) / len(rows) for word in ("found", "noted")] for label, rows in bars.items()}
    # Outside of the range of the seeds, as one more seed is by chance.
    by_chance = 2 / (json.loads((record / "results.json").read_text())["seeds"] + 1)
    shares["loss curves, no bug at all"] = [by_chance, 0]
    shares |= {
        f"torch's own checks,\nall {len(rows)} bugs": [count(rows, "found") / len(rows), 0] for rows in others[:1]
    }
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for y, (label, (found, noted)) in enumerate(shares.items()):
        color = "#9a9a9a" if label.endswith("at all") else COLORS["found"]
        axes.barh(y, 100, 0.7, color="#eeeeee")
        axes.barh(y, 100 * found, 0.7, color=color)
        axes.barh(y, 100 * noted, 0.7, left=100 * found, color=COLORS["noted"])
        words = f"{100 * found:.0f} %" + (f" + {100 * noted:.0f} %" if noted else "")
        axes.text(100 * (found + noted) + 1.5, y, words, va="center", fontsize=11)
    axes.set(xlim=(0, 100), ylim=(len(shares) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(shares)), list(shares), fontsize=11)
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    handles = [Patch(color=COLORS[word], label=label) for word, label in MEANS.items()]
    handles.append(Patch(color="#9a9a9a", label="by chance"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    figure.suptitle("Real bugs that raise no error: which tool says something?", fontsize=12, fontweight="bold")
    return figure
