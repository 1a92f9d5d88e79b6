"""The training task: a network, its loss, metrics and optimizer. A strategy parallelises it.

With `--virtual_replicas` a callback passes each batch through in parts; nothing else here depends on the mode.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from lit_cifar.checkpoint.exact_resume import ExactResume
from lit_cifar.checkpoint.format import AVERAGED, Header, TrainedOn, read_checkpoint
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.data.images import Batch
from lit_cifar.errors import CheckpointError, bounded, clash
from lit_cifar.models import DEFAULT_ARCH, Arch, Stem, Whitening, build_network, stem_of
from lit_cifar.models.fine_tuning import FineTuning, Frozen
from lit_cifar.models.memory_format import plain
from lit_cifar.models.random_streams import RandomStreams
from lit_cifar.task.metrics import STEP_METRICS, ConfusionMatrix, EpochMeans, EvaluationMetrics, MeanLoss, TopAccuracy
from lit_cifar.task.optim import NesterovSGD, WarmupDecay
from lit_cifar.task.optimization import Optimization, RateScaling

_PREFIX = "network."  # what Lightning puts before the names of the plain network's tensors


class PartByPart(Protocol):
    """A callback that passes a batch through in parts."""

    def train(self, module: L.LightningModule, batch: Batch, loss_of: Callable[[Batch], Tensor]) -> Tensor:
        """The loss of the last part, behind the backward of all others; `loss_of` computes that of a part."""

    def evaluate(self, images: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits (n, num_classes) of images (n, ...); `forward` computes those of a part."""


class LitResNet(L.LightningModule):
    """A network that classifies images: by default a ResNet.

    The default recipe is meant for 24 epochs of CIFAR-10 at a global batch of 512.

    Args:
        arch: Network by name: "resnet18", "resnet34" (the default), "resnet50", "resnet101", "resnet152",
            "wide_resnet50_2", "wide_resnet101_2", "vit_tiny", or "fast", which two CPU cores can train. There are small
            ones for tests: "tiny", "tiny_bottleneck", "resnet10" and "vit_micro".
        stem: First layers of a ResNet. With "cifar", the default, they keep the full 32 x 32 resolution. With "strided"
            they halve it, which makes the network 4 times cheaper; torchvision's own, "imagenet", 16 times.
        zero_init_residual: Start a ResNet's blocks as the identity: their last BatchNorm weight is 0 (Goyal, 2017).
        network: A network of your own in place of `arch`, from images (n, 3, image_size, image_size) to logits. On the
            command line a class, or a function that says what it returns, with its arguments:
            --model.network=my_package.Net --model.network.width=64, or --model.network=torchvision.models.resnet18.
            `lit_cifar.models.blocks` says what `mp`, `pp` and `tp` need.
        fine_tuning: What a training starts from, leaves as it is, and trains faster: `FineTuning`.
        num_classes: Number of classes, the size of the logits. The default is 10, on the command line that of the data.
        image_size: Height and width of the images, in pixels. The default is 32, on the command line that of the data.
        ghost_batchnorm: Ghost batch normalisation on one device: BatchNorm normalises each of these parts of a batch
            on its own. This equals a mode whose replicas or microbatches are normalised separately.
        channels_last: Keep images, activations and weights in the channels-last memory format, which convolutions on
            recent GPUs prefer. Checkpoints keep torch's own. The default is false; on the command line `fit` chooses.
        compile: Compile the network with torch.compile, which takes half a minute or more at the first step. Batches
            smaller than the largest so far run uncompiled. With "cuda_graphs", for one device and `ddp`, a GPU gets all
            kernels of a forward or backward pass at once, so that it does not wait for the host.
        optimizer: Optimizer, a class name with its arguments: --model.optimizer=SGD --model.optimizer.lr=0.1.
        lr_scheduler: Learning rate schedule, a class name with its arguments. `WarmupDecay`, `OneCycleLR` and
            `CyclicLR` step after every optimizer step, all others after every epoch.
        test_views: With 2, evaluate each image and its mirror image, and take the mean of their logits. That is
            test-time augmentation: say so beside an accuracy.
        label_smoothing: Share of the target that is spread over all classes (Szegedy et al., 2016), in the losses too.
        rate_scaling: Scaling of the learning rate with the global batch: `RateScaling`.
    """

    def __init__(
        self,
        arch: Arch | None = None,
        *,
        stem: Stem | None = None,
        zero_init_residual: bool = False,
        network: nn.Module | None = None,
        fine_tuning: FineTuning = FineTuning(),  # noqa: B008  # it is frozen
        num_classes: int | None = None,
        image_size: int | None = None,
        ghost_batchnorm: GhostBatches | None = None,
        channels_last: bool | None = None,
        compile: bool | Literal["cuda_graphs"] = False,
        optimizer: OptimizerCallable = NesterovSGD,
        lr_scheduler: LRSchedulerCallable = WarmupDecay,
        test_views: Literal[1, 2] = 1,
        label_smoothing: float = 0.1,
        rate_scaling: RateScaling = RateScaling(),  # noqa: B008  # it is frozen
    ) -> None:
        super().__init__()
        num_classes = 10 if num_classes is None else num_classes
        image_size = 32 if image_size is None else image_size
        self.image_shape = (3, image_size, image_size)
        sizes = {"num_classes": num_classes, "image_size": image_size}
        own = None if network is None else f"{type(network).__module__}.{type(network).__qualname__}"
        if network is None:
            arch = arch or DEFAULT_ARCH
            stem = stem_of(arch, stem)
            network = build_network(arch, stem=stem, zero_init_residual=zero_init_residual, **sizes)
        else:
            for name, value in {"arch": arch, "stem": stem, "zero_init_residual": zero_init_residual or None}.items():
                if value is not None:
                    raise clash(f"--model.network={own}", f"--model.{name}={value}", "that is about another network")
            for layer in network.modules():  # what hooks compute before each pass, as of `prune`: `deepcopy` refuses it
                held = vars(layer).items() if layer._forward_pre_hooks else ()
                vars(layer).update({key: it.detach() for key, it in held if isinstance(it, Tensor) and not it.is_leaf})
        self.network, self.header = network, Header(arch=arch, stem=stem, network=own, **sizes)
        self.ghost_batchnorm = ghost_batchnorm
        if ghost_batchnorm is not None:
            from lit_cifar.models.ghost_batchnorm import normalise_apart

            normalise_apart(self.network, ghost_batchnorm)
        self.weights = fine_tuning.weights
        self.frozen = Frozen.of(fine_tuning, self.network)
        if channels_last:
            self.network.to(memory_format=torch.channels_last)
        self.channels_last = bool(channels_last)
        self.compiles, self.cuda_graphs = bool(compile), compile == "cuda_graphs"
        self.optimization = Optimization(
            optimizer, lr_scheduler, fine_tuning=fine_tuning, rate_scaling=rate_scaling, num_classes=num_classes
        )
        self.test_views = test_views
        self.label_smoothing = bounded("--model.label_smoothing", label_smoothing, 0, 1)
        self._forward_fn: Callable[[Tensor], Tensor] | None = None
        self.virtual_replicas: PartByPart | None = None
        self._newest: tuple[Tensor, Tensor, Tensor] | None = None  # losses, logits, labels of a batch
        self._logged_epoch: int | None = None

        self.train_loss = MeanLoss()
        self.train_acc = TopAccuracy(num_classes)
        self.val_metrics = EvaluationMetrics("val", num_classes)
        self.test_metrics = EvaluationMetrics("test", num_classes)

    def train(self, mode: bool = True) -> "LitResNet":
        """Set training or evaluation mode, in which frozen BatchNorm layers always are."""
        super().train(mode)
        self.frozen.keep_norms(self.network)
        return self

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LitResNet":
        """Move or convert all tensors; sums of metrics in float64 stay so: `Module.to` of `bf16-true` would narrow."""
        metrics = [each for each in self.modules() if isinstance(each, Metric)]
        held: list[tuple[Metric, str, Any, Any]] = []
        held += [(each, *state, each._defaults[state[0]]) for each in metrics for state in each.metric_state.items()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for metric, name, state, default in held:
            if isinstance(state, Tensor) and state.dtype == torch.float64:
                setattr(metric, name, fn(state.view(torch.int64)).view(torch.float64))  # nothing narrows integers
                metric._defaults[name] = fn(default.view(torch.int64)).view(torch.float64)
        return self

    def setup(self, stage: str) -> None:
        """Take the given weights, and whiten by the training images, in a network that does; reset the metrics.

        A spawned process receives the metrics in memory shared with all others. Lightning copies only parameters and
        buffers, so without a reset all processes would add to the same sums, and none would count in its own memory.
        """
        # Lightning converts after loading a checkpoint, when its float64 weights have already been rounded.
        self.trainer.precision_plugin.convert_module(self)
        if stage == "fit":
            self.start_from_weights()
        for layer in self.network.modules():
            if stage == "fit" and isinstance(layer, Whitening) and not layer.conv.weight.any():
                layer.whiten(self.trainer.datamodule.first_images(5000))  # type: ignore[attr-defined]
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.reset()
        self._newest = self._logged_epoch = None
        self.optimization.forget()
        if self.compiles:  # a strategy may later replace it by its own function
            from lit_cifar.models.compiled import Compiled

            self.use_forward_fn(Compiled(self.network, cuda_graphs=self.cuda_graphs))

    def teardown(self, stage: str) -> None:
        """Let `forward` run the plain network again, on batches of any size without compiling."""
        self.use_forward_fn(None)

    def use_forward_fn(self, forward_fn: Callable[[Tensor], Tensor] | None) -> None:
        """Let `forward` call `forward_fn`, which runs `self.network`, or with None the network itself again.

        Strategies that split the network or batch call this. What they wrap is no child of this module: keys stay.
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
        # Logging each step would be slow. Once a training should stop, Lightning writes in each what was logged last.
        if every and (self.trainer.should_stop or (self.trainer.global_step + 1) % every == 0):
            self.log_dict(self.step_metrics())
        return loss

    def _train_on(self, batch: Batch) -> Tensor:
        """The loss of a batch, or of a part of one, whose samples are counted."""
        logits = self(batch.images)
        losses = self.loss(logits, batch.targets)
        if self._newest is None:  # the first of several parts is with the same process in every mode
            kept = logits.detach().clone() if self.cuda_graphs else logits.detach()  # a graph writes over its output
            self._newest = losses.detach(), kept, batch.labels
        self.train_loss.update(losses.detach())
        self.train_acc.update(logits.detach(), batch.labels)
        return losses.mean() * batch.weight

    def _log_epoch(self) -> None:
        """Log this epoch's means. Once is enough: at its end Lightning asks the metrics."""
        if self._logged_epoch != self.current_epoch:
            self._logged_epoch = self.current_epoch
            self.log("train/loss", self.train_loss, on_step=False, on_epoch=True)
            self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)

    on_train_epoch_end = _log_epoch  # of an epoch that is resumed after its last batch, too

    def step_metrics(self) -> dict[str, Tensor]:
        """Loss and accuracy of this process's newest training batch, without communication; none before the first."""
        if self._newest is None:
            return {}
        losses, logits, labels = self._newest
        means = losses.mean(), (logits.argmax(dim=1) == labels).float().mean()
        return dict(zip(STEP_METRICS, means, strict=True))

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Logits (n, num_classes) of the batch; counts go to the `val/` metrics, or to the `test/` metrics."""
        metrics = self.test_metrics if self.trainer.testing else self.val_metrics
        if batch_idx == 0:  # the only metric that Lightning does not know, and so does not reset
            metrics.confusion.reset()
        logits = self._evaluated(batch.images)
        metrics.update(logits, batch.labels, self.loss(logits, batch.labels))
        # Lightning sees the metric objects themselves: it sums their counts over processes at the epoch's end.
        self.log(f"{metrics.split}/loss", metrics.loss, on_step=False, on_epoch=True)
        self.log_dict(metrics.scores, on_step=False, on_epoch=True)
        return logits

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Class probabilities, (n, num_classes)."""
        return torch.softmax(self._evaluated(batch.images).float(), dim=1)

    def _evaluated(self, images: Tensor) -> Tensor:
        replicas = self.virtual_replicas
        forward: Callable[[Tensor], Tensor] = self if replicas is None else partial(replicas.evaluate, forward=self)
        if self.test_views == 1:
            return forward(images)
        return forward(images) / 2 + forward(images.flip(3)) / 2  # halved at once: a CUDA graph overwrites the logits

    def confusion_matrix(self, split: Literal["val", "test"]) -> ConfusionMatrix:
        return (self.val_metrics if split == "val" else self.test_metrics).confusion

    def configure_callbacks(self) -> list[Callback]:
        """The callbacks that a run needs to resume in the middle of an epoch, without those that the Trainer has."""
        trainer: Any = self.trainer
        needed: list[type[Callback]] = [ExactResume]
        needed += [RandomStreams] if isinstance(trainer.datamodule, CIFAR10DataModule) else []
        given = {type(callback) for callback in trainer.callbacks}
        if EpochMeans not in given:
            trainer.callbacks.insert(0, EpochMeans())
        return [kind() for kind in needed if kind not in given]

    def configure_optimizers(self) -> Any:
        if self.frozen.parameters:
            rank_zero_info(self.frozen.told(self.network))
        return self.optimization.configure(self.network, self.trainer, label_smoothing=self.label_smoothing)

    def on_train_start(self) -> None:
        self.frozen.keep_norms(self.network)  # within an epoch Lightning does not call `train`
        self.optimization.start(self.trainer)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: str | torch.device | None = None, **kwargs: Any
    ) -> "LitResNet":
        """The network that the file's header describes, with the file's weights, on the CPU or `map_location`.

        `kwargs`, those of the constructor, override the header; `network` must be among them for a network of your own.
        Only tensors and primitives are read in any case, and nothing else of the file is an argument.

        Raises:
            CheckpointError: The file cannot be read, or holds a different network.
        """
        content = read_checkpoint(Path(checkpoint_path))
        header = Header.read(content)
        if header.network is not None and "network" not in kwargs:
            problem = f"the checkpoint holds {header}, and no code is run because a checkpoint names it"
            raise CheckpointError(problem, remedy=f"pass network={header.network.rpartition('.')[2]}(...)")
        kwargs.pop("weights_only", None)  # weights alone, always
        model = cls(**header.arguments() | kwargs)
        model.on_load_checkpoint(content)
        model.load_state_dict(content["state_dict"])
        return model.to(map_location)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the plain network's keys and a header that says which network it is."""
        state_dict = checkpoint["state_dict"]
        checkpoint["state_dict"] = plain({key.removeprefix(_PREFIX): value for key, value in state_dict.items()})
        if "optimizer_states" in checkpoint:  # the checkpoint is not of weights alone
            checkpoint["optimizer_states"] = plain(checkpoint["optimizer_states"])
            self.optimization.save(checkpoint, self.trainer)
        self.header.write(checkpoint)
        if (data := _data_of(self)) is not None:
            TrainedOn(data.dataset, data.classes).write(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the header and the classes, and give the keys back this module's prefix."""
        from lit_cifar.checkpoint.compatibility import check_classes, check_header, check_shapes

        if (data := _data_of(self)) is not None:
            check_classes(checkpoint, TrainedOn(data.dataset, data.classes), normalised=False)
            data.compare(checkpoint)  # also weights alone, of which callbacks are not told
        check_header(checkpoint, self.header)
        trainer: Any = self._trainer
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        averages = fits and any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)
        if AVERAGED in checkpoint and fits and not averages:
            rank_zero_info("the checkpoint holds averaged weights too: the training goes on with those that it trained")
            trained = checkpoint[AVERAGED].items()
            checkpoint["state_dict"] = {key.removeprefix(_PREFIX): value for key, value in trained}
        check_shapes(self.network, checkpoint["state_dict"])
        checkpoint["state_dict"] = {_PREFIX + key: value for key, value in checkpoint["state_dict"].items()}
        self.optimization.load(checkpoint)


def _data_of(module: LitResNet) -> CIFAR10DataModule | None:
    """The data module of the run, if it is ours: others do not name their classes."""
    data = getattr(module._trainer, "datamodule", None)
    return data if isinstance(data, CIFAR10DataModule) else None
