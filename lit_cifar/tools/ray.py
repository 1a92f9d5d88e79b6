"""`python -m lit_cifar ray`: a run over nodes of a Ray cluster, started again when a worker or a node is lost.

A train loop of Ray Train runs in a thread of Ray's worker, where neither signal handlers nor forks can be used. Here an
actor on each node starts processes as torchrun would, and all that follows torchrun holds for them.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from lit_cifar.errors import ConfigError, one_line
from lit_cifar.launch.node import NodeProcesses
from lit_cifar.launch.signals import EXIT_STOPPED, handlers_put_back
from lit_cifar.tools.terminal import CommandParser, names_config, refuse_owned, say

_USERS_MISTAKE = 2  # exit status
_LAST_CALL_S = 30.0  # for more nodes, when the smallest number is there
_GRACE_S = 100.0  # after SIGTERM: for the current step or validation, and for saving
_POLL_S = 0.3
_FORWARDED = ("GLOO_", "NCCL_")  # what the variables begin with that go to every node
_DESCRIPTION = """\
Train or evaluate over nodes of a running Ray cluster, in any mode. What follows fit, validate, test or predict is as
without Ray. Each node has equally many workers, which are processes as those of torchrun."""
_say = partial(say, file=sys.stderr)


def main(args: list[str]) -> int:
    """Run it; return the exit status of the workers."""
    options = ray_parser().parse_args(args)
    refuse_owned(options.flags, {"trainer.devices", "trainer.num_nodes"}, command="ray")
    resumes = names_config(options.flags) or any(flag.startswith("--resume") for flag in options.flags)
    if options.max_failures and options.command == "fit" and not resumes:
        raise ConfigError(
            f"--max_failures={options.max_failures}, but a training that starts again would not resume",
            remedy="add --resume=auto and --run_dir=FOLDER, which every node can read",
        )
    with _connected(options.address) as ray, handlers_put_back():
        return Job(ray, options).run()


def ray_parser() -> argparse.ArgumentParser:
    parser = CommandParser("ray", description=_DESCRIPTION)
    add = parser.add_argument
    add("--nodes", type=_bounds, default=(1, 1), help="Number of nodes; 1:2 goes on while one is there (default: 1).")
    add("--workers_per_node", type=_positive, default=1, metavar="N", help="Processes on each node (default: 1).")
    add("--gpus_per_worker", type=int, default=0, metavar="N", help="GPUs of each process (default: 0).")
    add("--max_failures", type=int, default=0, metavar="N", help="How often to start again (default: 0).")
    add("--address", default="auto", help="Of the Ray cluster (default: the one that this machine belongs to).")
    add("command", choices=["fit", "validate", "test", "predict"])
    add("flags", nargs=argparse.REMAINDER, help="As without Ray.")
    return parser


class Job:
    """Starts the processes until they end well, or once more often than `--max_failures`."""

    def __init__(self, ray: Any, options: argparse.Namespace) -> None:
        self.ray = ray
        self.options = options
        self.words = [options.command, *options.flags]
        self.num_stops = 0  # how often the user has asked it to end
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)

    def run(self) -> int:
        for restarts in range(self.options.max_failures + 1):
            if restarts:
                _say(f"lit_cifar: start {restarts} of {self.options.max_failures} after a failure")
            with self._placed() as nodes:
                status = self._attempt(nodes, restarts) if nodes else EXIT_STOPPED
            if status in (0, _USERS_MISTAKE) or self.num_stops:
                break
        return status

    @contextmanager
    def _placed(self) -> Iterator[list[Any]]:
        """An actor on each of as many nodes as there are; none if the user ends the job before."""
        options = self.options
        bundle = {"CPU": options.workers_per_node, "GPU": options.workers_per_node * options.gpus_per_worker}
        smallest, largest = options.nodes
        for num_nodes in range(largest, smallest - 1, -1):
            group = self.ray.util.placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD")
            try:
                if self._wait(group, _LAST_CALL_S if num_nodes > smallest else float("inf")):
                    yield [self._actor(group, node, bundle) for node in range(num_nodes)]
                    return
            finally:
                self.ray.util.remove_placement_group(group)  # ends the actors, and with them what they have started
        yield []

    def _wait(self, group: Any, limit_s: float) -> bool:
        begin, said = time.monotonic(), False
        while time.monotonic() - begin < limit_s and not self.num_stops:
            if group.wait(timeout_seconds=1):
                return True
            if not said and time.monotonic() - begin > _LAST_CALL_S / 6:
                said = True
                each = ", ".join(f"{count:g} {name}" for name, count in group.bundle_specs[0].items() if count)
                _say(f"lit_cifar: waiting for {group.bundle_count} nodes with {each} free on each")
        return False

    def _actor(self, group: Any, node: int, bundle: dict[str, int]) -> Any:
        variables = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # Ray's would be that of the whole node
        place = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, node)
        actor = self.ray.remote(NodeProcesses).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle["GPU"],
            scheduling_strategy=place,
            runtime_env={"env_vars": variables},
        )
        return actor.remote()

    def _attempt(self, nodes: list[Any], restarts: int) -> int:
        """The exit status of the rank that has failed first; 0 if none has."""
        errors = self.ray.exceptions
        each = {"num_nodes": len(nodes), "num_local": self.options.workers_per_node, "restarts": restarts}
        try:
            place = self.ray.get(nodes[0].meeting_place.remote(num_nodes=len(nodes)))
            self.ray.get(
                [
                    actor.start.remote(self.words, folder=str(Path.cwd()), place=place, node=node, **each)
                    for node, actor in enumerate(nodes)
                ]
            )
            return self._follow(nodes)
        except errors.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ConfigError) else error from None
        except errors.RayError as error:
            _say(f"lit_cifar: a node is lost: {one_line(error)[:200]}")
            return 1

    def _follow(self, nodes: list[Any]) -> int:
        """Print what the processes print, until all have ended."""
        failed, deadline = 0, float("inf")
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
            if deadline == float("inf") and (failed or self.num_stops):
                deadline = time.monotonic() + _GRACE_S
                self.ray.get([node.signal.remote(signal.SIGTERM) for node in nodes])
            elif time.monotonic() > deadline or self.num_stops > 1:
                self.ray.get([node.signal.remote(signal.SIGKILL) for node in nodes])
            time.sleep(_POLL_S)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.num_stops += 1


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError("Ray is not installed here", remedy="pip install 'lit-cifar[ray]'") from error
    try:
        ray.init(address, log_to_driver=False, logging_level="warning")
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"there is no Ray cluster at --address={address}: {one_line(error)[:150]}",
            remedy="start one: ray start --head; on the other machines ray start --address=HOST:6379",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _bounds(text: str) -> tuple[int, int]:
    smallest, _, largest = text.partition(":")
    bounds = _positive(smallest), _positive(largest or smallest)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text} is not NUMBER or SMALLEST:LARGEST")
    return bounds


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)
