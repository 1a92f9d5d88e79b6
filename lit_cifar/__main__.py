"""`python -m lit_cifar`. Kept this thin so that spawned processes can import every class from a named module."""

from lit_cifar.cli import main

if __name__ == "__main__":
    main()
