"""`benchmarks/scripts`: runs are trained with each seed or in each mode, and a record is continued where it ends."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documents import SCRIPTS
from short_fits import data, fit, short
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from lit_cifar import LitResNet
from lit_cifar.errors import ConfigError

sys.path.insert(0, str(SCRIPTS))

import overhead
import run_record


def test_a_record_is_continued_with_the_cases_that_it_lacks(tmp_path: Path) -> None:
    output, settings = tmp_path / "record.json", {"flags": ["--data.batch_size=8"]}
    tried: list[int] = []
    told: list[dict[str, Any]] = []

    def train(case: int) -> dict[str, Any]:
        tried.append(case)
        if tried == [1, 2]:
            raise KeyboardInterrupt
        return {"case": case}

    with pytest.raises(KeyboardInterrupt):
        run_record.complete(output, [1, 2], train, settings=settings, tell=told.append)
    assert json.loads(output.read_text())["rows"] == [{"case": 1}]
    rows = run_record.complete(output, [1, 2, 3], train, settings=settings, tell=told.append, at_once=2)
    assert sorted(tried) == [1, 2, 2, 3]
    assert rows == told == json.loads(output.read_text())["rows"] == [{"case": 1}, {"case": 2}, {"case": 3}]
    assert json.loads(output.read_text())["flags"] == settings["flags"]
    with pytest.raises(ConfigError, match=r"record\.json has been made with other flags\n.*name a new file"):
        run_record.complete(output, [1, 2], train, settings={"flags": ["--x"]}, tell=print)


@short
def test_the_plain_loop_computes_what_fit_computes(tmp_path: Path) -> None:
    """Else it would be no measure: the same weights, bit for bit, and the same mean loss."""
    network, twin = (nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 10)) for _ in range(2))
    twin.load_state_dict(network.state_dict())
    schedule = {"lr_scheduler": lambda optimizer: StepLR(optimizer, 1000)}
    module = LitResNet(network=network, optimizer=lambda params: SGD(params, lr=0.1), label_smoothing=0.2, **schedule)
    images = data()
    images.setup("fit")
    precision = SimpleNamespace(forward_context=nullcontext)
    settings = SimpleNamespace(precision_plugin=precision, log_every_n_steps=2, datamodule=images)
    loop = overhead.PlainLoop(twin, settings, module)
    loop.run(2)
    trainer = fit(module, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), twin.parameters(), strict=True))
    ((loss, accuracy),) = loop.logged
    assert loss == pytest.approx(float(trainer.callback_metrics["train/loss"]))
    assert accuracy == pytest.approx(float(trainer.callback_metrics["train/acc"]))
