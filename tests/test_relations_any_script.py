"""Relations on scripts as strangers have them: what runs unedited, and what has a reason why it cannot."""

import re
from hashlib import sha256
from pathlib import Path

import pytest
from commands import run_here

from lit_cifar.checks.relations import landlock

STEPS = """
import ctypes, os, subprocess, sys, time, torch
from pathlib import Path
def train(steps, wait=0.0):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(steps, 8, 4):
        time.sleep(wait)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, inside a git tree, whose files must stay as they are."""
    tree = tmp_path / "tree"
    for folder in (tree / ".git", tree / "data", tree / "own" / "work", tree / "own" / "runs"):
        folder.mkdir(parents=True)
    for name in ("data/x.txt", "own/runs/log.txt", "own/work/model.safetensors"):
        (tree / name).write_text(Path(name).parts[0])
    monkeypatch.setattr("lit_cifar.tools.relations.exit_orderly_when_terminated", lambda: None)
    monkeypatch.chdir(tree / "own" / "work")
    return tmp_path


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def said(home: Path, *words: str, only: str = "trained") -> str:
    """What the command says of a script. It has changed no file."""
    before = digests(home)
    result = run_here("relations", *words[:1], f"--only={only}", *words[1:], check=False)
    assert digests(home) == before
    return str(result.stdout)


IN_C = f"""{STEPS}
assert subprocess.run("echo more >> ../../data/x.txt", shell=True).returncode
assert subprocess.run("rm ../../data/x.txt && echo own > ../../data/x.txt", shell=True).returncode == 0
system = ctypes.CDLL(None)
assert system.open(b"../runs/log.txt", os.O_WRONLY | os.O_TRUNC) == -1 == system.truncate(b"../runs/log.txt", 0)
assert system.open(b"new.txt", os.O_WRONLY | os.O_CREAT, 0o600) > 0
try:
    from safetensors.torch import load_file, save_file
except ImportError:
    pass
else:
    save_file({{"a": torch.ones(2)}}, "model.safetensors")
    assert load_file("model.safetensors")["a"].sum() == 2
torch.manual_seed(0)
train(6)
"""


@pytest.mark.skipif(not landlock.is_there(), reason="needs Linux 6.2 with Landlock")
def test_code_in_c_and_other_programs_write_to_no_file_of_the_user(home: Path) -> None:
    Path("train.py").write_text(IN_C)
    output = said(home, "train.py")
    assert re.search("^PASS    run .*6 steps.*twice the same$", output, flags=re.M), output
    assert "Landlock" not in output


def test_where_linux_guards_nothing_a_line_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "_LEAST", 99)
    Path("train.py").write_text(f"{STEPS}\ntrain(1)")
    assert "written by C code" in said(home, "train.py")


BAD = {
    "asks": ("print('?')\ninput()", "train.py:2 by EOFError.*; it reads its standard input"),
    "asks by a line": ("import sys\nint(sys.stdin.readline())", "train.py:2 by ValueError.*; it reads its standard in"),
    "writes beyond": ("open('/var/lit-cifar.txt', 'w')", "train.py:1 by PermissionError.* would share /var, so"),
    "lacks a package": ("\nimport no_such", "train.py:2 by ModuleNotFoundError.*; install it"),
    "lacks an argument": ("import argparse as a\np = a.ArgumentParser()\np.add_argument('x')\np.parse_args()", "--"),
    "is no Python": ("\n\nx = (", "train.py:3 by SyntaxError"),
    "is wrong": ("def f():\n    1 / 0\nf()", "train.py:2 by ZeroDivisionError.*; .* itself: python train.py$"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_script_that_cannot_run_here_has_a_place_and_a_remedy(name: str, home: Path) -> None:
    script, reason = BAD[name]
    Path("train.py").write_text(script)
    output = said(home, "train.py")
    assert re.match(f"CRASH   run .*{reason}", output, flags=re.M), output
    assert len(output.splitlines()[0]) < 600
