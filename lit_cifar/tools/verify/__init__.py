"""`python -m lit_cifar verify`: proof that a mode trains the same model as one device."""
