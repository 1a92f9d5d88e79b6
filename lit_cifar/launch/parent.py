"""Who started this process, noted before the imports that take seconds, in which it may be killed."""

import os

PARENT_PID = os.getppid()
