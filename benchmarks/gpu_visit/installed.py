"""Says where `lit_cifar` is imported from: `python -m gpu_visit.installed FOLDER`; 1 if that is not FOLDER."""

import sys
from importlib import import_module
from pathlib import Path


def main(site: str) -> int:
    """Import the command line from `site`, ahead of the checkout."""
    sys.path.insert(0, site)
    package = Path(import_module("lit_cifar.cli.main").__file__ or "").parent
    print(f"the wheel's package answers from {package}")
    return 0 if package.is_relative_to(site) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
