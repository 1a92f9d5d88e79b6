"""Whether copies between GPUs arrive: the findings of `lit_cifar.copy_probe`."""

from collections.abc import Callable

from lit_cifar.doctor.findings import Finding


def check_copies(num_gpus: int, *, report: Callable[[str], None]) -> tuple[str, list[Finding]]:
    """A sentence to print, and what is wrong."""
    if num_gpus < 2:
        return f"nothing to probe: copies from GPU to GPU need two GPUs, and torch sees {num_gpus or 'none'}", []
    raise NotImplementedError
