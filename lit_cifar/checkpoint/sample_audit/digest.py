"""The data receipt: proof that an epoch has used every sample once, and a digest of what was used in which step.

During the training every use is added to a tally on the device, and nothing waits for it. Where a checkpoint is
written or an epoch ends, the tallies of all ranks are summed and compared with the plan: the order of the sampler.
What has passed is written down as a digest, SHA-256 chained over all optimizer steps of a run, each of which enters
with its ids in rising order. So two runs have the same digest if, and only if, each of their steps has used the same
samples, whatever the number of processes, the accumulation or the mode.

Plain arithmetic without a process group: the sum over ranks is for the caller to take.
"""

from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from lit_cifar.data.samplers import TrainSampler
from lit_cifar.errors import CheckpointError, ConfigError, SampleAuditError, printable

EMPTY = sha256().hexdigest()  # the digest before the first step of a run
KEY = "receipt"
_USE = 2**32  # the low half of a tally's entry has room for the step
_MAX_IDS = 10


class Tally:
    """One data-parallel rank's uses of an epoch's samples.

    `uses` is int64, (num_samples,): each use of a sample adds 2**32, and the optimizer step (from 1) in which it was
    used. So one sum over the ranks says how often, and of samples that were used once also when.
    """

    def __init__(self, num_samples: int, *, epoch: int, device: torch.device) -> None:
        self.epoch = epoch
        self.loader_steps = 0
        self.uses = torch.zeros(num_samples, dtype=torch.int64, device=device)
        self._one = torch.ones((), dtype=torch.int64, device=device)

    @classmethod
    def resumed(cls, sampler: TrainSampler, *, step: int, device: torch.device) -> "Tally":
        """The tally after so many optimizer steps of `sampler.epoch`, all of it with the first rank."""
        tally = cls(sampler.num_samples, epoch=sampler.epoch, device=device)
        tally.loader_steps = step * sampler.accumulation
        if sampler.batch_split.dp_rank == 0:
            tally.uses += planned(sampler, loader_steps=tally.loader_steps).to(device)
        return tally

    def count(self, ids: Tensor, *, accumulation: int) -> None:
        """Add a batch; `ids` is int64, (n,), on the tally's device; n may be 0."""
        step = self.loader_steps // accumulation + 1
        self.uses.index_add_(0, ids, self._one.expand(len(ids)), alpha=_USE + step)  # a scalar: no copy to the device
        self.loader_steps += 1


def planned(sampler: TrainSampler, *, loader_steps: int) -> Tensor:
    """What the tallies of all ranks should sum up to after so many batches of `sampler.epoch`, as `Tally.uses`.

    No sample is planned twice, whatever the sampler's order says.
    """
    order = sampler.order()
    positions = torch.arange(len(order))
    step, position = positions // sampler.batch_size, positions % sampler.batch_size
    turn = position // sampler.batch_split.dp_size % sampler.accumulation
    due = step * sampler.accumulation + turn < loader_steps
    uses = torch.zeros(sampler.num_samples, dtype=torch.int64)
    uses[order[due]] = _USE + step[due] + 1
    return uses


def prove(uses: Tensor, sampler: TrainSampler, *, loader_steps: int) -> None:
    """Raise a `SampleAuditError` unless `uses` is what was planned for the first `loader_steps` batches of each rank.

    `uses` is the sum of the tallies of all ranks, int64, (num_samples,), on the host; `sampler` is any rank's, at the
    epoch in question.
    """
    plan = planned(sampler, loader_steps=loader_steps)
    if uses.equal(plan):
        return
    times, due = uses // _USE, plan > 0
    faults = {
        "missing": due & (times == 0),
        "used more than once": times > 1,
        "used in another step than planned": (times == 1) & (uses != plan),
    }
    raise SampleAuditError(
        f"broken data receipt of epoch {sampler.epoch} after {-(-loader_steps // sampler.accumulation)} of "
        f"{sampler.num_batches} optimizer steps\n"
        + "\n".join(f"{fault}: {_listed(mask)}" for fault, mask in faults.items() if mask.any())
    )


def chain(digest: str, uses: Tensor, *, num_steps: int) -> str:
    """`digest` (hexadecimal) continued over the first `num_steps` optimizer steps of an epoch."""
    step_of = uses % _USE  # 0: not used
    ids = torch.argsort(step_of, stable=True)
    sizes = torch.bincount(step_of, minlength=num_steps + 1).tolist()
    for of_step in torch.split(ids, sizes)[1 : num_steps + 1]:
        digest = sha256(bytes.fromhex(digest) + of_step.numpy().astype("<i8").tobytes()).hexdigest()
    return digest


OrderSettings = dict[str, int | str]


def order_settings(sampler: TrainSampler, *, dataset: str, val_size: int) -> OrderSettings:
    """All that decides which image is used in which step, by the data module's flags."""
    return {
        "dataset": dataset,
        "num_train": sampler.num_samples + val_size,
        "val_size": val_size,
        "batch_size": sampler.batch_size,
        "seed": sampler.seed,
        "shuffle": sampler.shuffle,
        "frozen_order": sampler.frozen,
        "drop_last": sampler.drop_last,
    }


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a checkpoint says about the samples that were used until it was written.

    It needs no list of them: no other samples have this digest.
    """

    epoch: int
    step: int  # whole optimizer steps taken in it
    start: str  # digest before the epoch's first step
    digest: str  # digest after its latest step
    settings: OrderSettings  # from `order_settings`

    def write(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = asdict(self)

    @classmethod
    def read(cls, checkpoint: dict[str, Any]) -> "Receipt | None":
        found = checkpoint.get(KEY)
        if found is None:
            return None
        if not isinstance(found, dict) or found.keys() != {field.name for field in fields(cls)}:
            raise CheckpointError(
                "the checkpoint's data receipt has not the entries of this version",
                remedy="resume with the version of lit_cifar that wrote it, or start anew",
            )
        settings = {name: printable(v) if isinstance(v, str) else v for name, v in found["settings"].items()}
        return cls(**found | {"settings": settings})

    def check(self, sampler: TrainSampler, settings: OrderSettings) -> None:
        """Refuse to resume in the middle of an epoch unless this run's plan for it begins with what was used.

        `sampler` is any rank's, at this receipt's epoch.
        """
        if not self.step:
            return
        written = f"the checkpoint was written after {self.step} optimizer steps of epoch {self.epoch}"
        names = [name for name, value in settings.items() if self.settings.get(name) != value]
        if names:
            then = _flags({name: value for name, value in self.settings.items() if name in names})
            raise ConfigError(
                f"{written} with {then}; {_flags({name: settings[name] for name in names})} would order the rest of "
                "it otherwise",
                remedy=f"pass {then}, or resume a checkpoint that was written between two epochs",
            )
        uses = planned(sampler, loader_steps=self.step * sampler.accumulation)
        if chain(self.start, uses, num_steps=self.step) != self.digest:
            raise ConfigError(
                f"{written}, whose samples are not those that the same settings give here",
                remedy="resume with the version of lit_cifar that wrote it, or a checkpoint from between two epochs",
            )


def _listed(mask: Tensor) -> str:
    """How many samples, and the first ids of them."""
    ids = mask.nonzero().flatten().tolist()
    more = ", ..." if len(ids) > _MAX_IDS else ""
    return f"{len(ids)} samples, ids {', '.join(map(str, ids[:_MAX_IDS]))}{more}"


def _flags(settings: OrderSettings) -> str:
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
    return " ".join(f"--data.{name}={value}" for name, value in values.items())
