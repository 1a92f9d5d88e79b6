"""`python -m lit_cifar ray`: a run over nodes of a Ray cluster, started again when a worker or a node is lost.

A train loop of Ray Train runs in a thread of Ray's worker, where neither signal handlers nor forks can be used. Here an
actor on each node starts processes as torchrun would, and all that follows torchrun holds for them.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from lit_cifar.errors import ConfigError, one_line
from lit_cifar.launch.node import NodeProcesses
from lit_cifar.launch.signals import EXIT_REFUSED, EXIT_STOPPED, Keystrokes, handlers_put_back, stop_signals
from lit_cifar.tools.terminal import CommandParser, positive, refuse_owned, say, whole

_GRACE_S = 100.0  # wait after SIGTERM for the current step or validation, and for saving
_POLL_S = 0.3
_FORWARDED = ("GLOO_", "NCCL_", "LIT_CIFAR_")  # variables that begin so go to every node
_DESCRIPTION = """\
Train or evaluate over nodes of a running Ray cluster, in any mode. What follows fit, validate, test or predict is as
without Ray."""
_say = partial(say, file=sys.stderr)


def main(args: list[str]) -> int:
    options = ray_parser().parse_args(args)
    refuse_owned(options.flags, {"trainer.devices", "trainer.num_nodes"}, command="ray")
    if options.max_failures and options.command == "fit" and "--resume" not in " ".join(options.flags):
        problem = f"--max_failures={options.max_failures}, but a training that starts again would not resume"
        raise ConfigError(problem, remedy="add --resume=auto and --run_dir=FOLDER, which every node can read")
    with _connected(options.address) as ray, handlers_put_back():
        return RayRun(ray, options).run()


def ray_parser() -> argparse.ArgumentParser:
    parser = CommandParser("ray", description=_DESCRIPTION)
    add = parser.add_argument
    add("--nodes", type=positive, default=1, metavar="N", help="Number of nodes (default: 1).")
    add("--workers_per_node", type=positive, default=1, metavar="N", help="Processes on each node (default: 1).")
    add("--gpus_per_worker", type=whole, default=0, metavar="N", help="GPUs of each process (default: 0).")
    add("--max_failures", type=whole, default=0, metavar="N", help="How often to start again (default: 0).")
    add("--address", default="auto", help="Of the Ray cluster (default: the one that this machine belongs to).")
    add("command", choices=["fit", "validate", "test", "predict"])
    add("flags", nargs=argparse.REMAINDER, help="As without Ray.")
    return parser


class RayRun:
    """Starts the processes until they end well, or once more often than `--max_failures`."""

    def __init__(self, ray: Any, options: argparse.Namespace) -> None:
        self.ray, self.options = ray, options
        self._gpus = options.workers_per_node * options.gpus_per_worker
        self.num_stops = 0  # 1 if the user has asked the run to end, 2 after another Ctrl-C
        self._keystrokes = Keystrokes()
        for number in stop_signals():
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.num_stops = max(self.num_stops, 1 + self._keystrokes.insist(number))

    def run(self) -> int:
        for restarts in range(self.options.max_failures + 1):
            if restarts:
                _say(f"lit_cifar: start {restarts} of {self.options.max_failures} after a failure")
            with self._placed() as nodes:
                status = self._attempt(nodes, restarts) if nodes else EXIT_STOPPED
            if status in (0, EXIT_REFUSED) or self.num_stops:
                break
        return status

    @contextmanager
    def _placed(self) -> Iterator[list[Any]]:
        """An actor on each node, once all are there; none if the user ends the job before."""
        each = {"CPU": self.options.workers_per_node, "GPU": self._gpus}
        group = self.ray.util.placement_group([each] * self.options.nodes, strategy="STRICT_SPREAD")
        try:
            for second in count():
                if self.num_stops or group.wait(timeout_seconds=1):
                    break
                if second == 5:
                    _say(f"lit_cifar: waits for nodes with free resources: {group.bundle_specs}")
            yield [] if self.num_stops else [self._actor(group, node) for node in range(self.options.nodes)]
        finally:
            self.ray.util.remove_placement_group(group)  # ends the actors, and the processes that they have started

    def _actor(self, group: Any, node: int) -> Any:
        variables = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # Ray's is that of the whole node
        actor = self.ray.remote(NodeProcesses).options(
            num_cpus=self.options.workers_per_node,
            num_gpus=self._gpus,
            scheduling_strategy=self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, node),
            runtime_env={"env_vars": variables},
        )
        return actor.remote()

    def _attempt(self, nodes: list[Any], restarts: int) -> int:
        """The exit status of the rank that has failed first; 0 if none has."""
        errors = self.ray.exceptions
        words = [self.options.command, *self.options.flags]
        sizes = {"num_nodes": len(nodes), "num_local": self.options.workers_per_node}
        each = {"folder": str(Path.cwd()), "restarts": restarts, **sizes}
        try:
            each["place"] = self.ray.get(nodes[0].meeting_place.remote(num_nodes=len(nodes)))
            self.ray.get([actor.start.remote(words, node=node, **each) for node, actor in enumerate(nodes)])
            return self._follow(nodes)
        except errors.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ConfigError) else error from None
        except errors.RayError as error:
            _say(f"lit_cifar: a node is lost: {one_line(error)[:200]}")
            return 1

    def _follow(self, nodes: list[Any]) -> int:
        failed, deadline = 0, inf
        while True:
            polled = self.ray.get([node.poll.remote() for node in nodes])
            for _, texts in polled:
                for stream, text in zip((sys.stdout, sys.stderr), texts, strict=True):
                    stream.write(text.decode(errors="replace"))
                    stream.flush()
            statuses = [status for found, _ in polled for status in found]
            if not failed and any(statuses):
                rank, failed = next((rank, status) for rank, status in enumerate(statuses) if status)
                failed = 128 - failed if failed < 0 else failed
                _say(f"lit_cifar: rank {rank} has ended with status {failed}")
            if None not in statuses:
                return failed
            if deadline == inf and (failed or self.num_stops):
                deadline = time.monotonic() + _GRACE_S
                self.ray.get([node.signal.remote(signal.SIGTERM) for node in nodes])
            elif time.monotonic() > deadline or self.num_stops > 1:
                self.ray.get([node.signal.remote(signal.SIGKILL) for node in nodes])
            time.sleep(_POLL_S)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError("Ray is not installed here", remedy="pip install 'lit-cifar[ray]'") from error
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        problem = f"there is no Ray cluster for this program at --address={address}: {one_line(error)[:150]}"
        raise ConfigError(problem, remedy="ray start --head; on others ray start --address=HOST:6379") from error
    try:
        yield ray
    finally:
        ray.shutdown()
