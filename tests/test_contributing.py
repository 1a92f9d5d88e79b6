"""The diffs of CONTRIBUTING.md apply, and what they add works."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import TINY
from data_files import write_binary_edition
from documents import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SMALL = ["--data.num_train=96", "--data.num_test=16", "--data.val_size=16", "--data.batch_size=16"]


def added(title: str, folder: Path) -> list[str]:
    """Copy the repository to `folder` and apply a section's diff; return the section's command without `python`."""
    section = PAGE.split(f"### {title}\n")[1].split("\n### ")[0].split("\n## ")[0]
    (diff,), (command,) = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL) for kind in ("diff", "bash"))
    for part in ("lit_cifar", "configs", "tests/mutations"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "--verbose", "-"], input=diff, text=True, cwd=folder, check=True)
    return command.split()[1:]


def succeeds(folder: Path, *arguments: str) -> str:
    """What the command prints."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("title", [part.split("\n")[0] for part in PAGE.split("\n### ")[1:] if "```diff" in part])
def test_what_is_to_be_added_applies(title: str, tmp_path: Path) -> None:
    added(title, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("title", "modes"), [("A network", 4), ("A mode", 1)])
def test_what_is_added_is_verified(title: str, modes: int, tmp_path: Path) -> None:
    arch = [] if title == "A network" else ["--model.arch=tiny", "--model.stem=imagenet"]
    succeeds(tmp_path, *added(title, tmp_path), *SMALL, *arch, "--trainer.accelerator=cpu", "--json", "found.json")
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["passed"] for row in rows] == [True] * modes


@pytest.mark.slow
def test_an_added_data_set_is_trained_on(tmp_path: Path) -> None:
    command = added("A data set", tmp_path)
    reader = tmp_path / "lit_cifar" / "data" / "cifar10.py"
    reader.write_text(reader.read_text().replace('"train": 50_000, "test": 10_000', '"train": 100, "test": 20'))
    write_binary_edition(tmp_path, records_per_file=20)
    small = [flag for flag in TINY if not flag.startswith(("--data.dataset", "--data.num"))]
    succeeds(tmp_path, *command, *small, f"--data.root={tmp_path}", "--run_dir=run")
    assert "grey CIFAR-10" in (tmp_path / "run" / "environment.json").read_text()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_added_mutation_is_found(tmp_path: Path) -> None:
    succeeds(tmp_path, *added("A mutation", tmp_path), "--json", "found.json")
    findings = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert [(found["mutation"], found["right"]) for found in findings] == [(None, True), ("no-warmup", True)]
