"""A Ray cluster of nodes on this machine, as a program that prints its address."""

import os
import signal
import socket
import sys
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

# On a busy machine Ray's own helpers need longer than it waits for them, and a worker that gives way to all others.
_BUSY = {"RAY_agent_register_timeout_ms": "300000", "RAY_raylet_start_wait_time_s": "120", "RAY_worker_niceness": "0"}
_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def _settings() -> dict[str, Any]:
    """Of a node; it waits 15 s for the ports that it is not given."""
    with ExitStack() as sockets:
        open_ones = [sockets.enter_context(socket.create_server(("", 0))) for _ in _PORTS]
        ports = [each.getsockname()[1] for each in open_ones]
    return {"include_dashboard": False, "object_store_memory": 80 * 2**20, **dict(zip(_PORTS, ports, strict=True))}


def _reap(cluster: Any) -> None:
    """Killed nodes: else their workers, which ask for the pid, take them for alive and never end."""
    for node in cluster.list_all_nodes():
        for started in node.all_processes.values():
            for each in started:
                each.process.poll()


def main() -> None:
    """Four nodes, or as many as the argument says, with room for two workers each, until stdin is closed."""
    os.environ.update(_BUSY, RAY_USAGE_STATS_ENABLED="0")
    from ray.cluster_utils import Cluster

    with TemporaryDirectory(dir="/tmp") as folder:  # a short name: that of a socket has at most 107 letters
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "temp_dir": folder, **_settings()})
        signal.signal(signal.SIGCHLD, lambda *_: _reap(cluster))
        for _ in range(int(sys.argv[1]) if sys.argv[1:] else 4):
            cluster.add_node(num_cpus=2, **_settings())
        print(cluster.address, flush=True)
        sys.stdin.read()
        cluster.shutdown()


if __name__ == "__main__":
    main()
