"""Progress as text: a bar on a terminal, lines in a file, and the same figures on every rank."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_task import TinyData, TinyTask, tiny_trainer

from lit_cifar.callbacks import ProgressBar, Throughput


def fit(folder: Path, bar: ProgressBar, **settings: Any) -> None:
    settings = {"max_epochs": 2, "enable_progress_bar": True, "logger": False} | settings
    tiny_trainer(folder, callbacks=[bar, Throughput(warmup_steps=1)], **settings).fit(TinyTask(), datamodule=TinyData())


def test_a_log_file_gets_a_line_per_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ProgressBar())
    out, err = capsys.readouterr()
    lines = out.splitlines()

    assert [line.split("  ")[:2] for line in lines] == [["epoch 1/2", "done"], ["epoch 2/2", "done"]]
    for line in lines:
        words = [part.split()[0] for part in line.split("  ")[2:-1]]
        assert words == ["loss", "val", "img/s"]
    assert "\r" not in out + err


def test_a_long_epoch_gets_lines_in_between(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ProgressBar(line_every_s=0), max_epochs=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1].strip() for line in lines] == ["33%", "67%", "100%", "done"]


def test_a_terminal_gets_a_bar_with_short_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    fit(tmp_path, ProgressBar(refresh_rate=1))
    shown = capsys.readouterr().out
    final = [part for part in shown.replace("\n", "\r").split("\r") if "100%" in part and "val=" in part]

    assert any(line.startswith("epoch 1/2: 100%|") for line in final)
    assert any(line.startswith("epoch 2/2: 100%|") for line in final)
    assert all(name in final[-1] for name in ("3/3", "loss=", "val=", "img/s="))
    assert "train/" not in shown


def test_no_progress_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ProgressBar(refresh_rate=0))
    assert capsys.readouterr().out == ""


def test_endless_runs_count_epochs_without_a_total(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ProgressBar(), max_epochs=-1, max_steps=4)
    assert capsys.readouterr().out.splitlines()[0].startswith("epoch 1  done")
