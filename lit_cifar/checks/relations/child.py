"""`python -m lit_cifar.checks.relations.child PLAN`: a process of a run. It runs the user's training and watches it."""

import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import termios
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed
import torch.multiprocessing

from lit_cifar.checks import relations
from lit_cifar.checks.relations import flags, generators, made_data, mirror, notebooks, told
from lit_cifar.checks.relations.crashes import note_error
from lit_cifar.checks.relations.in_lightning import InLightning
from lit_cifar.checks.relations.loaders import Loaders
from lit_cifar.checks.relations.own_devices import follow_devices
from lit_cifar.checks.relations.own_files import Guard
from lit_cifar.checks.relations.patching import before, patched
from lit_cifar.checks.relations.plan import End, Target
from lit_cifar.checks.relations.switches import set_switches
from lit_cifar.checks.relations.watching import Ended, Watched
from lit_cifar.checks.relations.workers import READ_AGAIN

_PR_SET_CHILD_SUBREAPER = 36
_TERMINAL = (24, 80)  # lines and columns


def main(plan_file: str) -> None:
    target, plan = pickle.loads(Path(plan_file).read_bytes())
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(plan_file).parent / str(rank)
    os.chdir(target.folder)
    # Whatever this process starts stays one of its children, also when the one between them ends.
    CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watched = Watched(plan, folder, rank)
    loaders = Loaders(watched)
    watched.trace.script.said = dict(target.flags)
    try:
        _prepare(watched, loaders)
        _run(target, watched, loaders)
    except BaseException as error:
        note_error(watched.trace.end, error, folder.parent / mirror.MIRROR)
        watched.trace.end.wants_data = made_data.misses_data(error)
    file = folder / "trace"
    torch.save(watched.trace, file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)
    sys.stdout.flush()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    # A training that was ended may have threads and processes that wait for it. An error ends the other ranks too.
    os._exit(bool(watched.trace.end.error))


def _prepare(watched: Watched, loaders: Loaders) -> None:
    plan = watched.plan
    multiprocessing.set_start_method(None, force=True)  # the fork server's own would hold for loaders' workers
    temporary = watched.folder / "temporary"
    temporary.mkdir()
    os.environ |= dict.fromkeys(("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), str(temporary))
    if not plan.on_own_devices:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # else it trains alone on each rank
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # its own folder, in place of a server
    tempfile.tempdir = None
    _give_terminal(watched.trace.end)
    watched.patch()
    loaders.patch()
    InLightning(watched).patch()
    flags.watch_parsers(lambda flag: watched.trace.script.flags.update({flag.words[0]: flag}))
    told.listen(watched.hear, watched.hear_line)
    if plan.made_data:
        made_data.make_data(watched.trace.made_data)
    if plan.on_own_devices:
        follow_devices(plan, watched.trace)
    _join(watched)
    set_switches(plan, watched.trace)
    if plan.quiet:
        generators.make_quiet(watched.trace.remarks.add)
    watched.draws.patch(watched.drawn_apart)
    generators.seed_all("start", plan.seed, watched.rank)
    relations.session = watched
    Guard(watched.folder.parent, watched.trace.end.outside).start()


def _run(target: Target, watched: Watched, loaders: Loaders) -> None:
    sys.argv = [target.program, *target.arguments, *watched.plan.arguments]
    try:
        if target.is_module:
            sys.path.insert(0, "")
            runpy.run_module(target.program, run_name="__main__", alter_sys=True)
        else:
            script = Path(target.program).absolute()
            sys.path.insert(0, str(script.parent))
            main = sys.modules["__main__"] = ModuleType("__main__")  # its classes are needed after its end
            main.__file__ = str(script)
            if script.suffix == notebooks.SUFFIX:
                vars(main)["display"] = print
            for code in notebooks.code_of(script):
                exec(code, vars(main))
    except Ended:
        watched.finish()  # while what the script has is alive
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if watched.plan.asks == READ_AGAIN:
        loaders.read_again()
    watched.finish()


def _join(watched: Watched) -> None:
    """Let every process group of this run meet at the run's own address, whatever the script names."""
    ranks = watched.plan.ranks
    address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}

    def join(make: Any, backend: str | None = None, *_: Any, **__: Any) -> None:
        watched.trace.script.is_distributed = True
        os.environ.update(address)
        alone = {"store": torch.distributed.HashStore()} if ranks == 1 else {}  # type: ignore[attr-defined]
        have_devices = watched.plan.on_own_devices and torch.cuda.device_count() >= ranks
        make(backend if have_devices else "gloo", rank=watched.rank, world_size=ranks, **alone)

    def call_here(_: Any, fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, *_how: Any, **how: Any) -> Any:
        """Every process of the run is one of those that the script would start, and has ended when it may wait."""
        watched.trace.script.ranks = nprocs
        is_told = bool(args) and type(args[0]) is int and args[0] == nprocs  # as by custom the first says how many
        for options in args:
            if getattr(options, "world_size", None) == nprocs:
                options.world_size = ranks
        fn(watched.rank, *((ranks, *args[1:]) if is_told else args))
        return SimpleNamespace(join=lambda *_, **__: True, processes=[])

    def leave(*_: Any, **__: Any) -> None:
        if watched.trace.norms:
            watched.finish()  # while ranks can still gather what they divide

    patched(torch.distributed, "init_process_group", join)
    patched(torch.distributed, "destroy_process_group", before(leave))
    for name in ("spawn", "start_processes"):
        patched(torch.multiprocessing, name, call_here)


def _give_terminal(end: End) -> None:
    """Let the standard input be a terminal that is at its end, whose size is that of the other streams too."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with suppress(OSError):  # where a machine has no pseudo-terminals
        _, inside = os.openpty()  # the other side stays open with this process
        termios.tcsetwinsize(inside, _TERMINAL)
        settings = termios.tcgetattr(inside)
        settings[3] &= ~(termios.ICANON | termios.ECHO)
        settings[6][termios.VMIN] = settings[6][termios.VTIME] = 0  # a reader does not wait
        termios.tcsetattr(inside, termios.TCSANOW, settings)
        os.dup2(inside, 0)

    sys.stdin = os.fdopen(0, closefd=False)
    patched(sys.stdin, "readline", before(lambda *_: setattr(end, "asks", True)))  # which `input` calls too
    patched(os, "get_terminal_size", _terminal_size)


def _terminal_size(own: Any, *args: Any) -> Any:
    with suppress(OSError):
        return own(*args)
    return os.terminal_size(_TERMINAL[::-1])


if __name__ == "__main__":
    main(sys.argv[1])
