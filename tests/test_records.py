"""What the documents say of a measurement is in its record: commit, machine, numbers and pictures.

Tables are written here anew from the files in `benchmarks/`, and must be in the pages line by line.
"""

import csv
import json
import re
import statistics
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from commands import counts
from documents import BENCHMARKS, PAGES, RECORDS, ROOT, blocks, is_in_history, parser_of
from PIL import Image

from analysis.articles import PRINTED_LOSSES
from analysis.comparing_runs import paired, read_shuffling, welch
from lit_cifar.strategies.modes import MODES
from tests.mutations.catalogue import OF_PARTS

README, DOCS = ROOT / "README.md", ROOT / "docs"
ARTICLES = BENCHMARKS / "2026-11-20-articles-stem"
ARTICLES_BEFORE = BENCHMARKS / "2026-11-20-articles-run"
PLAIN = BENCHMARKS / "2026-11-23-articles-plain-momentum"
DEFAULT = BENCHMARKS / "2026-11-20-default-recipe"
EVALUATION = BENCHMARKS / "2026-11-20-evaluation"
FOUR_MODES = BENCHMARKS / "2026-11-20-modes"
VERIFY = BENCHMARKS / "2026-11-20-verify"
NETWORKS = BENCHMARKS / "2026-11-22-networks"
CLEAN = BENCHMARKS / "2026-11-24-verify-clean"
SELF_TEST = BENCHMARKS / "2026-11-22-self-test"
AGREEMENT = BENCHMARKS / "2026-11-20-agreement"
CHAOS = BENCHMARKS / "2026-11-22-chaos"
CURVES = BENCHMARKS / "2026-11-21-loss-curves"
SAME_BITS = BENCHMARKS / "2026-11-22-same-bits"
WHOLE_EPOCH = BENCHMARKS / "2026-11-23-same-bits"
SHUFFLING = BENCHMARKS / "2026-11-23-shuffling"
STOCK = BENCHMARKS / "2026-11-24-stock-lightning"
GPU = BENCHMARKS / "2026-11-23-gpu"
RECIPES = BENCHMARKS / "2026-11-23-recipes"
RECIPE_CPU = BENCHMARKS / "2026-11-23-recipe-cpu"
# Written before these commands noted commit and machine; their pages say so.
WITHOUT_COMMIT = {
    *(VERIFY / f"devices{n}_float{bits}.json" for n in (2, 4) for bits in (32, 64)),
    AGREEMENT / "agreement.json",
    CURVES / "losses.json",
    CURVES / "losses_float32.json",
    *(GPU / name / "results.json" for name in ("checks", "speed")),
    *(RECIPES / f"{name}.json" for name in ("search", "search_sgd", "sgd_epochs", "steps")),
}


def page(record: Path) -> str:
    """A record's page, or another, in one line."""
    path = record / "README.md" if record.is_dir() else record
    return " ".join(path.read_text(encoding="utf-8").split())


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def logged(run: Path, name: str) -> list[float]:
    """The values of a metric in the order in which they were logged."""
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def brief(value: float) -> str:
    """A difference with one digit, 0 where there is none."""
    return "0" if value == 0 else f"{value:.0e}"


def record_of(file: Path) -> Path:
    return next(record for record in RECORDS if record in file.parents)


# Every record ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_names_command_hardware_versions_and_n(record: Path) -> None:
    text = page(record)
    assert blocks(record / "README.md")
    assert re.search(r"cores? of an (AMD|Intel)|NVIDIA", text)
    assert re.search(r"torch \d+\.\d+\.\d+, lightning \d+\.\d+\.\d+", text)
    assert re.search(r"\bn = \d", text)
    assert re.search(r"\bcommit [0-9a-f]{7}\b", text)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commits_that_a_page_names_are_in_the_history(path: Path) -> None:
    named = re.findall(r"\b(?:commit|checkout) ([0-9a-f]{7,40})\b", page(path))
    assert [commit for commit in named if not is_in_history(commit)] == []


@pytest.mark.parametrize("file", sorted(BENCHMARKS.rglob("*.json")), ids=lambda file: str(file.relative_to(BENCHMARKS)))
def test_a_page_says_of_commit_and_machine_what_its_files_say(file: Path) -> None:
    content, text = read(file), page(record_of(file))
    assert file in WITHOUT_COMMIT or content["git"]["modified"] is False
    if "git" in content:
        assert f"commit {content['git']['commit'][:7]}" in text
    if "versions" in content:
        assert f"torch {content['versions']['torch'].split('+')[0]}" in text
        assert f"lightning {content['versions']['lightning']}" in text
        assert content["cpu"]["model"].replace("(R)", "").removesuffix(" Processor") in text
        assert bool(content["gpus"]) != ("no GPU" in text)


@pytest.mark.parametrize(
    "config", sorted(BENCHMARKS.rglob("config.yaml")), ids=lambda file: str(file.relative_to(BENCHMARKS))
)
def test_settings_that_are_refused_today_name_the_program_that_reads_them(config: Path) -> None:
    subcommand = "test" if config.parent.name == "test" else "fit"
    refused = False
    try:
        parser_of(subcommand).parse_args([subcommand, "--config", str(config)])
    except SystemExit:
        refused = True
    assert not refused or re.search(r"git checkout [0-9a-f]{7}", page(record_of(config)))


# Figures -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import figures

    return figures


@pytest.mark.parametrize("name", ["articles_run", "choosing", "gallery", "loss_curves", "proof", "stock_lightning"])
def test_a_figure_shows_its_record(name: str, figures: ModuleType, tmp_path: Path) -> None:
    """By what it says that it shows; and by its pixels, where the same release of Matplotlib draws them."""
    draw, record = figures.FIGURES[name]
    figures.save(draw(record), tmp_path / "new.png")
    with Image.open(DOCS / "figures" / f"{name}.png") as old, Image.open(tmp_path / "new.png") as new:
        assert old.text["Content"] == new.text["Content"], "draw it again: python benchmarks/figures.py"
        if old.text["Software"] == new.text["Software"]:
            assert old.size == new.size
            assert np.abs(np.asarray(old.convert("L"), float) - np.asarray(new.convert("L"), float)).mean() < 0.1


def test_the_digests_of_a_precision_are_the_same() -> None:
    rows = read(SAME_BITS / "digests.json")["rows"]
    shown = re.findall(
        r"^\| (\S+) \| (\S+) \| (\d) \| `(\w{16})` \|$", (SAME_BITS / "README.md").read_text(), flags=re.MULTILINE
    )
    assert shown == [(row["precision"], row["mode"], str(row["devices"]), row["sha256"][:16]) for row in rows]
    assert len({row["sha256"] for row in rows}) == len({row["precision"] for row in rows}) == 2
    assert {row["mode"] for row in rows} == {mode.name for mode in MODES} - {"tp"}


def test_the_digests_of_a_whole_epoch_are_the_same() -> None:
    records = [read(WHOLE_EPOCH / f"{name}.json")["rows"] for name in ("digests", "digests_bf16")]
    text = (WHOLE_EPOCH / "README.md").read_text()
    shown = re.findall(r"^\| (\S+) \| (\S+) \| (\d) \| `(\w{16})` \|$", text, flags=re.MULTILINE)
    assert shown == [
        (row["precision"], row["mode"], str(row["devices"]), row["sha256"][:16]) for rows in records for row in rows
    ]
    for rows, whole in zip(records, ("32-true", "bf16-mixed"), strict=True):
        assert len({row["sha256"] for row in rows}) == len({row["precision"] for row in rows})
        runs = {(row["mode"], row["devices"]) for row in rows if row["precision"] == whole}
        assert len(runs) == 15
        assert {mode for mode, _ in runs} == {mode.name for mode in MODES} - {"tp"}


@pytest.mark.usefixtures("figures")
def test_the_accuracy_with_virtual_replicas() -> None:
    import virtual_replicas_accuracy

    rows = read(WHOLE_EPOCH / "accuracy.json")["rows"]
    runs = {(row["seed"], row["parts"]): row for row in rows}
    for seed in range(len(rows) // 2):
        pair = [runs[seed, parts] for parts in (None, 4)]
        cells = [f"{row['correct']:,}" for row in pair] + [f"{row['losses'][-1]:.3f}" for row in pair]
        assert f"| {seed} | {' | '.join(cells)} |" in page(WHOLE_EPOCH)
    assert virtual_replicas_accuracy.summary(rows).splitlines()[-1] in page(WHOLE_EPOCH)


def test_what_virtual_replicas_cost_is_what_was_measured() -> None:
    record = read(SAME_BITS / "price.json")
    memory = {(row["processes"], row["parts"]): row["peak_mib"] for row in read(SAME_BITS / "memory.json")["rows"]}
    line = r"^\| (\d) \| (none|\d) \| (\S+) \| (\S+) \| .*\| (\d+) \|$"
    shown = re.findall(line, (SAME_BITS / "README.md").read_text(), flags=re.MULTILINE)
    assert shown == [
        (
            str(row["processes"]),
            str(row["parts"] or "none"),
            f"{statistics.median(row['step_s']):.2f}",
            f"{statistics.median(row['price']):.2f}" if row["parts"] else "1",
            f"{statistics.median(memory[row['processes'], row['parts']]):.0f}",
        )
        for row in record["rows"]
    ]
    assert {len(row["price"]) for row in record["rows"]} == {record["rounds"]}


def test_a_job_that_was_resized_ended_with_the_same_bits() -> None:
    record = read(SAME_BITS / "chaos.json")
    assert record["passed"]
    assert {row["difference"] for row in record["rows"]} == {0.0}
    for row in record["rows"]:
        counts = [len(row["events"]), row["restarts"], row["repeated"], row["missing"], row["doubled"]]
        cells = [", ".join(map(str, row["sizes"])), *map(str, counts), "0"]
        assert f"| {' | '.join(cells)} |" in (SAME_BITS / "README.md").read_text()


def test_every_figure_is_drawn_from_a_record(figures: ModuleType) -> None:
    assert {path.stem for path in (DOCS / "figures").iterdir()} == set(figures.FIGURES)


def test_the_gallery_is_written_from_its_records(figures: ModuleType) -> None:
    record, self_test = read(figures.GALLERY), read(SELF_TEST / "self_test.json")
    written = figures.gallery.page(record, self_test)
    assert (DOCS / "gallery.md").read_text() == written, "python benchmarks/gallery.py RECORD --page SELF_TEST"
    noise = figures.gallery.spread(record["of_seeds"])
    hidden = sum(not figures.gallery.is_seen(row, noise) for row in record["rows"])
    assert f"{hidden} of them change the losses" in page(README)


def test_one_other_number_in_the_record_is_another_figure(figures: ModuleType, tmp_path: Path) -> None:
    draw, record = figures.FIGURES["loss_curves"]
    content = read(record)
    content["rows"][4]["losses"][7] += 1e-9
    (tmp_path / "losses.json").write_text(json.dumps(content))
    assert figures.digest(draw(tmp_path / "losses.json")) != figures.digest(draw(record))


# Numbers -----------------------------------------------------------------------------------------------------------


def verify_rows() -> dict[str, list[dict[str, Any]]]:
    """For each mode its rows: float64 on 2 and 4 devices, float32 on 2 and 4; none where the mode does not fit."""
    found: dict[str, list[Any]] = {}
    names = ("devices2_float64", "devices4_float64", "devices2_float32", "devices4_float32")
    for place, name in enumerate(names):
        content = read(VERIFY / f"{name}.json")
        assert content["passed"]
        for row in content["rows"]:
            found.setdefault(row["mode"], [None] * len(names))[place] = row
    return found


def test_what_verify_found() -> None:
    text = page(VERIFY)
    for mode, rows in verify_rows().items():
        cells = [brief(max(row["differences"].values())) if row else "-" for row in rows[:2]]
        cells += [_of_what_it_may(row) if row else "-" for row in rows[2:]]
        assert f"| `{mode}` | {' | '.join(cells)} |" in text


@pytest.mark.parametrize(("column", "network"), [(0, "vit_tiny"), (1, "wide_resnet50_2")])
def test_what_verify_found_with_other_networks(column: int, network: str) -> None:
    rows = [row for path in NETWORKS.glob(f"{network}_*.json") for row in read(path)["rows"]]
    assert all(row["passed"] for row in rows)
    shown = re.findall(
        r"^\| `([\w-]+)` \| (\S+) \| (\S+) \|$", (NETWORKS / "README.md").read_text(), flags=re.MULTILINE
    )
    assert {mode: cells[column] for mode, *cells in shown} == {
        row["mode"]: brief(max(row["differences"].values())) for row in rows
    }


def test_the_largest_difference_with_other_networks() -> None:
    rows = [row for path in NETWORKS.glob("*.json") for row in read(path)["rows"]]
    largest = max(difference for row in rows for difference in row["differences"].values())
    assert f"the largest difference is {brief(largest)} in float64" in page(DOCS / "networks.md")


def _of_what_it_may(row: dict[str, Any]) -> str:
    difference = brief(row["differences"]["parameters"])
    return difference if difference == "0" else f"{difference} of {row['tolerance']['parameters']:.0e}"


def test_the_largest_difference_from_one_device() -> None:
    largest = max(max(rows[1]["differences"].values()) for rows in verify_rows().values())
    assert f"**{brief(largest)}** is the largest difference" in page(README)


def test_what_one_device_differs_from_itself() -> None:
    """Of the bounds, a factor of 4 on both kinds."""
    tolerances = [row["tolerance"] for rows in verify_rows().values() for row in rows[2:] if row]
    for kind, shape in (("parameters", "{:.1e} to {:.1e}"), ("optimizer", "{:.2f} to {:.2f}")):
        noise = sorted(tolerance[kind] / 4 for tolerance in tolerances)
        said = shape.format(noise[0], noise[-1]).replace("e-04", "e-4")
        assert said in page(VERIFY)
        assert said in page(DOCS / "verify.md")


def test_how_many_right_runs_verify_called_wrong() -> None:
    """None; the table has the modes of each configuration and their largest difference."""
    rows = read(CLEAN / "clean.json")["rows"]
    outcomes = Counter(mode["outcome"] for row in rows for mode in row["modes"])
    assert outcomes == {"passed": 149, "abstained": 1}
    assert f"{outcomes.total()} runs of {len(rows)} configurations" in page(CLEAN)
    assert f"149 of {outcomes.total()} runs of {len(rows)} configurations" in page(DOCS / "verify.md")
    for row in rows:
        largest = brief(max(mode["difference"] for mode in row["modes"]))
        assert f"| {row['configuration']} | {len(row['modes'])} | {largest} |" in page(CLEAN)


def test_how_many_mistakes_the_self_test_caught(figures: ModuleType) -> None:
    content = read(SELF_TEST / "self_test.json")
    planted = [finding for finding in content["findings"] if finding["bug"]]
    shown = sum(map(len, figures.mistakes(figures.PLANTED).values()))
    for path in (README, DOCS / "verify.md"):
        assert f"a planted mistake, {shown} of {len(planted)}" in page(path)
    said = re.search(r"self-test caught all of (\d+) planted mistakes and passed the (\d+) modes", page(SELF_TEST))
    assert said is not None
    assert tuple(map(int, said.groups())) == (len(planted), len(content["findings"]) - len(planted))
    assert content["passed"]
    assert all(finding["right"] for finding in content["findings"])


def test_mistakes_that_only_bits_show() -> None:
    content, shown = read(SAME_BITS / "planted.json"), page(SAME_BITS)
    planted = [finding for finding in content["findings"] if finding["bug"] and not finding["no_place"]]
    without = [finding for finding in content["findings"] if finding["bug"] is None]
    assert f"{len(planted)} planted mistakes acted and were caught, and {len(without)} runs without one" in shown
    assert f"For {len(content['findings']) - len(planted) - len(without)} mistakes" in shown
    assert content["passed"]
    for finding in planted:
        if finding["bug"] in {mutation.name for mutation in OF_PARTS}:
            first = finding["problems"][0].replace(", allowed 0.0e+00", "")
            assert f"| `{finding['bug']}` | {finding['imitates']} | `{finding['mode']}` | {first} |" in shown


KINDS = {
    "kill": "SIGKILL",
    "term": "SIGTERM",
    "stop": "SIGSTOP",
    "truncate": "truncated checkpoints",
    "disk": "full disk",
}


def chaos_row(row: dict[str, Any]) -> str:
    faults = Counter(event["fault"]["kind"] for event in row["events"])
    resizes = faults.pop("resize", 0)
    kinds = ", ".join(f"{faults[kind]} {word}" for kind, word in KINDS.items() if faults[kind])
    kinds += f"; and {resizes} orderly resizes" if resizes else ""
    sizes = [row["sizes"][0], *(e["fault"]["size"] for e in row["events"] if e["fault"]["kind"] == "resize")]
    job = f"{', '.join(map(str, sizes))} processes, float{row['precision'][:2]}"
    end = f"{row['difference']:.1e}" if row["difference"] else "0, bit for bit"
    numbers = [str(row[name]) for name in ("restarts", "repeated", "missing", "doubled")]
    return f"| {' | '.join([job, f'{faults.total()}: {kinds}', *numbers, end])} |"


@pytest.mark.parametrize("path", [DOCS / "resume.md", CHAOS], ids=lambda path: path.name)
def test_what_chaos_found(path: Path) -> None:
    content = read(CHAOS / "chaos.json")
    assert content["passed"]
    assert [row for row in map(chaos_row, content["rows"]) if row not in page(path)] == []


def test_how_many_faults_came() -> None:
    content = read(CHAOS / "chaos.json")
    rows = content["rows"]
    events = [event for row in rows for event in row["events"]]
    resizes = sum(event["fault"]["kind"] == "resize" for event in events)
    faults = f"{len(events) - resizes} faults and {resizes} resizes on two cores"
    assert f"{faults}; {sum(row['repeated'] for row in rows)} steps were repeated" in page(README)


def articles_row(name: str, run: Path, correct: str) -> str:
    losses = " ".join(f"{loss:.2f}" for loss in logged(run / "fit", "train/loss")[:6])
    return f"| {name} | {losses} | {logged(run / 'fit', 'train/acc')[-1]:.1%} | {correct} |".replace("%", " %")


def test_the_articles_recipe() -> None:
    right = {run: counts(run / "test")["all"] for run in (ARTICLES / "seed0", *ARTICLES_BEFORE.glob("seed*"))}
    assert {total for _, total in right.values()} == {10_000}
    ours = right.pop(ARTICLES / "seed0")[0]
    said = f"reaches {ours / 100:.2f} % on the 10,000 test images after 15 epochs (n = 1"
    assert said in page(DOCS / "training.md")
    assert f"to {ours / 100:.2f} % in four full runs" in page(README)
    assert articles_row("seed 0", ARTICLES / "seed0", f"**{ours:,}**") in page(ARTICLES)
    mean = statistics.mean(correct for correct, _ in right.values()) / 100
    said = f"reaches [{mean:.1f} %](../benchmarks/2026-11-20-articles-run/README.md) (n = {len(right)})"
    assert said in page(DOCS / "training.md")
    assert f"Mean of n = {len(right)}: {mean:.2f} %" in page(ARTICLES_BEFORE)
    for run, (correct, _) in right.items():
        assert articles_row(run.name.replace("seed", "seed "), run, f"{correct:,}") in page(ARTICLES_BEFORE)
    slow, fast = (logged(ARTICLES_BEFORE / name / "fit", "train/loss") for name in ("seed0", "seed1"))
    assert all(a > b for a, b in zip(slow, fast, strict=True))  # "in every epoch"


def test_the_recipe_with_plain_momentum() -> None:
    ours, total = counts(PLAIN / "seed0" / "test")["all"]
    losses = logged(PLAIN / "seed0" / "fit", "train/loss")
    assert (len(losses), total) == (15, 10_000)
    assert articles_row("seed 0", PLAIN / "seed0", f"**{ours:,}**") in page(PLAIN)
    shown = " ".join(f"{loss:.2f}" for loss in losses[:6])
    assert f"momentum as in copies of their code | {shown} | 1 |" in page(BENCHMARKS / "articles.md")
    assert f"| {ours / 100:.2f} %, stem of their code, momentum as in copies" in page(BENCHMARKS / "articles.md")
    assert f"reaches {ours / 100:.2f} % (n = 1)" in page(DOCS / "training.md")
    distance = statistics.mean(abs(a - b) for a, b in zip(PRINTED_LOSSES, losses, strict=False))
    assert f"are {distance:.2f} from the printed ones" in page(PLAIN)


def test_the_articles_numbers_beside_ours() -> None:
    text = page(BENCHMARKS / "articles.md")
    assert f"| printed | {' '.join(f'{loss:.2f}' for loss in PRINTED_LOSSES)} | 1 |" in text
    for run in (ARTICLES / "seed0", *ARTICLES_BEFORE.glob("seed*")):
        losses = " ".join(f"{loss:.2f}" for loss in logged(run / "fit", "train/loss")[:6])
        assert f"| {losses} | 1 |" in text
    (best, _), *before = (
        counts(run / "test")["all"] for run in (ARTICLES / "seed0", *sorted(ARTICLES_BEFORE.glob("seed*")))
    )
    assert f"| 74.79 to 76.04 % | {best / 100:.2f} %, stem of their code" in text
    assert (
        f"| {' and '.join(f'{correct / 100:.2f}' for correct, _ in before)} %, torchvision's stem | {len(before)} |"
        in text
    )
    for processes, printed in (("2", "3,491 + 3,521"), ("4", "1,751 + 1,730 + 1,740 + 1,791")):
        found = counts(EVALUATION / f"ddp{processes}")
        ranks = " + ".join(f"{correct:,}" for rank, (correct, _) in found.items() if rank != "all")
        assert f"| {processes} | {printed} = 7,012 | {ranks} = {found['all'][0]:,} |" in text
    counted = [counts(EVALUATION / name)["all"][1] for name in ("ddp3", "ddp3-padded")]
    assert f"| 10,002 | {counted[0]:,}; with `--data.pad_eval=true` {counted[1]:,} |" in text
    (mean,) = logged(FOUR_MODES / "dp" / "fit", "train/loss")
    assert f"finite; mean training loss {mean:.3f}, n = 1" in text


def test_the_default_recipe() -> None:
    tested, validated = counts(DEFAULT / "test")["all"], counts(DEFAULT / "fit", split="val")["all"]
    speed = statistics.median(logged(DEFAULT / "fit", "train/images_per_s"))
    reached = f"Shortened to one epoch it reaches {tested[0] / tested[1]:.1%}"
    assert reached.replace("%", " %") in page(DOCS / "training.md")
    said = f"validation accuracy {validated[0] / validated[1]:.2%}, **test accuracy {tested[0] / tested[1]:.2%}**"
    assert said.replace("%", " %") in page(DEFAULT)
    assert f"({tested[0]:,} of {tested[1]:,}), 14 minutes, {speed:.0f} images/s" in page(DEFAULT)


def test_one_checkpoint_counts_the_same_on_any_number_of_processes() -> None:
    exact = {run: counts(run)["all"] for run in EVALUATION.iterdir() if re.fullmatch(r"ddp\d", run.name)}
    ((correct, total),) = set(exact.values())
    assert (correct, total) == counts(ARTICLES_BEFORE / "seed1" / "test")["all"]
    for run in exact:
        assert f"| {run.name.removeprefix('ddp')} | {correct:,} | {total:,} |" in page(EVALUATION)
    sizes = sorted(int(run.name.removeprefix("ddp")) for run in exact)
    listed = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} processes find the same {correct:,} of {total:,}"
    assert listed in page(DOCS / "run-folder.md")
    padded = counts(EVALUATION / "ddp3-padded")["all"]
    assert f"| 3, `--data.pad_eval=true` | {padded[0]:,} | {padded[1]:,} = " in page(EVALUATION)
    text = (DOCS / "run-folder.md").read_text(encoding="utf-8")
    shown = re.findall(r"^│ (\w+) +│ +([\d,]+) │ +([\d,]+) │", text, flags=re.MULTILINE)
    printed = {rank: (int(a.replace(",", "")), int(b.replace(",", ""))) for rank, a, b in shown}
    assert printed == counts(EVALUATION / "ddp3")


def test_four_modes_on_the_real_data() -> None:
    text = page(FOUR_MODES)
    for mode in ("single", "dp", "ddp", "ddp_spawn"):
        run = FOUR_MODES / mode
        steps = ", ".join(f"{loss:.2f}" for loss in logged(run / "fit", "train/loss_step")[::2])
        speed = statistics.median(logged(run / "fit", "train/images_per_s"))
        (mean,), (correct, _) = logged(run / "fit", "train/loss"), counts(run / "test")["all"]
        name = "one device" if mode == "single" else f"`{mode}`"
        assert f"| {name} | {steps} | {mean:.3f} | {correct:,} | {speed:.0f} |" in text
    one, two = (statistics.median(logged(FOUR_MODES / m / "fit", "train/images_per_s")) for m in ("single", "ddp"))
    assert f"{two:.0f} images/s, not {one:.0f}" in page(DOCS / "choosing.md")


def test_ddp_and_ddp_spawn_computed_the_same() -> None:
    forked, spawned = (FOUR_MODES / mode for mode in ("ddp", "ddp_spawn"))
    assert logged(forked / "fit", "train/loss_step") == logged(spawned / "fit", "train/loss_step")
    assert counts(forked / "test") == counts(spawned / "test")
    assert counts(forked / "fit", split="val") == counts(spawned / "fit", split="val")
    (a,), (b,) = (logged(run / "fit", "train/loss") for run in (forked, spawned))
    assert 1e-7 < abs(a - b) / a < 1e-6  # "in the seventh digit"


def gaps(row: dict[str, Any]) -> list[float]:
    return [abs(a - b) for a, b in zip(row["losses"], row["expected_losses"], strict=True)]


def test_the_loss_curves() -> None:
    text = page(CURVES)
    rows = read(CURVES / "losses.json")["rows"]
    for row in rows:
        cells = [f"{loss:.3f}" for loss in (row["losses"][0], row["losses"][-1], row["expected_losses"][-1])]
        cells += [brief(max(gaps(row)[:2])), brief(max(gaps(row)))]
        assert f"| `{row['mode']}` | {' | '.join(cells)} |" in text
    farthest = brief(max(max(gaps(row)) for row in rows))
    assert f"follows the one device that it equals, to {farthest}" in page(DOCS / "training.md")
    assert f"follows the one device to {farthest}" in text
    float32 = [gaps(row) for row in read(CURVES / "losses_float32.json")["rows"]]
    assert f"agree to {max(max(gap[:2]) for gap in float32):.0e} for two".replace("e-05", "e-5") in text
    apart = f"part by up to {max(map(max, float32)):.2f}"
    assert apart in text
    assert apart in page(DOCS / "verify.md")


def test_how_far_stock_lightning_parts(figures: ModuleType) -> None:
    rows = read(STOCK / "stock.json")["rows"]
    for program in ("stock", "lit_cifar"):
        curves = {(row["processes"], row["seed"]): row["losses"] for row in rows if row["program"] == program}
        apart = {
            other: f"{figures.farthest({1: curves[1, 0], 2: curves[other]}):.2g}" for other in [(2, 0), (4, 0), (1, 1)]
        }
        assert f"| {program} | {' | '.join(apart.values())} |" in page(STOCK)
        of_processes = sorted((apart[2, 0], apart[4, 0]), key=float)[1]
        said = {"stock": "losses part by up to", "lit_cifar": "Ours part by"}[program]
        assert f"{said} {of_processes}" in page(README)
        assert program == "lit_cifar" or f"moves them by up to {apart[1, 1]}" in page(README)


def test_what_agreeing_costs() -> None:
    content, text = read(AGREEMENT / "agreement.json"), page(AGREEMENT)
    asking, noting, step = (content[f"{name}_s"] * 1000 for name in ("asking", "noting", "step"))
    for cell in (f"{asking:.1f} ms", f"{noting:.2f} ms", f"{step:.1f} ms"):
        assert f" | {cell} |" in text
    assert f"medians over {content['n']} steps" in text
    assert f"asking takes {asking:.1f} ms" in page(DOCS / "resume.md")


def test_what_a_frozen_order_costs() -> None:
    frame = read_shuffling(SHUFFLING / "shuffling.json")
    frame = frame.assign(accuracy=100 * frame["accuracy"]).sort_values(["processes", "seed"])
    of_seeds = frame.groupby(["seed", "set_epoch"], as_index=False).mean()
    assert len(of_seeds) == 20
    groups = {name: (welch, frame[frame["processes"] == int(name)]) for name in ("1", "2", "4")}
    groups["mean of the three, seed by seed"] = (paired, of_seeds)
    for value, digits in (("accuracy", 2), ("loss", 4)):
        for name, (test, some) in groups.items():
            first, second = (some.loc[some["set_epoch"] == flag, value].tolist() for flag in (True, False))
            found = test(first, second)
            means = [f"{statistics.fmean(values):.{digits}f}" for values in (first, second)]
            interval = f"{found.low:+.{digits}f} to {found.high:+.{digits}f}"
            cells = [
                name,
                *means,
                f"{found.difference:+.{digits}f}",
                interval,
                "< 0.001" if found.p < 0.0005 else f"{found.p:.3f}",
                f"{found.num_runs[0]} + {found.num_runs[1]}",
            ]
            assert f"| {' | '.join(cells)} |" in page(SHUFFLING)


# A visit to a GPU --------------------------------------------------------------------------------------------------


def findings(part: str, number: int) -> dict[str, dict[str, Any]]:
    """What step `number` of the visit found, by the name of the check."""
    (step,) = (step for step in read(GPU / part / "results.json")["steps"] if step["number"] == number)
    return {finding["name"]: finding for finding in step["findings"]}


def test_which_checks_on_a_gpu_did_not_pass() -> None:
    steps = [step for part in ("checks", "speed") for step in read(GPU / part / "results.json")["steps"]]
    wrong = {
        s["number"]: [f["name"] for f in s["findings"] if f["status"] != "ok"] for s in steps if s["status"] != "ok"
    }
    assert wrong == {3: ["pytest"], 5: ["tp runs"], 9: ["compiled"], 10: []}
    assert re.findall(r"\*\*Step (\d+)\.\*\*", page(GPU)) == [*map(str, wrong)]
    assert findings("checks", 3)["pytest"]["text"].startswith("14 passed, 7 errors")


def test_what_every_mode_on_a_gpu_differs_from_one_cpu_device() -> None:
    rows = {
        (name.removesuffix(" agrees"), finding["figures"]["processes"]): finding["figures"]["differences"]
        for number in (4, 5)
        for name, finding in findings("checks", number).items()
        if name.endswith(" agrees")
    }
    where = {1: "1", 2: "2, through gloo"}
    shown = re.findall(
        r"^\| `([\w-]+)` \| (\d[^|]*) \| (\de-.+) \|$", (GPU / "README.md").read_text(), flags=re.MULTILINE
    )
    assert shown == [
        (name, where[processes], " | ".join(map(brief, differences.values())))
        for (name, processes), differences in rows.items()
    ]
    largest = max(value for differences in rows.values() for value in differences.values())
    assert largest < 1e-13


def test_the_digests_of_a_precision_are_the_same_on_a_gpu() -> None:
    digests: dict[str, list[str]] = {}
    for name, finding in findings("checks", 8).items():
        if name.endswith(" runs"):
            digests.setdefault(name.removesuffix(" runs").split(", ")[1], []).append(finding["text"])
    rows = [(name, str(len(found)), *{digest[:16] for digest in found}) for name, found in digests.items()]
    assert {len(set(found)) for found in digests.values()} == {1}
    shown = re.findall(r"^\| (\S+) \| (\d) \| `(\w+)` \|$", (GPU / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(shown) == sorted(rows)
    assert f"had one digest in each of {len(rows)} precisions".replace("3", "three") in page(DOCS / "same-bits.md")


def test_losses_in_mixed_precision_on_a_gpu() -> None:
    found: dict[tuple[str, str], set[str]] = {}
    for name, finding in findings("checks", 6).items():
        mode, precision = name.split(", ")
        found.setdefault((precision, finding["text"].removeprefix("losses ")), set()).add(mode)
    (header,) = re.findall(r"^\| precision \| (`.*) \| (`.*) \|$", (GPU / "README.md").read_text(), flags=re.MULTILINE)
    columns = [set(re.findall(r"`([\w-]+)`", cell)) for cell in header]
    assert [*found.values()] == columns * 2
    for precision in ("bf16-mixed", "16-mixed"):
        assert f"| {precision} | {' | '.join(text for name, text in found if name == precision)} |" in page(GPU)
    assert f"{len(findings('checks', 6))} of 18 runs passed" in page(GPU)


def test_what_a_resumed_run_differs_on_a_gpu() -> None:
    for name, cells in {"resumed": "GPU | GPU", "device to CPU": "GPU | CPU", "CPU to device": "CPU | GPU"}.items():
        differences = findings("checks", 7)[f"{name}, against the whole run"]["figures"]["differences"]
        assert differences.pop("loss") == 0
        assert f"| {cells} | {' | '.join(map(brief, differences.values()))} |" in page(GPU)


def test_nothing_waits_for_the_gpu() -> None:
    waits = findings("checks", 2)
    assert waits.pop("a planted wait")["text"] == "found"
    assert {finding["text"] for finding in waits.values()} == {"no wait in 9 steps"}
    (listed,) = re.findall(r"nine steps of each: (.*?)\. A wait that was planted", page(GPU))
    assert {f"`{name.split(',')[0]}`" in listed for name in waits} == {True}


def test_images_per_second_on_a_gpu() -> None:
    names = {
        "eager": "`fit`",
        "channels_last": "`fit`, channels_last",
        "channels_last, compiled": "`fit`, channels_last, compiled",
        "plain loop, channels_last": "plain loop, channels_last",
        "plain loop, channels_last, compiled": "plain loop, channels_last, compiled",
    }
    for name, title in names.items():
        figures = findings("speed", 9)[name]["figures"]
        speed = figures["images_per_s"]
        cells = [title, f"{speed:,.0f}", f"{speed * 6.95 / 1e3:.0f}"]
        if epoch := figures.get("median"):
            parts = [epoch[f"{part}_s"] for part in ("training", "validation", "else")]
            cells += [*(f"{part:.2f} s" if part else "off" for part in parts), f"{figures['peak_mib']:.0f}"]
        assert f"| {' | '.join(cells)} |" in page(GPU)
    first = [findings("speed", 9)[name]["figures"]["epochs"][0]["total_s"] for name in [*names][:3]]
    assert "The first epoch took {:.1f} s, {:.1f} s and {:.1f} s".format(*first) in page(GPU)


def test_where_the_time_of_a_step_on_a_gpu_goes() -> None:
    profile = findings("speed", 9)["where the time goes"]
    steps = profile["figures"]["steps"]
    with (GPU / "speed" / "kernels.csv").open(encoding="utf-8") as file:
        kernels = [(row["name"], int(row["number"]), float(row["microseconds"])) for row in csv.DictReader(file)]
    words = {
        "convolutions": ("cudnn", "xmma", "nhwcAddPadding"),
        "BatchNorm": ("batch_norm",),
        "ReLU and additions": ("clamp_scalar", "threshold_kernel", "CUDAFunctor_add<c10::BFloat16>"),
        "optimizer": ("multi_tensor_apply",),
        "everything else": (),
        "all": (),
    }
    spent: dict[str, float] = dict.fromkeys(words, 0.0)
    for name, _, microseconds in kernels:
        kinds = [kind for kind, parts in words.items() if any(part in name for part in parts)]
        for kind in (*(kinds or ["everything else"]), "all"):
            spent[kind] += microseconds / steps / 1e3
    for kind, parts in words.items():
        said = ", ".join(f"`{part}`" for part in parts)
        assert f"| {kind} | {said}{' ' * bool(said)}| {spent[kind]:.1f} |" in page(GPU)
    assert f"starts {sum(number for _, number, _ in kernels) // steps} kernels, copies and fills" in page(GPU)
    names = ("channels_last", "plain loop, channels_last")
    step, plain = (512e3 / findings("speed", 9)[name]["figures"]["images_per_s"] for name in names)
    assert f"Without the profiler a step takes {step:.1f} ms" in page(GPU)
    assert f"The plain loop takes {plain:.1f} ms" in page(GPU)
    with (GPU / "speed" / "host.csv").open(encoding="utf-8") as file:
        host = {row["action"].split(".")[-1]: 1e3 * float(row["mean_s"]) for row in csv.DictReader(file)}
    spends = f"{host['training_step']:.1f} ms in the forward pass and {host['backward']:.1f} ms in the backward pass"
    assert spends in page(GPU)
    assert f"busy for {1e3 * profile['figures']['device_s'] / steps:.1f} ms a step" in page(GPU)


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", ["fast94", "fast95", "fast96"])
def test_what_a_recipe_reached_is_shown(name: str) -> None:
    record = read(RECIPES / f"{name}.json")
    (row,) = record["rows"]
    assert (row["at_once"], row["total"], len(record["gpus"])) == (1, 10_000, 1)
    plain, flipped = (f"{row[key] / 100:.2f} %" for key in ("correct", "correct_flipped"))
    shown = f"| {row['epochs']} | {plain} | {flipped} |"
    assert f"| `{name}` {shown} {row['epoch_s']:.2f} s | {row['train_s']:.1f} s |" in page(RECIPES)
    assert f"| `{name}.yaml` {shown} {row['train_s']:.1f} s |" in page(DOCS / "training.md")
    config = yaml.safe_load((ROOT / "configs" / "recipes" / f"{name}.yaml").read_text())
    assert config["trainer"]["max_epochs"] == row["epochs"]
    first = (ROOT / "configs" / "recipes" / f"{name}.yaml").read_text().splitlines()[0]
    assert f"{row['correct'] / 100:.1f} % of the test images, {row['correct_flipped'] / 100 + 1e-9:.1f} %" in first
    if name == "fast95":
        assert f"in {row['train_s']:.1f} s, compiling apart, to {plain}, {flipped} with mirror" in page(README)


def test_what_the_recipe_for_a_cpu_reached_is_shown() -> None:
    rows = {file.stem: read(file)["rows"][0] for file in RECIPE_CPU.glob("*.json")}
    labels = {"cpu": "`strided`, the recipe", "strided_22_epochs": "`strided`", "cifar_stem": "`cifar`"}
    for name, row in rows.items():
        assert (row["at_once"], row["total"]) == (1, 10_000)
        plain, flipped = (f"{row[key] / 100:.2f} %" for key in ("correct", "correct_flipped"))
        times = f"{row['epoch_s']:.1f} s | {row['train_s'] / 60:.1f} min"
        assert f"| {labels[name]} | {row['epochs']} | {plain} | {flipped} | {times} |" in page(RECIPE_CPU)
    row = rows["cpu"]
    plain, flipped = (f"{row[key] / 100:.2f} %" for key in ("correct", "correct_flipped"))
    took = f"{row['train_s'] / 60:.1f} minutes"
    assert f"{took} and reaches {plain} of the test images, {flipped} with mirror images" in page(DOCS / "training.md")
    assert f"on two cores in {took} to {plain} of the test images, {flipped} with mirror" in page(README)
    file = ROOT / "configs" / "recipes" / "cpu.yaml"
    assert yaml.safe_load(file.read_text())["trainer"]["max_epochs"] == row["epochs"]
    said = f"in {took} {row['correct'] / 100:.1f} % of the test images, {row['correct_flipped'] / 100 + 1e-9:.1f} %"
    assert said in file.read_text().splitlines()[0]


def test_the_search_of_the_recipes_is_shown() -> None:
    for run in read(RECIPES / "search.json"):
        split = "test" if run["images"] == 50_000 else "val"
        accuracy = f"{run[split]:.2f} % | {run[f'{split}_flipped']:.2f} % |"
        ends = f"| {run['images']:,} | {run['epochs']} | {run['cutout']} | {accuracy}"
        rates = f"| {run['lr']} | {run.get('lr_others', '')} ".replace("|  ", "| ")
        assert f"{rates}{ends}" in page(RECIPES)


def test_the_search_with_sgd_is_shown() -> None:
    for run in read(RECIPES / "search_sgd.json"):
        ends = f"| {run['epochs']} | {run['cutout']} | {run['test']:.2f} % | {run['test_flipped']:.2f} % |"
        starts = f"| {run['lr']} | {'yes' if run['zero'] else 'no'} |"
        lines = [line for line in (RECIPES / "README.md").read_text().splitlines() if line.startswith(starts)]
        assert sum(line.endswith(ends) for line in lines) == 1


def test_the_speed_of_options_is_that_of_the_records() -> None:
    speed = {
        finding["name"]: finding["figures"]
        for step in read(GPU / "speed" / "results.json")["steps"]
        for finding in step["findings"]
    }
    rows = {
        "no option": speed["eager"]["images_per_s"],
        "channels_last": speed["channels_last"]["images_per_s"],
        "channels_last, `--model.compile=true`": speed["channels_last, compiled"]["images_per_s"],
    }
    graphs = read(RECIPES / "sgd_epochs.json")
    rows["channels_last, `--model.compile=cuda_graphs`, fused SGD"] = graphs["images"] / graphs["median"]["training_s"]
    for name, images_per_s in rows.items():
        assert f"| {name} | {images_per_s:,.0f} |" in page(DOCS / "gpu-options.md")
