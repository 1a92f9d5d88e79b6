"""Trainings of strangers for `Replay`, all in one pair of processes: `torchrun --nproc-per-node=2 ... FILE`."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate

from lit_cifar import Replay, ReplicaAudit, replay
from lit_cifar.errors import ReplicaAuditError
from lit_cifar.launch.signals import destroy_process_group_at_exit
from lit_cifar.strategies.sync_batchnorm import ProcessSyncBatchNorm
from lit_cifar.tools.modes import SILENT


class Pictures(Dataset[dict[str, Any]]):
    """Batches are dictionaries, with words among them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(3, 6, 6, generator=generator), "y": index % 5, "name": str(index)}


class Task(pl.LightningModule):
    """BatchNorm, dropout, a layer that is not used, a schedule, and the mistakes that cases plant by overriding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(96, 5)
        )
        self.weight = 1.0

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        loss = self.weight * cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss, sync_dist=True)
        return {"loss": loss, "step": self.global_step}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight = 1.0 + 0.1 * batch_idx

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Held:
    weight = 1.0


OUTSIDE = Held()


class Scheduled(Task):
    """A weight of its loss changes with each batch, and `change` says where it is held."""

    change: Callable[[Any, float], Any]

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"weight": 1.0, "layer": self.net[5]}
        self.holder, self.rates, self.seen = Held(), torch.ones(2), [0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        OUTSIDE.weight = 1.0
        self.change(1 / (1 + batch_idx))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.seen[0] += 1
        weight = self.settings["weight"] * self.holder.weight * self.rates[0] * OUTSIDE.weight / self.seen[0]
        loss = weight * cross_entropy(self.settings["layer"](self.net[:5](batch["x"])), batch["y"])
        if OUTSIDE.weight == 2:
            OUTSIDE.weight = 3.0
        return vars(self).get("closure", abs)(loss)


CHANGES: dict[str, Callable[[Any, float], Any]] = {
    "dict": lambda its, weight: its.settings.update(weight=weight),
    "object": lambda its, weight: setattr(its.holder, "weight", weight),
    "tensor": lambda its, weight: its.rates.fill_(weight),
    "layer that is frozen": lambda its, weight: its.net[0].requires_grad_(weight in (1, 1 / 2, 1 / 5)),
    "closure": lambda its, weight: setattr(its, "closure", lambda loss: loss * weight),
    "global value": lambda its, weight: setattr(OUTSIDE, "weight", weight),
    "global value of each rank": lambda its, weight: setattr(OUTSIDE, "weight", 1 + 0.5 * its.global_rank),
    "global value that a step changes": lambda its, weight: setattr(OUTSIDE, "weight", 2.0),
}


def scheduled(change: Callable[[Any, float], Any]) -> type[Scheduled]:
    return type("Scheduled", (Scheduled,), {"change": change})


class Talkative(Task):
    """Returns its loss, and what it has computed the loss from."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        outputs = self.net(batch["x"])
        return {"outputs": outputs, "loss": cross_entropy(outputs, batch["y"]), "again": outputs}


class WithData(Task):
    """With an option for the command line."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(Pictures(), batch_size=4, shuffle=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)  # a finite number
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ClipsAfterBackward(Task):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Adversarial(pl.LightningModule):
    """Two optimizers, manual optimization, a moving average of weights, clipping by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 108))
        self.critic = nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.register_buffer("average", torch.zeros(16, 4))

    def training_step(self, batch: dict[str, Any]) -> None:
        of_generator, of_critic = self.optimizers()
        made = self.generator(torch.randn(len(batch["x"]), 4))
        with of_critic.toggle_model():
            loss = self.critic(made.detach()).mean() - self.critic(batch["x"]).mean()
            of_critic.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(of_critic, 0.1, "norm")
            of_critic.step()
        with of_generator.toggle_model():
            of_generator.zero_grad()
            self.manual_backward(-self.critic(made).mean())
            of_generator.step()
        self.average.lerp_(self.generator[0].weight.detach(), 0.1)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.critic)
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in parts], []


class TakesAway(Task):
    """Leaves a layer as it is by taking its gradients away, on these ranks."""

    ranks = (0, 1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if dist.get_rank() in self.ranks:
            self.net[5].bias.grad = None


class TakesAwayOnRank1(TakesAway):
    ranks = (1,)


class WrongLoss(Task):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        found = super().training_step(batch, batch_idx)
        return found | {"loss": found["loss"] * (1.001 if self.global_rank else 1.0)}


class WrongGradient(Task):
    def on_fit_start(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient * (1.001 if dist.get_rank() else 1.0))


class WrongStatistics(Task):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        self.net[1].momentum = 0.1
        found = super().training_step(batch, batch_idx)
        if dist.get_rank():
            self.net[1].running_var.data += 1e-6
        return found


class OtherRate(Task):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 if self.global_rank else 0.1001, momentum=0.9)


class Forgotten(Task):
    """One rank's gradient is overwritten after the reduction."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if dist.get_rank():
            self.net[5].bias.grad[0] += 1e-6


class Contrastive(Task):
    """Ranks exchange features and labels, with gradients, and a number that they agree on."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        features = self.all_gather(self.net(batch["x"]), sync_grads=True)
        most = batch["x"].detach().abs().max()
        all_reduce(most, op=dist.ReduceOp.MAX)  # imported by its name
        labels = [torch.empty_like(batch["y"]) for _ in range(2)]
        dist.all_gather(labels, batch["y"])
        loss: Tensor = cross_entropy(features.flatten(0, 1) / most, torch.cat(labels))
        self.log("loss", loss, sync_dist=True)
        return loss


class WrongExchange(Contrastive):
    """One rank sends what it should not."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[5].register_forward_hook(lambda layer, inputs, output: output * (1 + 1e-6 * dist.get_rank()))


class OwnExchange(Task):
    """One rank changes what it received."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        found = super().training_step(batch, batch_idx)
        total = found["loss"].detach().clone()
        dist.all_reduce(total)
        return found | {"loss": found["loss"] * total.detach()}


class Sends(Task):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        number = torch.ones(1)
        if dist.get_rank():
            dist.send(number, 0)
        else:
            dist.recv(number, 1)
        return super().training_step(batch, batch_idx)


class Unrepeatable(Task):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        generator = torch.Generator()
        generator.seed()
        batch["x"] = batch["x"] + torch.rand(batch["x"].shape, generator=generator)
        return super().training_step(batch, batch_idx)


class Doubled(pl.Callback):
    """All ranks scale their averaged gradients alike."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.net[5].weight.grad.mul_(1.0001)


class NeverAveraged(pl.Callback):
    """As a `no_sync` that was never left."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.strategy.model.require_backward_grad_sync = False


class Odd(Pictures):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"place": Path(str(index))}


def listed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch with an object of its own."""
    places = [sample.pop("place") for sample in samples]
    return default_collate(samples) | {"places": places[0]}


class OddBatches(Task):
    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(Odd(), batch_size=4, shuffle=True, collate_fn=listed)


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Of tokens, and how many of each are valid."""

    def __init__(self, is_even: bool) -> None:
        made = torch.Generator().manual_seed(7)
        self.tokens = torch.randn(64, 5, 4, generator=made)
        self.numbers = torch.full((64,), 3) if is_even else torch.randint(1, 6, (64,), generator=made)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.numbers[index]


class Tokens(pl.LightningModule):
    """The loss is a mean over valid tokens, of which batches have unlike numbers."""

    is_even = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, numbers = batch
        loss: Tensor = self.net(tokens[torch.arange(5) < numbers[:, None]]).square().mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Sequences(self.is_even), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EvenTokens(Tokens):
    is_even = True


class Compressed(pl.Callback):
    """Lightning's own option for it has no effect on a CPU."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.model.register_comm_hook(None, fp16_compress_hook)


class Torn(pl.Callback):
    """The sum of one rank is another, as after a fault of the network."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        group: Any = dist.ProcessGroup
        self.real, self.kept = group.allreduce, vars(group)["allreduce"]
        group.allreduce = lambda *args: self.torn(*args)

    def torn(self, group: Any, tensors: Any, options: Any) -> Any:
        work = self.real(group, tensors, options)
        if dist.get_rank():
            work.wait()
            tensors[0].view(-1)[:1] += 1e-5
        return work

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        dist.ProcessGroup.allreduce = self.kept


class Uncopyable(Task):
    def __init__(self) -> None:
        super().__init__()
        self.file = (number for number in range(3))


class Evaluated(Task):
    """What it logs in an evaluation is of rank 0's samples, or of all."""

    def __init__(self, sync_dist: bool) -> None:
        super().__init__()
        self.sync_dist = sync_dist

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch["x"]), batch["y"]), sync_dist=self.sync_dist)


class Frozen(DistributedSampler[dict[str, Any]]):
    """The order of its first epoch for ever."""

    def set_epoch(self, epoch: int) -> None:
        pass


class Summing(DDPStrategy):
    """Gradients are summed over the ranks, as DDP's mean is multiplied by their number."""

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(closure_loss * 2, *args, **kwargs)


class Sharded(Task):
    """Divided by FSDP2, as Lightning's documentation shows it."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[5]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class SummedShards(Sharded):
    """The gradient of a layer is summed over the ranks, not averaged."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net[5].set_force_sum_reduction_for_comms(True)  # the other way of dividing needs NCCL
        self.net[5].set_gradient_divide_factor(1.0)


class ClipsByShard(Sharded):
    """Each rank clips by the norm of its own shards."""

    def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
        if isinstance(self.net[5].weight, DTensor):
            shards = [parameter.grad.to_local() for parameter in self.parameters()]
            norm = torch.stack([shard.norm() for shard in shards]).norm()
            for shard in shards:
                shard.mul_(0.1 / norm)
        else:
            super().configure_gradient_clipping(optimizer, 0.1, "norm")


class Fused(Task):
    """A GradScaler leaves its scale to the kernel of the step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, fused=True)


class Descent(torch.optim.Optimizer):
    """Has a rate of its own, and an object in its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter].setdefault("projector", object())
                parameter.data.sub_(parameter.grad, alpha=0.1)
        return loss


class OwnRate(Task):
    def configure_optimizers(self) -> Any:
        return Descent(self.parameters())


class ClipsBeforeStep(Adversarial):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Columns(Task):
    def configure_model(self) -> None:
        parallelize_module(
            self.net, self.device_mesh["tensor_parallel"], {"5": ColwiseParallel(output_layouts=Replicate())}
        )


def scaled(scale: float = 1000.0) -> Any:
    """Losses are multiplied, so that gradients in float16 do not vanish."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


ON_TWO: dict[str, Any] = {"accelerator": "cpu", "devices": 2, **SILENT}
# Made anew for each trainer.
FSDP: dict[str, Any] = {"strategy": partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)}
TP: dict[str, Any] = {"strategy": partial(ModelParallelStrategy, data_parallel_size=1, tensor_parallel_size=2)}
CASES: dict[str, tuple[type[pl.LightningModule], dict[str, Any]]] = {
    "float32": (Task, {}),
    "float64": (Task, {"precision": "64-true"}),
    "talkative": (Talkative, {}),
    "takes away": (TakesAway, {}),
    "takes away on one rank": (TakesAwayOnRank1, {}),
    "talkative, unused": (Talkative, {"strategy": "ddp_find_unused_parameters_true"}),
    "bf16": (Task, {"precision": "bf16-mixed"}),
    "scaled": (Task, {"plugins": scaled, "gradient_clip_val": 0.05, "accumulate_grad_batches": 2}),
    "scaled, fused": (Fused, {"plugins": scaled}),
    "overflowed": (Task, {"plugins": partial(scaled, 2.0**60)}),
    "accumulated": (Task, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "clipped after backward": (ClipsAfterBackward, {}),
    "clipped after backward, accumulated": (ClipsAfterBackward, {"accumulate_grad_batches": 2}),
    "by value": (Task, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "manual": (Adversarial, {"strategy": "ddp_find_unused_parameters_true"}),
    "manual, clipped before a step": (ClipsBeforeStep, {"strategy": "ddp_find_unused_parameters_true"}),
    "manual, scaled": (Adversarial, {"strategy": "ddp_find_unused_parameters_true", "plugins": scaled}),
    "own rate": (OwnRate, {}),
    "audited meanwhile": (Task, {"callbacks": [ReplicaAudit(every_n_steps=2)], "at": [2]}),
    "later": (Task, {"at": [5]}),
    "sharded": (Sharded, FSDP),
    "sharded in bf16, accumulated": (Sharded, FSDP | {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    "sharded and clipped": (Sharded, FSDP | {"gradient_clip_val": 0.05}),
    "sharded, summed": (SummedShards, FSDP),
    "sharded, clipped apart": (ClipsByShard, FSDP),
    "tensor parallel": (Columns, TP),
    "summed": (Task, {"strategy": Summing, "accumulate_grad_batches": 3}),
    "wrong loss": (WrongLoss, {}),
    "wrong loss in bf16": (WrongLoss, {"precision": "bf16-mixed"}),
    "wrong gradient": (WrongGradient, {}),
    "wrong statistics": (WrongStatistics, {}),
    "wrong mean": (Task, {"callbacks": [Doubled()]}),
    "never averaged": (Task, {"callbacks": [NeverAveraged()]}),
    "other rate": (OtherRate, {}),
    "forgotten": (Forgotten, {}),
    "same samples": (Task, {"use_distributed_sampler": False}),
    "compressed": (Task, {"callbacks": [Compressed()]}),
    "contrastive": (Contrastive, {}),
    "wrong exchange": (WrongExchange, {}),
    "received otherwise": (OwnExchange, {"callbacks": [Torn()]}),
    "sends": (Sends, {}),
    "synchronised": (Task, {"plugins": [ProcessSyncBatchNorm()], "sync_batchnorm": True}),
    "odd batches": (OddBatches, {}),
    "tokens": (Tokens, {}),
    "tokens in bf16": (Tokens, {"precision": "bf16-mixed"}),
    "even tokens": (EvenTokens, {"accumulate_grad_batches": 2}),
    "unrepeatable": (Unrepeatable, {}),
    "uncopyable": (Uncopyable, {}),
}
CASES |= {
    f"weight in a {name}": (scheduled(change), {"strategy": "ddp_find_unused_parameters_true"})
    for name, change in CHANGES.items()
    if "rank" not in name and "step" not in name
}


def report_of(module: type[pl.LightningModule], options: dict[str, Any], folder: Path) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    options = {"strategy": "ddp", "at": [0], **options}
    options |= {name: value() for name, value in options.items() if callable(value)}
    watch = Replay(steps=2, at=options.pop("at"))
    max_steps = 16 if issubclass(module, Adversarial) else 8
    options["callbacks"] = [*options.get("callbacks", []), watch]
    trainer = pl.Trainer(**ON_TWO, max_steps=max_steps, default_root_dir=folder, **options)
    has_own_data = issubclass(module, OddBatches | Tokens)
    trainer.fit(module(), None if has_own_data else DataLoader(Pictures(), batch_size=4, shuffle=True))
    assert not [*folder.glob("replay-*")]
    return watch.reports[0].as_json()


def audited(change: Callable[[Any, float], Any], folder: Path) -> dict[str, Any]:
    """What `ReplicaAudit` says, and the error by which it ends the training."""
    pl.seed_everything(1, verbose=False)
    said: list[str] = []
    raised = ""
    options = ON_TWO | {"strategy": "ddp_find_unused_parameters_true", "max_steps": 6, "default_root_dir": folder}
    with patch("lit_cifar.checks.replica_audit.callback.rank_zero_warn", said.append):
        try:
            trainer = pl.Trainer(callbacks=[ReplicaAudit(every_n_steps=1)], **options)
            trainer.fit(scheduled(change)(), DataLoader(Pictures(), batch_size=4, shuffle=True))
        except ReplicaAuditError as error:
            raised = str(error)
    return {"said": said, "raised": raised}


def epoch_reports(*, sync_dist: bool, frozen: bool) -> dict[str, Any]:
    """What is said of two epochs and of the first evaluation, by subject."""
    watch = Replay(steps=1)
    folder = Path(sys.argv[1]).parent
    options: dict[str, Any] = ON_TWO | {"use_distributed_sampler": not frozen, "default_root_dir": folder}
    trainer = pl.Trainer(strategy="ddp", max_epochs=2, callbacks=[watch], **options)
    data, some, rank = Pictures(), Subset(Pictures(), range(31)), int(os.environ["RANK"])
    loader, of_evaluation = DataLoader(data, batch_size=4, shuffle=True), DataLoader(some, batch_size=7)
    if frozen:
        loader = DataLoader(data, batch_size=4, sampler=Frozen(data, 2, rank))
        of_evaluation = DataLoader(some, batch_size=7, sampler=DistributedSampler(some, 2, rank, shuffle=False))
    trainer.fit(Evaluated(sync_dist), loader, of_evaluation)
    return {report.subject: report.as_json() for report in watch.reports}


def report_of_the_older_package(folder: Path) -> dict[str, Any]:
    """Classes of `pytorch_lightning` are others than those of `lightning.pytorch`. Both write to one logger."""
    import pytorch_lightning as older

    class Logging(older.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(108, 5)

        def training_step(self, batch: dict[str, Any]) -> Tensor:
            loss = cross_entropy(self.net(batch["x"].flatten(1)), batch["y"])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    watch = Replay(2, stop=True)
    trainer = older.Trainer(strategy="ddp", callbacks=[watch], default_root_dir=folder, **ON_TWO)
    trainer.fit(Logging(), DataLoader(Pictures(), batch_size=4))
    return watch.reports[0].as_json()


def shards() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 21), nn.ReLU(), nn.Linear(21, 5))
    for layer in (model[0], model):
        fully_shard(layer)
    return model


class Half(nn.Module):
    """The part of a layer that a rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        all_reduce(other := outputs.detach().clone())
        return outputs + other - outputs.detach()


def report_of_unwrapped(make: Callable[[], nn.Module], *, seed_of_model: int, seed_of_data: int) -> dict[str, Any]:
    """A loop for the replay alone. Nothing wraps the model, and nothing but shards averages its gradients."""
    torch.manual_seed(seed_of_model)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.manual_seed(seed_of_data)
    its = replay(model, optimizer, steps=2).start()
    while not its.done:
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 5, (8,))).backward()
        optimizer.step()
    return its.finish().as_json()


def report_of_stages(*, by_broadcast: bool) -> dict[str, Any]:
    """Two stages by hand: the second gets what the first returns, and sends a gradient back."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def moved(tensor: Tensor, sender: int) -> Tensor:
        if by_broadcast:
            dist.broadcast(tensor, sender)
        elif rank == sender:
            dist.send(tensor, 1 - sender)
        else:
            dist.recv(tensor, sender)
        return tensor

    with replay(stage, optimizer, steps=2) as its:
        for _ in range(2):
            optimizer.zero_grad()
            if rank == 0:
                outputs = stage(torch.randn(8, 16))
                moved(outputs.detach(), 0)
                outputs.backward(moved(torch.empty(8, 16), 1))
            else:
                inputs = moved(torch.empty(8, 16), 0).requires_grad_()
                cross_entropy(stage(inputs), torch.randint(0, 16, (8,))).backward()
                moved(inputs.grad, 1)
            optimizer.step()
    return its.report.as_json()


def report_of_uneven_ranks() -> dict[str, Any]:
    """Rank 1 has one batch less in each of two epochs."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with replay(model, optimizer, steps=8) as its:
        for _ in range(2):
            with model.join():
                for _ in range(3 - dist.get_rank()):
                    optimizer.zero_grad()
                    cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 5, (8,))).backward()
                    optimizer.step()
    return its.report.as_json()


def plain_report(*, wrong: bool = False, forward_outside: bool = False) -> dict[str, Any]:
    """A loop without Lightning, with accumulation and clipping.

    `forward_outside`: `no_sync` surrounds the backward pass alone, so that gradients are averaged after each batch.
    """
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    with replay(model, optimizer, steps=2) as its:
        for _ in range(4):
            for last in (False, True):
                unsynced: Any = contextlib.nullcontext if last else model.no_sync
                with contextlib.nullcontext() if forward_outside else unsynced():
                    loss: Tensor = cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 5, (8,)))
                with unsynced():
                    loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if wrong and dist.get_rank():
                model.module[0].weight.grad.mul_(1.001)
            optimizer.step()
            optimizer.zero_grad()
        drawn = torch.get_rng_state()
    assert torch.equal(drawn, torch.get_rng_state()), "changed by the replay of the other rank"
    return its.report.as_json()


class WithLoss(nn.Module):
    """Gets its batch by name, and returns its loss too; a penalty depends on its output again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 5)

    def forward(self, *, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.net(x)
        return cross_entropy(outputs, y), outputs


class Wrapped(torch.optim.Optimizer):
    """As accelerate wraps one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


PLAIN = {
    "loss from inside": lambda model, loss, outputs: loss.backward(),
    "trains nothing": lambda model, loss, outputs: (0 * loss).backward(),
    "penalty on weights": lambda model, loss, outputs: (loss + model.module.net.weight.abs().sum()).backward(),
    "penalty on an output": lambda model, loss, outputs: (loss + outputs.square().mean()).backward(),
    "gathers outputs": lambda model, loss, outputs: (
        dist.all_gather([torch.empty_like(outputs) for _ in range(2)], outputs),
        loss.backward(),
    ),
    "two passes": lambda model, loss, outputs: (loss.backward(retain_graph=True), outputs.square().mean().backward()),
}


def report_of_loss(backward: Callable[[Any, Tensor, Tensor], Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = DistributedDataParallel(WithLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with replay(model, Wrapped(optimizer), steps=2) as its:
        for _ in range(3):
            optimizer.zero_grad()
            backward(model, *model(x=torch.randn(8, 16), y=torch.randint(0, 5, (8,))))
            optimizer.step()
    return its.report.as_json()


def reports(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (module, options) in CASES.items():
        yield name, report_of(module, options, folder)
    for name, change in CHANGES.items():
        yield f"audit with a {name}", audited(change, folder)
    yield "plain", plain_report()
    yield "plain, forward outside of no_sync", plain_report(forward_outside=True)
    yield "plain and wrong", plain_report(wrong=True)
    yield "right epochs", epoch_reports(sync_dist=True, frozen=False)
    yield "wrong epochs", epoch_reports(sync_dist=False, frozen=True)
    yield "older package", report_of_the_older_package(folder)
    rank = dist.get_rank()
    yield "plain and sharded", report_of_unwrapped(shards, seed_of_model=1, seed_of_data=rank)
    yield "not wrapped", report_of_unwrapped(lambda: nn.Linear(16, 5), seed_of_model=1, seed_of_data=rank)
    yield "parts by hand", report_of_unwrapped(Half, seed_of_model=rank, seed_of_data=1)
    yield "stages by hand", report_of_stages(by_broadcast=False)
    yield "stages by hand, broadcast", report_of_stages(by_broadcast=True)
    yield "uneven ranks", report_of_uneven_ranks()
    for name, backward in PLAIN.items():
        yield name, report_of_loss(backward)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = dict(reports(file.parent))
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    destroy_process_group_at_exit()  # now, and without what Trainers still hold of it
