"""Runs several commands one after the other in the same processes: `torchrun run_commands.py FILE`, a list of lists."""

import json
import sys
from pathlib import Path

from lit_cifar.cli import main

if __name__ == "__main__":
    for command in json.loads(Path(sys.argv[1]).read_text()):
        main(command)
