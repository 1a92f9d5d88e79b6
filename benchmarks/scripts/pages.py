"""Fill README, docs and notebooks with numbers of recorded files: `python benchmarks/scripts/pages.py [--check]`.

A place is `<!--n:NAME-->9e-14<!--/n-->` within a line, or a table between two such lines. Of a table the two lines of
its header stay, and columns at the right that the record lacks. `--check` writes nothing and names what would change.
"""

import argparse
import csv
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import gallery
from diagrams import SPLIT
from figures import PLANTED, farthest, mistakes

from lit_cifar.mode import refusals
from lit_cifar.mode.table import MODES

HERE = Path(__file__).parents[1]
FAULTS = {"kill": "SIGKILL", "term": "SIGTERM", "stop": "SIGSTOP", "truncate": "truncated checkpoints"}
FAULTS["disk"] = "full disk"
PLACE = re.compile(r"(<!--n:([\w-]+)-->)(.*?)(<!--/n-->)", flags=re.DOTALL)
Values: TypeAlias = dict[str, str | list[list[str]]]


def read(path: str, key: str = "rows") -> Any:
    return json.loads((HERE / path).read_text(encoding="utf-8"))[key]


def table(path: str) -> list[dict[str, str]]:
    with (HERE / path).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def brief(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def largest(row: dict[str, Any]) -> float:
    return max(row["differences"].values())


def verified() -> Values:
    """Every mode beside one device: ResNet34, other networks, and runs that are right."""
    names = [f"{name}_devices{n}" for name in ("vit_tiny", "wide_resnet50_2") for n in (2, 4)]
    networks = [row for name in names for row in read(f"verify/2026-11-22-networks/{name}.json")]
    clean = read("verify/2026-11-24-clean/clean.json")
    outcomes = Counter(mode["outcome"] for row in clean for mode in row["modes"])
    return {
        "verify-largest": brief(max(map(largest, read("verify/2026-11-20/devices4_float64.json")))),
        "networks-largest": brief(max(map(largest, networks))),
        "clean-passed": f"{outcomes['passed']} of {outcomes.total()} runs of {len(clean)} configurations",
    }


def planted() -> Values:
    """How many planted mistakes the self-test finds, and how many the curves of a training do not show."""
    of_seeds, rows = (read("mistakes/2026-11-22-gallery/gallery.json", key) for key in ("of_seeds", "rows"))
    said = [it for it in json.loads(PLANTED.read_text())["findings"] if it["mutation"]]
    parts = (HERE / "mistakes/2026-11-24-unseen").glob("*.json")
    unseen = [it for part in parts for it in json.loads(part.read_text())["findings"] if it["mutation"]]
    noise, finals = gallery.spread(of_seeds), [gallery.final(curves) for curves in of_seeds]
    widest = {kind: max(f[kind] for f in finals) - min(f[kind] for f in finals) for kind in noise}

    def hidden(by: dict[str, float]) -> str:
        return str(sum(not gallery.is_seen(row, by) for row in rows))

    return {
        "unseen-found": f"{sum(it['right'] for it in unseen)} of {len(unseen)}",
        "mistakes-planted": str(len(said)),
        "mistakes-found": str(sum(it["right"] for it in said)),
        "mistakes-sized": str(sum(map(len, mistakes(PLANTED).values()))),
        "gallery-noise": hidden(noise),
        "gallery-seen": str(len(rows) - int(hidden(noise))),
        "gallery-widest": hidden(widest),
    }


def compared() -> Values:
    """Losses beside those of one device, and stock Lightning's on 4 processes and with another seed."""
    pairs = [(row["losses"], row["expected_losses"]) for row in read("modes/2026-11-21-steps/losses.json")]
    gaps = [abs(a - b) for losses, expected in pairs for a, b in zip(losses, expected, strict=True)]
    rows = read("stock-lightning/2026-11-24/stock.json")
    losses = {(row["program"], row["processes"], row["seed"]): row["losses"] for row in rows}

    def apart(program: str, processes: int, seed: int) -> str:
        return f"{farthest({1: losses[program, 1, 0], 2: losses[program, processes, seed]}):.2g}"

    apart_by = {"stock-4": apart("stock", 4, 0), "stock-seed": apart("stock", 1, 1)}
    return {"curves-largest": brief(max(gaps)), "lit_cifar-4": apart("lit_cifar", 4, 0), **apart_by}


def related() -> Values:
    """Which of these bugs a relation shows, and of how many mended twins one fails, in rounds and once more."""
    values = judged_by_relations("relations-all", read("silent_bugs/2026-11-29-all/relations.json"))
    for kind in ("unedited", "edited"):
        rounds = {name: read(f"silent_bugs/2026-11-29-{name}/{kind}.json") for name in ("fourth", "fifth", "sixth")}
        rounds["asked"] = rounds["fifth"] + rounds["sixth"]  # for bugs of what relations are made for
        rounds["blind"] = rounds["fourth"] + rounds["asked"]
        for name, rows in rounds.items():
            values |= judged_by_relations(f"relations-{name}-{kind}", rows)
    return values


def judged_by_relations(name: str, rows: Sequence[dict[str, Any]]) -> Values:
    """Of how many cases the bug is found or noted, and a relation fails on the mended twin."""
    return {
        f"{name}-found": f"{sum(row['found'] == 'fail' for row in rows)} of {len(rows)}",
        f"{name}-noted": str(sum(row["found"] == "note" for row in rows)),
        f"{name}-twins": f"{sum(bool(row['false_alarm']) for row in rows)} of {len(rows)}",
    }


def right_trainings() -> Values:
    """What relations say of trainings that are right."""
    trainings = read("relations/2026-11-30-right/rights.json", "trainings")
    verdicts = [(training["training"], verdict) for training in trainings for verdict in training["verdicts"]]
    outcomes = Counter(verdict["outcome"] for _, verdict in verdicts)
    seconds = [training["seconds"] for training in trainings]

    def judged(relation: str) -> str:
        judged_in = {
            name for name, v in verdicts if v["relation"] == relation and v["outcome"] in ("pass", "note", "fail")
        }
        return f"{len(judged_in)} of {len(trainings)}"

    failed = {name for name, verdict in verdicts if verdict["outcome"] == "fail"}
    return {
        **{f"relations-right-{it}": str(outcomes[it]) for it in ("pass", "note", "abstain", "fail", "crash")},
        "relations-right-trainings": f"{len(failed)} of {len(trainings)}",
        "relations-right-ranks": judged("ranks"),
        "relations-right-accumulation": judged("accumulation"),
        "relations-right-seconds": f"{median(seconds):.0f} and {max(seconds):.0f}",
    }


def public_trainings(name: str, record: str) -> Values:
    """What relations say of public trainings: how many are judged in resume, evaluation or ranks, and in what time."""
    trainings = read(f"relations/{record}/trainings.json", "trainings")
    found: dict[str, set[int]] = {}
    for number, training in enumerate(trainings):
        for verdict in training["verdicts"]:
            relation = verdict["relation"].split()[0]
            is_judged = verdict["outcome"] in ("pass", "note", "fail")
            if is_judged and relation in ("resume", "evaluation", "ranks", "replicas"):
                found.setdefault("judged", set()).add(number)
            if is_judged and relation == "checkpoint":
                found.setdefault("checkpoint", set()).add(number)
            found.setdefault(verdict["outcome"], set()).add(number)
    kinds = ("judged", "checkpoint", "crash", "fail")
    of_siamese = [training["seconds"] for training in trainings if training["script"].startswith("siamese")]
    return {
        **{f"relations-{name}-{kind}": f"{len(found.get(kind, ()))}" for kind in kinds},
        **({"relations-siamese-seconds": f"{of_siamese[0]:.0f}"} if of_siamese else {}),
        f"relations-{name}": str(len(trainings)),
        f"relations-{name}-seconds": f"{median(training['seconds'] for training in trainings):.0f}",
    }


def job(row: dict[str, Any]) -> list[str]:
    """What became of a job that `chaos` has killed and resized."""
    kinds = Counter(event["fault"]["kind"] for event in row["events"])
    resizes = kinds.pop("resize", 0)
    sizes = [row["sizes"][0], *(it["fault"]["size"] for it in row["events"] if it["fault"]["kind"] == "resize")]
    faults = ", ".join(f"{kinds[kind]} {word}" for kind, word in FAULTS.items() if kinds[kind])
    return [
        f"{', '.join(map(str, sizes))} processes, float{row['precision'][:2]}",
        f"{kinds.total()}: {faults}" + (f"; and {resizes} orderly resizes" if resizes else ""),
        *(str(row[name]) for name in ("restarts", "repeated", "missing", "doubled")),
        f"{row['difference']:.1e}" if row["difference"] else "0, bit for bit",
    ]


def chaos() -> Values:
    """Jobs that were killed and resized."""
    return {"chaos": [job(row) for row in read("chaos/2026-11-22/chaos.json")]}


def audited() -> Values:
    """Of how many flipped bits that were still there an audit of replicas has found how many."""
    rows = read("drift/2026-11-25/flips.json")
    found, differ = (sum(row[name] for row in rows) for name in ("found", "differ"))
    return {"flips-found": f"{found} of {differ}"}


def trained() -> Values:
    """Losses and accuracies of trainings."""
    runs = {"stem": "articles/2026-11-20/seed0", "plain": "articles/2026-11-23-plain-momentum/seed0"}
    runs |= {f"seed{seed}": f"articles/2026-11-20-torchvision-stem/seed{seed}" for seed in (0, 1)}
    values: Values = {"recipes": []}
    for name, run in runs.items():
        losses = [f"{float(row['train/loss']):.2f}" for row in table(f"{run}/fit/metrics.csv") if row["train/loss"]]
        values[f"articles-{name}-losses"] = " ".join(losses[:6])
        values[f"articles-{name}"] = f"{int(table(f'{run}/test/per_rank.csv')[-1]['correct']) / 100:.2f}"
    for mode in ("single", "ddp"):
        rows = table(f"modes/2026-11-20-epoch/{mode}/fit/metrics.csv")
        speeds = [float(row["train/images_per_s"]) for row in rows if row["train/images_per_s"]]
        values[f"epoch-{mode}"] = f"{statistics.median(speeds):.0f}"
    for record in ("cpu/cpu", "gpu/fast94", "gpu/fast95", "gpu/fast96"):
        (row,) = read(f"recipes/2026-11-23-{record}.json")
        name = "cpu" if record == "cpu/cpu" else f"muon_{row['epochs']}_epochs"
        cells = [f"{row['correct'] / 100:.2f} %", f"{row['correct_flipped'] / 100:.2f} %"]
        cells += [f"{row['train_s'] / 60:.1f} minutes" if name == "cpu" else f"{row['train_s']:.1f} s"]
        cells += [f"{row['seconds']:.1f} s"]
        if name in ("cpu", "muon_23_epochs"):
            values |= zip((f"{name}-mirrored", f"{name}-time"), cells[1:3], strict=True)
        if name == "cpu":
            values[name] = cells[0]
        else:
            values["recipes"].append([f"`{name}.yaml`", *cells])
    rows = read("recipes/2026-11-26-fast/fast.json")
    for name, key in {"fast": "correct", "fast-mirrored": "correct_flipped"}.items():
        values[name] = f"{statistics.fmean(row[key] for row in rows) / 100:.2f} %"
    (quiet,) = read("recipes/2026-11-26-fast/quiet.json")
    values["fast-time"] = f"{quiet['train_s'] / 60:.1f} minutes"
    (default,) = read("recipes/2026-11-30-default-cpu/default.json")
    for name, key in {"default": "correct", "default-mirrored": "correct_flipped"}.items():
        values[name] = f"{default[key] / 100:.2f} %"
    values["default-time"] = f"{default['train_s'] / 3600:.1f} hours"
    values["fast-worst"] = f"{max(row['train_s'] for row in rows) / 60:.1f}"
    return values


def on_one_h200() -> Values:
    """Every mode beside one device, a step of `fit` beside that of a plain loop, recipes."""
    folder, batch = "gpu/2026-11-26", 512
    (step,) = read(f"{folder}/modes.json", "steps")
    found = [each["figures"] for each in step["findings"].values() if each["status"] == "ok"]
    by_mode = {row["mode"]: row for row in reversed(found)}  # of `ddp_mp` the one of four devices
    on_cpu = {row["mode"]: row for row in read("verify/2026-11-20/devices4_float64.json")}
    names = [row.name for row in MODES]
    splits = {split: [name for name in names if SPLIT[name] == split] for split in SPLIT.values()}
    values: Values = {
        "status": [
            [", ".join(f"`{name}`" for name in alike), "-" if split == "nothing" else "not run"]
            + [brief(max(largest(rows[name]) for name in alike)) for rows in (by_mode, on_cpu)]
            for split, alike in splits.items()
        ]
    }
    ratios, of_fit = {}, {}
    for name in ("eager", "graphs-fit-alone", "compiled", "compiled-again", "compiled-alone"):
        turns = read(f"{folder}/step-{name}.json", "turns")
        if name == "graphs-fit-alone":
            turns |= read(f"{folder}/step-graphs-plain-alone.json", "turns")
        fit, plain = (median(turn["wall"] for turn in turns[way]) for way in ("fit", "plain loop"))
        if not name.startswith("compiled"):
            for way, step_ms in {"fit": fit, "plain": plain}.items():
                values[f"h200-{name}-{way}"] = f"{step_ms:.2f}"
                values[f"h200-{name}-{way}-images"] = f"{1e3 * batch / step_ms:,.0f}"
        ratios[name], of_fit[name] = f"{fit / plain:.2f}", fit
    saved_ms = of_fit["eager"] - of_fit["graphs-fit-alone"]
    compiling_ms = 40_000  # at most, without kernels in a cache
    values |= {"h200-graphs-saved": f"{saved_ms:.1f}", "h200-graphs-pays": f"{round(compiling_ms / saved_ms, -3):,.0f}"}
    values |= {"h200-eager-ratio": ratios["eager"], "h200-graphs-ratio": ratios["graphs-fit-alone"]}
    compiled = sorted(ratio for name, ratio in ratios.items() if name.startswith("compiled"))
    values["h200-compiled-ratio"] = f"{compiled[0]} to {compiled[-1]}"
    values["h200-default"] = f"{read(f'{folder}/default/test.json', 'correct') / 100:.2f}"
    for short, name in {"fast": "fast_9_epochs", "muon": "muon_12_epochs"}.items():
        runs = read(f"recipes/2026-11-26-gpu/{name}.json")
        mirrored = statistics.fmean(row["correct_flipped"] for row in runs)
        values[f"h200-{short}-mirrored"] = f"{mirrored / 100:.2f} %"
        values[f"h200-{short}-time"] = f"{median(row['train_s'] for row in runs):.1f} s"
    unequal = read("recipes/2026-11-29-unequal/unequal.json")
    for short, name in {"none": "the recipe", "weights": "class weights", "balanced": "equal draws"}.items():
        right = statistics.fmean(row["correct"] / row["total"] for row in unequal if row["trial"] == name)
        values[f"unequal-{short}"] = f"{100 * right:.1f} %"
    for short, file, ending in (("9", "fast", ""), ("30", "long", ", 30 epochs")):
        runs = read(f"recipes/2026-11-27-augmentation/{file}.json")
        recipe = {row["seed"]: row["correct"] for row in runs if row["trial"] == f"the recipe{ending}"}
        for way, name in {"mixup": "mixup 0.2", "cutmix": "CutMix 1.0"}.items():
            lost = [recipe[row["seed"]] - row["correct"] for row in runs if row["trial"] == name + ending]
            values[f"{way}-{short}-epochs"] = f"{statistics.fmean(lost) / 50:.1f}"
    return values


def same_bits() -> Values:
    """What virtual replicas cost."""
    values: Values = {}
    for row in read("same-bits/2026-11-23-epoch/price.json"):
        if (row["parts"] or 0) > 1:
            price = f"{statistics.median(row['price']):.2f}"
            values[f"same-bits-price-{row['processes']}-{row['parts']}"] = price
    for row in read("same-bits/2026-11-23-epoch/memory.json"):
        if row["processes"] == 2 and row["parts"] in (None, 8):
            values[f"same-bits-peak-2-{row['parts'] or 0}"] = f"{row['peak_mib'][0]:.0f}"
    return values


def options() -> Values:
    """Which options work in which mode: the table of refusals."""

    def cell(option: str, name: str) -> str:
        if refusals.refusal_of(option, name) is not None:
            return "no"
        return "GPU" if option in refusals.NEED_GPU else "yes"

    options = dict.fromkeys(row.option for row in refusals.TABLE)
    return {"options": [[f"`{option}`", *(cell(option, name) for name in refusals.NAMES)] for option in options]}


def stored_times() -> Values:
    """How long the stored outputs of each notebook took."""
    values: Values = {}
    for path in HERE.parent.glob("notebooks/*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        seconds = (clock_s(notebook), notebook["metadata"]["processor_s"])
        clock, processor = (f"{each / 60:.1f} minutes" for each in seconds)
        values[f"minutes-{path.stem}"] = f"{clock} by the clock on two CPU cores, {processor} of processor time"
    return values


def clock_s(notebook: dict[str, Any]) -> float:
    """Seconds that the cells of a stored notebook took."""
    times = [cell["metadata"]["execution"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return sum(moment(each["shell.execute_reply"]) - moment(each["iopub.status.busy"]) for each in times)


def moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def filled(place: re.Match[str], values: Values) -> str:
    """The place with what the record says now."""
    start, name, old, end = place.groups()
    if isinstance(value := values[name], str):
        return f"{start}{value}{end}"
    head, rule, *lines = old.strip().splitlines()
    kept = ["|".join(line.split("|")[len(value[0]) + 1 :]) for line in lines] + [""] * len(value)
    rows = [f"| {' | '.join(row)} |{rest}" for row, rest in zip(value, kept, strict=False)]
    return "\n".join([start, head, rule, *rows, end])


def main(*, check: bool) -> int:
    """Write the pages, or say what differs; the exit status."""
    values = (
        verified()
        | planted()
        | compared()
        | related()
        | right_trainings()
        | public_trainings("public", "2026-11-29-public")
        | public_trainings("fresh", "2026-11-30-fresh")
        | chaos()
        | audited()
        | trained()
        | on_one_h200()
        | same_bits()
        | options()
        | stored_times()
    )
    wrong = 0
    pages = [*HERE.parent.glob("docs/*.md"), *HERE.rglob("*.md"), *HERE.parent.glob("notebooks/*.ipynb")]
    for page in [HERE.parent / "README.md", *pages]:
        text = page.read_text(encoding="utf-8")
        for place in PLACE.finditer(text):
            if (new := filled(place, values)) != place[0]:
                wrong += 1
                print(f"{page.relative_to(HERE.parent)}: {place[2]} should be\n{new}")
        if not check:
            page.write_text(PLACE.sub(lambda place: filled(place, values), text), encoding="utf-8")
    return int(check and wrong > 0)


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    parser = argparse.ArgumentParser(
        description="Fill README, docs, notebooks and records with numbers of the recorded files."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page would change")
    return parser


if __name__ == "__main__":
    sys.exit(main(check=parser().parse_args().check))
