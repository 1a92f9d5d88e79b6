"""A disk that takes no further checkpoint: a limit on the size of files, so that a save fails halfway."""

import psutil  # type: ignore[import-untyped]

CAN_FILL = hasattr(psutil, "RLIMIT_FSIZE")
LEAST_BYTES = 4 << 20  # of a checkpoint, so that there is room for a log and not for it
_MAX_BYTES = 2 << 20


def fill_disk(processes: list[psutil.Process]) -> None:
    """Let none of `processes` write a larger file. Processes that are started later can."""
    for process in processes:
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (_MAX_BYTES, hard))
