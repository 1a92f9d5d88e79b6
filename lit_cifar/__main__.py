"""`python -m lit_cifar`. Kept this thin so that spawned processes can import every class from a named module."""

import atexit
import gc

from lit_cifar.launch.startup import gc_paused

with gc_paused():
    from lit_cifar.cli.main import main

# The imports live as long as the process: without them a collection takes a tenth of the time. At the end they are
# collected too, else the extension modules among them report what they had to leave.
gc.freeze()
atexit.register(gc.unfreeze)

if __name__ == "__main__":
    main()
