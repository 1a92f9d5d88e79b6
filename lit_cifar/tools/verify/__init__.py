"""`python -m lit_cifar verify`: proof that a mode trains the same model as one device, and that the proof can fail."""

from lit_cifar.tools.verify.verdict_table import VerifiedMode
from lit_cifar.tools.verify.verifier import verify

__all__ = ["VerifiedMode", "verify"]
