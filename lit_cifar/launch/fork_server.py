"""Imported only by the process from which workers are forked: SIGTERM, sent to all processes of a job, does not end it.

Schedulers send it so, and the processes that train still need their workers until they have saved.
"""

import os
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}))
