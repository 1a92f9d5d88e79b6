"""Is a rank that fails or hangs named, with its line, and is no healthy run ended? `hangs.py OUTPUT`.

A plain LightningModule under ddp on three CPU processes, with the callback `Watchdog`. One of them goes wrong in its
third epoch, in the next call of a hook. The first message must name its rank and a line of the function that does it.
Then healthy runs, in which something takes unusually long: none may be ended. As root, because one case mounts a file
system, and another throttles a disk.
"""

import argparse
import ctypes
import inspect
import itertools
import json
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from run_record import complete
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lit_cifar.tools.forked import ForkedRun
from lit_cifar.tools.terminal import say
from lit_cifar.watchdog.callback import Watchdog
from lit_cifar.watchdog.store import HeartbeatStore

RANKS, CULPRIT = 3, 1
BATCHES, BATCH = 8, 4  # of an epoch, of each rank
AT = 2 * BATCHES + 3  # optimizer steps before something goes wrong
LONG_S = 45.0
WITHIN_S, PATIENCE_S = 15.0, 40.0  # from then to the message; how long it is waited for
Row = dict[str, Any]


# What one rank does --------------------------------------------------------------------------------------------------


def fails() -> None:
    raise ValueError("planted")


def exits() -> None:
    sys.exit(3)


def exits_well() -> None:
    sys.exit(0)


def ends_at_once() -> None:
    os._exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def aborts() -> None:
    os.abort()


def reads_null() -> None:
    ctypes.string_at(0)


def recurses() -> None:
    recurses()


def needs_too_much_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
    bytearray(2**40)


def fills_a_disk() -> None:
    Path("/dev/full").write_text("a checkpoint")


def sleeps() -> None:
    time.sleep(1000)


def asks() -> None:
    sys.stdin = os.fdopen(os.pipe()[0])
    input("Go on? ")


def locks_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def joins_a_thread() -> None:
    thread = threading.Thread(target=sleeps, daemon=True)
    thread.start()
    thread.join()


def waits_for_an_event() -> None:
    threading.Event().wait()


def runs_a_program() -> None:
    subprocess.run(["sleep", "100"])


def runs_a_busy_program() -> None:
    subprocess.run(["timeout", "100", "sh", "-c", "while :; do :; done"])


def opens_a_fifo() -> None:
    os.mkfifo("fifo")
    Path("fifo").read_text()


def receives_from_a_socket() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.recv(1)


def reads_from_a_stuck_file_system() -> None:
    """Its server does not answer: the process is in the state of one that waits for a network file system."""
    libc, fuse = ctypes.CDLL(None), os.open("/dev/fuse", os.O_RDWR)
    libc.unshare(0x20000)  # the mount is this process's alone
    Path("stuck").mkdir()
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"stuck", b"stuck", b"fuse", 0, options):
        raise PermissionError("only root may mount")
    Path("stuck/data").stat()


def loops() -> None:
    while True:
        pass


def polls() -> None:
    while not Path("never").exists():
        time.sleep(0.01)


def multiplies_for_ever() -> None:
    x = torch.ones(64, 64)
    while True:
        x = x @ x


def matches_a_bad_pattern() -> None:
    re.match(r"(a+)+$", 60 * "a" + "b")


def sums_without_end() -> None:
    sum(itertools.repeat(0))


def waits_in_c() -> None:
    ctypes.CDLL(None).pause()


def locks_twice_in_c() -> None:
    """With the interpreter's lock, which other calls of C give up."""
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def meets() -> None:
    dist.barrier()


def reduces() -> None:
    dist.all_reduce(torch.ones(10))


def reduces_a_larger_one() -> None:
    dist.all_reduce(torch.ones(100_000))


def broadcasts() -> None:
    dist.broadcast(torch.ones(10), src=CULPRIT)


def gathers_objects() -> None:
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, "an object")


def receives() -> None:
    dist.recv(torch.ones(10), src=0)


class ExhaustedError(Exception):
    """A data set has no more samples."""


def has_fewer_batches() -> None:
    raise ExhaustedError


def nothing() -> None:
    pass


# What is unusual in a healthy run ------------------------------------------------------------------------------------


def computes_long() -> None:
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)


def sleeps_a_little() -> None:
    time.sleep(8)


def holds_the_interpreter_a_little() -> None:
    ctypes.PyDLL(None).sleep(8)


def writes_to_a_slow_disk() -> None:
    group, device = Path("/sys/fs/cgroup/blkio/hangs"), Path.cwd().stat().st_dev
    group.mkdir(exist_ok=True)
    (group / "blkio.throttle.write_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} 100000")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    file = os.open("slow", os.O_CREAT | os.O_WRONLY | os.O_DIRECT | os.O_DSYNC)
    os.write(file, memoryview(mmap.mmap(-1, 4096 * int(25 * LONG_S))))
    (group.parent / "cgroup.procs").write_text(str(os.getpid()))


def steps_three_times_as_long() -> None:
    time.sleep(0.6 if int(os.environ["RANK"]) == CULPRIT else 0.2)


def has_a_slow_store() -> None:
    exchange = HeartbeatStore._exchange

    def late(self: HeartbeatStore, beat: Any) -> Any:
        time.sleep(3)
        return exchange(self, beat)

    HeartbeatStore._exchange = late  # type: ignore[method-assign]


def is_suspended() -> None:
    """By its parent, with all others."""


class Case(NamedTuple):
    """`act` is what one rank does, at the first call of the hook `place` after `first_step` steps."""

    act: Callable[[], None]
    place: str = "training_step"
    others: Callable[[], None] = nothing  # what the other ranks do there
    first_step: int = AT
    has_line: bool = True  # whether the rank's own process can know where it was
    healthy: bool = False
    each_step: bool = False

    @property
    def name(self) -> str:
        return f"{self.act.__name__} in {self.place}, from step {self.first_step}; others: {self.others.__name__}"


SAMPLE, IN_WORKER = "a sample", "a sample, in a worker"
CALLBACK_HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
)
MODULE_HOOKS = ("training_step", "forward", "backward", "optimizer_step", "validation_step")
FAULTS = [
    *(Case(fails, place) for place in (*CALLBACK_HOOKS, *MODULE_HOOKS, SAMPLE, IN_WORKER)),
    *(Case(act) for act in (exits, exits_well, recurses, needs_too_much_memory, fills_a_disk)),
    Case(fills_a_disk, "on_save_checkpoint"),
    *(Case(act) for act in (aborts, reads_null)),
    Case(is_killed, has_line=False),
    Case(ends_at_once, has_line=False),
    Case(is_stopped, has_line=False),
    *(Case(sleeps, place) for place in ("on_train_batch_start", *MODULE_HOOKS)),
    *(Case(sleeps, place) for place in ("on_train_batch_end", "on_train_epoch_end", "on_save_checkpoint")),
    *(Case(act, place) for act in (sleeps, locks_twice, loops) for place in (SAMPLE, IN_WORKER)),
    *(Case(act, IN_WORKER, has_line=False) for act in (is_killed, is_stopped)),
    Case(sleeps, first_step=0),
    *(Case(act) for act in (asks, locks_twice, joins_a_thread, waits_for_an_event, runs_a_program, opens_a_fifo)),
    *(Case(act) for act in (receives_from_a_socket, waits_in_c, polls, runs_a_busy_program)),
    *(Case(act) for act in (loops, multiplies_for_ever, reads_from_a_stuck_file_system)),
    *(Case(act) for act in (matches_a_bad_pattern, sums_without_end, locks_twice_in_c)),
    *(Case(act) for act in (meets, reduces, broadcasts, gathers_objects, receives)),
    *(Case(act, others=reduces) for act in (meets, broadcasts, gathers_objects, reduces_a_larger_one, nothing)),
    Case(meets, "on_train_epoch_end"),
    Case(has_fewer_batches, SAMPLE, has_line=False),
]

HEALTHY = [
    Case(nothing, healthy=True),
    *(Case(computes_long, place, healthy=True) for place in ("training_step", "validation_step", "on_save_checkpoint")),
    Case(computes_long, first_step=0, healthy=True),
    Case(computes_long, others=computes_long, first_step=0, healthy=True),
    Case(computes_long, "validation_step", others=computes_long, healthy=True),
    Case(sleeps_a_little, healthy=True),
    Case(sleeps_a_little, IN_WORKER, healthy=True),
    Case(holds_the_interpreter_a_little, healthy=True),
    Case(writes_to_a_slow_disk, healthy=True),
    Case(is_suspended, healthy=True),
    Case(has_a_slow_store, others=has_a_slow_store, first_step=0, healthy=True),
    Case(steps_three_times_as_long, others=steps_three_times_as_long, first_step=0, each_step=True, healthy=True),
]
CASES = {case.name: case for case in [*FAULTS, *HEALTHY]}


# A stranger's training -----------------------------------------------------------------------------------------------


class Planted:
    """Does what a case says, once, in the calls of a hook."""

    def __init__(self, case: Case) -> None:
        self.case, self.step, self.done = case, 0, False

    def __call__(self, place: str) -> None:
        if place == self.case.place and self.step >= self.case.first_step and not self.done:
            self.done = not self.case.each_step
            is_culprit = int(os.environ["RANK"]) == CULPRIT
            if is_culprit:
                Path("begun").touch()
            (self.case.act if is_culprit else self.case.others)()


class Samples(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, planted: Planted) -> None:
        self.planted = planted

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        place = SAMPLE if torch.utils.data.get_worker_info() is None else IN_WORKER
        with suppress(ExhaustedError):
            for _ in range(BATCHES * BATCH):
                self.planted(place)
                yield torch.randn(8), torch.tensor(1)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, planted: Planted) -> Tensor:
        ctx.planted = planted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.planted("backward")
        return gradient, None


class Module(L.LightningModule):
    def __init__(self, planted: Planted) -> None:
        super().__init__()
        self.layers, self.planted = nn.Linear(8, 2), planted

    def forward(self, x: Tensor) -> Tensor:
        self.planted("forward")
        logits: Tensor = InBackward.apply(self.layers(x), self.planted)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.planted.step = self.global_step
        self.planted("training_step")
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.planted("validation_step")
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.planted("optimizer_step")
        super().optimizer_step(*args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def callback_of(planted: Planted) -> L.Callback:
    callback = L.Callback()
    for hook in CALLBACK_HOOKS:
        setattr(callback, hook, lambda *_, hook=hook, **__: planted(hook))
    return callback


def train(name: str) -> None:
    """As one of the ranks, in the working folder."""
    planted = Planted(CASES[name])
    checkpoints = ModelCheckpoint("checkpoints", every_n_epochs=1)
    workers: Row = {"num_workers": 1, "multiprocessing_context": "fork"} if planted.case.place == IN_WORKER else {}
    loader: Any = DataLoader(Samples(planted), BATCH, **workers)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=RANKS,
        max_epochs=3 if planted.case.act is has_fewer_batches else 8 if planted.case.healthy else 10**6,
        limit_val_batches=2,
        callbacks=[callback_of(planted), checkpoints, Watchdog()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(planted), loader, DataLoader(Samples(planted), BATCH))


# The record ----------------------------------------------------------------------------------------------------------


def observe(name: str) -> Row:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as text:
        folder, here = Path(text), Path.cwd()
        os.chdir(folder)
        run = ForkedRun(
            ["--train", name],
            environment=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
            stdout=folder / "stdout",
            stderr=folder / "stderr",
            num_ranks=RANKS,
            module="hangs",
        )
        os.chdir(here)
        try:
            row = (healthy if case.healthy else faulty)(case, run, folder)
        finally:
            run.kill()
    return {"case": name} | row


def faulty(case: Case, run: ForkedRun, folder: Path) -> Row:
    begun, stderr, until = folder / "begun", folder / "stderr", time.monotonic() + 60
    while not begun.exists() and time.monotonic() < until:
        time.sleep(0.05)
    begun_at = begun.stat().st_mtime if begun.exists() else time.time()
    while not (told := messages(stderr)) and time.time() < begun_at + PATIENCE_S:
        time.sleep(0.05)
    seconds = round(time.time() - begun_at, 1)
    message = told[0] if told else ""
    lines, first = inspect.getsourcelines(case.act)
    shown = {int(line) for line in re.findall(rf'{re.escape(Path(__file__).name)}(?:", line |:)(\d+)', message)}
    return {
        "seconds": seconds if told else None,
        "rank": message.startswith(f"lit_cifar: rank {CULPRIT} "),
        "line": not shown.isdisjoint(range(first, first + len(lines))) if case.has_line else None,
        "message": message,
    }


def healthy(case: Case, run: ForkedRun, folder: Path) -> Row:
    if case.act is is_suspended:
        while not (folder / "begun").exists():
            time.sleep(0.1)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in run.pids:
                os.killpg(pid, number)
            time.sleep(LONG_S)
    status = run.wait(200)
    return {"ended": status != 0, "notices": len(messages(folder / "stderr"))}


def messages(stderr: Path) -> list[str]:
    text = stderr.read_text() if stderr.exists() else ""
    return re.findall(r"^lit_cifar: rank \d.*?(?=^lit_cifar: the other)", text, re.DOTALL | re.MULTILINE)


def main(output: Path, train_as: str, only: str) -> None:
    if train_as:
        train(train_as)
        return
    cases = [name for name in CASES if re.search(only, name)]
    say(f"{len(cases)} cases")
    complete(output, cases, observe, settings={"within_s": WITHIN_S}, tell=lambda row: say(json.dumps(row)[:300]))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Is a rank that fails or hangs named, with its line?")
    parser.add_argument("output", type=Path, nargs="?", help="JSON file to write")
    parser.add_argument("--only", default="", help="pattern of the cases' names")
    parser.add_argument("--train", dest="train_as", default="", help="be one of the ranks of this case")
    return parser


if __name__ == "__main__":
    main(**vars(parser().parse_args()))
