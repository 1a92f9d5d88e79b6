"""A data set as a LightningDataModule whose batch size is the global one."""

from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_cifar.data.augment import Augment
from lit_cifar.data.balance import Balance
from lit_cifar.data.changed_order import check_held_out, check_rest_of_epoch, tell_changed
from lit_cifar.data.dataset import Split, open_dataset
from lit_cifar.data.images import Batch, ImageSet, normalised
from lit_cifar.data.loader import BatchLoader
from lit_cifar.data.mixing import Mixing
from lit_cifar.data.sample_order import Order, OrderSettings, augment_settings, order_settings, settings_in
from lit_cifar.data.samplers import EvaluationSampler, TrainSampler
from lit_cifar.data.workers import num_cores
from lit_cifar.errors import CheckpointError, ConfigError, bounded, clash
from lit_cifar.mode import Layout, mode_of


class CIFAR10DataModule(L.LightningDataModule):
    """The same batches for every number of processes and every mode.

    Images stay uint8 until a batch has reached its device; there they become float and are normalised with the data
    set's channel statistics. A GPU that has room for four copies of them holds all, and makes its batches itself.
    Order, augmentation and the validation split follow `seed`, never the global generators.

    Args:
        root: Folder of the data set. A download is stored here.
        dataset: Data set: "cifar10", "cifar100", "synthetic" (images drawn by code from `seed`, without files), or
            "folder": your own pictures, in ROOT/CLASS, or in ROOT/train/CLASS, ROOT/val/CLASS and ROOT/test/CLASS.
        image_size: Height and width to which the pictures of "folder" are resized, in pixels. The default is 32.
        batch_size: Global batch size: samples per optimizer step over all replicas and accumulation steps.
        eval_batch_size: Samples per evaluation step over all processes. It does not change any result.
        val_size: Number of training images held out for validation by a seeded split. With 0 the run trains on all
            images, without validation. The default is 5000 or a tenth of `num_train`; of "folder" a tenth, or ROOT/val.
        num_train: Use only the first n training images, before the split. The synthetic data set draws n images.
        num_test: Use only the first n test images. The synthetic data set draws n images.
        augment: What training images go through: with true random crops after padding, and alternating flips; with
            false nothing. Or `Augment`, its settings: --data.augment.cutout=8 adds cutout to these.
        mixing: Mixup and CutMix of training images: `Mixing`.
        balance: What is done for rare classes: `Balance`.
        order: In which order images are trained on, and which are left out or repeated: `Order`.
        num_workers: Number of worker processes, for each process that trains, that decode pictures which do not fit the
            memory and apply transforms of `augment`. With 0 it does so itself. By default its cores, if it decodes.
        download: Download the data set if it is missing.
        memory_gb: Largest size of the decoded pictures of a split of "folder", in GB, that each process keeps in its
            memory. Larger ones are decoded by worker processes in each epoch anew; all else is the same. The default is
            half of what the machine has free, divided among its processes that train.
        seed: Seed of order, augmentation, split and synthetic images, and of dropout; not negative.
        predict_dir: Folder of the images that `predict` classifies.

    Attributes:
        name: The data set's name in logs and tables.
        sets: Images that `setup` has read, by split: "train", "val", "test", "predict".
        files: Every file of `predict_dir`, with a line on why it cannot be read, or None.

    Raises:
        ConfigError: Settings that contradict each other; sizes that cannot be cut.
        DataError: A data set that is missing, incomplete or damaged, in `prepare_data` or `setup`.
    """

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 512,
        *,
        dataset: str = "cifar10",
        image_size: int | None = None,
        eval_batch_size: int = 500,
        val_size: int | None = None,
        num_train: int | None = None,
        num_test: int | None = None,
        augment: bool | Augment = True,
        mixing: Mixing = Mixing(),  # noqa: B008  # it is frozen, and so are the next
        balance: Balance = Balance(),  # noqa: B008
        order: Order = Order(),  # noqa: B008
        num_workers: int | None = None,
        download: bool = True,
        memory_gb: float | None = None,
        seed: int = 0,
        predict_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.root = Path(root)
        self.batch_size = bounded("--data.batch_size", batch_size, 1, 2**31)
        self.eval_batch_size = bounded("--data.eval_batch_size", eval_batch_size, 1, 2**31)
        self.num_images = {"train": num_train, "test": num_test}
        self.mixing, self.balance, self.order = mixing, balance, order
        self.download = download
        self.seed = bounded("--data.seed", seed, 0)
        self.dataset, self._held_out = dataset, bounded("--data.val_size", val_size, 0)
        self.predict_dir = None if predict_dir is None else Path(predict_dir)
        self.source = open_dataset(dataset, root, image_size=image_size, seed=seed)
        self.name, self.image_size = self.source.title, self.source.image_size
        self._memory_gb = bounded("--data.memory_gb", memory_gb, 0)
        if memory_gb is not None and dataset != "folder" and predict_dir is None:
            problem = f"--data.memory_gb={memory_gb} is for pictures of your own, which are decoded"
            raise ConfigError(problem, remedy="leave it out, or pass --data.dataset=folder")
        settings = Augment() if augment is True else augment
        self.augment_settings = augment_settings(settings)
        self.augmentation = settings.of_images(self.image_size, seed=seed) if settings else None
        self._transforms = self.augmentation is not None and bool(self.augmentation.transforms)
        self._num_workers = bounded("--data.num_workers", num_workers, 0, 2**16)
        if num_workers is not None and not self._transforms and dataset != "folder" and predict_dir is None:
            problem = f"--data.num_workers={num_workers}, but these images are in memory"
            raise ConfigError(problem, remedy="leave it out, or add --data.augment.transforms")
        self.sets: dict[str, ImageSet] = {}
        self._resumed: OrderSettings = {}  # `state_dict` of the run that wrote the checkpoint
        self.files: dict[str, str | None] = {}
        self._prepared = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without images: a spawned process reads them, as 150 MB do not fit every shared memory."""
        return self.__dict__ | {"sets": {}, "files": {}}

    @property
    def classes(self) -> tuple[str, ...]:
        return self.source.classes

    @cached_property
    def val_size(self) -> int:
        if self._held_out is not None:
            if self.source.own_val:
                problem = f"--data.val_size={self._held_out}, but {self.root} has a folder to validate on"
                raise ConfigError(problem, remedy="leave it out, or move that folder away")
            return self._held_out
        own, num_train = self.source.val_size, self.num_images["train"]
        return own if num_train is None or self.source.own_val else min(own, max(num_train, 0) // 10)

    # Lightning calls prepare_data in one process per node, then setup in every process.

    def prepare_data(self) -> None:
        """Download the data set if it is missing and may be downloaded, once in this process."""
        predicts = self.trainer is not None and self.trainer.state.fn == TrainerFn.PREDICTING
        if not predicts and not self._prepared:
            self.source.prepare(download=self.download)
            self._prepared = True

    def setup(self, stage: str) -> None:
        """Read what `stage` ("fit", "validate", "test" or "predict") needs into `self.sets`."""
        callbacks: list[L.Callback] = [] if self.trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, _HandsOver) for callback in callbacks):
            callbacks.append(_HandsOver())
        if stage in ("fit", "validate"):
            num_val = self.val_size  # before they are loaded, so that pictures are listed once
            if stage == "validate" and not num_val:
                remedy = "pass the --data.val_size of the training, or use the test subcommand"
                raise ConfigError("--data.val_size=0 holds out no images to validate on", remedy=remedy)
            if "train" not in self.sets:
                train = self._load("train")
                both = (train, self._load("val")) if self.source.own_val else self._split(train)
                self.sets["train"], self.sets["val"] = both
            for split in ("train", "val") if stage == "fit" else ("val",):
                self.sets[split] = self._decoded(self.sets[split])
        elif stage == "test" and "test" not in self.sets:
            self.sets["test"] = self._decoded(self._load("test"))
        elif stage == "predict":
            if self.predict_dir is None:
                raise ConfigError("predict classifies a folder of images", remedy="pass --data.predict_dir=FOLDER")
            from lit_cifar.data.pictures import read_folder  # only `predict` needs it

            self.files, self.sets["predict"] = read_folder(
                self.predict_dir,
                classes=self.classes,
                size=self.image_size,
                limit_gb=self._memory_gb,
                num_processes=self._num_processes,
            )

    def _load(self, split: Split) -> ImageSet:
        return self.source.load(split, num_images=self.num_images.get(split))

    def _decoded(self, images: ImageSet) -> ImageSet:
        return images.in_memory(self._memory_gb, num_processes=self._num_processes)

    @property
    def _num_processes(self) -> int:
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
        # Overfitting needs the same batches in every epoch; Lightning turns off the shuffling of DataLoaders only.
        overfits = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        if overfits and self.balance.draw_equally:
            raise clash("--trainer.overfit_batches", "--data.balance.draw_equally", "one repeats, one draws anew")
        return TrainSampler(
            num_samples=len(self.sets["train"]),
            batch_size=self.batch_size,
            layout=self.layout,
            accumulation=1 if self.trainer is None else self.trainer.accumulate_grad_batches,
            seed=self.seed,
            shuffle=not overfits,
            frozen=self.order.frozen,
            drop_last=self.order.drop_last,
            balanced=self.sets["train"].labels.cpu() if self.balance.draw_equally else None,
            behind=None if self.trainer is None else self._batches_behind,
        )

    def state_dict(self) -> dict[str, Any]:
        """Settings that order the samples, and the number of steps taken in the epoch. Checkpoints hold them."""
        if self.trainer is None or "train" not in self.sets:
            return {}
        return order_settings(self) | {"steps": batches_of_epoch(self.trainer) // self.trainer.accumulate_grad_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse to validate on images that the run that wrote the checkpoint was trained on."""
        self._resumed = state_dict
        if self.trainer is not None and self.trainer.state.fn in (TrainerFn.FITTING, TrainerFn.VALIDATING):
            check_held_out(state_dict, order_settings(self))

    def compare(self, checkpoint: dict[str, Any]) -> None:
        """Load the state of a data module of another class, too: Lightning does so for the same class alone."""
        if type(self).__qualname__ not in checkpoint and (settings := settings_in(checkpoint)):
            self.load_state_dict(settings)

    def _batches_behind(self) -> int:
        """Number of batches already trained on in the epoch within which a run resumes; 0 in all other epochs."""
        assert self.trainer is not None
        within = self.trainer.fit_loop.restarted_mid_epoch
        then, self._resumed = self._resumed, {}
        if then:
            compare = check_rest_of_epoch if within else tell_changed
            compare(then, order_settings(self))
        behind = batches_of_epoch(self.trainer) if within else 0
        # With 0 behind, all batches have been trained on, and the next epoch begins.
        accumulation = self.trainer.accumulate_grad_batches
        if behind and then.get("steps") not in (None, behind // accumulation):
            place = f"within an epoch after {then['steps']} optimizer steps"
            problem = f"the checkpoint was written {place}, which accumulate_grad_batches={accumulation} cuts otherwise"
            raise CheckpointError(problem, remedy="pass the accumulate_grad_batches of the run that wrote it")
        return behind

    def train_dataloader(self) -> BatchLoader:
        """Loader of this process's part of every global batch, augmented, uint8."""
        sampler = self.train_sampler()
        sampler.check()
        mixing, factors = self.mixing or None, self.class_factors()
        return self._loader("train", sampler, augmentation=self.augmentation, mixing=mixing, class_weights=factors)

    def class_factors(self) -> Tensor | None:
        return self.balance.factors(self.sets["train"].labels, self.classes)

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Loader of the held-out images, each once over all processes; none when there are no images."""
        return self._loader("val", self.evaluation_sampler("val")) if self.val_size else []

    def test_dataloader(self) -> BatchLoader:
        return self._loader("test", self.evaluation_sampler("test"))

    def predict_dataloader(self) -> BatchLoader:
        """Loader of the readable images of `predict_dir`, each once over all processes, with labels of -1."""
        return self._loader("predict", self.evaluation_sampler("predict"))

    def evaluation_sampler(self, split: str) -> EvaluationSampler:
        return EvaluationSampler(
            num_samples=len(self.sets[split]),
            batch_size=self.eval_batch_size,
            layout=self.layout,
            pad=self.order.pad_eval and split != "predict",
        )

    def _loader(self, split: str, sampler: TrainSampler | EvaluationSampler, **settings: Any) -> BatchLoader:
        """Loader of the images of `split`, which are put where batches are made of them."""
        images, transforms = self.sets[split], split == "train" and self._transforms
        num_workers = self._num_workers or 0 if images.are_encoded or transforms else 0
        if images.are_encoded and self._num_workers is None:
            num_workers = max(1, num_cores() // self._num_processes)
        device = images.images.device if self.trainer is None else self.trainer.strategy.root_device
        if (not transforms or (images.are_encoded and num_workers)) and has_room(images, device):  # else on the host
            images = images.to(device)
        return BatchLoader(images, sampler, num_workers=num_workers, **settings)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalise the images on the device, in the precision of the run."""
        images: Any = self._normalised(batch.images)
        if self.trainer is not None:  # Lightning converted the batch before, when there was no float in it yet
            images = self.trainer.precision_plugin.convert_input(images)
        return batch._replace(images=images)

    def first_images(self, num_images: int) -> Tensor:
        """The first training images, or all if there are fewer, normalised but not augmented: float32."""
        images = self.sets["train"]
        return self._normalised(images.gather(torch.arange(min(num_images, len(images)))))

    def _normalised(self, images: Tensor) -> Tensor:
        return normalised(images, mean=self.source.mean, std=self.source.std)


def has_room(images: ImageSet, device: torch.device) -> bool:
    """Whether `device` is a GPU that has room for four copies of the `images`."""
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 4 * images.images.nbytes


def batches_of_epoch(trainer: L.Trainer) -> int:
    """Number of batches that were trained in the current epoch."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(progress.processed)


class _HandsOver(L.Callback):
    """Tells a data module of a checkpoint, whatever the module of the training is."""

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
        if isinstance(data, CIFAR10DataModule):
            data.compare(checkpoint)
