"""The network interface that gloo and NCCL listen on."""

import os
import socket

LOOPBACK = "127.0.0.1"


def loopback_interface() -> str:
    """`lo` on Linux, `lo0` on macOS."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def listen_only_on(interface: str) -> None:
    """Bind the ports that gloo and NCCL open in this process from now on to `interface`.

    On several machines NCCL may use more than one interface: `NCCL_SOCKET_IFNAME` is kept if it is set.
    """
    exactly = f"={interface}"  # NCCL takes a name alone as a prefix: eth1 would match eth10
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if interface == loopback_interface():
        os.environ["NCCL_SOCKET_IFNAME"] = exactly
    else:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", exactly)
