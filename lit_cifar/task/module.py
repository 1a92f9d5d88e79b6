"""The training task: a network, its loss, metrics and optimizer. A strategy parallelises it.

With `--virtual_replicas` a callback passes each batch through in parts; nothing else here depends on the mode.
"""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Protocol

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau
from torchmetrics import Metric

from lit_cifar.checkpoint.atomic import read_checked
from lit_cifar.checkpoint.exact_resume import ExactResume, batches_of_epoch, steps_of
from lit_cifar.checkpoint.format import (
    SETTINGS,
    Header,
    TrainedOn,
    check_shapes,
    holds_training,
    name_optimizer,
)
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.data.images import Batch
from lit_cifar.errors import CheckpointError, ConfigError, bounded
from lit_cifar.models import DEFAULT_ARCH, Arch, Stem, Whitening, build_network, stem_of
from lit_cifar.models.compiled import Compiled
from lit_cifar.models.fine_tuning import Frozen, head_of
from lit_cifar.models.ghost_batchnorm import normalise_apart
from lit_cifar.models.memory_format import follow_parameters, plain
from lit_cifar.models.random_streams import RandomStreams
from lit_cifar.task.metrics import (
    STEP_METRICS,
    ConfusionMatrix,
    EpochMeans,
    EvaluationMetrics,
    MeanLoss,
    TopAccuracy,
)
from lit_cifar.task.optim import (
    NesterovSGD,
    Recipe,
    WarmupDecay,
    check_total_steps,
    followed_metric,
    keep_saved_types,
    scale_rates,
)

LRScaling = Literal["none", "linear", "sqrt"]
_PREFIX = "network."  # what Lightning puts before the names of the plain network's tensors


class PartByPart(Protocol):
    """A callback that passes a batch through in parts."""

    def train(self, module: L.LightningModule, batch: Batch, loss_of: Callable[[Batch], Tensor]) -> Tensor:
        """The loss of the last part, behind the backward of all others; `loss_of` computes that of a part."""

    def evaluate(self, images: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits (n, num_classes) of images (n, ...); `forward` computes those of a part."""


class LitResNet(L.LightningModule):
    """A network that classifies images: by default a ResNet.

    The default recipe is meant for 15 epochs of CIFAR-10 at a global batch of 128.

    Args:
        arch: Network by name: "resnet18", "resnet34" (the default), "resnet50", "resnet101", "resnet152",
            "wide_resnet50_2", "wide_resnet101_2", "vit_tiny", or "fast", which two CPU cores can train. There are small
            ones for tests: "tiny", "tiny_bottleneck", "resnet10" and "vit_micro".
        stem: First layers of a ResNet. With "cifar", the default, they keep the full 32 x 32 resolution. With "strided"
            they halve it, which makes the network 4 times cheaper; with torchvision's own, "imagenet", it is 16 times
            cheaper.
        zero_init_residual: Start a ResNet with blocks that are the identity: the weight of the last BatchNorm layer of
            each is 0 (Goyal et al., 2017).
        network: A network of your own in place of `arch`, from images (n, 3, image_size, image_size) to logits. On the
            command line a class, or a function that says what it returns, with its arguments:
            --model.network=my_package.Net --model.network.width=64, or --model.network=torchvision.models.resnet18.
            `lit_cifar.models.blocks` says what `mp`, `pp` and `tp` need.
        weights: File whose weights a new training starts from: of this package, torchvision, timm (.safetensors too),
            or any program that saves a `state_dict()`, also in a dictionary or behind prefixes. What of it fits is
            taken, a classifier of another number of classes is not, and what is new is said.
        freeze: Parameters that stay as they are: a pattern of their names, such as "conv1.*", or a list of patterns.
            BatchNorm layers among them normalise by their running statistics, which stay too.
        unfreeze_at: Epoch, counted from 0, from whose first step on they are trained too. Until then their gradients
            are computed and thrown away.
        head_lr: Learning rate of the classifier, where --model.optimizer.lr is that of all other parameters. Schedules
            keep the ratio of the two.
        num_classes: Number of classes, the size of the logits. The default is 10, on the command line that of the data.
        image_size: Height and width of the images, in pixels. The default is 32, on the command line that of the data.
        ghost_batchnorm: Ghost batch normalisation on one device: BatchNorm normalises each of these parts of a batch
            on its own. This equals a mode whose replicas or microbatches are normalised separately.
        channels_last: Keep images, activations and weights in the channels-last memory format, which convolutions on
            recent GPUs prefer. Checkpoints keep torch's default format.
        compile: Compile the network with torch.compile, which takes a minute or more at the first step. Batches
            smaller than the largest so far run uncompiled. With "cuda_graphs", for one device and `ddp`, a GPU gets all
            kernels of a forward or backward pass at once, so that it does not wait for the host.
        optimizer: Optimizer, a class name with its arguments: --model.optimizer=SGD --model.optimizer.lr=0.1.
        lr_scheduler: Learning rate schedule, a class name with its arguments. `WarmupDecay`, `OneCycleLR` and
            `CyclicLR` step after every optimizer step, all others after every epoch.
        test_views: Evaluate so many views of each image, and take the mean of their logits: 2 are the image and its
            mirror image. With 6 these have half of the weight, and the other half have both moved by one pixel, up and
            left, and down and right (Jordan, 2024, https://arxiv.org/abs/2404.00498). That is test-time augmentation:
            say so beside an accuracy.
        label_smoothing: Share of the target that is spread over all classes (Szegedy et al., 2016). The reported losses
            include it.
        lr_scaling: Scaling of the learning rate with the global batch: "linear" (Goyal et al., 2017) multiplies it by
            batch_size / base_batch_size, "sqrt" by the square root of that, "none" by 1.
        base_batch_size: The global batch size that the learning rate was chosen for.
    """

    def __init__(
        self,
        arch: Arch | None = None,
        *,
        stem: Stem | None = None,
        zero_init_residual: bool = False,
        network: nn.Module | None = None,
        weights: str | None = None,
        freeze: list[str] | str | None = None,
        unfreeze_at: int | None = None,
        head_lr: float | None = None,
        num_classes: int | None = None,
        image_size: int | None = None,
        ghost_batchnorm: GhostBatches | None = None,
        channels_last: bool = False,
        compile: bool | Literal["cuda_graphs"] = False,
        optimizer: OptimizerCallable = lambda params: NesterovSGD(params, lr=0.1),
        lr_scheduler: LRSchedulerCallable = lambda optimizer: WarmupDecay(optimizer, warmup=0.2, decay="linear"),
        test_views: Literal[1, 2, 6] = 1,
        label_smoothing: float = 0.0,
        lr_scaling: LRScaling = "none",
        base_batch_size: int = 128,
    ) -> None:
        super().__init__()
        num_classes = 10 if num_classes is None else num_classes
        image_size = 32 if image_size is None else image_size
        self.image_shape = (3, image_size, image_size)
        own = None
        if network is None:
            arch = arch or DEFAULT_ARCH
            stem = stem_of(arch, stem)
            sizes = {"num_classes": num_classes, "image_size": image_size}
            network = build_network(arch, stem=stem, zero_init_residual=zero_init_residual, **sizes)
        else:
            own = f"{type(network).__module__}.{type(network).__qualname__}"
            for name, value in {"arch": arch, "stem": stem, "zero_init_residual": zero_init_residual or None}.items():
                if value is not None:
                    raise ConfigError(
                        f"--model.network={own} is a network, and --model.{name}={value} is about another one",
                        remedy="leave one of the two out",
                    )
        self.ghost_batchnorm = ghost_batchnorm
        self.network = network if ghost_batchnorm is None else normalise_apart(network, ghost_batchnorm)
        self.weights = weights
        self.frozen = Frozen.matching(self.network, [freeze] if isinstance(freeze, str) else freeze or [])
        self.unfreeze_at = bounded("--model.unfreeze_at", unfreeze_at, 1)
        self.head_lr = bounded("--model.head_lr", head_lr, 0)
        if unfreeze_at is None:
            for name in self.frozen.parameters:
                self.network.get_parameter(name).requires_grad_(False)
        elif not self.frozen.parameters:
            raise ConfigError(f"--model.unfreeze_at={unfreeze_at}, but nothing is frozen", remedy="add --model.freeze")
        self.header = Header(arch=arch, stem=stem, num_classes=num_classes, image_size=image_size, network=own)
        if channels_last:
            self.network.to(memory_format=torch.channels_last)
        self.channels_last = channels_last
        self.compiles = bool(compile)
        self.cuda_graphs = compile == "cuda_graphs"
        self.make_optimizer = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.test_views = test_views
        self.label_smoothing = bounded("--model.label_smoothing", label_smoothing, 0, 1)
        self.lr_scaling: LRScaling = lr_scaling
        self.base_batch_size = bounded("--model.base_batch_size", base_batch_size, 1)
        self._forward_fn: Callable[[Tensor], Tensor] | None = None
        self.virtual_replicas: PartByPart | None = None
        self._newest: tuple[Tensor, Tensor, Tensor] | None = None  # losses, logits, labels of a batch
        self._logged_epoch: int | None = None
        self._recipe: Recipe | None = None
        self._resumed: dict[str, Any] | None = None  # the checkpoint that a training goes on from, until it starts

        self.train_loss = MeanLoss()
        self.train_acc = TopAccuracy(num_classes)
        self.val_metrics = EvaluationMetrics("val", num_classes)
        self.test_metrics = EvaluationMetrics("test", num_classes)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # Lightning assigns it 40 times a step, and torch would inspect it each time
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def is_frozen(self) -> bool:
        """Whether what is frozen at first is so in the current epoch."""
        return self.unfreeze_at is None or self.current_epoch < self.unfreeze_at

    def train(self, mode: bool = True) -> "LitResNet":
        """Set training or evaluation mode, in which frozen BatchNorm layers always are."""
        super().train(mode)
        for name in self.frozen.norms if self.is_frozen else ():
            self.network.get_submodule(name).train(False)
        return self

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let BatchNorm layers follow the epoch, also in a run that is resumed within one.

        Lightning does not call `train()`, and warns of layers that are in evaluation mode when a fit starts.
        """
        for name in self.frozen.norms:
            self.network.get_submodule(name).train(not self.is_frozen)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Throw away gradients of what will be trained later: DistributedDataParallel must have waited for them."""
        if self.unfreeze_at is not None and self.is_frozen:
            for name in self.frozen.parameters:
                self.network.get_parameter(name).grad = None

    def start_from_weights(self) -> None:
        """Take the weights of the file, the first time that this is called."""
        path, self.weights = self.weights, None
        if path is not None:
            from lit_cifar.checkpoint.pretrained import start_from_file

            start_from_file(self.network, Path(path), num_classes=self.header.num_classes)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load tensors, as those that spawned processes send back: the file of `weights` would overwrite them."""
        self.weights = None
        return super().load_state_dict(*args, **kwargs)

    def setup(self, stage: str) -> None:
        """Take the given weights, and whiten by the training images, in a network that does; reset the metrics.

        A spawned process receives the metrics in memory shared with all others. Lightning copies only parameters and
        buffers, so without a reset all processes would add to the same sums, and none would count in its own memory.
        """
        if stage == "fit":
            self.start_from_weights()
        for layer in self.network.modules():
            if stage == "fit" and isinstance(layer, Whitening) and not layer.conv.weight.any():
                layer.whiten(self.trainer.datamodule.first_images(5000))  # type: ignore[attr-defined]
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.reset()
        self._newest = self._logged_epoch = self._resumed = None
        if self.compiles:  # a strategy may later replace it by its own function
            self.use_forward_fn(Compiled(self.network, cuda_graphs=self.cuda_graphs))

    def teardown(self, stage: str) -> None:
        """Let `forward` run the plain network again, on batches of any size without compiling."""
        self.use_forward_fn(None)

    def use_forward_fn(self, forward_fn: Callable[[Tensor], Tensor] | None) -> None:
        """Let `forward` call `forward_fn`, which runs `self.network`, or with None the network itself again.

        Strategies that split the network or its batch call this. Whatever they wrap around the network stays outside of
        this module's children, so that checkpoints keep their keys.
        """
        self._forward_fn = forward_fn

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, num_classes) of normalised images (n, 3, height, width)."""
        if not len(images):  # many networks cannot take none, as where they flatten by `x.view(len(x), -1)`
            none: Tensor = self(images.new_zeros(1, *images.shape[1:]))[:0]
            return none
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.network(images) if self._forward_fn is None else self._forward_fn(images)
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of each sample, (n,), from `logits` (n, num_classes) and the `targets` of a batch.

        Label smoothing spreads a share of what a sample weighs over all classes.
        """
        if not targets.is_floating_point():
            return F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)
        wide = torch.promote_types(logits.dtype, torch.float32)
        logits, targets = logits.to(wide), targets.to(wide)
        spread = targets.sum(dim=1, keepdim=True) / targets.shape[1]
        return F.cross_entropy(logits, targets.lerp(spread, self.label_smoothing), reduction="none")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean loss of this process's samples times the weight of their number in the global batch."""
        self._newest = None
        if self.cuda_graphs:  # the gradients of the last step lie where this one writes
            self.zero_grad()
        replicas = self.virtual_replicas
        loss = self._train_on(batch) if replicas is None else replicas.train(self, batch, self._train_on)
        self._log_epoch()
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning's own omission
        # Logging every step would be slow: Lightning's `log` takes longer than all else that it does in a step.
        if every and (self.trainer.global_step + 1) % every == 0:
            self.log_dict(self.step_metrics())
        return loss

    def _train_on(self, batch: Batch) -> Tensor:
        """The loss of a batch, or of a part of one, whose samples are counted."""
        logits = self(batch.images)
        losses = self.loss(logits, batch.targets)
        found = losses.detach(), logits.detach(), batch.labels
        if self._newest is None:  # the first of several parts is with the same process in every mode
            self._newest = found
        self.train_loss.update(found[0])
        self.train_acc.update(*found[1:])
        return losses.mean() * batch.weight

    def _log_epoch(self) -> None:
        """Log this epoch's means. Once is enough: at its end Lightning asks the metrics."""
        if self._logged_epoch != self.current_epoch:
            self._logged_epoch = self.current_epoch
            self.log("train/loss", self.train_loss, on_step=False, on_epoch=True)
            self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        """Log the means of an epoch that is resumed after its last batch, too."""
        self._log_epoch()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the last step of a run that a callback has just stopped: Lightning writes a row for it."""
        if self.trainer.should_stop:
            self.log_dict(self.step_metrics())

    def step_metrics(self) -> dict[str, Tensor]:
        """Loss and accuracy of this process's newest training batch, without communication; none before the first."""
        if self._newest is None:
            return {}
        losses, logits, labels = self._newest
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return dict(zip(STEP_METRICS, (losses.mean(), accuracy), strict=True))

    def on_validation_epoch_start(self) -> None:
        self.val_metrics.confusion.reset()

    def on_test_epoch_start(self) -> None:
        self.test_metrics.confusion.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Logits (n, num_classes) of the batch; counts go to the `val/` metrics."""
        return self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Logits (n, num_classes) of the batch; counts go to the `test/` metrics."""
        return self._evaluate(batch, self.test_metrics)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Class probabilities, (n, num_classes)."""
        return torch.softmax(self._evaluated(batch.images), dim=1)

    def _evaluated(self, images: Tensor) -> Tensor:
        if self.test_views == 1:
            return self._logits(images)
        views = [(images, 1 / 2)]
        if self.test_views == 6:
            padded = F.pad(images, [1] * 4, mode="reflect")
            views = [(images, 1 / 4), (padded[:, :, 2:, 2:], 1 / 8), (padded[:, :, :-2, :-2], 1 / 8)]
        # The product is made at once: a CUDA graph overwrites the logits.
        logits = [weight * self._logits(each) for view, weight in views for each in (view.contiguous(), view.flip(3))]
        return torch.stack(logits).sum(dim=0)

    def _logits(self, images: Tensor) -> Tensor:
        replicas = self.virtual_replicas
        logits: Tensor = self(images) if replicas is None else replicas.evaluate(images, self)
        return logits

    def confusion_matrix(self, split: Literal["val", "test"]) -> ConfusionMatrix:
        """The metric to draw: counts of true and predicted classes."""
        return (self.val_metrics if split == "val" else self.test_metrics).confusion

    def _evaluate(self, batch: Batch, metrics: EvaluationMetrics) -> Tensor:
        logits = self._evaluated(batch.images)
        losses = self.loss(logits, batch.labels)
        metrics.update(logits, batch.labels, losses)
        # Lightning sees the metric objects themselves: it sums their counts over processes at the epoch's end.
        self.log(f"{metrics.split}/loss", metrics.loss, on_step=False, on_epoch=True)
        self.log_dict(metrics.scores, on_step=False, on_epoch=True)
        return logits

    def configure_callbacks(self) -> list[Callback]:
        """The callbacks that a run needs to resume in the middle of an epoch, without those that the Trainer has."""
        trainer: Any = self.trainer
        needed = [ExactResume, *([RandomStreams] if isinstance(trainer.datamodule, CIFAR10DataModule) else [])]
        given = {type(callback) for callback in trainer.callbacks}
        if EpochMeans not in given:
            trainer.callbacks.insert(0, EpochMeans())
        return [kind() for kind in needed if kind not in given]

    def parameter_groups(self) -> Any:
        """All parameters, frozen ones too, or with `head_lr` two groups of them, the classifier's last."""
        if self.head_lr is None:
            return self.network.parameters()
        head = head_of(self.network, self.header.num_classes)
        own = [*self.network.get_submodule(head).parameters()]
        others = [parameter for parameter in self.network.parameters() if parameter not in {*own}]
        return [{"params": others}, {"params": own, "lr": self.head_lr}]

    def new_optimizer(self) -> Optimizer:
        """The user's optimizer before its first step."""
        try:
            optimizer = self.make_optimizer(self.parameter_groups())
        except (AttributeError, TypeError) as error:
            if self.head_lr is None:
                raise
            raise ConfigError(
                f"--model.head_lr={self.head_lr}: the optimizer takes no groups of parameters ({error})",
                remedy="leave it out, or pass another --model.optimizer",
            ) from error
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "--model.optimizer=LBFGS computes a batch several times in a step, and each time would be counted",
                remedy="pass another --model.optimizer",
            )
        return optimizer

    def new_scheduler(self, optimizer: Optimizer) -> Any:
        """The user's schedule before its first step, whose rates have the ratio of `head_lr` to that of the others."""
        rates = [group["lr"] for group in optimizer.param_groups]
        scheduler = self.make_lr_scheduler(optimizer)
        if self.head_lr is not None:
            scale_rates(scheduler, optimizer.param_groups[1], number=1, ratio=rates[1] / rates[0] if rates[0] else 1.0)
        return scheduler

    def configure_optimizers(self) -> Any:
        """The optimizer with its learning rate scaled, and its schedule planned over the whole run."""
        optimizer = self.new_optimizer()
        if self.frozen.parameters:
            until = "" if self.unfreeze_at is None else f" before epoch {self.unfreeze_at}"
            rank_zero_info(
                f"not trained{until}: {len(self.frozen.parameters)} of {len([*self.network.parameters()])} parameters, "
                f"and the statistics of {len(self.frozen.norms)} BatchNorm layers"
            )
        keep_saved_types(optimizer)
        optimizer.register_load_state_dict_post_hook(follow_parameters)
        factor = self._lr_factor()
        for group in optimizer.param_groups:
            group["lr"] *= factor
        self._recipe = Recipe(optimizer)
        scheduler = self.new_scheduler(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            scale_rates(scheduler, group, number=number, ratio=factor)
        if self.lr_scaling != "none":
            first = optimizer.param_groups[0]
            peak = first.get("max_lr", first.get("initial_lr", first["lr"]))
            rank_zero_info(f"learning rate x {factor:.4g} = {peak:.4g}: {self.lr_scaling} scaling by the global batch")
        when: dict[str, Any] = {}
        if isinstance(scheduler, ReduceLROnPlateau):
            when = {"monitor": followed_metric(scheduler)}
        total_steps = self.trainer.estimated_stepping_batches
        check_total_steps(scheduler, total_steps)
        if isinstance(scheduler, WarmupDecay):
            scheduler.set_total_steps(int(total_steps))
        if isinstance(scheduler, WarmupDecay | OneCycleLR | CyclicLR):
            when = {"interval": "step"}
        self._recipe.add(optimizer, scheduler)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **when}}

    def on_train_start(self) -> None:
        """Use this run's own settings of optimizer and schedule where those of a resumed training differ."""
        if self._resumed is not None and self._recipe is not None:
            found, step, trainer = self._resumed.get(SETTINGS), self.trainer.global_step, self.trainer
            before = found if isinstance(found, dict) else None
            taken = None
            ends_by_epochs = trainer.max_steps != trainer.estimated_stepping_batches
            if trainer.lr_scheduler_configs[0].interval == "step" and ends_by_epochs:
                # Earlier epochs may have had other batches; the schedule is made of steps of this run.
                taken = trainer.current_epoch * steps_of(trainer, trainer.num_training_batches)
                taken += steps_of(trainer, batches_of_epoch(trainer))
            self._recipe.resume(trainer.optimizers[0], self.lr_schedulers(), before=before, step=step, taken=taken)
        self._resumed = None

    def _lr_factor(self) -> float:
        if self.lr_scaling == "none":
            return 1.0
        ratio: float = self.trainer.datamodule.batch_size / self.base_batch_size  # type: ignore[attr-defined]
        return ratio if self.lr_scaling == "linear" else ratio**0.5

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = None, **kwargs: Any
    ) -> "LitResNet":
        """The network that the file's header describes, with the file's weights.

        `kwargs`, those of the constructor and of Lightning, override the header; `network` must be among them for a
        network of your own. Only tensors and primitives are read in any case.

        Raises:
            CheckpointError: The file cannot be read, or holds a different network.
        """
        content = read_checked(Path(checkpoint_path))
        header = Header.of(content)
        if header.network is not None and "network" not in kwargs:
            raise CheckpointError(
                f"the checkpoint holds {header}, and no code is run because a checkpoint names it",
                remedy=f"pass network={header.network.rpartition('.')[2]}(...)",
            )
        arguments = header.arguments() | kwargs
        arguments.pop("weights_only", None)  # weights alone, always
        return super().load_from_checkpoint(checkpoint_path, map_location, weights_only=True, **arguments)

    def _data(self) -> CIFAR10DataModule | None:
        """The data module of the run, if it is ours: others do not name their classes."""
        try:
            data = self.trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
        except RuntimeError:  # without a Trainer
            return None
        return data if isinstance(data, CIFAR10DataModule) else None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the plain network's keys and a header that says which network it is."""
        state_dict = checkpoint["state_dict"]
        checkpoint["state_dict"] = plain({key.removeprefix(_PREFIX): value for key, value in state_dict.items()})
        if "optimizer_states" in checkpoint:  # the checkpoint is not of weights alone
            checkpoint["optimizer_states"] = plain(checkpoint["optimizer_states"])
            name_optimizer(checkpoint, self.trainer.optimizers[0], self.lr_schedulers())
            if self._recipe is not None:
                checkpoint[SETTINGS] = self._recipe.settings()
        self.header.write(checkpoint)
        data = self._data()
        if data is not None:
            TrainedOn(*data.meaning).write(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the header and the classes, and give the keys back this module's prefix."""
        data = self._data()
        if data is not None:
            TrainedOn.of(checkpoint).check(TrainedOn(*data.meaning), normalised=False)
            data.compare(checkpoint)  # also weights alone, of which callbacks are not told
        self.header.check(checkpoint)
        check_shapes(self.network, checkpoint["state_dict"])
        checkpoint["state_dict"] = {_PREFIX + key: value for key, value in checkpoint["state_dict"].items()}
        self._resumed = {SETTINGS: checkpoint.get(SETTINGS)} if holds_training(checkpoint) else None


# jsonargparse reads the defaults from the source of the signature, where they must be lambdas. Pickle finds a function
# by its name, which a lambda lacks; a module of defaults goes to the processes of ddp_spawn.
for _argument in ("optimizer", "lr_scheduler"):
    _default = signature(LitResNet).parameters[_argument].default
    _default.__qualname__ = f"_default_{_argument}"
    globals()[_default.__qualname__] = _default
