"""Checks that the ranks of a training end with one model, and that a resumed one goes on from its checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lit_cifar.checks.repeated_step.digests import Digest, digest
from lit_cifar.checks.repeated_step.tensors import names_of
from lit_cifar.checks.replay.recording import state_digests
from lit_cifar.checks.replay.verdict import Finding, Report

KEY = "lit_cifar.replay"  # entry of a checkpoint
States: TypeAlias = dict[str, tuple[int, float]]  # `Digest`s, in types that a checkpoint may hold


def gathered(value: Any) -> list[Any]:
    """The values of all ranks on rank 0; elsewhere an empty list."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, found)
    return found or []


def are_replicas(model: Any) -> bool:
    """Whether all ranks should hold the same parameters: a communication hook may have another plan."""
    return isinstance(model, DistributedDataParallel) and not getattr(model, "_comm_hooks", ())


def compare_replicas(report: Report, module: nn.Module) -> None:
    """Compare parameters at the end. All ranks must call this; rank 0 gets the findings."""
    if of_ranks := gathered({name: digest(parameter) for name, parameter in module.named_parameters()}):
        judge_replicas(report, of_ranks)


def judge_replicas(report: Report, of_ranks: Sequence[Mapping[str, Digest]]) -> None:
    first = of_ranks[0]
    report.counts["states"] += len(first) * (len(of_ranks) - 1)
    for rank, of_rank in enumerate(of_ranks[1:], start=1):
        for name in first:
            if name in of_rank and first[name].bits != of_rank[name].bits:
                text = f"at the end has the norm {of_rank[name].norm:.9g}, on rank 0 {first[name].norm:.9g}"
                report.findings.append(Finding("parameters", report.first_step, rank, name, text))


def states_of(trainer: pl.Trainer) -> States:
    """Digests of a training's state: parameters, buffers, states and settings of optimizers and schedules, counters."""
    module, optimizers = trainer.lightning_module, trainer.optimizers
    names = names_of(module, optimizers)
    found = {name: digest(parameter) for parameter, name in names.items()}
    found |= {name: digest(buffer) for name, buffer in _kept_buffers(module)}
    settings: dict[str, Any] = {"global_step": trainer.global_step}
    for number, optimizer in enumerate(optimizers):
        found |= state_digests(optimizer, names)
        for place, group in enumerate(optimizer.param_groups):
            own = {key: value for key, value in group.items() if key != "params"}
            settings |= {f"{key} of group {place} of optimizer {number}": value for key, value in own.items()}
    for number, config in enumerate(trainer.lr_scheduler_configs):
        settings |= {f"{key} of schedule {number}": value for key, value in config.scheduler.state_dict().items()}
    settings |= {f"{key} of the scaler": value for key, value in trainer.precision_plugin.state_dict().items()}
    found |= {name: digest(value) for name, value in settings.items() if _is_plain(value)}
    return {name: (value.bits, value.norm) for name, value in found.items()}


def weights_of(module: nn.Module) -> dict[str, int]:
    return {name: digest(parameter).bits for name, parameter in module.named_parameters()}


def loaded_weights(module: nn.Module, state: Mapping[str, Any]) -> dict[str, int]:
    """Digests of the weights in `state` that `module` has by the same name, in the module's dtypes."""
    own = {name: p for name, p in module.named_parameters() if name in state and state[name].shape == p.shape}
    return {name: digest(state[name].to(p.dtype)).bits for name, p in own.items()}


def _kept_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a checkpoint holds, also one that two modules share under both names."""
    kept = module.state_dict()
    for path, part in module.named_modules():
        yield from ((name, buffer) for name, buffer in part.named_buffers(path, recurse=False) if name in kept)


def _is_plain(value: Any) -> bool:
    """Whether equal values have equal `repr`: that of an object may contain its address."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def differences(saved: Mapping[str, tuple[int, float]], now: States) -> Iterator[tuple[str, str]]:
    """Names, and their differences in words."""
    for name, saved_digest in saved.items():
        before = Digest(*saved_digest)
        if name not in now:
            yield name, "was in the training that wrote the checkpoint and is not in this one"
        elif before.bits != now[name][0]:
            norms = f": its norm was {before.norm:.9g} and is {now[name][1]:.9g}" if before.norm or now[name][1] else ""
            yield name, f"is not what it was when the checkpoint was written{norms}"
    for name in now.keys() - saved.keys():
        yield name, "is in this training and was not in the one that wrote the checkpoint"


def compare_resumed(report: Report, saved: Mapping[str, tuple[int, float]], trainer: pl.Trainer) -> None:
    """Compare a resumed training with its checkpoint. All ranks must call this; rank 0 gets the findings."""
    now = states_of(trainer)
    report.counts["states"] = len(now)
    for rank, of_rank in enumerate(gathered([*differences(saved, now)])):
        report.findings += [Finding("resume", report.first_step, rank, name, text) for name, text in of_rank]
