"""Number of a run's processes and devices, and the plugin by which they meet.

torchrun may start a different number after a restart. `--trainer.devices` and `--trainer.num_nodes` need not be
repeated on the command line, and cannot be if the number of machines changes. What is said of torchrun here holds for
`srun` too: its tasks have torchrun's variables (`torchrun.py`).
"""

import os
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy, StrategyRegistry

from lit_cifar.errors import ConfigError
from lit_cifar.launch.rendezvous import LocalEnvironment
from lit_cifar.launch.startup import RANKS
from lit_cifar.launch.torchrun import TorchrunEnvironment
from lit_cifar.mode import mode_of


def resolve_world_size(config: dict[str, Any]) -> None:
    """Take `devices` and `num_nodes` from torchrun, if it started this process, and say where processes meet.

    `config`, the arguments of a Trainer, is changed in place. Its strategy is made, or a registered name.
    """
    strategy, plugins = _made(config["strategy"]), as_list(config["plugins"])
    is_single = mode_of(strategy).is_single_process  # then the strategy itself refuses several processes
    if TorchElasticEnvironment.detect() and not is_single:
        _follow_torchrun(config, strategy)
    given = [*plugins, strategy.cluster_environment if isinstance(strategy, ParallelStrategy) else None]
    if any(isinstance(plugin, ClusterEnvironment) for plugin in given):
        return
    if not is_single:
        config["plugins"] = [*plugins, cluster_environment(num_nodes=config["num_nodes"])]
    elif SLURMEnvironment.detect():  # Lightning's own would save in the middle of a step, and start again from that
        config["plugins"] = [*plugins, SLURMEnvironment(auto_requeue=False)]


def check_processes(trainer: Trainer, *, rank: int) -> None:
    """Refuse a rank other than 0 without other processes, and processes that do not know where they meet."""
    if rank and trainer.world_size == 1:
        given = [name for name in RANKS if os.environ.get(name) == str(rank)]
        ranks = " ".join(f"{name}={rank}" for name in given) or f"rank {rank}"
        problem = f"{ranks} in the environment, and this run has one process, which is rank 0"
        remedy = f"unset {' '.join(given or RANKS)}, or pass --trainer.strategy=ddp and --trainer.devices=N"
        raise ConfigError(problem, remedy=remedy)
    strategy = trainer.strategy
    environment = strategy.cluster_environment if isinstance(strategy, ParallelStrategy) else None
    if trainer.world_size > 1 and isinstance(environment, LocalEnvironment):
        environment.check(timeout=strategy._timeout if isinstance(strategy, DDPStrategy) else None)


def _follow_torchrun(config: dict[str, Any], strategy: Strategy | None) -> None:
    mode = mode_of(strategy)
    if mode.start_method != "popen":
        problem = f"--trainer.strategy={config['strategy']} starts processes itself, which torchrun or srun has done"
        raise ConfigError(problem, remedy="pass --trainer.strategy=ddp, or start it with python")
    processes, machines, total = (int(os.environ[f"{name}WORLD_SIZE"]) for name in ("LOCAL_", "GROUP_", ""))
    if processes * machines != total:
        problem = f"{total} processes on {machines} machines, but {processes} on this one: each must have equally many"
        remedy = "pass torchrun the same --nproc-per-node everywhere, or srun --ntasks-per-node=N"
        raise ConfigError(problem, remedy=remedy)
    _follow(config, "devices", processes * mode.devices_per_process, started=f"{processes} processes on each machine")
    _follow(config, "num_nodes", machines, started=f"{machines} machine(s)")


def _made(strategy: Any) -> Strategy | None:
    """The strategy itself, None where Lightning will choose or refuse."""
    if isinstance(strategy, str):
        return StrategyRegistry.get(strategy) if strategy in StrategyRegistry.available_strategies() else None
    return strategy if isinstance(strategy, Strategy) else None


def _follow(config: dict[str, Any], name: str, value: int, *, started: str) -> None:
    given = config[name]
    if given in ("auto", 1, "1"):
        config[name] = value
    elif _count(given) not in (None, value):
        problem = f"--trainer.{name}={given}, but torchrun or srun started {started}, which makes {value}"
        raise ConfigError(problem, remedy=f"leave out --trainer.{name}, which they decide")


def _count(given: Any) -> int | None:
    """Number of devices or machines that are asked for; None if only the accelerator can count them, as for -1."""
    if isinstance(given, str):
        given = [part for part in given.split(",") if part] if "," in given else int(given)
    if isinstance(given, int):
        return None if given < 0 else given
    return len(given)


def cluster_environment(*, num_nodes: int = 1) -> ClusterEnvironment:
    """The plugin for `Trainer(plugins=[...])` by which the processes meet where other machines cannot connect."""
    if TorchElasticEnvironment.detect():
        return TorchrunEnvironment()
    others = (kind for kind in (LSFEnvironment, MPIEnvironment) if kind.detect())
    num_tasks = max((kind().world_size() for kind in others), default=1)
    if SLURMEnvironment.detect():
        num_tasks = int(os.environ["SLURM_NTASKS"])  # Lightning's class might refuse the job
    if num_tasks > 1:
        problem = f"a cluster has {num_tasks} tasks for this job, and this process does not train together with others"
        alone = "for one process srun --ntasks=1; in a shell of salloc's: export SLURM_JOB_NAME=bash"
        raise ConfigError(problem, remedy=f"srun python -m lit_cifar fit, or configs/cluster/slurm.sh; {alone}")
    if num_nodes > 1:
        problem = f"--trainer.num_nodes={num_nodes}, but the processes were not started by torchrun"
        raise ConfigError(problem, remedy="start torchrun on each machine: see configs/cluster/torchrun.sh")
    return LocalEnvironment()


def as_list(plugins: Any) -> list[Any]:
    """A Trainer's `plugins` as a new list: they may be none, one or several."""
    return [] if plugins is None else list(plugins) if isinstance(plugins, list | tuple) else [plugins]
