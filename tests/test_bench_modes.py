"""`bench modes`: runs that wait for their turn, and what the rows say of a tiny network."""

import json
import socket
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import TINY

from lit_cifar.bench import mode_speed
from lit_cifar.bench.fits import Fit
from lit_cifar.bench.settings import Settings
from lit_cifar.bench.turns import Turns, training_in_turn


def test_a_run_takes_only_the_steps_that_it_is_allowed() -> None:
    steps: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        turns: Any = Turns(server.getsockname()[1], "ddp")

        def train() -> None:
            turns.on_train_start(SimpleNamespace(global_rank=1), None)
            for step in range(4):
                turns.on_train_batch_start(None, None, None, step)
                steps.append(step)

        trains = Thread(target=train)
        trains.start()
        with server.accept()[0] as connection:
            line = connection.makefile("rw")
        assert json.loads(line.readline()) == {"name": "ddp", "rank": 1}
        assert len(json.loads(line.readline())) == 1  # the first batch is there, and no step has been allowed
        assert steps == []
        line.write("3\n")
        line.flush()
        began = json.loads(line.readline())
        line.close()
        trains.join()
        turns._file.close()
    assert steps[:3] == [0, 1, 2]
    assert len(began) == 4  # the beginnings of the three steps, and the end of the last
    assert began == sorted(began)


def test_a_fit_that_fails_is_named(tmp_path: Path) -> None:
    broken = Fit(flags=[*TINY, "--data.batch_size=7", "--trainer.devices=2", "--trainer.strategy=ddp"])
    with (
        pytest.raises(RuntimeError, match="fit broken has ended while it was timed"),
        training_in_turn({"broken": broken}, folder=tmp_path),
    ):
        pass


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_row_of_a_tiny_network(tmp_path: Path) -> None:
    settings = Settings(device=torch.device("cpu"), folder=tmp_path, rounds=1, small=True)
    rows = mode_speed.measure(settings, lambda line: None)
    assert [row.unit for row in rows] == [*["x"] * 6, "img/s"] * 2
    assert all(row.found.median > 0 for row in rows)
