"""The doctor's probe with a rank 1 that never comes to an all-reduce."""

from faulty_devices import Hanging

from lit_cifar.doctor.measurement import Device
from lit_cifar.doctor.rank_probe import main

if __name__ == "__main__":
    main(lambda device, rank: Hanging(device) if rank == 1 else Device(device))
