"""Imported first by a fork server: while it imports the rest, Ctrl-C ends it at once and shows no traceback."""

import signal
import sys

if "multiprocessing.forkserver" in sys.orig_argv[-1]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
