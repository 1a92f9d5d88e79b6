"""The doctor's probe with a rank 1 that dies in its first all-reduce."""

import os

from torch import Tensor

from lit_cifar.tools.doctor.measurement import Device, main


class Dying(Device):
    def all_reduce(self, values: Tensor) -> None:
        os._exit(3)


if __name__ == "__main__":
    main(lambda device, rank: Dying(device) if rank == 1 else Device(device))
