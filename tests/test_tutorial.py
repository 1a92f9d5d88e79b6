"""The tutorial, followed by its text alone: each program of it is written, each command run, each output compared."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from documents import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
MISTAKE = ("(model(images)", "(model.module(images)")  # of `broken.py`
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


def steps() -> Iterator[tuple[str, str, str]]:
    """Each block of the page: its kind, its text, and the program that the text before it has named last."""
    named = ""
    for before, kind, block in re.findall(r"(.*?)```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL):
        named = (re.findall(r"`(\w+\.py)`", before) or [named])[-1]
        yield kind, block, named


def is_shown(line: str, expected: str) -> bool:
    """Whether a printed line is the page's: its words, and its numbers but for rounding; " ... " is anything."""
    words = (re.escape(NUMBER.sub("0", part)) for part in re.split(r" \.\.\.", expected))
    if re.fullmatch(".*".join(words), NUMBER.sub("0", line)) is None:
        return False
    pairs = [] if " ..." in expected else zip(NUMBER.findall(line), NUMBER.findall(expected), strict=True)
    return all(float(a) == pytest.approx(float(b), rel=1e-3, abs=1e-12) for a, b in pairs)


def check(printed: str, expected: str) -> None:
    lines, may_skip = iter(printed.splitlines()), False
    for wanted in expected.splitlines():
        if wanted == "...":
            may_skip = True
            continue
        found = next((line for line in lines if is_shown(line, wanted) or not may_skip), "")
        assert is_shown(found, wanted), f"{wanted!r} is not printed after what stands before it:\n{printed}"
        may_skip = False


def run(command: str, folder: Path, *, attempts: int = 5) -> str:
    """What a command prints on both streams; of a run under torchrun, rank 1 is killed in its second epoch.

    A program in plain PyTorch may be aborted after its last line where the machine is busy: a thread of gloo asks for
    the interpreter's lock while that ends (https://github.com/pytorch/pytorch/pull/179291). Then it is run again.
    """
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **paths, "OMP_NUM_THREADS": "1"}
    stderr = subprocess.STDOUT if "max-restarts" in command else subprocess.PIPE
    with subprocess.Popen(
        command, shell=True, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=stderr
    ) as process:
        if "max-restarts" in command:
            kill_rank_1(psutil.Process(process.pid), folder / "runs" / "killed")
        printed, said = process.communicate()
    if process.returncode and attempts > 1 and "terminate called without an active exception" in (said or ""):
        return run(command, folder, attempts=attempts - 1)
    assert process.returncode == 0, f"{printed}{said}"
    return printed


def kill_rank_1(process: psutil.Process, run: Path) -> None:
    while not (run / "checkpoints" / "last.ckpt").exists():
        time.sleep(0.1)
    (rank,) = [child for child in process.children(recursive=True) if child.environ().get("LOCAL_RANK") == "1"]
    rank.kill()


def test_every_program_prints_what_the_page_says(tmp_path: Path) -> None:
    printed, kinds = "", []
    for kind, block, name in steps():
        if kind == "python":
            (tmp_path / name).write_text(block)
        elif kind == "bash":
            if name == "broken.py" and not (tmp_path / name).exists():
                (tmp_path / name).write_text((tmp_path / "ddp.py").read_text().replace(*MISTAKE))
            printed = run(block, tmp_path)
        elif kind == "text" and kinds[-1] == "bash":
            check(printed, block)
        kinds.append(kind)
    assert kinds.count("bash") > 7
    hashes = [(tmp_path / "runs" / run / "weights.sha256").read_text().split()[-3] for run in ("two", "killed")]
    assert hashes[0] == hashes[1]
