"""The doctor's probe on devices that compute wrongly, are slow, lose what they send, or die."""

import os
import time

import torch
from torch import Tensor

from lit_cifar.tools.doctor.measurement import Device, main

PAUSE_S = 0.05  # beside operations of a millisecond or two


class SlowAndFlipping(Device):
    """One bit of one value is flipped in the convolution."""

    def run(self, operation: str, left: Tensor, right: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        result = super().run(operation, left, right)
        if operation == "convolution":
            result.view(torch.int32).view(-1)[5] ^= 1  # the lowest bit of the fraction
        return result


class Stale(Device):
    """The result of an all-reduce is that of the call before, if that had as many values."""

    before = torch.zeros(0)

    def all_reduce(self, values: Tensor) -> None:
        super().all_reduce(values)
        right = values.clone()
        if len(self.before) == len(values):
            values.copy_(self.before)
        self.before = right


class Dying(Device):
    def all_reduce(self, values: Tensor) -> None:
        os._exit(3)


FAULTS = {kind.__name__: kind for kind in (Device, SlowAndFlipping, Stale, Dying)}


if __name__ == "__main__":
    kinds = os.environ["FAULTY_DEVICES"].split()  # by rank
    main(lambda device, rank: FAULTS[kinds[rank]](device))
