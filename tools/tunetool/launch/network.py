"""Finds the network interface that leads to the other nodes."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_towards(address: str) -> str | None:
    """The network interface from which this machine connects to ``address`` (IPv4); None if unknown.

    By default, gloo and NCCL use the address to which the host name resolves (127.0.1.1 on Debian), or any interface.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing, only looks up the route
            own_address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = struct.pack("256s", name.encode()[:15])
                    reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                    if socket.inet_ntoa(reply[20:24]) == own_address:
                        return name
    except OSError:
        return None
    return None
