"""This machine on the network: the address from which another one is reached, and what carries it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import struct
import time
from datetime import timedelta
from typing import Any

IFNAME = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`. Raises OSError where there is no such host, or no way."""
    target = socket.gethostbyname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect((target, port))
        return str(probe.getsockname()[0])


def is_here(host: str) -> bool:
    """Whether a host's address is one of this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((socket.gethostbyname(host), 0))
        except OSError:
            return False
    return True


def wait_for(host: str, port: int, seconds: float) -> None:
    """Return when something listens there. Raises TimeoutError after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise TimeoutError(f"nothing listens on {host}:{port}") from None
        time.sleep(0.2)


def free_port(host: str, port: int) -> bool:
    """Whether this machine's port can be listened on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((socket.gethostbyname(host), port))
        except OSError:
            return False
    return True


def is_meeting_place(host: str, port: int, seconds: float) -> bool:
    """Whether what listens there is another launcher's store, as where one machine plays two."""
    # In a process of its own: whoever asks something that never answers waits for ever, whatever timeout it gave.
    asking: Any = multiprocessing.get_context("fork").Process(target=_ask, args=(host, port, seconds), daemon=True)
    asking.start()
    asking.join(seconds)
    if asking.is_alive():
        asking.kill()
        asking.join()
    return bool(asking.exitcode == 0)


def _ask(host: str, port: int, seconds: float) -> None:
    from torch.distributed import TCPStore

    code = 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where something else answers, torch shows its own frames
    try:
        TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)
        code = 0
    finally:
        os._exit(code)


def talk_through(address: str) -> None:
    """Let gloo and NCCL use the interface of this address: by themselves they go by the machine's name, which may be another's.

    What the user has set stays.
    """
    name = _interface(address)
    for variable in IFNAME if name else ():
        os.environ.setdefault(variable, str(name))


def _interface(address: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(packed[20:24]) == address:
                    return name
    return None
