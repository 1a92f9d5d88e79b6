"""`python -m lit_cifar.checks.relations.child PLAN`: one process of a run. It runs the user's training and watches it."""

import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from lit_cifar.checks.relations import calls, in_lightning
from lit_cifar.checks.relations.generators import make_quiet, seed_all
from lit_cifar.checks.relations.loaders import Loaders
from lit_cifar.checks.relations.own_files import Guard, mirror
from lit_cifar.checks.relations.plan import Target
from lit_cifar.checks.relations.watching import Ended, Watched

_THREADS = 1  # more would add up in another order from run to run


def main(plan_file: str) -> None:
    target, plan = pickle.loads(Path(plan_file).read_bytes())
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(plan_file).parent / str(rank)
    own = folder / "folder"
    mirror(Path(target.folder), own)
    os.chdir(own)
    watched = Watched(plan, folder)
    loaders = Loaders(watched)
    try:
        _prepare(watched, loaders, rank)
        _run(target, watched, loaders)
    except BaseException as error:
        watched.trace.error = (traceback.format_exception_only(error)[-1].strip().splitlines() or [""])[0]
        watched.trace.traceback = traceback.format_exc()
    file = folder / "trace"
    file.with_suffix(".part").write_bytes(pickle.dumps(watched.trace))
    file.with_suffix(".part").rename(file)
    sys.stdout.flush()
    os._exit(0)  # a training that was ended may have threads and workers that wait for it


def _prepare(watched: Watched, loaders: Loaders, rank: int) -> None:
    plan = watched.plan
    torch.set_num_threads(_THREADS)
    multiprocessing.set_start_method(None, force=True)  # the fork server's own would hold for loaders' workers
    temporary = watched.folder / "temporary"
    temporary.mkdir()
    os.environ |= {"TMPDIR": str(temporary), "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}
    tempfile.tempdir = None
    sys.stdin = Path(os.devnull).open()
    watched.patch()
    loaders.patch()
    in_lightning.patch(watched)
    _join(watched, rank)
    if plan.double:
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        torch.nn.Module.float = torch.nn.Module.double  # type: ignore[method-assign]
        _compute_in_one_precision()
    if plan.quiet:
        make_quiet()
    if plan.seed:
        _seed_otherwise(plan.seed)
    seed_all("start", plan.seed)
    calls.session = watched
    Guard(watched.folder.parent, watched.trace.outside).start()


def _run(target: Target, watched: Watched, loaders: Loaders) -> None:
    sys.argv = [target.program, *target.arguments]
    try:
        if target.is_module:
            sys.path.insert(0, "")
            runpy.run_module(target.program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target.program).absolute().parent))
            runpy.run_path(target.program, run_name="__main__")
    except Ended:
        pass
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if watched.plan.probe_loaders:
        loaders.probe()
    watched.trace.state = watched.trace.state or watched.snapshot()


def _join(watched: Watched, rank: int) -> None:
    """Let every process group of this run meet in a file, whatever addresses the script names."""
    begin, plan = dist.init_process_group, watched.plan

    def begun(*args: Any, **settings: Any) -> None:
        watched.trace.is_distributed = True
        store = dist.FileStore(str(watched.folder.parent / "store"), plan.ranks)
        begin("gloo", store=store, rank=rank, world_size=plan.ranks)

    def spawned(function: Any, args: tuple[Any, ...] = (), nprocs: int = 1, **settings: Any) -> None:
        watched.trace.own_ranks = nprocs
        function(rank, *args)

    dist.init_process_group = begun
    torch.multiprocessing.spawn = torch.multiprocessing.start_processes = spawned


def _compute_in_one_precision() -> None:
    make = torch.autocast.__init__

    def made(own: Any, device_type: str = "cpu", *args: Any, **settings: Any) -> None:
        make(own, "cpu", enabled=False)

    torch.autocast.__init__ = made  # type: ignore[method-assign]


def _seed_otherwise(offset: int) -> None:
    """Every seed of torch's own generator is another."""
    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(int(number) + offset)


if __name__ == "__main__":
    main(sys.argv[1])
