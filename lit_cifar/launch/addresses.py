"""The addresses at which other machines can reach this one."""

import os
import socket

import psutil

from lit_cifar.errors import ConfigError
from lit_cifar.launch.network_interfaces import LOOPBACK, loopback_interface


def named_interface() -> str:
    """The interface over which machines communicate, named by `GLOO_SOCKET_IFNAME`, which must be set."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if not name:
        raise ConfigError(
            "the run has several machines, but GLOO_SOCKET_IFNAME does not name the interface that connects them",
            remedy=f"export GLOO_SOCKET_IFNAME=NAME on every machine; this one has {_known()}",
        )
    return name


def address_of(interface: str) -> str:
    """IPv4 address of an interface, which must have one."""
    if interface == loopback_interface():
        return LOOPBACK
    address = addresses().get(interface)
    if address is None:
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME={interface} is not an interface of this machine with an IPv4 address",
            remedy=f"set it to one of: {_known()}",
        )
    return address


def _known() -> str:
    found = {name: address for name, address in addresses().items() if address != LOOPBACK}
    return ", ".join(f"{name} ({address})" for name, address in found.items()) or "none but the loopback interface"


def addresses() -> dict[str, str]:
    """The first IPv4 address of each interface that has one."""
    found = psutil.net_if_addrs().items()
    ipv4 = {name: [entry.address for entry in entries if entry.family == socket.AF_INET] for name, entries in found}
    return {name: own[0] for name, own in ipv4.items() if own}
