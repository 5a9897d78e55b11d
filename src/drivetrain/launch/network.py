"""This machine on the network: the address that another one reaches it by, ports, and the interface for collectives."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from datetime import timedelta

from drivetrain.core.errors import UserError
from drivetrain.core.forking import ForkedProcess

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ANSWER_S = 2.0  # within which this machine answers itself
_SIOCGIFADDR = 0x8915


def local_address_towards(host: str, port: int) -> str:
    """This machine's address on the route to `host`. Raises OSError where there is no such host, or no route."""
    target = socket.gethostbyname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((target, port))
        return str(probe.getsockname()[0])


def own_address() -> str:
    """The name or address at which this machine's processes reach each other: localhost, or what works in its place.

    Raises UserError where nothing does.
    """
    why = {}
    for host in ("localhost", "127.0.0.1", "::1"):
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as listener, socket.socket(family, kind) as client:
                listener.bind(address)
                listener.listen()
                client.settimeout(ANSWER_S)
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


def is_local(host: str) -> bool:
    """Whether a host's address is one of this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((socket.gethostbyname(host), 0))
        except OSError:
            return False
    return True


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


def is_port_free(host: str, port: int) -> bool:
    """Whether this machine's port can be listened on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((socket.gethostbyname(host), port))
        except OSError:
            return False
    return True


def is_torch_store(host: str, port: int, seconds: float) -> bool:
    """Whether what listens on host:port is the store of a torch launcher, as where one machine plays two."""
    # In a process of its own: a client of something that never answers waits for ever, whatever its timeout.
    client = ForkedProcess(target=_connect_to_store, args=(host, port, seconds), daemon=True)
    client.start()
    client.join(seconds)
    if client.is_alive():
        client.kill()
        client.join()
    return client.exitcode == 0


def _connect_to_store(host: str, port: int, seconds: float) -> None:
    """The child of `is_torch_store`: exits with 0 where a store answers."""
    from torch.distributed import TCPStore

    code = 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where something else answers, torch prints its own frames
    try:
        TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)
        code = 0
    finally:
        os._exit(code)


def use_interface_of(address: str) -> None:
    """Let gloo and NCCL use the interface that has this address; variables that the user has set stay.

    By themselves they look up the machine's name, whose address other machines may not reach.
    """
    name = _interface_of(address)
    for variable in INTERFACE_VARIABLES if name else ():
        os.environ.setdefault(variable, str(name))


def _interface_of(address: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(packed[20:24]) == address:
                    return name
    return None
