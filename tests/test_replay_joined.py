"""A step is compared with that of all its batches joined to one, where they can be joined."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_cifar.checks.repeated_step.digests import Surroundings
from lit_cifar.checks.repeated_step.events import Call
from lit_cifar.checks.replay.step_data import JoinedBatch

CPU = torch.device("cpu")


class Task(nn.Module):
    """BatchNorm and dropout; `loss` decides what a step is."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 2))
        self.loss = loss
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return {"loss": self.loss(self.net(batch["x"]))}


def mean(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def note(*batches: Any, loss: Callable[[Tensor], Tensor] = mean, accumulated: bool = False) -> str:
    """Each batch is that of a rank, or one of those that one rank accumulates."""
    module = Task(loss)
    before = copy.deepcopy(module.state_dict())
    calls = [Call(((its, 0), {}), Surroundings.now(CPU), {}, {}, {}, {}, {}) for its in batches]
    its = JoinedBatch(copy.deepcopy, CPU)
    its.begin(module)
    text = its.note({0: calls} if accumulated else {rank: [call] for rank, call in enumerate(calls)})
    assert module.seen == 0
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert its.note({0: calls}) == ""  # once
    return text


def of_size(number: int, **others: Any) -> dict[str, Any]:
    return {"x": torch.randn(number, 4)} | others


@pytest.mark.parametrize("accumulated", [False, True])
def test_batches_of_one_size_are_one_batch_and_others_are_not(accumulated: bool) -> None:
    assert note(of_size(5), of_size(5), accumulated=accumulated) == ""
    assert "(2 batches have 5 to 9)" in note(of_size(5), of_size(9), accumulated=accumulated)


def test_sums_and_losses_that_compare_samples_are_noted() -> None:
    assert "gradient is 50 % away" in note(of_size(5), of_size(5), loss=torch.sum)
    assert "% away" in note(of_size(5), of_size(5), loss=lambda outputs: (outputs @ outputs.T).logsumexp(1).mean())


@pytest.mark.parametrize(
    ("batches", "loss"),
    [
        ([of_size(5)], mean),
        ([of_size(5, name="a"), of_size(9, name="b")], mean),
        ([of_size(5, y=torch.ones(3)), of_size(9, y=torch.ones(3))], mean),  # not divided by samples
        ([of_size(5, y=torch.ones(5, 1)), of_size(9, y=torch.ones(9, 2))], mean),
        ([{"x": 1.0}, {"x": 1.0}], mean),
        ([of_size(5), of_size(9)], lambda outputs: mean(outputs @ outputs)),  # an error
        ([of_size(5), of_size(9)], lambda outputs: mean(outputs * torch.rand(2))),
        ([of_size(5), of_size(9)], lambda outputs: mean(outputs * random.random())),
    ],
)
def test_what_cannot_be_joined_is_left_alone(batches: list[Any], loss: Callable[[Tensor], Tensor]) -> None:
    assert note(*batches, loss=loss) == ""
