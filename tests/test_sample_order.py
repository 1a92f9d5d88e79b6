"""What a checkpoint says of the order of its samples, compared with a run that goes on from there."""

from typing import Any

import pytest
from torchvision.transforms import v2

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.augment import Augment
from lit_cifar.data.changed_order import check_held_out, check_rest_of_epoch
from lit_cifar.data.sample_order import _text, order_settings
from lit_cifar.errors import CheckpointError

SETTINGS = {
    **{"dataset": "synthetic", "num_train": 120, "val_size": 20, "batch_size": 24, "seed": 0},
    **{"order.frozen": False, "order.drop_last": False},
    **{"balance.class_weights": "null", "mixing.mixup": 0.0},
}
OWN_VAL = {"train files": "a", "val files": "c", "val_size": 0}  # pictures in folders, of which some are to validate on


@pytest.mark.parametrize(
    ("changed", "problem", "remedy"),
    [
        ({"seed": 1}, "--data.seed=1", "--data.seed=0"),
        ({"batch_size": 20}, "--data.batch_size=20", "--data.batch_size=24"),
        ({"order.frozen": True}, "--data.order.frozen=true", "--data.order.frozen=false"),
        ({"balance.class_weights": "[1,2.5]"}, *(f"--data.balance.class_weights={it}" for it in ("[1,2.5]", "null"))),
        ({"mixing.mixup": 0.4}, "--data.mixing.mixup=0.4", "--data.mixing.mixup=0.0"),
        ({"val_size": 10}, "--data.val_size=10", "--data.val_size=20"),
        ({"dataset": "cifar10"}, "--data.dataset=cifar10", "--data.dataset=synthetic"),
        ({"num_train": 130, "seed": 1}, "--data.num_train=130 --data.seed=1", "--data.num_train=120 --data.seed=0"),
    ],
    ids=str,
)
def test_other_settings_are_refused_within_an_epoch(changed: dict[str, Any], problem: str, remedy: str) -> None:
    with pytest.raises(CheckpointError) as error:
        check_rest_of_epoch(SETTINGS, SETTINGS | changed)
    assert error.value.problem.endswith(f"within an epoch with {remedy}; {problem} would train on the rest otherwise")
    # Between two epochs the order may change, but not what is held out.
    mixed = bool({"seed", "num_train"} & changed.keys())
    other = "start a new training" if mixed else "resume a checkpoint from between two epochs"
    assert error.value.remedy == f"pass {remedy}, or {other}"


@pytest.mark.parametrize("other", [False, Augment(cutout=4), Augment(transforms=[v2.RandAugment(num_ops=3)])], ids=str)
def test_another_augmentation_is_refused_within_an_epoch(other: bool | Augment) -> None:
    """A transform that is made again is the same one."""
    found = []
    for augment in (Augment(transforms=[v2.RandAugment()]), Augment(transforms=[v2.RandAugment()]), other):
        data = CIFAR10DataModule(dataset="synthetic", num_train=20, augment=augment)
        data.setup("fit")
        found.append(order_settings(data))
    check_rest_of_epoch(found[0], found[1])
    with pytest.raises(CheckpointError, match=r"within an epoch with --data\.augment"):
        check_rest_of_epoch(found[0], found[2])


# What was trained on and what is held out now, as (then, now, whether some images are of both).
HELD_OUT: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "nothing changed": ({}, {}, None),
    "another order": ({}, {"batch_size": 20, "order.frozen": True, "order.drop_last": True}, None),
    "another seed": ({}, {"seed": 1}, "--data.seed=0"),
    "another seed, and nothing is validated on": ({}, {"seed": 1, "val_size": 0}, None),
    "more are held out": ({}, {"val_size": 30}, "--data.val_size=20"),
    "fewer are held out": ({}, {"val_size": 10}, None),
    "none were held out": ({"val_size": 0}, {}, "--data.val_size=0"),
    "there are more images": ({}, {"num_train": 130}, "--data.num_train=120"),
    "the same files": ({"train files": "a"}, {"train files": "a"}, None),
    "a file more": ({"train files": "a"}, {"train files": "b", "num_train": 121}, "put them back"),
    "as many files": ({"train files": "a"}, {"train files": "b"}, "put them back"),
    "a file more, and nothing is validated on": ({"train files": "a"}, {"train files": "b", "val_size": 0}, None),
    "the seed of a folder that has others": (OWN_VAL, OWN_VAL | {"seed": 1}, None),
    "a file more to train on": (OWN_VAL, OWN_VAL | {"train files": "b"}, None),
    "a file more to validate on": (OWN_VAL, OWN_VAL | {"val files": "d"}, None),
    "a file was moved": (OWN_VAL, OWN_VAL | {"train files": "b", "val files": "d"}, "put them back"),
    "a folder to validate on is new": ({"train files": "a"}, OWN_VAL, None),
    "a folder to validate on took some": ({"train files": "a"}, OWN_VAL | {"train files": "b"}, "put them back"),
    "a folder to validate on is gone": (OWN_VAL, {"train files": "a"}, "put them back"),
}


@pytest.mark.parametrize("case", HELD_OUT)
def test_images_that_were_trained_on_are_not_validated_on(case: str) -> None:
    then, now, remedy = HELD_OUT[case]
    if remedy is None:
        check_held_out(SETTINGS | then, SETTINGS | now)
        return
    with pytest.raises(CheckpointError, match="images that the checkpoint was trained on would be validated") as error:
        check_held_out(SETTINGS | then, SETTINGS | now)
    assert remedy in error.value.remedy


def test_other_files_are_refused_within_an_epoch() -> None:
    then = SETTINGS | OWN_VAL
    check_rest_of_epoch(then, then | {"val files": "d"})
    with pytest.raises(CheckpointError, match="since then files to train on were added, removed or renamed"):
        check_rest_of_epoch(then, then | {"train files": "b"})


def test_the_place_of_an_object_in_memory_is_no_setting() -> None:
    assert _text([object(), [print]]) == "[<object object>,[<built-in function print>]]"
