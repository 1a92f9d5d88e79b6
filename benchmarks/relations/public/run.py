"""Judges public trainings as they are, on made samples, and writes what was said.

    python benchmarks/relations/public/run.py --clones FOLDER --out RECORD.json [PART_OF_A_NAME ...]

FOLDER has, or is given, a clone of each repository, `OWNER+NAME`. A training that a record has is not run again. Small
files that a script expects, and would download or be given, are made in the clone; the record names them.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image

from lit_cifar.checks.relations.judging import RELATIONS, judged
from lit_cifar.checks.relations.made_data import picture
from lit_cifar.checks.relations.plan import LIMIT_S, Limits, Target
from lit_cifar.checks.verdict import summary
from lit_cifar.tools.terminal import about, exit_orderly_when_terminated, say, write_json

TABLE = Path(__file__).with_name("trainings.toml")
# Nothing is asked of a hub; what `evaluate` has downloaded is in the folder of the script.
_VARIABLES = {"HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "HF_MODULES_CACHE": "made_modules"}
_VARIABLES |= {"WANDB_MODE": "offline", "MPLBACKEND": "agg"}
_METRIC = """
import datasets, evaluate
from sklearn.metrics import accuracy_score, f1_score

class Glue(evaluate.Metric):
    def _info(self):
        columns = datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value("int64")))
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=columns)

    def _compute(self, predictions, references):
        return {"accuracy": accuracy_score(references, predictions), "f1": f1_score(references, predictions)}
"""


@dataclass(frozen=True)
class Training:
    """One row of the table."""

    repository: str
    commit: str
    script: str  # with its arguments
    made: dict[str, str]  # the kind of what is made at each path, from the script's folder


def trainings(table: Path) -> Iterator[Training]:
    for repository, each in tomllib.loads(table.read_text()).items():
        for group in (each, *each.get("given", [])):
            for script in group["scripts"]:
                yield Training(repository, each["commit"], script, group.get("made", {}))


def _make_text(path: Path, num_words: int = 160_000) -> None:
    draws = np.random.default_rng(0)
    words = [f"w{number}" for number in range(200)]
    lines = (" ".join(draws.choice(words, 16)) for _ in range(num_words // 16))
    path.write_text(" O God, O God! \n" + "".join(f" {line} \n" for line in lines))  # what minGPT's goes on from


def _make_texts(folder: Path) -> None:
    for part in ("train", "valid", "test"):
        _make_text(folder / f"{part}.txt", num_words=6_000)


def _make_tokens(folder: Path) -> None:
    for part in ("train", "val"):
        np.random.default_rng(0).integers(0, 65, 4_000, dtype=np.uint16).tofile(folder / f"{part}.bin")


def _make_images(folder: Path) -> None:
    for number in range(60):
        label = number % 2
        Image.fromarray(picture(label, number, size=256)).save(folder / f"class{label}_{number}.jpg")


def _make_citations(content: Path) -> None:
    """As the archive of Cora has them, with 60 words in place of 1433, of the papers that the repository names."""
    draws, cites = np.random.default_rng(0), content.with_name("cora.cites")
    if not cites.exists():
        np.savetxt(cites, draws.permutation(np.arange(3400) % 1700).reshape(-1, 2), fmt="%d", delimiter="\t")
    nodes = np.unique(np.loadtxt(cites, dtype=int))
    rows = ([node, *draws.integers(0, 2, 60), f"class{node % 7}"] for node in nodes)
    content.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))


def _make_bert(folder: Path) -> None:
    """A small one with random weights, which spells words."""
    import transformers

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    transformers.set_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(words), **small)
    transformers.BertForMaskedLM(config).save_pretrained(folder)


def _make_metric(modules: Path) -> None:
    """The metric "glue" of `evaluate`, where its cache has it."""
    folder = modules / "evaluate_modules/metrics/evaluate-metric--glue" / ("0" * 64)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "glue.py").write_text(_METRIC)


MAKERS = {
    "text": _make_text,
    "texts": _make_texts,
    "tokens": _make_tokens,
    "images": _make_images,
    "citations": _make_citations,
    "bert": _make_bert,
    "metric": _make_metric,
}


def make(path: Path, kind: str) -> None:
    (path.parent if path.suffix else path).mkdir(parents=True, exist_ok=True)
    if kind != "folder":
        MAKERS[kind](path)


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


def record(training: Training, root: Path, limit_s: float, most_s: float) -> dict[str, Any]:
    """The verdicts about a training, until the next one would begin after `most_s`."""
    program, *arguments = shlex.split(training.script)
    path = root / program
    for name, kind in training.made.items():
        make(path.parent / name, kind)
    target = Target(program=path.name, arguments=tuple(arguments), folder=str(path.parent))
    started, verdicts = perf_counter(), []
    sys.path.insert(0, str(root))  # runs have what this process has
    for verdict in judged(target, RELATIONS, limits=Limits(), limit_s=limit_s, made_data=True):
        verdicts.append(verdict)
        say(str(verdict))
        if perf_counter() - started > most_s:
            break
    sys.path.remove(str(root))
    say(summary(verdicts))
    said = json.dumps([asdict(verdict) for verdict in verdicts]).replace(f"{root.parent}/", "")
    return {"seconds": perf_counter() - started, "verdicts": json.loads(said)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PART_OF_A_NAME", help="Only trainings that have one of them.")
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--table", type=Path, default=TABLE, help="Of trainings (default: trainings.toml).")
    parser.add_argument("--out", type=Path, required=True, help="The record, written anew after each training.")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="Seconds of a run.")
    parser.add_argument("--most", type=float, default=600, metavar="S", help="Seconds of a training, about.")
    options = parser.parse_args()
    exit_orderly_when_terminated()
    os.environ.update(_VARIABLES)
    content = json.loads(options.out.read_text()) if options.out.exists() else about() | {"trainings": []}
    known = {(each["repository"], each["script"]) for each in content["trainings"]}
    for training in trainings(options.table):
        name = f"{training.repository} {training.script}"
        is_asked = not options.names or any(part in name for part in options.names)
        if (training.repository, training.script) in known or not is_asked:
            continue
        say(f"\n{name}")
        root = clone(training.repository, training.commit, options.clones.resolve())
        judged_by = {"checker": about()["git"]}  # a record may be made in several pieces
        content["trainings"].append(asdict(training) | judged_by | record(training, root, options.limit, options.most))
        write_json(options.out, content)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
