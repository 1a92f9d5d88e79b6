"""The data sets by name, and one of them as a LightningDataModule whose batch size is the global one.

A damaged data set is an error: it is never repaired, or replaced by another in silence.
"""

from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_cifar.data.augment import Augmentation
from lit_cifar.data.dataset import Dataset, Split
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.loader import BatchLoader
from lit_cifar.data.mixing import Mixing
from lit_cifar.data.options import Augment, Pictures
from lit_cifar.data.sample_order import (
    OrderSettings,
    check_held_out,
    check_rest_of_epoch,
    order_settings,
    settings_in,
)
from lit_cifar.data.samplers import EvaluationSampler, TrainSampler
from lit_cifar.data.workers import num_cores
from lit_cifar.errors import CheckpointError, ConfigError, bounded, nearest
from lit_cifar.mode import Layout, mode_of

if TYPE_CHECKING:
    from lit_cifar.data.pictures import FolderImages

# The class of each data set, which is imported when it is asked for.
DATASETS = {
    "cifar10": "cifar10.Cifar10",
    "cifar100": "cifar10.Cifar100",
    "fashion_mnist": "fashion_mnist.Fashion",
    "synthetic": "synthetic.Synthetic",
    "folder": "pictures.OwnPictures",
}


def open_dataset(
    name: str, root: str | Path, *, image_size: int | None = None, seed: int = 0, pictures: Pictures | None = None
) -> Dataset:
    """The data set called `name`, with `Dataset`'s arguments; `pictures` are further ones, of "folder"."""
    if name not in DATASETS:
        meant = nearest(name, DATASETS)
        guess = "" if meant is None else f"did you mean --data.dataset={meant}? "
        raise ConfigError(f"there is no data set {name!r}", remedy=f"{guess}choose one of {', '.join(DATASETS)}")
    given: dict[str, Any] = {}
    if name == "folder":
        given["pictures"] = pictures
    elif pictures is not None:
        pictures.refuse()
    module, _, kind = DATASETS[name].partition(".")
    dataset: type[Dataset] = getattr(import_module(f"lit_cifar.data.{module}"), kind)
    return dataset(Path(root), image_size=image_size, seed=seed, **given)


class CIFAR10DataModule(L.LightningDataModule):
    """The same batches for every number of processes and every mode.

    Images stay uint8 until a batch has reached its device; there they become float and are normalised with the data
    set's channel statistics. Order, augmentation and the validation split follow `seed`, never the global generators.

    Args:
        root: Folder of the data set. A download is stored here.
        dataset: Data set: "cifar10", "cifar100", "fashion_mnist" (grey repeated to three channels, padded to 32 x 32),
            "synthetic" (images drawn by code from `seed`, without files), or "folder": your own pictures, in ROOT/CLASS
            or in ROOT/train/CLASS, with ROOT/val/CLASS and ROOT/test/CLASS if there are such, or other usual names.
        image_size: Height and width to which the pictures of "folder" are resized, in pixels. The default is 32.
        batch_size: Global batch size: samples per optimizer step over all replicas and accumulation steps.
        eval_batch_size: Samples per evaluation step over all processes. It does not change any result.
        val_size: Number of training images held out for validation by a seeded split. With 0 the run trains on all
            images and does not validate. The default is 5000, or a tenth of `num_train` if that is less; of "folder" a
            tenth, and none where there is ROOT/val.
        num_train: Use only the first n training images, before the split. The synthetic data set draws n images.
        num_test: Use only the first n test images. The synthetic data set draws n images.
        augment: What training images go through: with true random crops after padding, and random flips; with false
            nothing. Or `Augment`, its settings: --data.augment.cutout=8 adds cutout to these.
        mixup: Mix each training image with another one of its global batch (Zhang et al., 2018): the parameter of the
            Beta distribution of their shares. With 0 there is no mixup. A loss must then be taken with `Batch.targets`.
        cutmix: Replace a rectangle of each training image by that of another one (Yun et al., 2019): the parameter, as
            above. With both, each step takes one of the two. With 0 there is no CutMix.
        class_weights: Factors of the losses by class, in the order of the classes, or "balanced": in inverse proportion
            to the number of training images. They are divided by their mean over the global batch.
        balanced: Draw each class equally often in an epoch, which has as many samples as before: those of rare classes
            several times, those of frequent ones not all.
        shuffle: Draw a new permutation for each epoch. With false every epoch has the order of the files.
        frozen_order: Repeat the order of the first epoch in every epoch, as a forgotten `set_epoch` does. For study.
        drop_last: Leave out the last batch of an epoch if it is not full. With false it is weighted by its size.
        pad_eval: Repeat samples until each process evaluates equally many, as torch's DistributedSampler does, and
            count them twice. For study.
        resident: Place of the uint8 images: in "host" memory, or on the "device", where the GPU makes its batches
            itself. With "auto" they are on the GPU if it has room for four copies of them.
        num_workers: Number of worker processes, for each process that trains, that decode pictures which do not fit the
            memory and apply the transforms of `augment`. With 0 it does so itself. The default is its share of the
            cores to decode, and 0 otherwise.
        download: Download the data set if it is missing.
        pictures: How the pictures of "folder" are read: `Pictures`.
        seed: Seed of order, augmentation, split and synthetic images, and of dropout; not negative.
        predict_dir: Folder of the images that `predict` classifies.

    Attributes:
        name: The data set's name in logs and tables.
        sets: Images that `setup` has read, by split: "train", "val", "test", "predict".
        folder: Every file of `predict_dir`, readable or not.

    Raises:
        ConfigError: Settings that contradict each other; sizes that cannot be cut.
        DataError: A data set that is missing, incomplete or damaged, in `prepare_data` or `setup`.
    """

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 128,
        *,
        dataset: str = "cifar10",
        image_size: int | None = None,
        eval_batch_size: int = 500,
        val_size: int | None = None,
        num_train: int | None = None,
        num_test: int | None = None,
        augment: bool | Augment = True,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        class_weights: Literal["balanced"] | list[float] | None = None,
        balanced: bool = False,
        shuffle: bool = True,
        frozen_order: bool = False,
        drop_last: bool = False,
        pad_eval: bool = False,
        resident: Literal["auto", "host", "device"] = "auto",
        num_workers: int | None = None,
        download: bool = True,
        pictures: Pictures = Pictures(),  # noqa: B008  # it is frozen
        seed: int = 0,
        predict_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.root = Path(root)
        self.batch_size = batch_size
        self.eval_batch_size = bounded("--data.eval_batch_size", eval_batch_size, 1)
        self.num_images = {"train": num_train, "test": num_test}
        self.shuffle = shuffle
        self.frozen_order = frozen_order
        self.drop_last = drop_last
        self.pad_eval = pad_eval
        self.resident, self.num_workers = resident, bounded("--data.num_workers", num_workers, 0, 2**16)
        self.download = download
        self.seed = bounded("--data.seed", seed, 0)
        self._dataset, self._held_out = dataset, bounded("--data.val_size", val_size, 0)
        self.predict_dir = None if predict_dir is None else Path(predict_dir)
        self.source = open_dataset(dataset, root, image_size=image_size, seed=seed, pictures=pictures)
        self.name, self.image_size = self.source.title, self.source.image_size
        self.decoded_size, self._memory_gb = pictures.decoded_size or self.image_size, pictures.memory_gb
        settings = Augment() if augment is True else augment
        self.augmentation: Augmentation | None = None
        if settings:
            self.augmentation = settings.of_images(self.image_size, decoded_size=pictures.decoded_size, seed=seed)
        self.mixing = Mixing(seed=seed, mixup=mixup, cutmix=cutmix) if mixup or cutmix else None
        self.class_weights, self.balanced = class_weights, balanced
        self.sets: dict[str, ImageSet] = {}
        self._resumed: OrderSettings = {}  # `state_dict` of the run that wrote the checkpoint
        self.folder: FolderImages | None = None
        self._prepared = False
        for name, parameter in {"mixup": mixup, "cutmix": cutmix}.items():
            if not 0 <= parameter < inf:
                problem = f"--data.{name}={parameter:g} is the parameter of a Beta distribution, which is positive"
                raise ConfigError(problem, remedy=f"pass --data.{name}=1.0, or 0 for none")
        if isinstance(class_weights, list) and not all(0 < factor < inf for factor in class_weights):
            problem = f"--data.class_weights={class_weights}: a factor of a loss is positive and finite"
            raise ConfigError(problem, remedy="pass one factor for each class, or balanced")
        self._transforms = self.augmentation is not None and bool(self.augmentation.transforms)
        if self._transforms and resident == "device":
            problem = "--data.resident=device makes batches on the GPU, and --data.augment.transforms run on the host"
            raise ConfigError(problem, remedy="leave one of the two out")
        if num_workers is not None and not self._transforms and dataset != "folder":
            problem = f"--data.num_workers={num_workers} has nothing to do: these images are in memory"
            raise ConfigError(problem, remedy="leave it out, or add --data.augment.transforms")
        if balanced and not shuffle:
            problem = "--data.balanced=true draws an order, and --data.shuffle=false has none"
            raise ConfigError(problem, remedy="leave one of the two out")
        if frozen_order and not shuffle:
            problem = "--data.frozen_order=true repeats one shuffled order, and --data.shuffle=false has none"
            raise ConfigError(problem, remedy="leave one of the two out")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without images: a spawned process reads them, as 150 MB do not fit every shared memory."""
        return self.__dict__ | {"sets": {}}

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by label."""
        return self.source.classes

    @property
    def meaning(self) -> tuple[str, tuple[str, ...]]:
        """The meaning of labels: the data set, a value of `--data.dataset`, and the classes."""
        return self._dataset, self.classes

    @property
    def dataset(self) -> str:
        """Text by which a checkpoint knows the data set."""
        return self.source.identity(self._dataset)

    @cached_property
    def val_size(self) -> int:
        """Number of images to validate on."""
        own, num_train = self.source.val_size, self.num_images["train"]
        if self.source.own_val:
            if self._held_out is not None:
                raise ConfigError(
                    f"--data.val_size={self._held_out} holds out images to validate on, and {self.root} has a folder "
                    "of them",
                    remedy="leave it out, or move that folder away",
                )
            return own
        if num_train is not None:
            own = min(own, max(num_train, 0) // 10)
        return own if self._held_out is None else self._held_out

    # Lightning calls prepare_data in one process per node, then setup in every process.

    def prepare_data(self) -> None:
        """Download the data set if it is missing and may be downloaded, once in this process."""
        if self.predict_dir is None and not self._prepared:
            self.source.prepare(download=self.download)
            self._prepared = True

    def setup(self, stage: str) -> None:
        """Read what `stage` ("fit", "validate", "test" or "predict") needs into `self.sets`."""
        callbacks: list[L.Callback] = [] if self.trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, _HandsOver) for callback in callbacks):
            callbacks.append(_HandsOver())
        # Pictures are listed here, and not once more when they are loaded.
        if stage in ("fit", "validate") and not self.val_size and stage == "validate":
            problem = "--data.val_size=0 holds out no images to validate on"
            raise ConfigError(problem, remedy="pass the --data.val_size of the training, or use the test subcommand")
        if stage in ("fit", "validate") and "train" not in self.sets:
            if self.source.own_val:
                train, val = self._load("train"), self._load("val")
            else:
                train, val = self._split(self._load("train"))
            self.sets |= {"train": self._decoded(train), "val": self._decoded(val)}
        if stage == "test" and "test" not in self.sets:
            self.sets["test"] = self._decoded(self._load("test"))
        if stage == "predict":
            if self.predict_dir is None:
                raise ConfigError("predict classifies a folder of images", remedy="pass --data.predict_dir=FOLDER")
            from lit_cifar.data.pictures import read_folder  # only `predict` needs it

            self.folder = read_folder(self.predict_dir, classes=self.classes, size=self.decoded_size)
            self.sets["predict"] = self.folder.images

    def read_ahead(self, stage: str) -> None:
        """`setup`, while another process checks the run; what cannot be read yet is left to Lightning's call."""
        with suppress(ConfigError):
            self.setup(stage)

    def _load(self, split: Split) -> ImageSet:
        return self.source.load(split, num_images=self.num_images.get(split))

    def _decoded(self, images: ImageSet) -> ImageSet:
        """The `images`, in memory if they fit."""
        return images.in_memory(self._memory_gb, num_processes=self._num_processes)

    @property
    def _num_processes(self) -> int:
        """Number of processes that train on this machine."""
        return 1 if self.trainer is None else mode_of(self.trainer.strategy).num_local_processes

    def _split(self, images: ImageSet) -> tuple[ImageSet, ImageSet]:
        if self.val_size >= len(images):
            problem = f"--data.val_size={self.val_size} leaves none of {len(images)} images to train on"
            raise ConfigError(problem, remedy=f"lower it, e.g. --data.val_size={len(images) // 10}")
        held_out = torch.zeros(len(images), dtype=torch.bool)
        held_out[self.source.hold_out(images.labels, self.val_size)] = True
        return images.subset((~held_out).nonzero()[:, 0]), images.subset(held_out.nonzero()[:, 0])

    @property
    def layout(self) -> Layout:
        """Layout of the trainer's strategy; without a trainer, such as in a notebook, there is one replica."""
        return Layout() if self.trainer is None else mode_of(self.trainer.strategy).layout

    def train_sampler(self) -> TrainSampler:
        # Overfitting needs the same batches in every epoch, and Lightning can turn off the shuffling of DataLoaders
        # only.
        overfits = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        if overfits and self.balanced:
            raise ConfigError(
                "--trainer.overfit_batches repeats the first batches, and --data.balanced=true draws others",
                remedy="leave out one of them",
            )
        return TrainSampler(
            num_samples=len(self.sets["train"]),
            batch_size=self.batch_size,
            layout=self.layout,
            accumulation=1 if self.trainer is None else self.trainer.accumulate_grad_batches,
            seed=self.seed,
            shuffle=self.shuffle and not overfits,
            frozen=self.frozen_order,
            drop_last=self.drop_last,
            balanced=self.sets["train"].labels.cpu() if self.balanced else None,
            behind=None if self.trainer is None else self._batches_behind,
        )

    def state_dict(self) -> dict[str, Any]:
        """Settings that order the samples, and the number of steps taken in the epoch. Checkpoints hold them."""
        if self.trainer is None or "train" not in self.sets:
            return {}
        return order_settings(self) | {"steps": self._trained() // self.trainer.accumulate_grad_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse to validate on images that the run that wrote the checkpoint was trained on."""
        self._resumed = state_dict
        if self.trainer is not None and self.trainer.state.fn in (TrainerFn.FITTING, TrainerFn.VALIDATING):
            check_held_out(state_dict, order_settings(self))

    def compare(self, checkpoint: dict[str, Any]) -> None:
        """Load the state of a data module of another class, too: Lightning does so for the same class alone."""
        if type(self).__qualname__ not in checkpoint and (settings := settings_in(checkpoint)):
            self.load_state_dict(settings)

    def _trained(self) -> int:
        """Number of batches of the epoch, by the Trainer's count."""
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current  # type: ignore[union-attr]
        return int(progress.processed)

    def _batches_behind(self) -> int:
        """Number of batches already trained on in the epoch within which a run resumes; 0 in all other epochs."""
        assert self.trainer is not None
        if not self.trainer.fit_loop.restarted_mid_epoch:
            return 0
        behind = self._trained()
        if self._resumed:
            check_rest_of_epoch(self._resumed, order_settings(self))
        # With 0 behind, all batches have been trained on, and the next epoch begins.
        if behind and self._resumed.get("steps") not in (None, behind // self.trainer.accumulate_grad_batches):
            raise CheckpointError(
                f"the checkpoint was written within an epoch after {self._resumed['steps']} optimizer steps, which "
                f"accumulate_grad_batches={self.trainer.accumulate_grad_batches} would cut otherwise",
                remedy="pass the accumulate_grad_batches of the run that wrote it",
            )
        return behind

    def train_dataloader(self) -> BatchLoader:
        """Loader of this process's part of every global batch, augmented, uint8."""
        sampler = self.train_sampler()
        sampler.check()
        images = self._resident("train")
        factors = self.class_factors()
        weights = None if factors is None else factors.to(images.images.device)
        return BatchLoader(
            images,
            sampler,
            augmentation=self.augmentation,
            mixing=self.mixing,
            class_weights=weights,
            num_workers=self._workers(images, transforms=self._transforms),
        )

    def class_factors(self) -> Tensor | None:
        """Factors of the loss of each class, float32, (C,), if there are any; a wrong number of them is refused."""
        if self.class_weights is None:
            return None
        if isinstance(self.class_weights, list):
            factors = torch.tensor(self.class_weights)
        else:
            factors = 1 / torch.bincount(self.sets["train"].labels, minlength=len(self.classes)).clamp(min=1)
        if len(factors) != len(self.classes):
            problem = f"--data.class_weights has {len(factors)} factors for {len(self.classes)} classes"
            raise ConfigError(problem, remedy=f"pass one for each of {', '.join(self.classes[:5])} ...")
        return factors

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Loader of the held-out images, each once over all processes; none when there are no images."""
        return self._evaluation_loader("val") if self.val_size else []

    def test_dataloader(self) -> BatchLoader:
        """Loader of the test images, each once over all processes."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> BatchLoader:
        """Loader of the readable images of `predict_dir`, each once over all processes, with labels of -1."""
        return self._evaluation_loader("predict")

    def evaluation_sampler(self, split: str) -> EvaluationSampler:
        return EvaluationSampler(
            num_samples=len(self.sets[split]),
            batch_size=self.eval_batch_size,
            layout=self.layout,
            pad=self.pad_eval and split != "predict",
        )

    def _evaluation_loader(self, split: str) -> BatchLoader:
        images = self._resident(split)
        return BatchLoader(images, self.evaluation_sampler(split), num_workers=self._workers(images))

    def _workers(self, images: ImageSet, *, transforms: bool = False) -> int | None:
        """Number of processes that make the batches, 0 if it is this one, None if blocks of batches are made here."""
        if images.are_encoded and self.num_workers is None:
            return max(1, num_cores() // self._num_processes)
        return self.num_workers if images.are_encoded or (transforms and self.num_workers) else None

    def _resident(self, split: str) -> ImageSet:
        """The images of `split` where `resident` wants them."""
        images = self.sets[split]
        device = images.images.device if self.trainer is None else self.trainer.strategy.root_device
        if self.resident == "device" and device.type == "cpu":
            rank_zero_warn("--data.resident=device has no effect on the CPU: the host's memory is the device's")
        on_host = self.resident == "host" or (split == "train" and self._transforms and not images.are_encoded)
        if on_host or (self.resident == "auto" and not _has_room(images.images, device)):
            return images
        return images.to(device)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalise the images on the device, in the precision of the run."""
        images = self._normalised(batch.images)
        # Lightning converted the batch before the transfer, when there was no float in it yet.
        converted: Any = images if self.trainer is None else self.trainer.precision_plugin.convert_input(images)
        return batch._replace(images=converted)

    def first_images(self, num_images: int) -> Tensor:
        """The first training images, or all if there are fewer, normalised but not augmented: float32."""
        images = self.sets["train"]
        return self._normalised(images.gather(torch.arange(min(num_images, len(images)))))

    def _normalised(self, images: Tensor) -> Tensor:
        """The centres of `images`, normalised, from uint8 to float32."""
        size = self.image_size
        border = max(0, images.shape[3] - size) // 2  # 0 after augmentation
        centre = images[:, :, border : border + size, border : border + size]
        mean, std = (_channel_values(values, images.device) for values in (self.source.mean, self.source.std))
        return centre.to(torch.float32, copy=True).sub_(mean).div_(std)


class _HandsOver(L.Callback):
    """Tells a data module of a checkpoint, whatever the module of the training is."""

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
        if isinstance(data, CIFAR10DataModule):
            data.compare(checkpoint)


@cache
def _channel_values(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Shares of the full range in units of a byte, (C, 1, 1). Cached: the host waits for a copy to a GPU."""
    return 255 * torch.tensor(values, device=device)[:, None, None]


def _has_room(images: Tensor, device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 4 * images.nbytes
