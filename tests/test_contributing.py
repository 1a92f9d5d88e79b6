"""The diffs of CONTRIBUTING.md apply, and what they add works."""

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
TITLES = [part.split("\n")[0] for part in PAGE.split("\n### ")[1:] if "```diff" in part]
VERIFIED = ["--data.num_train=96", "--data.num_test=16", "--data.val_size=16", "--data.batch_size=16"]
VERIFIED += ["--trainer.accelerator=cpu"]
TRAINED = [flag for flag in TINY if not flag.startswith(("--data.dataset", "--data.num"))]
TRAINED += ["--data.root=.", "--run_dir=run"]
# What keeps each section's command small.
SMALL = {"A network": VERIFIED, "A data set": TRAINED, "A mode": VERIFIED, "A mutation": []}


def added(title: str, folder: Path) -> list[str]:
    """Copy the repository to `folder` and apply a section's diff; return the section's command without `python`."""
    section = PAGE.split(f"### {title}\n")[1].split("\n### ")[0].split("\n## ")[0]
    (diff,), (command,) = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL) for kind in ("diff", "bash"))
    for part in ("lit_cifar", "configs", "tests/mutations"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "--verbose", "-"], input=diff, text=True, cwd=folder, check=True)
    return command.split()[1:]


@pytest.mark.parametrize("title", TITLES)
def test_what_is_to_be_added_applies(title: str, tmp_path: Path) -> None:
    added(title, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("title", TITLES)
def test_what_is_added_works(title: str, tmp_path: Path) -> None:
    """A network and a mode pass in `verify`, a data set is trained on, and the mutation is caught: exit status 0."""
    command = added(title, tmp_path)
    if title == "A data set":
        reader = tmp_path / "lit_cifar" / "data" / "cifar10.py"
        reader.write_text(reader.read_text().replace('"train": 50_000, "test": 10_000', '"train": 100, "test": 20'))
        write_binary_edition(tmp_path, records_per_file=20)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *command, *SMALL[title]]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
