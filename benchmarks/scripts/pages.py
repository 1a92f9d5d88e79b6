"""Fill README, docs and records with numbers of the recorded files: `python benchmarks/scripts/pages.py [--check]`.

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
from pathlib import Path
from statistics import median
from string import ascii_lowercase
from typing import Any, TypeAlias

import gallery
import silent_bugs as bugs
from figures import PLANTED, farthest, mistakes

from lit_cifar.mode import refusals

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
    two, four = ({row["mode"]: row for row in read(f"verify/2026-11-20/devices{n}_float64.json")} for n in (2, 4))
    names = [f"verify/2026-11-22-networks/{name}_devices{{}}.json" for name in ("vit_tiny", "wide_resnet50_2")]
    vit, wide = ([row for n in (2, 4) for row in read(name.format(n))] for name in names)
    clean = read("verify/2026-11-24-clean/clean.json")
    outcomes = Counter(mode["outcome"] for row in clean for mode in row["modes"])
    return {
        "verify": [
            [f"`{mode}`", brief(largest(two[mode])) if mode in two else "-", brief(largest(row))]
            for mode, row in four.items()
        ],
        "verify-largest": brief(max(map(largest, four.values()))),
        "networks": [[f"`{a['mode']}`", brief(largest(a)), brief(largest(b))] for a, b in zip(vit, wide, strict=True)],
        "networks-largest": brief(max(map(largest, [*vit, *wide]))),
        "clean-passed": f"{outcomes['passed']} of {outcomes.total()} runs of {len(clean)} configurations",
        "clean": [
            [row["configuration"], str(len(row["modes"])), brief(max(mode["difference"] for mode in row["modes"]))]
            for row in clean
        ],
    }


def planted() -> Values:
    """What the self-test says of each planted mistake, and what the curves of a training show of it."""
    of_seeds = read("mistakes/2026-11-22-gallery/gallery.json", "of_seeds")
    rows = {row["mutation"]: row for row in read("mistakes/2026-11-22-gallery/gallery.json")}
    said = {it["mutation"]: it for it in json.loads(PLANTED.read_text())["findings"] if it["mutation"]}
    parts = sorted((HERE / "mistakes/2026-11-24-unseen").glob("*.json"))
    unseen = [it for part in parts for it in json.loads(part.read_text())["findings"] if it["mutation"]]
    noise, finals = gallery.spread(of_seeds), [gallery.final(curves) for curves in of_seeds]
    widest = {kind: max(f[kind] for f in finals) - min(f[kind] for f in finals) for kind in noise}
    yardsticks = {"noise": noise, "widest": widest}

    def hidden(by: dict[str, float]) -> str:
        return str(sum(not gallery.is_seen(row, by) for row in rows.values()))

    return {
        "mistakes": [[f"`{name}`", it["imitates"], f"`{it['mode']}`", it["caught_by"]] for name, it in said.items()],
        "unseen": [
            [
                f"`{it['mutation']}`",
                it["imitates"],
                f"`{it['mode']}`",
                it["problems"][0] if it["right"] else "not found",
            ]
            for it in unseen
        ],
        "unseen-found": f"{sum(it['right'] for it in unseen)} of {len(unseen)}",
        "mistakes-planted": str(len(said)),
        "mistakes-found": str(sum(it["right"] for it in said.values())),
        "mistakes-sized": str(sum(map(len, mistakes(PLANTED).values()))),
        "gallery": [
            [
                f"`{name}`: {row['imitates']}",
                f"`{row['mode']}`",
                gallery.in_words(row, noise),
                said[name]["problems"][0],
            ]
            for name, row in rows.items()
        ],
        **{f"gallery-{name}": hidden(by) for name, by in yardsticks.items()},
        **{f"gallery-{name}-{kind}": f"{by[kind]:.2f}" for name, by in yardsticks.items() for kind in by},
    }


def in_precisions() -> Values:
    """Planted mistakes that `verify` finds in each precision, by a replay or without one."""
    found: dict[str, dict[str, Any]] = {"64-true": {}, "32-true": {}, "bf16-mixed": {}, "virtual": {}}
    for name, its in found.items():
        rows = json.loads((HERE / f"mistakes/2026-11-25-precisions/{name}.json").read_text())["findings"]
        its |= {row["mutation"]: row for row in rows if row["mutation"] and not row["no_place"]}
    virtual = found.pop("virtual")

    def word(row: dict[str, Any]) -> str:
        replayed = any(problem.startswith("replay: ") for problem in row["problems"])
        alone = replayed and all(problem.startswith("replay: ") for problem in row["problems"])
        return "missed" if not row["right"] else "by the replay alone" if alone else "found"

    counted = [
        sum(any(problem.startswith("replay: ") for problem in row["problems"]) for row in its.values())
        for its in (found["32-true"], found["bf16-mixed"])
    ]
    found_there = sum(row["right"] for row in virtual.values())
    return {
        "precisions-virtual": f"{found_there} of {len(virtual)}",
        "precisions": [
            [f"`{name}`: {row['imitates']}", f"`{row['mode']}`", *(word(its[name]) for its in found.values())]
            for name, row in found["32-true"].items()
        ],
        "precisions-replayed": " and ".join(map(str, counted)),
        **{f"precisions-{n}": f"{sum(r['right'] for r in its.values())} of {len(its)}" for n, its in found.items()},
    }


def compared() -> Values:
    """Losses beside those of one device, and stock Lightning's on 2 and 4 processes and with another seed."""
    curves, ends, gaps = read("modes/2026-11-21-steps/losses.json"), [], []
    for row in curves:
        ends.append([f"{loss:.3f}" for loss in (row["losses"][0], row["losses"][-1], row["expected_losses"][-1])])
        gaps.append([abs(a - b) for a, b in zip(row["losses"], row["expected_losses"], strict=True)])
    values: Values = {"curves-largest": brief(max(map(max, gaps))), "stock": []}
    values["curves"] = [
        [f"`{row['mode']}`", *end, brief(max(gap[:2])), brief(max(gap))]
        for row, end, gap in zip(curves, ends, gaps, strict=True)
    ]
    for program in ("stock", "lit_cifar"):
        rows = [row for row in read("stock-lightning/2026-11-24/stock.json") if row["program"] == program]
        losses = {(row["processes"], row["seed"]): row["losses"] for row in rows}
        apart = [f"{farthest({1: losses[1, 0], 2: losses[kind]}):.2g}" for kind in ((2, 0), (4, 0), (1, 1))]
        values["stock"].append([program, *apart])
        values |= {f"{program}-4": apart[1], f"{program}-seed": apart[2]}
    return values


def replayed() -> Values:
    """What `Replay` says of the training scripts of public projects, and of trainings that are right."""
    rows = read("replay/2026-11-24-projects/projects.json")
    outcomes = Counter(row["outcome"] for row in rows)
    clean = read("replay/2026-11-24-clean/clean.json")
    seconds = [row["seconds"] / row["num_steps"] for row in clean if row["num_steps"]]
    sizes = [row["mebibytes"] / row["num_steps"] for row in clean if row["num_steps"]]
    kinds = ("one device", "`ddp`", "FSDP2")
    groups: dict[str, list[dict[str, Any]]] = {
        f"{kind}, {precision}": [] for kind in kinds for precision in ("64-true", "32-true", "bf16-mixed")
    }
    for row in clean:
        kind = kinds[0] if row["num_ranks"] == 1 else kinds[2] if row["kind"] == "fsdp2" else kinds[1]
        groups[f"{kind}, {row['precision']}"].append(row)
    return {
        "replays-clean": [
            [
                name,
                str(len(its)),
                str(sum(row["outcome"] == "pass" for row in its)),
                f"{max(row['largest_share'] for row in its):.2f}" if its[0]["num_ranks"] > 1 else "-",
            ]
            for name, its in groups.items()
            if its
        ],
        "replays-clean-passed": f"{sum(row['outcome'] == 'pass' for row in clean)} of {len(clean)}",
        "replays-clean-wrong": f"{sum(row['outcome'] == 'fail' for row in clean) or 'none'} of {len(clean)}",
        "replays-clean-seconds": f"{median(seconds):.2f} to {max(seconds):.1f} s",
        "replays-clean-mebibytes": f"{median(sizes):.1f} to {max(sizes):.1f} MiB",
        "projects": [
            [
                f"{row['repository']} {row['commit'][:7]}: `{row['script']}`",
                f"{row['processes']}, {row['precision']}",
                str(len(row["lines_added"])) + (f" + {changed}" if (changed := len(row["lines_changed"])) else ""),
                row["outcome"],
                *(str(row["counts"][what]) for what in ("steps", "samples", "gradients", "reduced", "states")),
                f"{row['seconds']:.0f}",
                f"{row['replay_seconds']:.1f}",
                row["first_try"],
            ]
            for row in rows
        ],
        "projects-outcomes": ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common()),
    }


def found_of(file: str) -> str:
    """Of how many of the cases `Replay` fails, and not on the mended twin."""
    rows = read(f"silent_bugs/2026-11-25/{file}")
    return f"{sum(row['found'] == 'fail' and not row['false_alarm'] for row in rows)} of {len(rows)}"


def unseen_bugs(file: str) -> str:
    """What became of the cases that were written after the checks of the first record."""
    rows = read(f"silent_bugs/2026-11-25/{file}")
    alarms = sum(bool(row["false_alarm"]) for row in rows)
    found, noted = (sum(row["found"] == kind and not row["false_alarm"] for row in rows) for kind in ("fail", "note"))
    missed = len(rows) - found - noted
    return f"{found} is found, {noted} are noted, {missed} missed, and {alarms or 'no'} mended twin is called wrong"


def silent_bugs() -> Values:
    """Which bugs of public trackers `Replay` finds, and which of them the losses show."""
    rows = read("silent_bugs/2026-11-25/results.json")
    words = {"fail": "found", "note": "noted", "": "missed"}
    for row in rows:
        row["found"] = "" if row["false_alarm"] else row["found"]  # what fails mended too finds nothing

    def counted(its: list[dict[str, Any]]) -> list[str]:
        numbers = [len(its), *(sum(row["found"] == kind for row in its) for kind in words)]
        return [*map(str, numbers), str(sum(row["beyond_seed_noise"] for row in its))]

    kinds = sorted({row["class"] for row in rows})
    return {
        "silent-bugs-classes": [
            [name, *counted(its)]
            for name, its in (*((kind, [r for r in rows if r["class"] == kind]) for kind in kinds), ("all", rows))
        ],
        "silent-bugs": [
            [
                f"[{row['case']}]({row['report']})",
                words[row["found"]],
                (row["said"] or ["-"])[0].split(" differs")[0].split(" is not ")[0].replace("|", "/"),
                "yes" if row["beyond_seed_noise"] else "no",
            ]
            for row in rows
        ],
        "silent-bugs-found": found_of("results.json"),
        "silent-bugs-localised": str(sum(r["found"] == "fail" and ": the loss" not in r["said"][0] for r in rows)),
        "silent-bugs-blind": found_of("unseen.json"),
        "silent-bugs-noted": str(sum(row["found"] == "note" for row in rows)),
        "silent-bugs-by-losses": str(sum(row["beyond_seed_noise"] for row in rows)),
        "silent-bugs-tools": bugs.compared(),
        "silent-bugs-unseen": unseen_bugs("unseen.json"),
        "silent-bugs-unseen-again": unseen_bugs("unseen_again.json"),
        "silent-bugs-false": f"{sum(bool(row['false_alarm']) for row in rows) or 'none'}",
        "silent-bugs-seconds": f"{median(row['seconds'] for row in rows):.0f} s",
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
    jobs = read("chaos/2026-11-22/chaos.json")
    kinds = [event["fault"]["kind"] for row in jobs for event in row["events"]]
    resizes, repeated = kinds.count("resize"), sum(row["repeated"] for row in jobs)
    faults = f"{len(kinds) - resizes} faults and {resizes} resizes"
    return {"chaos": [job(row) for row in jobs], "chaos-faults": faults, "chaos-repeated": str(repeated)}


def audited() -> Values:
    """Faults of one rank that audits of replicas have found, and what an audit takes."""
    trials = [trial for row in read("drift/2026-11-26/faults.json") for trial in row["trials"]]
    values: Values = {"audits": []}
    for kind in dict.fromkeys(trial["kind"] for trial in sorted(trials, key=lambda trial: trial["kind"])):
        its = [trial for trial in trials if trial["kind"] == kind]
        found = {ranks: [trial for trial in its if trial["found"] and trial["ranks"] == ranks] for ranks in (2, 3)}
        numbers = [f"{len(found[ranks])} of {sum(trial['ranks'] == ranks for trial in its)}" for ranks in (3, 2)]
        named = [str(sum(trial["found"]["rank"] for trial in found[ranks])) for ranks in (3, 2)]
        values["audits"].append([kind, numbers[0], named[0], numbers[1], named[1]])
    none, some = read("drift/2026-11-26/cost.json")
    values["audit-steps"] = f"{median(some['audit_steps']):.2f}"
    values["audit-worst"] = f"{max(some['audit_steps']):.2f}"
    values["audit-share"] = f"{median(some['audit_steps']) / 2:.1f} %"  # of 200 steps
    values["audit-memory"] = f"{some['peak_mib']:.0f} MiB with audits, {none['peak_mib']:.0f} without"
    return values


def hung() -> Values:
    """Ranks that fail or hang on purpose: are they named, and their lines, and when?"""
    rows = read("hangs/2026-11-26/hangs.json")
    faulty = [row for row in rows if "rank" in row]
    lines = [row["line"] for row in faulty if row["line"] is not None]
    seconds = sorted(row["seconds"] for row in faulty if row["seconds"] is not None)
    values: Values = {
        "hangs": f"{len(faulty)} cases of {len({row['case'].partition(' in ')[0] for row in faulty})} kinds",
        "hangs-named": str(sum(second <= 15 for second in seconds)),
        "hangs-slowest": f"{seconds[-1]:.1f} s",
        "hangs-ranks": str(sum(row["rank"] for row in faulty)),
        "hangs-lines": f"{sum(lines)} of {len(lines)}",
        "healthy": f"{sum(not row['ended'] for row in rows if 'ended' in row)} of {len(rows) - len(faulty)}",
        "hangs-kinds": [],
    }
    for act in dict.fromkeys(row["case"].partition(" in ")[0] for row in faulty):
        its = [row for row in faulty if row["case"].partition(" in ")[0] == act]
        known = [row["line"] for row in its if row["line"] is not None]
        latest = max((row["seconds"] for row in its if row["seconds"] is not None), default=None)
        cells = [act, str(len(its)), str(sum(row["rank"] for row in its)), f"{sum(known)} of {len(known)}"]
        values["hangs-kinds"].append([*cells, "-" if latest is None else f"{latest:.1f} s"])
    return values


def paused() -> Values:
    """Healthy runs with a pause: are they ended, and when is the rank named?"""
    rows = read("hangs/2026-11-26-pauses/pauses.json")
    ended = [row for row in rows if row["status"] or not row["finished"]]
    notices = [second for row in rows for second in row["notices_after_s"]]
    values: Values = {
        "pauses": str(len(rows)),
        "pauses-ended": str(len(ended)),
        "pauses-named": str(sum(bool(row["notices_after_s"]) for row in rows)),
        "pauses-notices": f"{min(notices):.0f} to {max(notices):.0f} s",
        "pauses-kinds": [],
    }
    for act, place in dict.fromkeys((row["act"], row["place"]) for row in rows):
        its = [row for row in rows if (row["act"], row["place"]) == (act, place)]
        cells = [
            f"{sum(row in ended for row in its if row['seconds'] == long)} of {n}" if n else "-"
            for long, n in ((long, sum(row["seconds"] == long for row in its)) for long in (20, 60, 300))
        ]
        values["pauses-kinds"].append([act, place, *cells])
    return values


def recovered() -> Values:
    """Kills of ranks that are forked again, with checkpoints on a disk and in memory."""
    values: Values = {}
    for key, prefix in {"kills": "", "kills-memory": "memory_"}.items():
        rows = [row for size in ("two", "four") for row in read(f"chaos/2026-11-26-kills/{prefix}{size}.json")]
        found, medians = [], []
        for row in rows:
            kills = [event for event in row["events"] if event["fault"]["kind"] == "kill"]
            away = [event["away_s"] for event in kills if event["away_s"] and event["fault"]["aim"] != "start"]
            cells = [
                f"`{row['mode']}`",
                str(row["sizes"][0]),
                str(len(kills)),
                str(row["missing"]),
                str(row["doubled"]),
            ]
            cells += [brief(row["difference"]), f"{row['repeated']} in {row['restarts']}"]
            times = [f"{median(away):.2f}", f"{max(away):.2f}", str(len(away))]
            found.append([*cells, *times])
            medians.append((median(away), f"{times[0]} and {times[1]} s (`{row['mode']}`)"))
        values |= {key: found, f"{key}-best": min(medians)[1], f"{key}-worst": max(medians)[1]}
        values[f"{key}-repeated"] = " in ".join(
            str(sum(row[name] for row in rows)) for name in ("repeated", "restarts")
        )
    return values


def trained() -> Values:
    """Losses and accuracies of trainings."""
    runs = {"stem": "articles/2026-11-20/seed0", "plain": "articles/2026-11-23-plain-momentum/seed0"}
    runs |= {f"seed{seed}": f"articles/2026-11-20-torchvision-stem/seed{seed}" for seed in (0, 1)}
    values: Values = {"evaluation": [], "recipes": []}
    for name, run in runs.items():
        losses = [f"{float(row['train/loss']):.2f}" for row in table(f"{run}/fit/metrics.csv") if row["train/loss"]]
        values[f"articles-{name}-losses"] = " ".join(losses[:6])
        values[f"articles-{name}"] = f"{int(table(f'{run}/test/per_rank.csv')[-1]['correct']) / 100:.2f}"
    values["default"] = f"{int(table('recipes/2026-11-20-default/test/per_rank.csv')[-1]['correct']) / 100:.1f}"
    for mode in ("single", "ddp"):
        rows = table(f"modes/2026-11-20-epoch/{mode}/fit/metrics.csv")
        speeds = [float(row["train/images_per_s"]) for row in rows if row["train/images_per_s"]]
        values[f"epoch-{mode}"] = f"{statistics.median(speeds):.0f}"
    for n in (1, 2, 3, 4, 7):
        of_all = table(f"evaluation/2026-11-20/ddp{n}/per_rank.csv")[-1]
        values["evaluation"].append([str(n), f"{int(of_all['correct']):,}", f"{int(of_all['total']):,}"])
    for record in ("cpu/cpu", "gpu/fast94", "gpu/fast95", "gpu/fast96"):
        (row,) = read(f"recipes/2026-11-23-{record}.json")
        name = "cpu" if record == "cpu/cpu" else f"muon_{row['epochs']}_epochs"
        cells = [f"{row['correct'] / 100:.2f} %", f"{row['correct_flipped'] / 100:.2f} %"]
        cells += [f"{row['train_s'] / 60:.1f} minutes" if name == "cpu" else f"{row['train_s']:.1f} s"]
        cells += [f"{row['seconds']:.1f} s"]
        values |= zip((name, f"{name}-mirrored", f"{name}-time", f"{name}-command"), cells, strict=True)
        values["recipes"].append([f"`{name}.yaml`", *cells])
    del values["recipes"][0]  # that of a CPU has a page of its own
    rows = read("recipes/2026-11-26-fast/fast.json")
    for name, key in {"fast": "correct", "fast-mirrored": "correct_flipped"}.items():
        values[name] = f"{statistics.fmean(row[key] for row in rows) / 100:.2f} %"
    (quiet,) = read("recipes/2026-11-26-fast/quiet.json")
    values["fast-time"] = f"{quiet['train_s'] / 60:.1f} minutes"
    values["fast-worst"] = f"{max(row['train_s'] for row in rows) / 60:.1f}"
    return values


def on_one_gpu() -> Values:
    """Images per second of `fit` and of plain loops."""
    values: Values = {}
    (speed,) = (step["findings"] for step in read("gpu/2026-11-23/speed/results.json", "steps") if step["number"] == 9)
    for figures in (found for found in speed if "images_per_s" in found["figures"]):
        name = "gpu-" + re.sub(r"\W+", "-", figures["name"])
        values[name] = f"{figures['figures']['images_per_s']:,.0f}"
        values[f"{name}-ms"] = f"{512e3 / figures['figures']['images_per_s']:.1f}"
    graphs = json.loads((HERE / "recipes/2026-11-23-gpu/sgd_epochs.json").read_text())
    for name, part in {"gpu-graphs": "training_s", "gpu-graphs-epoch": "total_s"}.items():
        values[name] = f"{graphs['images'] / graphs['median'][part]:,.0f}"
    found = json.loads((HERE / "recipes/2026-11-23-gpu/search.json").read_text())
    loops = [row["images"] / row["epoch_s"] for row in found if row["opt"] == "sgd"]
    values["gpu-plain-loop-graphs"] = f"{statistics.median(loops):,.0f}"
    return values


def on_one_h200() -> Values:
    """Every mode beside one device, a step of `fit` beside that of a plain loop, recipes."""
    folder = "gpu/2026-11-26"
    values: Values = {"h200-modes": [], "h200-steps": [], "h200-recipes": []}
    (step,) = read(f"{folder}/modes.json", "steps")
    rows = {name: each["figures"] for name, each in step["findings"].items() if each["status"] == "ok"}
    values["h200-largest"] = brief(max(map(largest, rows.values())))
    for name, row in rows.items():
        differences = [
            brief(row["differences"][kind]) for kind in ("loss", "parameters", "buffers", "optimizer", "logits")
        ]
        values["h200-modes"].append(
            [f"`{row['mode']}`{name.removeprefix(row['mode'])}", str(row["processes"]), *differences]
        )
    status = ["single", "dp", "ddp", "ddp_spawn", "mp", "ddp_mp", "pp", "ddp_pp", "fsdp2", "tp"]
    by_mode = {row["mode"]: row for row in reversed(rows.values())}  # of `ddp_mp` the one of four devices
    values["h200-status"] = [
        ["none" if mode == "single" else f"`{mode}`", brief(largest(by_mode[mode])), str(by_mode[mode]["processes"])]
        for mode in status
    ]
    of_step = {
        name: read(f"{folder}/step-{name}.json", "turns")
        for name in ("eager", "eager-fit-alone", "graphs-fit-alone", "compiled", "compiled-again", "compiled-alone")
    }
    for name in ("eager", "graphs"):
        of_step[f"{name}-fit-alone"] |= read(f"{folder}/step-{name}-plain-alone.json", "turns")
    titles = {
        "eager": "eager, in turn",
        "eager-fit-alone": "eager, alone",
        "graphs-fit-alone": "CUDA graphs, alone",
        "compiled": "compiled, in turn",
        "compiled-again": "compiled, in turn, again",
        "compiled-alone": "compiled, in turn, nothing beside it",
    }
    ratios = {}
    for name, title in titles.items():
        cells, medians = [], []
        for way in ("fit", "plain loop"):
            walls = [turn["wall"] for turn in of_step[name][way]]
            medians.append(median(walls))
            cells += [f"{median(walls):.2f}", f"{min(walls):.2f}, {max(walls):.2f}"]
        ratios[name] = f"{medians[0] / medians[1]:.2f}"
        values["h200-steps"].append([title, *cells, ratios[name]])
        values |= {f"h200-{name}-fit": cells[0], f"h200-{name}-plain": cells[2]}
    values |= {"h200-eager-ratio": ratios["eager"], "h200-graphs-ratio": ratios["graphs-fit-alone"]}
    compiled = sorted(ratio for name, ratio in ratios.items() if name.startswith("compiled"))
    values["h200-compiled-ratio"] = f"{compiled[0]} to {compiled[-1]}"
    flat = next(row for row in read(f"{folder}/graphs-flat.json", "rows") if row["mode"] == "ddp_flat")
    values["h200-flat"] = brief(largest(flat))
    for name, way in {"h200-eager-host": "fit", "h200-eager-host-plain": "plain loop"}.items():
        values[name] = f"{median(turn['cpu'] for turn in of_step['eager'][way]):.1f}"
    (fit,) = (each for way, each in read(f"{folder}/step-eager.json", "profiles").items() if way == "fit")
    spans = sum(row[2] for row in fit["by_kernel"] if row[0].startswith("Optimizer.step"))  # no kernel
    values["h200-eager-kernels"] = f"{fit['kernels_ms'] - spans:.1f}"
    *_, last = (row for row in table(f"{folder}/default/metrics.csv") if row["val/acc"])
    values |= {
        f"h200-default-{split}": f"{100 * float(last[f'{split}/acc']):.{digits}f}"
        for split, digits in (("val", 2), ("train", 1))
    }
    values["h200-default"] = f"{read(f'{folder}/default/test.json', 'correct') / 100:.2f}"
    for short, name in {"fast": "fast_9_epochs", "muon": "muon_12_epochs"}.items():
        runs = read(f"recipes/2026-11-26-gpu/{name}.json")
        views = [[row[key] / 100 for row in runs] for key in ("correct", "correct_flipped")]
        cells = [f"{statistics.fmean(each):.2f} ± {statistics.stdev(each):.2f} %" for each in views]
        cells += [f"{min(views[1]):.2f} %", f"{median(row['train_s'] for row in runs):.1f} s"]
        cells += [f"{median(row['seconds'] for row in runs):.1f} s", str(len(runs))]
        values["h200-recipes"].append([f"`{name}.yaml`", *cells])
        values |= {
            f"h200-{short}": f"{statistics.fmean(views[0]):.2f} %",
            f"h200-{short}-mirrored": f"{statistics.fmean(views[1]):.2f} %",
        }
        values[f"h200-{short}-time"] = cells[3]
    runs = read("recipes/2026-11-26-default/trials.json")
    base = next(run for run in runs if run["trial"] == "the recipe")
    values["h200-trials"] = [
        [
            run["trial"],
            *(f"{100 * run[key] / run['total']:.2f} %" for key in ("correct", "correct_flipped")),
            f"{100 * (run['correct'] - base['correct']) / run['total']:+.2f}",
        ]
        for run in sorted(runs, key=lambda run: -run["correct"])
    ]
    return values


def same_bits() -> Values:
    """Digests of what was trained, and what virtual replicas cost."""
    values: Values = {"same-bits-price": []}
    peaks = {(row["processes"], row["parts"]): row["peak_mib"][0] for row in read("same-bits/2026-11-22/memory.json")}
    for row in read("same-bits/2026-11-22/price.json"):
        processes, parts, prices = row["processes"], row["parts"], row["price"]
        price = f"{statistics.median(prices):.2f}" if parts else "1"
        spread = f"{min(prices):.2f} to {max(prices):.2f}" if parts else ""
        cells = [str(processes), str(parts or "none"), f"{statistics.median(row['step_s']):.2f}", price, spread]
        values["same-bits-price"].append([*cells, f"{peaks[processes, parts]:.0f}"])
        values[f"same-bits-price-{processes}-{parts or 0}"] = price
        values[f"same-bits-peak-{processes}-{parts or 0}"] = f"{peaks[processes, parts]:.0f}"
    for name in ("2026-11-22/digests", "2026-11-23-epoch/digests", "2026-11-23-epoch/digests_bf16"):
        rows = read(f"same-bits/{name}.json")
        cells = [[row["precision"], row["mode"], str(row["devices"]), f"`{row['sha256'][:16]}`"] for row in rows]
        values["same-bits-" + name.replace("/", "-")] = cells
    return values


def options() -> Values:
    """Which options work in which mode: the table of refusals."""
    options = dict.fromkeys([*refusals.OTHERS, *(row.option for row in refusals.TABLE)])
    letters = {row: f"({letter})" for row, letter in zip(refusals.TABLE, ascii_lowercase, strict=False)}

    def cell(option: str, name: str) -> str:
        if (row := refusals.refusal_of(option, name)) is not None:
            return letters[row]
        return "GPU" if option in refusals.NEED_GPU else "yes"

    shown = {"mode": "NAME", "parts": 4}
    return {
        "options": [[f"`{option}`", *(cell(option, name) for name in refusals.NAMES)] for option in options],
        "refusals": [
            [letter, f"{row.problem.format(option=row.option, optimizer=optimizer, **shown)}; {row.remedy}"]
            for row, letter in letters.items()
            for optimizer in ["MuonSGD" if "Muon" in row.option else "NesterovSGD"]
        ],
    }


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
        | in_precisions()
        | compared()
        | replayed()
        | silent_bugs()
        | chaos()
        | audited()
        | hung()
        | paused()
        | recovered()
        | trained()
        | on_one_gpu()
        | on_one_h200()
        | same_bits()
        | options()
    )
    wrong = 0
    for page in [HERE.parent / "README.md", *HERE.parent.glob("docs/*.md"), *HERE.rglob("*.md")]:
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
    parser = argparse.ArgumentParser(description="Fill README, docs and records with numbers of the recorded files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page would change")
    return parser


if __name__ == "__main__":
    sys.exit(main(check=parser().parse_args().check))
