"""Is a healthy run ended in which a rank pauses? `pauses.py OUTPUT`.

A plain LightningModule under ddp on two CPU processes, with the callback `Watchdog`. In its third epoch one of them, or
both, do something that takes long, in the next call of a hook. The run must end with status 0, all its steps done.
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from hangs import BATCH, BATCHES, CALLBACK_HOOKS, IN_WORKER, MODULE_HOOKS, SAMPLE, Module, Row, Samples, messages
from lightning.pytorch.callbacks import ModelCheckpoint
from run_record import complete
from torch.utils.data import DataLoader

from lit_cifar.tools.forked import ForkedRun
from lit_cifar.tools.terminal import say
from lit_cifar.watchdog.callback import Watchdog

EPOCHS, AT = 4, 2 * BATCHES + 3  # optimizer steps before the pause
BOTH = "both"


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


def computes(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def keeps_the_interpreters_lock(seconds: float) -> None:
    """In a call of C that gives it to no other thread, and that no signal interrupts."""
    mutex, until = ctypes.create_string_buffer(64), (ctypes.c_long * 2)(int(time.time() + seconds), 0)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_timedlock(mutex, until)


def runs_a_program(seconds: float) -> None:
    subprocess.run(["sleep", str(seconds)], check=True)


def waits_for_a_socket(seconds: float) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.settimeout(seconds)
        try:
            client.recv(1)
        except TimeoutError:
            return


def waits_for_a_lock(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=seconds)


ACTS = {
    act.__name__: act
    for act in (sleeps, computes, keeps_the_interpreters_lock, runs_a_program, waits_for_a_socket, waits_for_a_lock)
}


class Case(NamedTuple):
    seconds: int
    place: str
    rank: int | str = 0
    act: str = "sleeps"


LATE_HOOKS = ("on_validation_end", "on_train_end", "on_fit_end")
PLACES = (*CALLBACK_HOOKS, *LATE_HOOKS, *MODULE_HOOKS, SAMPLE, IN_WORKER)
CASES = [
    *(Case(seconds, place, rank) for seconds in (20, 60) for place in PLACES for rank in (0, 1, BOTH)),
    *(Case(60, "on_train_batch_end", rank, act) for act in [*ACTS][1:] for rank in (0, 1)),
    *(Case(300, place, rank) for place in PLACES for rank in (0, 1, BOTH)),
]


class Pause:
    """Does what a case says, once, in the first call of its hook after `AT` steps."""

    def __init__(self, case: Case) -> None:
        self.case, self.step, self.done = case, 0, False

    def __call__(self, place: str) -> None:
        if place == self.case.place and self.step >= AT and not self.done:
            self.done = True
            if self.case.rank in (BOTH, rank := int(os.environ["RANK"])):
                Path(f"paused{rank}").touch()
                ACTS[self.case.act](self.case.seconds)


def train(case: Case) -> None:
    """As one of the ranks."""
    pause, callback = Pause(case), L.Callback()
    for hook in (*CALLBACK_HOOKS, *LATE_HOOKS):
        setattr(callback, hook, lambda *_, hook=hook, **__: pause(hook))
    workers: Row = {"num_workers": 1, "multiprocessing_context": "fork"} if case.place == IN_WORKER else {}
    loader: Any = DataLoader(Samples(pause), BATCH, **workers)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=EPOCHS,
        limit_val_batches=2,
        callbacks=[callback, ModelCheckpoint("checkpoints", every_n_epochs=1), Watchdog()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(pause), loader, DataLoader(Samples(pause), BATCH))
    Path(f"done{trainer.global_rank}").write_text(str(trainer.global_step))


def observe(case: Case) -> Row:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        run = ForkedRun(
            ["--train", json.dumps([*case]), "--folder", text],
            environment=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
            stdout=folder / "stdout",
            stderr=folder / "stderr",
            num_ranks=2,
            module="pauses",
        )
        try:
            status = run.wait(case.seconds + 300)
        finally:
            run.kill()
        told = messages(folder / "stderr")
        done = [path.read_text() for path in folder.glob("done*")]
        paused = len([*folder.glob("paused*")]) == 1 + (case.rank == BOTH)
    finished = paused and done == 2 * [str(EPOCHS * BATCHES)]
    late = [float(seconds) for seconds in re.findall(r"no (?:progress|heartbeat) for (\d+) s", "".join(told))]
    return case._asdict() | {"status": status, "finished": finished, "notices_after_s": late}


def main(output: Path, train_as: str, folder: Path, only: str, at_once: int) -> None:
    if train_as:
        os.chdir(folder)
        train(Case(*json.loads(train_as)))
        return
    cases = [case for case in CASES if re.search(only, json.dumps([*case]))]
    say(f"{len(cases)} cases")
    complete(output, cases, observe, settings={}, tell=lambda row: say(json.dumps(row)), at_once=at_once)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Is a healthy run ended in which a rank pauses?")
    parser.add_argument("output", type=Path, nargs="?", help="JSON file to write")
    parser.add_argument("--only", default="", help='pattern of cases, such as [60, "forward", 0, "sleeps"]')
    parser.add_argument("--at_once", type=int, default=16, help="runs at a time; most of them sleep")
    parser.add_argument("--train", dest="train_as", default="", help="be one of the ranks of this case")
    parser.add_argument("--folder", type=Path, default=Path(), help="where")
    return parser


if __name__ == "__main__":
    main(**vars(parser().parse_args()))
