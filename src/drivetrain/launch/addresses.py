"""Addresses and sockets by which the ranks of several machines find each other."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from drivetrain.core.errors import UserError
from drivetrain.core.machine.forking import NoAnswer, answer_of

if TYPE_CHECKING:
    pass


INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK_S = 2.0  # within which this machine must answer itself
_SIOCGIFADDR = 0x8915


def local_address_towards(host: str, port: int) -> str:
    """This machine's address on the route to `host`. Raises OSError without such a host or a route to it."""
    target = socket.gethostbyname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((target, port))
        return str(probe.getsockname()[0])


def own_address() -> str:
    """The name or address at which this machine's processes reach each other: localhost, or a working substitute.

    Raises UserError if no address works.
    """
    why = {}
    for host in ("localhost", "127.0.0.1", "::1"):
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.create_server(address, family=family) as listener, socket.socket(family, kind) as client:
                client.settimeout(LOOPBACK_S)
                client.connect(listener.getsockname())
        except OSError as error:
            why[host] = error.strerror or str(error)
        else:
            return host
    told = "; ".join(f"{host}: {reason}" for host, reason in why.items())
    raise UserError(
        f"the ranks of a run talk to each other over this machine's loopback interface, and none answers ({told}): turn it on "
        "(ip link set lo up), or set parallel=single"
    )


def wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Wait until something listens on host:port. Raises TimeoutError after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise TimeoutError(f"nothing listens on {host}:{port}") from None
        time.sleep(0.2)


def can_listen(host: str, port: int = 0) -> bool:
    """True if a host's address is one of this machine's, and its port can be bound (0: any free port)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((socket.gethostbyname(host), port))
        except OSError:
            return False
    return True


def is_torch_store(host: str, port: int, seconds: float) -> bool:
    """True if a torch launcher's store listens on host:port, for instance because one machine plays two.

    A separate process asks, because a client of a silent server waits for ever, whatever its timeout.
    """

    def connect(answer: Callable[[bool], None]) -> None:
        from torch.distributed import TCPStore

        TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)
        answer(True)

    try:
        return answer_of(connect, "no store", seconds)
    except NoAnswer:
        return False


def use_interface_of(address: str) -> None:
    """Let gloo and NCCL use the interface with this address; variables set by the user stay.

    By default they look up the machine's name, and other machines may not reach that address.
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(packed[20:24]) == address:
                    os.environ |= {each: name for each in INTERFACE_VARIABLES if each not in os.environ}
