"""A network of the user's own, on pictures of the user's own, from the command line."""

import csv
import shlex
import shutil
from pathlib import Path

import lightning as L
import own_networks
import pytest
import torch
from commands import TINY, callback, last_checkpoint, losses, mode_flags, own_network, refused, run_here
from data_files import draw_pictures

from lit_cifar import CheckpointError, CIFAR10DataModule, ConfigError, DataError, LitResNet
from lit_cifar.models.blocks import blocks_of, tensor_split_of

STEPS = 3


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ROOT/CLASS, with 9 cats and 8 dogs."""
    root = tmp_path_factory.mktemp("pictures")
    draw_pictures(root / "cat", 9)
    draw_pictures(root / "dog", 8, seed=1)
    return root


def flags(pictures: Path, *more: str) -> list[str]:
    """A training in float64 on pictures of 24 x 24, a checkpoint after each step."""
    of_pictures = ["--data.dataset=folder", f"--data.root={pictures}", "--data.image_size=24", "--data.batch_size=8"]
    training = ["--trainer.precision=64-true", "--model.optimizer.lr=0.01", f"--trainer.max_steps={STEPS}"]
    training += ["--trainer.max_epochs=-1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    written = ["--trainer.log_every_n_steps=1", "--figures.every_n_epochs=0", "--last_checkpoint.every_n_steps=1"]
    return [*of_pictures, *training, *written, *more]


def own(name: str) -> str:
    return f"--model.network=own_networks.{name}"


def test_trained_tested_resumed_and_loaded(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, whole, path = tmp_path / "run", tmp_path / "whole", tmp_path / "run" / "checkpoints" / "last.ckpt"
    fitting = ["fit", *flags(pictures, own("Chain"), "--model.network.width=4")]
    told = run_here(*fitting, f"--run_dir={whole}").stdout
    assert "            train on: cat 8, dog 8\n            held out: cat 1, dog 0\n" in told
    assert "test it" not in told  # there is nothing to test on
    run_here(*fitting, f"--run_dir={run}", f"--ckpt_path={whole / 'checkpoints' / 'previous.ckpt'}")
    header = {"arch": None, "stem": None, "num_classes": 2, "image_size": 24, "network": "own_networks.Chain"}
    assert last_checkpoint(run)["lit_cifar"].items() >= header.items()
    expected = last_checkpoint(whole)["state_dict"]
    assert expected.keys() == own_networks.Chain(width=4).state_dict().keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in last_checkpoint(run)["state_dict"].items())

    saved = [f"--config={run / 'config.yaml'}", f"--ckpt_path={path}"]
    run_here("validate", *saved, f"--run_dir={tmp_path / 'validate'}")
    predicted = tmp_path / "predict"
    told = run_here("predict", *saved, f"--run_dir={predicted}", f"--data.predict_dir={pictures}").stdout
    assert told.startswith(f"predict     {path}\ndata        17 files, 17 of them pictures\n")
    assert len((predicted / "predictions.csv").read_text().splitlines()) == 1 + 17
    # As many classes, of which one has another number.
    for split, name in [(split, name) for split in ("train", "val", "test") for name in ("bird", "cat")]:
        draw_pictures(tmp_path / "others" / split / name, 8)
    other = [f"--data.root={tmp_path / 'others'}", f"--data.predict_dir={pictures}", "--trainer.max_steps=9"]
    rule = "class 0 is cat in the checkpoint and bird in these data; it was trained on ('cat', 'dog'), and"
    for command in ("test", "validate", "predict", "fit"):
        said = refused(command, *saved, *other, f"--run_dir={tmp_path / 'x'}", says=[rule])
    remedy = shlex.split(said.splitlines()[-1])[-1]  # of `fit`
    start = [own("Chain"), "--model.network.width=4", other[0], remedy]
    run_here("fit", *flags(pictures, *start), f"--run_dir={tmp_path / 'start'}")
    assert last_checkpoint(tmp_path / "start")["trained_on"] == {"dataset": "folder", "classes": ["bird", "cat"]}
    resumed = [*fitting, *other[::2], "--resume=auto", f"--run_dir={run}"]
    refused(*resumed, says=[rule])
    data = CIFAR10DataModule(tmp_path / "others", dataset="folder", image_size=24)
    module = LitResNet(network=own_networks.Chain(width=4), num_classes=2, image_size=24)
    with pytest.raises(CheckpointError, match="class 0 is cat in the checkpoint and bird in these data"):
        L.Trainer(accelerator="cpu", logger=False).test(module, data, ckpt_path=path, weights_only=True)

    network = own_networks.Chain(width=4).double()
    assert LitResNet.load_from_checkpoint(path, network=network).network is network
    assert torch.equal(network[6].bias, expected["6.bias"])
    with pytest.raises(CheckpointError, match="no code is run because a checkpoint names it\npass network=Chain"):
        LitResNet.load_from_checkpoint(path)
    for other, problem in {
        own("Opaque"): "holds own_networks.Chain with 2 classes, 24 x 24 images, the model is own_networks.Opaque",
        "--model.arch=tiny": "pass the flags of its training, which RUN_FOLDER/config.yaml has",
        f"{own('Chain')} --model.network.width=8": "(4, 3, 3, 3) in the checkpoint, (8, 3, 3, 3) in the model",
    }.items():
        given = [*flags(pictures, *other.split()), f"--ckpt_path={path}", f"--run_dir={tmp_path / 'x'}"]
        assert problem in refused("fit", *given)


@pytest.mark.slow
def test_predictions_need_no_training_pictures(pictures: Path, tmp_path: Path) -> None:
    root, run = shutil.copytree(pictures, tmp_path / "root" / "train").parent, tmp_path / "run"
    shutil.copytree(pictures, root / "val")
    run_here("fit", *flags(root, own("Chain"), "--data.order.drop_last=true"), f"--run_dir={run}")
    given = [f"--config={run / 'config.yaml'}", f"--data.predict_dir={pictures}"]
    checkpoint = f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}"

    def predicted(to: str, *more: str) -> str:
        run_here("predict", *given, *more, checkpoint, f"--run_dir={tmp_path / to}")
        return (tmp_path / to / "predictions.csv").read_text()

    before = predicted("before")
    assert {row["class"] for row in csv.DictReader(before.splitlines())} <= {"cat", "dog"}
    shutil.rmtree(root / "train")
    assert predicted("others left") == before
    shutil.rmtree(root / "val")
    assert predicted("empty") == before
    root.rmdir()
    assert predicted("gone", "--data.memory_gb=0") == before
    gone = f"there is no folder {root}"
    refused("test", *given, checkpoint, f"--run_dir={tmp_path / 'x'}", says=[gone])
    draw_pictures(root / "cat", 1)
    draw_pictures(root / "fox", 1)
    refused("predict", *given, checkpoint, f"--run_dir={tmp_path / 'x'}", says=["class 1 is dog in the checkpoint"])


@pytest.mark.filterwarnings("ignore:the training before had lr_scheduler.total_steps")
def test_a_run_goes_on_with_the_same_files(pictures: Path, tmp_path: Path) -> None:
    root, run = shutil.copytree(pictures, tmp_path / "pictures"), tmp_path / "run"
    fitting = flags(root, own("Chain"), "--data.val_size=1", "--data.order.drop_last=true")
    run_here("fit", *fitting, "--trainer.max_steps=2", f"--run_dir={run}")
    longer = [*fitting, f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", f"--run_dir={tmp_path / 'longer'}"]
    renamed = (root / "dog" / "3.png").rename(root / "dog" / "3a.png")  # as many
    refused("fit", *longer, says=["put them back as they were"])
    renamed.rename(root / "dog" / "3.png")
    run_here("fit", *longer)
    assert last_checkpoint(tmp_path / "longer")["global_step"] == STEPS


def test_layers_that_backward_computes_again_draw_the_same(tmp_path: Path) -> None:
    found = []
    for name in ("Drawing", "Checkpointed"):
        run_here("fit", *own_network(name), "--trainer.precision=64-true", f"--run_dir={tmp_path / name}")
        found.append(losses(tmp_path / name))
    assert found[0] == pytest.approx(found[1], rel=1e-12)


# The first word names one of `own_networks`.
MISTAKES = {
    "Opaque --trainer.strategy=mp": "give it blocks() (lit_cifar.models.blocks)",
    "Opaque --trainer.strategy=tp": "Opaque does not say which can be split",
    "Chain --model.network.width=3 --trainer.strategy=tp --trainer.devices=4": "layers of Chain have 6 parts",
    "Chain --model.arch=tiny": "with --model.arch=tiny: that is about another network",
    "Chain --model.network.num_classes=3": "Chain returns (2, 3) for 2 images in training, not logits of 2 classes",
    "Forgetful": "in training the blocks of Forgetful, one after the other, do not compute its forward()",
    "--model.network=torch.nn.MaxPool1d --model.network.kernel_size=9": "MaxPool1d cannot take images (3, 24, 24): ",
    "Lazy": "the lazy layer 2, and an optimizer needs all parameters before the first batch\n  make it nn.Linear(",
    "Unreached --trainer.strategy=ddp": "not depend on 2 of its parameters, such as 0.unused.weight: ddp would "
    "wait for their gradients\n  pass --trainer.strategy=ddp_find_unused_parameters_true",
    "Skipping --trainer.strategy=fsdp2": "Skipping leaves out 1.layer.weight in some steps",
    "Routed --model.network.num_classes=2 --trainer.strategy=fsdp2": "Routed leaves out bright.weight",
    "Skipping --virtual_replicas=4": "1.layer.weight in some steps",
    "Skipping --trainer.strategy=ddp": "Skipping leaves out 1.layer.weight in some steps",
    "Tied --trainer.strategy=pp": "0.weight = 3.weight is needed in two places, between which --tr",
    "Tied --trainer.strategy=fsdp2": "0.weight = 3.weight is needed",
    "Tied --trainer.strategy=mp": "0.weight = 3.weight is needed",
    "Hooked --trainer.strategy=pp": "6.weight has a hook on its gradient, which --trainer.strategy=pp",
    "Hooked --model.network.accumulated=true --trainer.strategy=fsdp2": "6.weight has a hook",
    "Hooked --trainer.strategy=ddp_spawn": "which --trainer.strategy=ddp_spawn calls otherwise or never",
    "Chian": "did you mean --model.network=own_networks.Chain?",
    "--model.arch=vit_micro --model.stem=cifar": "--model.stem=cifar is of a ResNet, and vit_micro is none",
    "--model.arch=vit_micro --data.image_size=20": "do not fill images of 20\n  pass --data.image_size=16",
    "--data.val_size=3 --data.dataset=synthetic": "but images of synthetic have 32",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_named_before_a_process_is_started(words: str, pictures: Path, tmp_path: Path) -> None:
    more = ["--trainer.devices=2"] if "strategy" in words else []
    more += [word if word.startswith("--") else own(word) for word in words.split()]
    assert MISTAKES[words] in refused("fit", *flags(pictures), *more, f"--run_dir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


BUILDERS = [
    (["torchvision.models.resnet18", "--model.network.num_classes=10"], "torchvision.models.resnet.ResNet"),
    (
        ["timm.create_model", "--model.network.model_name=resnet18", "--model.network.dict_kwargs.num_classes=10"],
        "timm.models.resnet.ResNet",
    ),
]


@pytest.mark.parametrize(("words", "kind"), BUILDERS, ids=["torchvision", "timm"])
def test_a_network_that_a_function_builds(words: list[str], kind: str, tmp_path: Path) -> None:
    """It trains in modes that take any network, and its run folder is enough to evaluate it."""
    pytest.importorskip(kind.partition(".")[0], reason="timm is not installed")
    whole = [flag for flag in TINY if "--model" not in flag] + [f"--model.network={words[0]}", *words[1:]]
    run = tmp_path / "run"
    run_here("fit", *whole, "--trainer.max_steps=1", f"--run_dir={run}")
    assert last_checkpoint(run)["lit_cifar"]["network"] == kind
    run_here("test", run, f"--run_dir={tmp_path / 'tested'}")
    for mode, says in {"pp": "ResNet does not say which it has", "tp": "does not say which can be split"}.items():
        refused("fit", *whole, *mode_flags(mode), f"--run_dir={tmp_path / 'x'}", says=[says])
    refused("fit", *whole, "--model.network.width=3", says=["did you mean --model.network.dict_kwargs.width?"])


def test_a_rank_without_images_evaluates_none() -> None:
    assert LitResNet(network=own_networks.Viewed()).eval()(torch.zeros(0, 3, 32, 32)).shape == (0, 10)


@pytest.mark.usefixtures("one_process")
def test_a_gradient_hook_that_is_added_late_is_refused(pictures: Path, tmp_path: Path) -> None:
    late = [own("Chain"), *callback("own_networks.HookAtStart"), *mode_flags("fsdp2", 1)]
    said = refused("fit", *flags(pictures), *late, f"--run_dir={tmp_path / 'run'}")
    assert "6.weight has a hook on its gradient" in said


def test_a_network_says_its_blocks_by_a_method_or_as_a_sequence() -> None:
    chain = own_networks.Chain()
    assert list(blocks_of(chain) or {}) == [str(index) for index in range(7)]
    assert blocks_of(own_networks.Opaque()) is None  # a list of layers of this name is no method
    assert tensor_split_of(chain) == {f"3.{name}": kind for name, kind in chain[3].tensor_split.items()}
    repeated = torch.nn.Sequential(chain[0], chain[2], chain[2])
    assert list((blocks_of(repeated) or {}).values()) == [chain[0], chain[2], chain[2]]


def test_one_picture_of_each_class_in_turn(pictures: Path) -> None:
    data = CIFAR10DataModule(pictures, dataset="folder", image_size=24, num_train=6, val_size=2)
    data.setup("fit")
    assert data.classes == ("cat", "dog")
    assert data.source.load("train").labels.tolist() == [0, 1] * 8 + [0]
    split = [data.sets[name].labels for name in ("train", "val")]
    assert ([len(part) for part in split], sorted(torch.cat(split).tolist())) == ([4, 2], [0, 0, 0, 1, 1, 1])
    by_default = CIFAR10DataModule(pictures, dataset="folder")
    assert (by_default.val_size, by_default.image_size) == (1, 32)
    with pytest.raises(DataError, match=r"there is no folder .*test"):
        data.setup("test")


def test_nothing_is_held_out_beside_a_folder_to_validate_on(tmp_path: Path) -> None:
    draw_pictures(tmp_path / "train" / "cat", 3)
    draw_pictures(tmp_path / "train" / "dog", 2)
    draw_pictures(tmp_path / "val" / "dog", 2)
    data = CIFAR10DataModule(tmp_path, dataset="folder")
    data.setup("fit")
    labels = {name: images.labels.tolist() for name, images in data.sets.items()}
    assert labels == {"train": [0, 1, 0, 1, 0], "val": [1, 1]}
    with pytest.raises(ConfigError, match=r"--data.val_size=1, but .* has a folder to validate on"):
        CIFAR10DataModule(tmp_path, dataset="folder", val_size=1).setup("fit")
