"""Runs several commands one after the other in the same processes: `torchrun run_commands.py FILE`, a list of lists.

One that stops as it was asked to, with exit status 143, is followed by the next.
"""

import gc
import json
import sys
from pathlib import Path

from lit_cifar.callbacks import EXIT_STOPPED
from lit_cifar.cli import main
from lit_cifar.errors import Stopped

if __name__ == "__main__":
    for command in json.loads(Path(sys.argv[1]).read_text()):
        try:
            main(command)
        except Stopped as stop:
            if stop.code != EXIT_STOPPED:
                raise
        gc.collect()  # what the next command needs must not go with this one's Trainer
