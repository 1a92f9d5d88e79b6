"""Import of the process from which workers are forked, and of no other: SIGTERM does not end that process.

Schedulers send SIGTERM to all processes of a job, and those that train need their workers until they have saved.
"""

import os
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}))
