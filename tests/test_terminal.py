"""What a user sees of a run: our own lines and nothing of Lightning's, and a help that begins with what people use."""

import os
import re
from pathlib import Path

import pytest
from commands import TINY, graded, launch, mode_flags, run_here

from lit_cifar.cli.help import COMMON

# Each of these makes Lightning say something.
TALKATIVE = ["--trainer.log_every_n_steps=50", "--trainer.limit_val_batches=1", "--seed_everything=1"]
# What a line of a fit begins with.
OURS = ("model ", "data ", "batch ", "mode ", "split ", "epoch ", "result ", "run folder ", "look at it ")
OURS += ("length ", "optimizer ", "note ", "test it ")


@pytest.mark.parametrize("mode", graded("single", "pp", slow=["ddp", "ddp_spawn"]))
def test_fit_prints_our_lines_and_none_of_lightning(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own process, in those that Lightning starts or spawns, of torchrun, and on a login node of SLURM."""
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    ranks = 2 if mode == "pp" else 1
    flags = [*TALKATIVE, *mode_flags(mode), f"--run_dir={tmp_path / 'run'}"]
    result = launch("fit", *TINY, *flags, ranks=ranks)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("model ")
    assert lines[2].startswith("batch ")
    assert [line for line in lines if not line.startswith((*OURS, " " * 12))] == []


def test_a_resumed_fit_says_from_where_and_an_evaluation_begins_with_our_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*TINY, *TALKATIVE, "--model.lr_scheduler=StepLR", "--model.lr_scheduler.step_size=9"]
    run_here("fit", *flags, f"--run_dir={run}")
    again = launch("fit", *flags, f"--run_dir={run}", "--resume=auto", "--trainer.max_epochs=2")
    assert again.stderr == f"--resume=auto: resuming from {run}/checkpoints/last.ckpt\n"
    best = f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}"
    tested = launch("test", *flags, best, f"--run_dir={tmp_path / 'test'}")
    assert tested.stderr == ""
    assert [line.split()[0] for line in tested.stdout.splitlines()[:3]] == ["test", "data", "mode"]


@pytest.mark.slow
def test_our_warnings_and_what_lightning_is_asked_to_say_are_shown_in_a_line_each(tmp_path: Path) -> None:
    flags = ["--trainer.sync_batchnorm=true", "--trainer.max_time=00:00:00:00"]
    warning, said, why = launch("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}").stderr.splitlines()
    expected = "--trainer.sync_batchnorm=true has no effect with one process, which sees the whole batch"
    assert warning == f"lit_cifar: warning: {expected}"
    assert "Time limit reached" in said
    assert "ended after 0 optimizer steps by --trainer.max_time" in why


@pytest.mark.parametrize("subcommand", COMMON)
def test_help_shows_the_common_flags_and_how_to_see_all(subcommand: str) -> None:
    shown = run_here(subcommand, "--help").stdout
    flags = set(re.findall(r"^  (?:-c CONFIG, )?--([\w.]+)", shown, flags=re.MULTILINE))
    assert flags == {flag for group in COMMON[subcommand].values() for flag in group}
    assert 12 <= len(flags) <= 26
    assert len(shown.splitlines()) < 95
    assert f"`python -m lit_cifar {subcommand} --help=all` shows every flag" in shown
