"""Whether the ranks of a data-parallel training end with one model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_cifar.tools.replay.digests import Digest, digest
from lit_cifar.tools.replay.verdict import Finding, Report


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


def parameters_of_ranks(module: nn.Module) -> list[dict[str, Digest]]:
    """Digests of every rank's parameters, on rank 0. All ranks must call this."""
    return gathered({name: digest(parameter) for name, parameter in module.named_parameters()})


def judge_replicas(report: Report, of_ranks: Sequence[Mapping[str, Digest]]) -> None:
    """Compare every rank's parameters with those of rank 0."""
    first = of_ranks[0]
    report.counts["states"] += len(first) * (len(of_ranks) - 1)
    for rank, its in enumerate(of_ranks[1:], start=1):
        for name in first:
            if name in its and first[name].bits != its[name].bits:
                text = f"at the end has the norm {its[name].norm:.9g}, on rank 0 {first[name].norm:.9g}"
                report.findings.append(Finding("parameters", report.first_step, rank, name, text))
