"""The processes of a run on one machine, started with the variables that torchrun would give them.

Schedulers that have an agent of their own on each machine use this. The file is all that the agent imports.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lit_cifar.launch.rendezvous import own_interface
from lit_cifar.launch.startup import die_with_parent
from lit_cifar.launch.torchrun import torchrun_variables

_PIPE_BYTES = 2**20  # more than a pipe holds


class NodeProcesses:
    """Starts processes, hands over their output, and ends them; they never outlive the thread that starts them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []

    def meeting_place(self, *, num_nodes: int) -> tuple[str, int]:
        """The address of this machine's interface, and a free port, for a rank 0 that is started here."""
        _, address = own_interface(num_machines=num_nodes)
        with reserved_port(address) as port:
            return address, port

    def start(self, words: Sequence[str], *, folder: str, num_local: int, **run: Any) -> None:
        """Run `python -m lit_cifar words` in `folder`, as each of `num_local` ranks: see `torchrun_variables`."""
        pipes = [os.pipe(), os.pipe()]
        for local_rank in range(num_local):
            own = torchrun_variables(local_rank=local_rank, num_local=num_local, **run)
            process = subprocess.Popen(
                [sys.executable, "-m", "lit_cifar", *words],
                env=os.environ | own,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                preexec_fn=die_with_parent,
            )
            self._processes.append(process)
        for reader, writer in pipes:
            os.close(writer)
            os.set_blocking(reader, False)
            self._pipes.append(reader)

    def poll(self) -> tuple[list[int | None], list[bytes]]:
        """The exit status of each process, None while it runs; and new text on stdout and on stderr."""
        return [process.poll() for process in self._processes], [_new(pipe) for pipe in self._pipes]

    def signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)


@contextmanager
def reserved_port(address: str) -> Iterator[int]:
    """Reserve a port at which a rank 0 of this machine can listen."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, 0))
        yield reserved.getsockname()[1]


def _new(pipe: int) -> bytes:
    try:
        return os.read(pipe, _PIPE_BYTES)
    except BlockingIOError:
        return b""
