"""Relations on scripts as strangers have them: what runs unedited, and what has a reason why it cannot."""

import json
import os
import re
import sys
from hashlib import sha256
from pathlib import Path

import psutil
import pytest
from commands import graded, refused, run_here

from lit_cifar.checks.relations import judging, own_files

DAEMON = str(86_399 + os.getpid())  # seconds that it sleeps, by which it is known, apart from tests beside these
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
    """What the command says of a script. It has changed no file and left no process."""
    before = digests(home)
    result = run_here("relations", *words[:1], f"--only={only}", *words[1:], check=False)
    assert digests(home) == before
    assert not [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[-1:] == [DAEMON]]
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


@pytest.mark.skipif(not own_files.has_landlock(), reason="needs Linux 6.2 with Landlock")
def test_code_in_c_and_other_programs_write_to_no_file_of_the_user(home: Path) -> None:
    Path("train.py").write_text(IN_C)
    output = said(home, "train.py")
    assert re.search("^PASS    run .*6 steps.*twice the same$", output, flags=re.M), output
    assert "Landlock" not in output


def test_where_linux_guards_nothing_a_line_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files, "_LEAST", 99)
    Path("train.py").write_text(f"{STEPS}\ntrain(1)")
    assert "written by C code" in said(home, "train.py")


# It has no seed, and works where it is started.
UNUSUAL = f"""{STEPS}
assert (Path(__file__).parents[2] / "data" / "x.txt").read_text() == "data"
Path("../runs/log.txt").open("a").write("more")
subprocess.run(["setsid", "-f", "sleep", "{DAEMON}"])
os.chdir("..")
Path("new").mkdir()
train(6)
"""
MAGICS = "%matplotlib inline\n!pip list\nif torch.cuda.is_available():\n    %time 1\ndisplay(1 % 2)"
NOTEBOOK = ["%%bash\nexit 1", STEPS, MAGICS, UNUSUAL]


@pytest.mark.parametrize("kind", ["notebook", "module", "command"])
def test_a_training_is_taken_as_it_is_started(kind: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"notebook": ["train.ipynb"], "module": ["-m", "train"], "command": ["my-train"]}[kind]
    cells = [{"cell_type": "code", "source": cell} for cell in NOTEBOOK]
    Path("train.ipynb").write_text(json.dumps({"cells": cells}))
    Path("train.py").write_text(UNUSUAL)
    installed = home / "bin" / "my-train"
    installed.parent.mkdir()
    installed.write_text(f"#!{sys.executable}\nimport sys\nsys.path.insert(0, '')\nimport train\nsys.exit(0)\n")
    installed.chmod(0o755)
    monkeypatch.setenv("PATH", f"{installed.parent}:{os.environ['PATH']}")
    output = said(home, *words)
    assert re.search(r"^PASS    run .*6 steps.*twice the same$", output, flags=re.M), output


def test_what_an_earlier_training_may_have_left_is_named(home: Path) -> None:
    Path("train.py").write_text("open('model.safetensors')")
    output = said(home, "train.py")
    assert re.search("^NOT JUDGED.*\n +run +no step .* was seen .it reads model.safetensors: move", output, flags=re.M)


def test_what_is_no_notebook_or_python_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("x.ipynb").write_text("{}")
    refused("relations", "x.ipynb", says=["x.ipynb is no notebook of format 4", "save it"])
    (home / "my").write_text("#!/bin/sh\n")
    (home / "my").chmod(0o755)
    monkeypatch.setenv("PATH", str(home))
    refused("relations", "my", says=["is no Python script"])


BAD = {
    "asks": ("print('?')\ninput()", "train.py:2 by EOFError.*; it reads its standard input"),
    "asks by a line": ("import sys\nint(sys.stdin.readline())", "train.py:2 by ValueError.*; it reads its standard in"),
    "writes beyond": ("open('/var/lit-cifar.txt', 'w')", "train.py:1 by PermissionError.* would share /var, so"),
    "lacks a package": ("\nimport no_such", "train.py:2 by ModuleNotFoundError.*; install it"),
    "lacks an argument": ("import argparse as a\np = a.ArgumentParser()\np.add_argument('x')\np.parse_args()", "--"),
    "never ends": (
        f"import subprocess, time\nsubprocess.run(['setsid', '-f', 'sleep', '{DAEMON}'])\ntime.sleep(99)",
        "a limit of 3 s: pass a higher --limit",
    ),
    "is no Python": ("\n\nx = (", "train.py:3 by SyntaxError"),
    "is wrong": ("def f():\n    1 / 0\nf()", "train.py:2 by ZeroDivisionError.*; .* itself: python train.py$"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_script_that_cannot_run_here_has_a_place_and_a_remedy(name: str, home: Path) -> None:
    script, reason = BAD[name]
    Path("train.py").write_text(script)
    output = said(home, "train.py", "--limit=3" if name == "never ends" else "--limit=60")
    assert re.match(f"CRASH   run .*{reason}", output, flags=re.M), output
    assert len(output.splitlines()[0]) < 600


@pytest.mark.parametrize(
    ("words", "wait", "steps"), graded(([], 0.05, 9), (["--steps=20"], 0.05, 20), slow=[([], 0.6, 4)])
)
def test_a_slow_training_is_cut_short_and_judged(
    words: list[str], wait: float, steps: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter = dict(zip((0.01, 0.07, 1.0), judging._SHORTER.values(), strict=True))  # after 0.6 and 4.2 seconds
    monkeypatch.setattr(judging, "_SHORTER", shorter)
    Path("train.py").write_text(f"{STEPS}\ntrain(40, wait={wait})")
    output = said(home, "train.py", *words)
    assert re.search(rf"^PASS    what is trained .*\(the first {steps} steps\)$", output, flags=re.M), output


def test_a_model_whose_optimizer_is_given_up_was_trained(home: Path) -> None:
    """As a teacher, before its student is."""
    models = "teacher, student = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)"
    trained = "\n".join(f"train(4, model={model})" for model in ("teacher", "student"))
    script = STEPS.replace("wait=0.0", "wait=0.0, model=None").replace("model = ", "model = model or ")
    Path("train.py").write_text(f"{script}\n{models}\n{trained}")
    assert "PASS    what is trained            " in said(home, "train.py")


def test_runs_of_a_training_that_listens_at_its_own_port_are_not_at_once(home: Path) -> None:
    port = 20_000 + os.getpid() % 10_000
    store = f'store = torch.distributed.TCPStore("127.0.0.1", {port}, 1, True)'
    Path("train.py").write_text(f"{STEPS}\n{store}\nfor _ in range(3):\n    train(4, wait=0.05)")
    output = said(home, "train.py", only="evaluation,workers,trained")
    assert "PASS    what is trained" in output
    assert "in use" not in output


LOADED = f"""{STEPS}
from torch.utils.data import DataLoader
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(24, 4)
def evaluate():
    model.eval()
    with torch.no_grad():
        losses = [model(batch).square().REDUCED() + NOISE for _, batch in zip(range(PARTS), DataLoader(data, 5))]
    sys.stdout.write(f"test loss {{torch.stack(losses).REDUCED():.5f}}\\n")
for epoch in range(50):
    TRAIN
    for batch in DataLoader(data, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    EVALUATE
evaluate()
"""


USUAL = {"REDUCED": "sum", "TRAIN": "model.train()", "NOISE": "0", "EVALUATE": "", "PARTS": "99"}  # behind 50 epochs


@pytest.mark.parametrize(
    ("changes", "outcome", "says"),
    graded(
        ({"REDUCED": "mean"}, "FAIL", "each of 4 parameters"),
        slow=[
            ({}, "PASS", "each of 4 parameters"),
            ({"NOISE": "torch.rand(())"}, "NOTE", "the evaluation draws random numbers"),
            ({"PARTS": "2"}, "NOTE", "the evaluation ends before its loader does"),
            ({"TRAIN": "", "EVALUATE": "evaluate()"}, "PASS", "3 of 9 steps are in eval mode"),
        ],
    ),
)
def test_an_evaluation_is_judged_where_it_stands(changes: dict[str, str], outcome: str, says: str, home: Path) -> None:
    words = USUAL | changes
    Path("train.py").write_text(re.sub("|".join(words), lambda found: words[found[0]], LOADED))
    output = said(home, "train.py", "--steps=9", only="evaluation,trained")
    assert re.search(rf"^{outcome} +evaluation .*printed: test loss.*\(.*the first 9 steps\)$", output, re.M), output
    assert says in output


STATEFUL = """
import argparse, copy, os, torch
from torch.utils.data import DataLoader
def made(model, epoch):
    model[0].requires_grad_(epoch >= STAGE)
    optimizer = torch.optim.SGD([own for own in model.parameters() if own.requires_grad], lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "schedule": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=20)}
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    resume = parser.parse_args().resume
    torch.manual_seed(0)
    os.path.islink("out") and os.rename("out", "old")
    os.makedirs("out", exist_ok=True)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
    loaded, average = torch.load(resume) if resume else {"epoch": 0}, copy.deepcopy(model).requires_grad_(False)
    parts = {"model": model, "average": average} | made(model, loaded["epoch"])
    for name in loaded.keys() & parts.keys() - ({"optimizer", "schedule"} if loaded["epoch"] == STAGE else set()):
        parts[name].load_state_dict(loaded[name])
    for epoch in range(loaded["epoch"], 4):
        if epoch == STAGE > loaded["epoch"]:
            parts |= made(model, epoch)
        for batch in DataLoader(torch.randn(40, 6, generator=torch.Generator().manual_seed(epoch)), 8):
            parts["optimizer"].zero_grad()
            (model(batch) - batch).square().mean().backward()
            parts["optimizer"].step()
            average[0].weight.lerp_(model[0].weight.detach(), 0.1)
        with torch.no_grad():
            parts["schedule"].step(average(torch.ones(1, 6)).sum())
        saved = {name: part.state_dict() for name, part in parts.items() if name != "LOST"}
        torch.save(saved["model"], "weights.pt")
        torch.save(saved | {"epoch": epoch + 1}, "out/x.txt")
    torch.save(saved["model"], "final.pt")
main()
"""


@pytest.mark.parametrize(
    ("lost", "stage", "says"),
    graded(
        ("schedule", "0", "FAIL.*holds no schedule"),
        slow=[("average", "0", "FAIL.*kept/beside"), ("none", "0", "PASS +resume"), ("none", "2", "PASS +resume")],
    ),
)
def test_a_resume_lacks_no_plateau_and_no_average(lost: str, stage: str, says: str, home: Path) -> None:
    """All of it is local to a function, a stage has an optimizer of its own, and the user's file is behind a link."""
    Path("out").symlink_to(home / "tree" / "data")
    Path("train.py").write_text(STATEFUL.replace("LOST", lost).replace("STAGE", stage))
    output = said(home, "train.py", only="resume")
    assert re.search(rf"^{says}", output, flags=re.M), output
    assert ("FAIL" in output) == says.startswith("FAIL")


SCALED = """
import os, torch
from torch.utils.data import DataLoader, DistributedSampler
world = int(os.environ.get("WORLD_SIZE", 1))
world > 1 and torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data, model = torch.randn(64, 6), torch.nn.Linear(6, 1)
own = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * FACTOR)
for batch in DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False) if world > 1 else None):
    optimizer.zero_grad()
    own(batch).square().sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_rate_may_follow_the_number_of_processes(home: Path) -> None:
    """As by the rule of Goyal et al.; other changes of it are failures."""
    for factor, outcome in {"world": "NOTE", "world ** 2": "FAIL"}.items():
        Path("train.py").write_text(SCALED.replace("FACTOR", factor))
        assert re.search(rf"^{outcome}    ranks ", said(home, "train.py", only="ranks"), flags=re.M)
