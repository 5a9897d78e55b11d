"""Recipes at addresses, of the web and of the Hugging Face hub: pinned, bounded in bytes, time and redirects, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from drivetrain.core.errors import UserError
from drivetrain.core.machine import files
from drivetrain.core.machine.paths import user_cache
from drivetrain.core.machine.process import __version__
from drivetrain.recipe.safe_yaml import MAX_BYTES, printable

if TYPE_CHECKING:
    import urllib3

MAX_REDIRECTS, TOTAL_S = 5, 30.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
FORMS = "https://HOST/FILE.yaml#sha256=HASH or hf://OWNER/REPO@COMMIT/FILE.yaml"
_SHA256, _COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_HUB = re.compile(r"hf://(?:(datasets|spaces)/)?([\w.-]+/[\w.-]+?)(?:@([\w./-]+?))?/([^@#]+)")


class Refused(Exception):
    """The reason why nothing was fetched: one line, which goes behind the address."""


@dataclass
class Fetched:
    """The answer that a server delivered."""

    content: bytes
    hosts: list[str]  # those asked, in order: more than one after redirects


on_fetch: list[Callable[[str, Fetched], None]] = []  # called with an address and what it gave, before anything is made of it


def sha256_of(content: bytes) -> str:
    """The SHA-256 of bytes, in hex."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Address:
    """An address that was read. `hub` are a file's kind of repository (None: models), repository and revision on the hub."""

    url: str  # without the hash
    path: str
    sha256: str | None
    hub: tuple[str | None, str, str | None] | None = None

    @property
    def is_pinned(self) -> bool:
        """True if it gives the same bytes at any time."""
        return self.sha256 is not None or (self.hub is not None and _COMMIT.fullmatch(self.hub[2] or "") is not None)


def parse(address: str) -> Address:
    """Read an address. Raises UserError for one that is not fetched."""
    scheme, (url, _, behind) = address.partition("://")[0], address.partition("#")
    sha256 = behind.removeprefix("sha256=")
    wrong = _problem(url if scheme != "hf" else url.replace("hf://", "https://", 1))
    found = _HUB.fullmatch(url)
    if scheme.startswith("git+"):
        wrong = "a file of a commit has an https address, which sites call its raw form: give that"
    elif scheme not in ("https", "http", "hf") or (scheme == "hf" and found is None):
        wrong = f"recipes are not fetched from such an address: give a file, or {FORMS}"
    elif "#" in address and (sha256 == behind or not _SHA256.fullmatch(sha256)):
        wrong = "what follows '#' is not sha256=HASH, whose HASH has 64 digits from 0-9 and a-f"
    if wrong:
        raise UserError(f"recipe={address}: {wrong}")
    hub = (found[1], found[2], found[3]) if found else None
    return Address(url, found[4] if found else urlsplit(url).path, sha256 or None, hub)


def _problem(url: str) -> str | None:
    """The reason why a URL is none that is fetched."""
    try:
        parts = urlsplit(url)
        named = parts.hostname and parts.port != 0
    except ValueError as error:
        return f"it is no URL: {error}"
    if not named:
        return "it names no host"
    if "@" in parts.netloc:
        return "a user's name and password do not belong into an address, which a run records: leave them out"
    if not url.isascii() or any(c.isspace() or not c.isprintable() for c in url):
        return "it has characters that no URL has: write them as %XX"
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
        return "it is not https, so that anybody on the way could change it"
    return None


def fetched(address: str) -> bytes:
    """The bytes at a pinned address: those that were kept when it was fetched before, else fetched now. Raises UserError."""
    place = parse(address)
    if not place.is_pinned:
        raise UserError(
            f"recipe={address} is not pinned, so that it could be another file tomorrow: the form is {FORMS}. "
            f"`drivetrain recipe fetch {address}` shows what it is now, runs nothing, and prints the pinned address"
        )
    if (content := _kept(address, place)) is not None:
        return content
    lock = _file(".lock")
    with files.one_at_a_time(lock) if lock is not None else contextlib.nullcontext():  # of ranks started together one fetches
        content = _kept(address, place)
        return content if content is not None else _fetch(address, place)[1]


def pin(address: str) -> str:
    """The pinned address of what an address gives now, which is fetched and kept. Raises UserError."""
    return _fetch(address, parse(address))[0]


def _file(name: str) -> Path | None:
    """A file among the fetched recipes that are kept; None where this user has no such folder of their own."""
    with contextlib.suppress(OSError):
        if (cache := user_cache()) is not None:
            folder = cache / "recipes"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return folder / name if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK) else None
    return None


def _kept(address: str, place: Address) -> bytes | None:
    """The bytes that were kept of an address. A file that was changed since counts as missing."""
    file = _file(f"{sha256_of(address.encode())}.yaml")
    with contextlib.suppress(OSError):
        content = files.read_bytes(file, MAX_BYTES) if file is not None else None
        return content if content is not None and place.sha256 in (None, sha256_of(content)) else None
    return None


def _keep(address: str, content: bytes) -> None:
    """Write what an address gave at once: a reader sees all of it or none."""
    if (file := _file(f"{sha256_of(address.encode())}.yaml")) is not None:
        with contextlib.suppress(OSError):
            files.write_bytes(file, content)


def _fetch(address: str, place: Address) -> tuple[str, bytes]:
    """Fetch a file, check it, show it and keep it; its pinned address and its bytes. Raises UserError."""
    try:
        place, found = _within_time(lambda: _from_hub(place) if place.hub else (place, get(place.url)))
        sha256 = sha256_of(found.content)
        if found.content[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html")):
            raise Refused("it is a web page, not a recipe: name the file itself, which sites call its raw form")
        if place.sha256 not in (None, sha256):
            raise Refused(f"it has another SHA-256, {sha256}: the file has changed, or is not the one that was meant")
    except (Refused, ValueError) as error:  # ValueError: a redirect to what is no URL
        raise UserError(f"recipe={address}: {error}") from None
    pinned = f"{place.url}#sha256={sha256}"
    for show in on_fetch:
        show(pinned, found)
    for key in {pinned, address}:
        _keep(key, found.content)
    return pinned, found.content


def _within_time(work: Callable[[], tuple[Address, Fetched]]) -> tuple[Address, Fetched]:
    """Do it in a thread, and wait for that no longer than TOTAL_S, wherever it hangs. Raises Refused."""
    done: Future[tuple[Address, Fetched]] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="fetching").start()  # a pool's threads would keep the process
    if not wait([done], TOTAL_S).done:
        raise Refused(f"it was not delivered within {TOTAL_S:g} s")
    return done.result()


def _from_hub(place: Address) -> tuple[Address, Fetched]:
    """Fetch a file of the hub, and of a branch the commit that it stands for now. Raises UserError or Refused."""
    try:
        from huggingface_hub import HfApi, get_token, hf_hub_url
    except ImportError:
        raise UserError("hf:// needs huggingface_hub, which is not installed: pip install 'drivetrain[hub]'") from None
    assert place.hub is not None
    kind, repository, revision = place.hub
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if wrong := _problem(endpoint):
        raise Refused(f"HF_ENDPOINT={endpoint}: {wrong}")
    of_kind, token = kind and kind.removesuffix("s"), get_token()
    hint = " (a private or gated repository needs `hf auth login` or HF_TOKEN)"
    if not place.is_pinned or revision is None:
        try:
            revision = HfApi(endpoint, token=token).repo_info(repository, revision=revision or "main", repo_type=of_kind).sha
        except Exception as error:  # the library's own, and what it makes of an answer that is none
            raise Refused(f"the hub gave no commit: {_clean(error)}{hint}") from None
        if not _COMMIT.fullmatch(str(revision)):
            raise Refused("the hub did not say which commit it is")
        place = replace(place, url=f"hf://{f'{kind}/' if kind else ''}{repository}@{revision}/{place.path}")
    url = hf_hub_url(repository, place.path, revision=revision, repo_type=of_kind, endpoint=endpoint)
    try:
        return place, get(url, {"Authorization": f"Bearer {token}"} if token else {})
    except Refused as error:
        raise Refused(f"{error}{hint if re.search('answered 40[13]', str(error)) else ''}") from None


def check_kind(asked: str, name: str, allowed: set[str], first: bool) -> None:
    """Raise Refused where a redirect leads to an IP address of another kind than `allowed`: public, and the typed host's."""
    import ipaddress

    address: Any = ipaddress.ip_address(asked.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    inside = "loopback" if address.is_loopback else "link-local" if address.is_link_local else "private"
    kind = "public" if address.is_global else inside
    if first:
        allowed.add(kind)
    elif kind not in allowed:
        raise Refused(f"it redirects to {name}, whose address {asked} is {kind}: that is not followed")


def get(url: str, headers: Mapping[str, str] | None = None) -> Fetched:
    """Fetch a small file. `headers` go to the URL's own host and port only. Raises Refused."""
    origin, hosts, kinds = urlsplit(url)[:2], [], {"public"}
    while True:
        hosts.append(str(urlsplit(url).hostname))
        if len(hosts) > 1 + MAX_REDIRECTS:
            raise Refused(f"it redirects more than {MAX_REDIRECTS} times ({' → '.join(dict.fromkeys(hosts))})")
        found = _ask(url, (headers or {}) if urlsplit(url)[:2] == origin else {}, kinds, hosts)
        if isinstance(found, bytes):
            return Fetched(found, hosts)
        url = _next(url, found, hosts[-1])


def _ask(url: str, headers: Mapping[str, str], kinds: set[str], hosts: list[str]) -> bytes | str:
    """One request: the bytes, or where it redirects. Raises Refused."""
    import ssl
    import urllib.request

    import urllib3

    host, context = hosts[-1], ssl.create_default_context()  # for which SSL_CERT_FILE holds
    proxy = None if host in LOOPBACK or urllib.request.proxy_bypass(host) else urllib.request.getproxies().get("https")
    headers = {"User-Agent": f"drivetrain/{__version__}", "Host": urlsplit(url).netloc, **headers}
    try:
        targets = [url] if proxy else _targets(url, kinds, first=len(hosts) == 1)
        pool: Any = urllib3.ProxyManager(proxy) if proxy else urllib3.PoolManager(ssl_context=context, server_hostname=host)
        with pool:
            for left in reversed(range(len(targets))):
                try:
                    return _answer(pool.request(
                        "GET", targets[-1 - left], headers=headers, redirect=False, retries=False, timeout=TOTAL_S,
                        preload_content=False, decode_content=False,
                    ), host)  # fmt: skip
                except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError):
                    if not left:
                        raise
        raise Refused(f"{host} has no address")
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise Refused(_reason(error, host, proxy)) from None


def _targets(url: str, kinds: set[str], first: bool) -> list[str]:
    """The URL with each IP address of its host, all checked, in place of the name: it may stand for others the next time."""
    import socket

    parts = urlsplit(url)
    found = dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM))
    for address in found:
        check_kind(address, str(parts.hostname), kinds, first)
    port = f":{parts.port}" if parts.port else ""
    return [parts._replace(netloc=f"{f'[{each}]' if ':' in each else each}{port}").geturl() for each in found]


def _answer(response: urllib3.BaseHTTPResponse, host: str) -> bytes | str:
    """The bytes of a response, or where it redirects. Raises Refused."""
    with contextlib.closing(response):
        if (to := response.get_redirect_location()) is not False:
            return str(to or "")
        if response.status >= 300:
            raise Refused(f"{host} answered {response.status} {_clean(response.reason or '')}".rstrip())
        content = b""
        for chunk in response.stream(2**14, decode_content=False):
            content += chunk
            if len(content) > MAX_BYTES:
                raise Refused(f"it is larger than {MAX_BYTES // 1024} KiB, the most that is fetched")
    return content


def _next(url: str, to: str, host: str) -> str:
    """The address that a redirect leads to. Raises Refused."""
    following = urljoin(url, to)
    wrong = _problem(following) or ("it is not https" if url.startswith("https:") > following.startswith("https:") else None)
    if wrong:
        raise Refused(f"{host} redirects to an address that is not followed, {_clean(following)}: {wrong}")
    return following


def _reason(error: Exception, host: str, proxy: str | None) -> str:
    """The reason why a host gave nothing, in one line."""
    import ssl

    cause: Any = error
    while isinstance(inner := getattr(cause, "reason", None) or cause.__cause__ or cause.__context__, BaseException):
        cause = inner
    via = " (asked through the proxy that https_proxy names)" if proxy else ""
    if isinstance(cause, TimeoutError):
        return f"{host} did not answer within {TOTAL_S:g} s{via}"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the certificate of {host} is not good: {cause.verify_message} (SSL_CERT_FILE names a file with your own)"
    if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError):
        return f"{host} cannot be reached{via}: {cause.strerror or _clean(cause)}"
    return f"{host} gave no whole answer: {_clean(cause)}{via}"


def _clean(text: object) -> str:
    return printable(str(text))[:120]
