"""`python -m lit_cifar verify`: proof that a mode trains the same model as one device."""

from lit_cifar.tools.verify.command import verify
from lit_cifar.tools.verify.judge import VerifiedMode

__all__ = ["VerifiedMode", "verify"]
