"""Warm-up, then decay, as a table."""

import pytest
import torch

from lit_cifar.task.optim import WarmupDecay


def rates(total: int, **settings: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = WarmupDecay(optimizer, **settings)
    schedule.set_total_steps(total)
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_linear_rise_and_fall() -> None:
    assert rates(10, warmup=0.4, decay="linear") == pytest.approx(
        [0.4, 0.8, 1.2, 1.6, 2.0, 2 * 5 / 6, 2 * 4 / 6, 2 * 3 / 6, 2 * 2 / 6, 2 * 1 / 6]
    )


def test_cosine_falls_through_half_at_half_time() -> None:
    seen = rates(8, warmup=0, decay="cosine")
    assert (seen[0], seen[4]) == (2.0, pytest.approx(1.0))
    assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize("warmup", [-0.1, 1.0])
def test_warmup_is_a_share(warmup: float) -> None:
    with pytest.raises(ValueError, match="share of all steps"):
        rates(10, warmup=warmup)


def test_a_longer_run_goes_on_in_its_own_plan() -> None:
    """Where the old one has ended, at zero."""
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0) for _ in range(2)]
    short, long = (WarmupDecay(optimizer, warmup=0, decay="linear") for optimizer in optimizers)
    short.set_total_steps(5)
    for _ in range(5):
        optimizers[0].step()
        short.step()
    assert optimizers[0].param_groups[0]["lr"] == 0
    long.set_total_steps(10)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    with pytest.warns(UserWarning, match=r"has 5 optimizer steps, this run has 10: from step 5 on"):
        long.load_state_dict(short.state_dict())
    assert optimizers[1].param_groups[0]["lr"] == 1.0
    optimizers[1].step()
    long.step()
    assert optimizers[1].param_groups[0]["lr"] == pytest.approx(0.8)
