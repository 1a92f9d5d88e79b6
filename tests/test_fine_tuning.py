"""Frozen parameters and layers stay in every mode, and the classifier has a learning rate of its own."""

from pathlib import Path
from typing import Any

import pytest
from commands import TINY, last_checkpoint, refused, run_here
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from lit_cifar.models import build_network
from lit_cifar.models.fine_tuning import FineTuning
from lit_cifar.models.frozen import head_of, matching
from lit_cifar.task.module import LitResNet
from lit_cifar.task.optim import WarmupDecay

# The first layers stay; the learning rate does not depend on the length of the run.
STEM = [*TINY, "--model.fine_tuning.freeze=['conv1.*','bn1.*','layer1.*']", "--last_checkpoint.every_n_steps=1"]
STEM += ["--model.lr_scheduler=StepLR", "--model.lr_scheduler.step_size=9"]


@pytest.mark.parametrize(
    ("patterns", "parameters", "norms"),
    [
        ([], set(), ()),
        (["0.*"], {"0.weight", "0.bias"}, ()),
        (["[01].*"], {"0.weight", "0.bias"}, ("1",)),
        (["3.weight"], {"3.weight"}, ()),
        (["3.weight", "3.bias", "1.*"], {"3.weight", "3.bias"}, ("1", "3")),
        (["*.bias"], {"0.bias", "2.bias", "3.bias"}, ()),
    ],
)
def test_names_that_match_and_their_layers(patterns: list[str], parameters: set[str], norms: tuple[str, ...]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    assert matching(network, patterns) == (parameters, norms)


def test_a_tied_weight_is_frozen_by_each_of_its_names() -> None:
    tied = nn.Sequential(first := nn.Linear(4, 4), first)
    assert matching(tied, ["1.weight"]) == ({"1.weight"}, ())


def test_frozen_layers_stay_in_evaluation_mode() -> None:
    module = LitResNet("tiny", stem="imagenet", fine_tuning=FineTuning(freeze="bn1.*")).train()
    for _ in range(2):
        assert (module.network.bn1.training, module.network.layer1[0].bn1.training) == (False, True)
        assert not module.network.bn1.weight.requires_grad
        module.eval()
        module.train()


@pytest.mark.parametrize(
    ("arch", "name"), [("tiny", "fc"), ("vit_micro", "head.classifier"), ("fast", "head.classifier")]
)
def test_the_classifier_of_each_network(arch: Any, name: str) -> None:
    assert head_of(build_network(arch, stem=None, num_classes=10, image_size=32), 10) == name


SCHEDULES: list[Any] = [
    lambda optimizer: WarmupDecay(optimizer, warmup=0.3),
    lambda optimizer: StepLR(optimizer, step_size=3),
    lambda optimizer: CosineAnnealingLR(optimizer, T_max=20),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_keep_the_ratio_and_the_other_rates(schedule: Any) -> None:
    def rates(**given: Any) -> list[list[float]]:
        settings: Any = {"optimizer": lambda params: SGD(params, lr=0.1, momentum=0.9), "lr_scheduler": schedule}
        module = LitResNet("tiny", stem="imagenet", **settings, **given)
        optimizer = module.optimization.new_optimizer(module.network)
        scheduler = module.optimization.new_scheduler(optimizer)
        if isinstance(scheduler, WarmupDecay):
            scheduler.set_total_steps(20)
        seen = []
        for _ in range(18):
            seen.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        return seen

    alone, both = rates(), rates(fine_tuning=FineTuning(head_lr=0.4))
    assert [first for first, _ in both] == [rate for (rate,) in alone]
    assert [head for _, head in both] == pytest.approx([4 * rate for (rate,) in alone], rel=1e-12)


def moved(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    pairs = ((name, before["state_dict"][name], after["state_dict"][name]) for name in before["state_dict"])
    return {name for name, then, now in pairs if not then.equal(now)}


@pytest.mark.filterwarnings("ignore:the training before had lr_scheduler.total_steps")
def test_a_training_moves_the_rest_and_resumes_within_an_epoch(tmp_path: Path) -> None:
    """Exactly as one that was not interrupted; groups of another number are refused."""
    flags = [*STEM, "--model.fine_tuning.head_lr=0.3"]
    runs = {name: tmp_path / name for name in ("first", "whole", "cut")}
    run_here("fit", *flags, f"--run_dir={runs['first']}", "--trainer.max_steps=1")
    run_here("fit", *flags, f"--run_dir={runs['whole']}")
    run_here("fit", *flags, f"--run_dir={runs['cut']}", "--trainer.max_steps=3")
    run_here("fit", *flags, f"--run_dir={runs['cut']}", "--resume=auto")
    first, whole, cut = (last_checkpoint(run) for run in runs.values())
    names = {name for name in first["state_dict"] if name.partition(".")[0] not in ("conv1", "bn1", "layer1")}
    assert moved(first, whole) == names
    assert moved(whole, cut) == set()
    trained = [name for name, _ in LitResNet("tiny", stem="imagenet").network.named_parameters() if name in names]
    assert len(whole["optimizer_states"][0]["state"]) == len(trained)  # no momentum of the others
    says = ["groups of [39, 2] parameters; this one has [41]", "pass --model.fine_tuning.head_lr"]
    refused("fit", *STEM, f"--run_dir={runs['cut']}", "--resume=auto", "--trainer.max_epochs=2", says=says)
