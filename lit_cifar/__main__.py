"""`python -m lit_cifar`. Kept this thin so that spawned processes can import every class from a named module."""

import atexit
import gc
import sys

from lit_cifar import startup
from lit_cifar.cli.overview import answer

startup.open_closed_streams()
startup.end_at_interrupt()
if __name__ == "__main__":
    answer(sys.argv[1:])
gc.disable()  # the imports leave a million objects and no garbage, and to look through them takes a seventh of the time
from lit_cifar.cli.main import main  # noqa: E402

# Imported objects live on: without them a collection takes a tenth. At the end they go too, or extensions report leaks.
gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)

if __name__ == "__main__":
    main()
