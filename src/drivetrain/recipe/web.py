"""Fetching a small file by http: bounded in bytes, redirects and time, and without credentials for other hosts."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit

from drivetrain.core.process import __version__

MAX_REDIRECTS = 5
STEP_S, TOTAL_S = 10.0, 30.0  # without a byte, and for all of it
REDIRECTS = (301, 302, 303, 307, 308)
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Refused(Exception):
    """Why nothing was fetched: one line, which goes behind the address."""


@dataclass
class Fetched:
    """What a server delivered."""

    content: bytes
    hosts: list[str]  # those asked, in order: more than one after redirects


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine."""
    return urlsplit(url).hostname in LOOPBACK


def problem(url: str) -> str | None:
    """Why a URL is none that is fetched."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"it is no URL: {error}"
    if not host:
        return "it names no host"
    if "@" in parts.netloc:
        return "a user's name and password do not belong into an address, which a run records: leave them out"
    if not url.isascii() or any(c.isspace() or not c.isprintable() for c in url):
        return "it has characters that no URL has: write them as %XX"
    return None


def get(url: str, most: int, headers: Mapping[str, str] | None = None) -> Fetched:
    """Fetch at most so many bytes. `headers` go to the URL's own host and port only. Raises Refused."""
    origin, hosts = _origin(url), [str(urlsplit(url).hostname)]
    with _Watch() as watch:
        while True:
            request = urllib.request.Request(url, headers={"User-Agent": f"drivetrain/{__version__}"})
            for name, value in (headers or {}).items() if _origin(url) == origin else ():
                request.add_unredirected_header(name, value)
            try:
                with _opener(url, watch).open(request, timeout=STEP_S) as response:
                    return _read(response, most, hosts, watch)
            except HTTPError as error:
                with error:
                    url = _next(url, error, hosts)
            except (URLError, OSError, http.client.HTTPException, ValueError) as error:
                raise Refused(watch.reason() or _reason(error, hosts[-1])) from None


def _read(response: Any, most: int, hosts: list[str], watch: _Watch) -> Fetched:
    """The response's bytes, as they come. Raises Refused."""
    content = b""
    while chunk := response.read1(64 * 1024):
        content += chunk
        if len(content) > most:
            raise Refused(f"it is larger than {most // 1024} KiB, the most that is fetched")
    if reason := watch.reason():  # a connection that was ended looks like the end of the file
        raise Refused(reason)
    if (length := response.headers.get("Content-Length")) and length.isdigit() and len(content) < int(length):
        raise Refused(f"{hosts[-1]} ended the connection after {len(content)} of {length} bytes")
    return Fetched(content, hosts)


def looks_like_a_page(content: bytes) -> bool:
    """Whether bytes are a web page."""
    return content[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html"))


def _next(url: str, error: HTTPError, hosts: list[str]) -> str:
    """Where a redirect leads. Raises Refused, also for any other status."""
    location = error.headers.get("Location")
    if error.code not in REDIRECTS or not location:
        raise Refused(f"{hosts[-1]} answered {error.code} {_clean(error.reason)}")
    following = urljoin(url, location)
    if wrong := problem(following):
        raise Refused(f"{hosts[-1]} redirects to an address that is not followed: {wrong}")
    hosts.append(str(urlsplit(following).hostname))
    if len(hosts) > 1 + MAX_REDIRECTS:
        raise Refused(f"it redirects more than {MAX_REDIRECTS} times ({' → '.join(dict.fromkeys(hosts))})")
    allowed = ("https", "http") if url.startswith("http:") else ("https",)
    if (scheme := urlsplit(following).scheme) not in allowed:
        raise Refused(f"{hosts[-2]} redirects to {scheme}://{hosts[-1]}, and only {' and '.join(allowed)} are followed")
    return following


def _proxy(host: str) -> str:
    """What to say of the proxy between this machine and a host."""
    proxies = [] if host in LOOPBACK or urllib.request.proxy_bypass(host) else list(urllib.request.getproxies())
    return " (asked through the proxy that https_proxy names)" if "https" in proxies else ""


def _reason(error: Exception, host: str) -> str:
    """Why a host was not reached, in one line."""
    cause: Any = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return f"{host} did not answer within {STEP_S:g} s"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the certificate of {host} is not good: {cause.verify_message} (SSL_CERT_FILE names a file with your own)"
    if isinstance(cause, OSError):
        return f"{host} cannot be reached{_proxy(host)}: {cause.strerror or _clean(cause)}"
    return f"{host} gave no answer that http knows: {type(cause).__name__} {_clean(cause)}".rstrip()


def _clean(text: object) -> str:
    return "".join(c if c.isprintable() else " " for c in str(text))[:80]


def _origin(url: str) -> tuple[str, str]:
    return urlsplit(url)[:2]


def _opener(url: str, watch: _Watch) -> urllib.request.OpenerDirector:
    """What opens a URL: http and https only, by the proxies of the environment, and without following redirects."""
    opener = urllib.request.OpenerDirector()
    proxies = urllib.request.ProxyHandler({} if is_loopback(url) else None)
    for handler in (proxies, _Http(watch), _Https(watch), urllib.request.HTTPErrorProcessor(), _Status()):
        opener.add_handler(handler)
    return opener


class _Status(urllib.request.HTTPDefaultErrorHandler):
    """Raises HTTPError for every status that is not 2xx."""


class _Http(urllib.request.HTTPHandler):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(partial(_watched, http.client.HTTPConnection, self._watch), req)  # type: ignore[arg-type]


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def https_open(self, req: urllib.request.Request) -> Any:
        connect = partial(_watched, http.client.HTTPSConnection, self._watch, context=ssl.create_default_context())
        return self.do_open(connect, req)  # type: ignore[arg-type]


def _watched(kind: type[http.client.HTTPConnection], watch: _Watch, host: str, **kwargs: Any) -> http.client.HTTPConnection:
    connection: Any = kind(host, **kwargs)
    connection._create_connection = watch.connect  # so that the watch sees the socket before TLS begins
    return connection  # type: ignore[no-any-return]


@dataclass
class _Watch:
    """Ends the connections of a fetch that takes too long, wherever it hangs: a time-out counts anew with every byte."""

    ends: float = field(default_factory=lambda: time.monotonic() + TOTAL_S)
    _sockets: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._timer = threading.Timer(TOTAL_S, self._end)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()  # a process that forks ranks must have no threads
        for twin in self._sockets:
            twin.close()

    def connect(self, *args: Any, **kwargs: Any) -> socket.socket:
        """socket.create_connection, with a second handle of the connection kept: TLS takes the first one over."""
        made = socket.create_connection(*args, **kwargs)
        self._sockets.append(socket.socket(fileno=os.dup(made.fileno())))
        return made

    def reason(self) -> str | None:
        """Why the connections were ended, if they were."""
        return f"it was not delivered within {TOTAL_S:g} s" if time.monotonic() >= self.ends else None

    def _end(self) -> None:
        for twin in self._sockets:
            with contextlib.suppress(OSError):
                twin.shutdown(socket.SHUT_RDWR)
