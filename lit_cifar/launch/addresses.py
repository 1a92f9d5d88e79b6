"""The network interface that gloo and NCCL listen on, and the addresses at which others can reach this machine."""

import os
import socket

from lit_cifar.errors import ConfigError

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


def named_interface() -> str:
    """The interface over which machines communicate, named by `GLOO_SOCKET_IFNAME`, which must be set."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if not name:
        problem = "the run has several machines, but GLOO_SOCKET_IFNAME does not name the interface that connects them"
        raise ConfigError(problem, remedy=f"export GLOO_SOCKET_IFNAME=NAME on every machine; this one has {_known()}")
    return name


def address_of(interface: str) -> str:
    """IPv4 address of an interface, which must have one."""
    if interface == loopback_interface():
        return LOOPBACK
    address = addresses().get(interface)
    if address is None:
        problem = f"GLOO_SOCKET_IFNAME={interface} is not an interface of this machine with an IPv4 address"
        raise ConfigError(problem, remedy=f"set it to one of: {_known()}")
    return address


def _known() -> str:
    found = [f"{name} ({address})" for name, address in addresses().items() if address != LOOPBACK]
    return ", ".join(found) or "none but the loopback interface"


def addresses() -> dict[str, str]:
    """The first IPv4 address of each interface that has one."""
    import psutil  # a run on one machine does without

    found = psutil.net_if_addrs().items()
    ipv4 = {name: [entry.address for entry in entries if entry.family == socket.AF_INET] for name, entries in found}
    return {name: own[0] for name, own in ipv4.items() if own}
