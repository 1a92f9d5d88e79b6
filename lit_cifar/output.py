"""Standard output and error that may lose their readers, as in `fit | head -1`, while the run goes on."""

import os
import sys
from typing import Any, TextIO


def outlast_readers() -> None:
    """Write to nowhere what this process prints to a pipe after the other end was closed, in place of failing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Outlasting):
            setattr(sys, name, _Outlasting(stream))


class _Outlasting:
    """A text stream that does not fail for want of a reader; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream does."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._lead_to_nowhere()
            return len(text)

    def flush(self) -> None:
        """As the stream does."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._lead_to_nowhere()

    def _lead_to_nowhere(self) -> None:
        """For the processes that this one will start as well, and for what Python itself flushes at its end."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
