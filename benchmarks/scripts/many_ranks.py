"""What grows with the number of ranks: `many_ranks.py OUTPUT`, on one machine, with light stand-ins for ranks.

The watchdog's calls to a real store, by as many connections as ranks; the groups of a mesh, with a process group that
sends nothing; the sample audit at a checkpoint; and what rank 0 writes after an evaluation. "Before" is what commit
fd36ea9 did, written out here where its code is gone.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from run_record import complete
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.tensorboard import SummaryWriter

from lit_cifar.checkpoint.sample_audit import Tally
from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.reporting.evaluation_tables import write_per_rank
from lit_cifar.reporting.rank_statistics import AccuracyCount, deviates
from lit_cifar.strategies.mesh import make_mesh
from lit_cifar.tools.terminal import say
from lit_cifar.watchdog.heartbeat import first_heartbeat

RANKS = (8, 64, 1024)
SAMPLES, BATCH, STEPS = 1_281_167, 4096, 100  # ImageNet, and the optimizer steps between two checkpoints
SECONDS, PROCESSES = 10, 8
Row = dict[str, Any]


# The watchdog: each second a rank writes its heartbeat, and reads some -----------------------------------------------


def serve(pipe: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.multi_set([f"beat{rank}" for rank in range(max(RANKS))], [""] * max(RANKS))
    pipe.send(store.port)
    pipe.recv()


def beat(store: TCPStore, rank: int, keys: list[str], until: float, took: list[float]) -> None:
    text = first_heartbeat(rank).to_json()
    time.sleep(rank % 97 / 97)  # they are not in step
    while (begin := time.monotonic()) < until:
        store.set(f"beat{rank}", text)
        store.multi_get(keys)
        took.append(time.monotonic() - begin)
        time.sleep(max(0.0, 1.0 - took[-1]))


def some_ranks(port: int, ranks: list[int], num_ranks: int, all_read_all: bool, pipe: Any) -> None:
    everyone = [f"beat{rank}" for rank in range(num_ranks)]
    took: list[float] = []
    stores = [TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in ranks]
    pipe.send(None)
    until = pipe.recv()
    threads = [
        threading.Thread(
            target=beat, args=(store, rank, everyone[: None if all_read_all or not rank else 1], until, took)
        )
        for store, rank in zip(stores, ranks, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(took)


def watchdog(num_ranks: int, *, before: bool) -> Row:
    """How much of a core the store takes, and how long a heartbeat and what is read after it."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,))
    server.start()
    port = here.recv()
    pipes, processes = [], []
    for first in range(min(PROCESSES, num_ranks)):
        pipe, other = context.Pipe()
        ranks = list(range(first, num_ranks, PROCESSES))
        processes.append(context.Process(target=some_ranks, args=(port, ranks, num_ranks, before, other)))
        pipes.append(pipe)
        processes[-1].start()
    for pipe in pipes:
        pipe.recv()
    until = time.monotonic() + SECONDS
    for pipe in pipes:
        pipe.send(until)
    time.sleep(2.0)
    begin, times = time.monotonic(), psutil.Process(server.pid).cpu_times()
    time.sleep(SECONDS - 3.0)
    spent, passed = psutil.Process(server.pid).cpu_times(), time.monotonic() - begin
    took = [each for pipe in pipes for each in pipe.recv()]
    here.send(None)
    for process in (*processes, server):
        process.join()
    busy = (spent.user + spent.system - times.user - times.system) / passed
    return {
        "store_cores": round(busy, 4),
        "exchange_s": round(statistics.median(took), 4),
        "longest_s": round(max(took), 4),
    }


# Other costs ---------------------------------------------------------------------------------------------------------


def groups(num_ranks: int, *, before: bool) -> Row:
    """Those that one process makes for `fsdp2`, whose replicas have one process each."""
    made: list[Any] = []
    new_group = dist.new_group
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        dist.new_group = lambda *args, **kwargs: made.append(args) or new_group(*args, **kwargs)  # type: ignore[assignment]
        begin = time.perf_counter()
        if before:
            for rank in range(num_ranks):  # as `new_subgroups_by_enumeration` does
                dist.new_group([rank])
        else:
            make_mesh("cpu", model_size=1, timeout=None)
        return {"groups": len(made), "seconds": round(time.perf_counter() - begin, 4)}
    finally:
        dist.new_group = new_group
        dist.destroy_process_group()


def audit(num_ranks: int, *, before: bool) -> Row:
    """What one rank does and sends at a checkpoint; the sum of all ranks is left out."""
    sampler = TrainSampler(num_samples=SAMPLES, batch_size=BATCH, batch_split=BatchSplit(dp_size=num_ranks))
    tally = Tally(sampler, device=torch.device("cpu"))
    begin = time.perf_counter()
    if before:
        uses = sampler.order() * 0 + tally.plan.uses(STEPS)  # the order was drawn, and all were compared
        sent = len(uses)
        torch.argsort(uses % 2**32, stable=True)
    else:
        sent = len(tally.unproven(STEPS)[0])
        tally.proceed("", loader_steps=STEPS, ends=False)
    return {"sent_mb": round(8 * sent / 1e6, 2), "seconds": round(time.perf_counter() - begin, 4)}


def evaluation(num_ranks: int) -> Row:
    """What rank 0 does with the counts of all ranks: table, intervals, TensorBoard."""
    counts = [AccuracyCount(40 + rank % 9, 50) for rank in range(num_ranks)]
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:  # type: ignore[no-untyped-call]
        begin = time.perf_counter()
        write_per_rank(Path(folder), "val", counts)
        for rank, count in enumerate(counts):
            writer.add_scalar(f"val/acc_rank{rank}", count.accuracy, 0)  # type: ignore[no-untyped-call]
        deviates(counts)
        seconds = time.perf_counter() - begin
        writer.flush()  # type: ignore[no-untyped-call]
        return {"seconds": round(seconds, 4), "bytes": sum(file.stat().st_size for file in Path(folder).iterdir())}


COSTS: dict[str, Callable[..., Row]] = {
    "watchdog, a second": watchdog,
    "groups of a mesh, a start": groups,
    "sample audit, a checkpoint": audit,
}


def main(output: Path) -> None:
    cases: list[tuple[str, str, int, Callable[[], Row]]] = [
        (name, when, num_ranks, partial(cost, num_ranks, before=when == "before"))
        for name, cost in COSTS.items()
        for num_ranks in RANKS
        for when in ("before", "after")
    ]
    cases += [("accuracy of ranks, an evaluation", "after", n, partial(evaluation, n)) for n in RANKS]
    settings = {"samples": SAMPLES, "batch_size": BATCH, "steps": STEPS, "seconds": SECONDS}
    complete(
        output,
        cases,
        lambda case: {"cost": case[0], "when": case[1], "ranks": case[2]} | case[3](),
        settings=settings,
        tell=say,
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What grows with the number of ranks.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    return parser


if __name__ == "__main__":
    main(**vars(parser().parse_args()))
