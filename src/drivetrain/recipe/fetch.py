"""A recipe at an https address: pinned by the SHA-256 of its bytes, bounded in size and time."""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Callable
from typing import Any

from drivetrain.core.errors import UserError, printable
from drivetrain.core.machine.process import __version__
from drivetrain.recipe.safe_yaml import MAX_BYTES

MAX_S, MAX_REDIRECTS = 30.0, 5
_URL = re.compile(r"https://[!-~]+")

on_fetch: list[Callable[[str, bytes], None]] = []  # called with an address and its content, before any use


def sha256_of(content: bytes) -> str:
    """The SHA-256 of bytes, in hex."""
    return hashlib.sha256(content).hexdigest()


@functools.cache
def fetched(address: str) -> bytes:
    """The bytes at a pinned address, fetched once per process. Raises UserError."""
    url, _, pin = address.partition("#")
    if not _URL.fullmatch(url) or "@" in url.split("/")[2]:
        raise UserError(
            f"recipe={address}: recipes are fetched from https://HOST/FILE.yaml#sha256=HASH alone, without a user's name. A file "
            "of a git repository or a hub has such an address, which sites call its raw form"
        )
    if not re.fullmatch("sha256=[0-9a-f]{64}", pin):
        raise UserError(
            f"recipe={address} is not pinned, so it could be another file tomorrow: read the file, and put #sha256=HASH "
            f"behind its address, whose 64 digits `curl -L '{url}' | sha256sum` prints"
        )
    answers: list[bytes | Exception] = []
    thread = threading.Thread(target=lambda: answers.append(_answer(url)), daemon=True)  # it may hang anywhere
    thread.start()
    thread.join(MAX_S)
    content = answers[0] if answers else TimeoutError(f"it was not delivered within {MAX_S:g} s")
    if isinstance(content, Exception):
        reason = printable(str(content))[:200] or type(content).__name__
        raise UserError(f"recipe={address} cannot be fetched: {reason}")
    if len(content) > MAX_BYTES:
        raise UserError(f"recipe={address} is larger than {MAX_BYTES // 1024} KiB, the largest size that is fetched")
    if sha256_of(content) != pin.removeprefix("sha256="):
        raise UserError(
            f"recipe={address} has another SHA-256, {sha256_of(content)}: the file has changed, or is not the one that was meant"
        )
    for show in on_fetch:
        show(address, content)
    return content


def _answer(url: str) -> bytes | Exception:
    """The first bytes of an answer, one more than a recipe may have; or the reason without an answer."""
    from urllib.error import HTTPError
    from urllib.parse import urljoin
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):  # urllib's own handler reads a redirect's whole body, and follows it to http
        def redirect_request(self, *_: Any) -> None:
            return None

    try:
        for _ in range(MAX_REDIRECTS + 1):
            request = Request(url, headers={"User-Agent": f"drivetrain/{__version__}"})
            try:
                with build_opener(NoRedirects).open(request, timeout=2 * MAX_S) as answer:
                    content: bytes = answer.read(MAX_BYTES + 1)
                    return content
            except HTTPError as error:
                if error.code // 100 != 3 or not error.headers["Location"]:
                    raise
                url = urljoin(url, error.headers["Location"])
                if not _URL.fullmatch(url):
                    raise ValueError(f"it redirects to {url}, which is not https") from None
        raise ValueError(f"it redirects more than {MAX_REDIRECTS} times")
    except Exception as error:  # errors of sockets, TLS, HTTP and URLs
        return error
