"""Recipes at addresses: each is pinned, fetched once, shown when it arrives, and kept by the hash of its bytes."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from drivetrain.core.errors import UserError
from drivetrain.recipe import cache, git, hub, web
from drivetrain.recipe.safe_yaml import MAX_BYTES

MAX_BUNDLE = 4 * 2**20
_SHA256, _COMMIT = re.compile(r"[0-9a-f]{64}$"), re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?$")


class Place:
    """A kind of address. `path` ends with the file's name; `sha256` is the file's, where the address says it."""

    form = ""  # of a pinned address

    def __init__(self, address: str) -> None:
        self.address = address
        self.path, _, pin = address.partition("#sha256=")
        self.sha256 = pin or None

    def problem(self) -> str | None:
        """Why this is no address that is fetched."""
        if self.sha256 is not None and not _SHA256.match(self.sha256):
            return f"sha256={self.sha256[:80]} is no SHA-256, which has 64 digits from 0-9 and a-f"
        return None

    def is_pinned(self) -> bool:
        """Whether the address gives the same bytes at any time."""
        return self.sha256 is not None

    def pinned(self, sha256: str) -> str:
        """The pinned address of what has just been fetched."""
        raise NotImplementedError

    def fetch(self, most: int) -> web.Fetched:
        """Fetch the file, unchecked. Raises UserError or web.Refused."""
        raise NotImplementedError

    @property
    def suffix(self) -> str:
        """The file's suffix in the cache."""
        return ".zip" if self.path.endswith(".zip") else ".yaml"


class Web(Place):
    """https://host/x.yaml#sha256=…; plain http too, since the hash tells whether anybody changed it on the way."""

    form = "https://HOST/FILE.yaml#sha256=HASH"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.url = self.path
        self.path = urlsplit(self.url).path

    def problem(self) -> str | None:
        if "#" in self.url:
            return f"what follows '#' is not sha256=HASH: the form is {self.form}"
        if self.sha256 is None and self.url.startswith("http:") and not web.is_loopback(self.url):
            return "it is plain http without a hash, so that anybody on the way could change it: say https://"
        return super().problem() or web.problem(self.url)

    def pinned(self, sha256: str) -> str:
        return f"{self.url}#sha256={sha256}"

    def fetch(self, most: int) -> web.Fetched:
        return web.get(self.url, most)


class Hub(Place):
    """hf://owner/repo@commit/x.yaml; hf://datasets/… and hf://spaces/… too."""

    form = "hf://OWNER/REPO@COMMIT/FILE.yaml"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        match = hub.FORM.match(self.path.removeprefix("hf://"))
        self.file = hub.File(match[1], match[2], match[3], match[4]) if match else None
        self.path = match[4] if match else ""

    def problem(self) -> str | None:
        return super().problem() or (f"the form is {self.form}" if self.file is None else web.problem(f"https://hf/{self.path}"))

    def is_pinned(self) -> bool:
        return self.file is not None and _COMMIT.match(self.file.revision or "") is not None

    def pinned(self, sha256: str) -> str:
        assert self.file is not None
        head = f"hf://{self.file.kind}/" if self.file.kind else "hf://"
        return f"{head}{self.file.repository}@{self.file.revision}/{self.path}"

    def fetch(self, most: int) -> web.Fetched:
        assert self.file is not None
        if not self.is_pinned():
            self.file = self.file._replace(revision=hub.commit_of(self.file))
        return hub.read(self.file, most)


class Git(Place):
    """git+https://host/repo@commit#path; git+http:// on this machine alone."""

    form = "git+https://HOST/REPOSITORY@COMMIT#FILE.yaml"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        before, _, self.path = self.path.removeprefix("git+").partition("#")
        head, at, tail = before.rpartition("@")
        named = bool(at) and "/" in urlsplit(head).path  # not the "@" of user@host
        self.url, self.revision = (head, tail) if named else (before, "")

    def problem(self) -> str | None:
        if not self.path or self.path.startswith(("/", "-")) or ".." in PurePosixPath(self.path).parts:
            return f"it names no file of the repository: the form is {self.form}"
        if self.url.startswith("http:") and not web.is_loopback(self.url):
            return "it is plain http, and anybody on the way could change it: say git+https://"
        if self.revision and not re.fullmatch(r"\w[\w./-]*", self.revision):
            return f"{self.revision[:80]} is no commit, branch or tag"
        return super().problem() or web.problem(self.url)

    def is_pinned(self) -> bool:
        return _COMMIT.match(self.revision) is not None

    def pinned(self, sha256: str) -> str:
        return f"git+{self.url}@{self.revision}#{self.path}"

    def fetch(self, most: int) -> web.Fetched:
        if not self.is_pinned():
            self.revision = git.commit_of(self.url, self.revision or "HEAD")
        return web.Fetched(git.read(self.url, self.revision, self.path, most), [str(urlsplit(self.url).hostname)])


PLACES: dict[str, type[Place]] = {"https": Web, "http": Web, "hf": Hub, "git+https": Git, "git+http": Git}


def parse(address: str) -> Place:
    """What fetches an address. Raises UserError for one that no place has."""
    scheme = address.partition("://")[0]
    if scheme not in PLACES:
        forms = " or ".join(dict.fromkeys(place.form for place in PLACES.values()))
        raise UserError(f"recipe={address}: recipes are not fetched by {scheme}://: give a file, or {forms}")
    try:
        place = PLACES[scheme](address)
        wrong = place.problem()
    except ValueError as error:
        wrong = f"it is no URL: {error}"
    if wrong:
        raise UserError(f"recipe={address}: {wrong}")
    return place


def fetched(address: str) -> Path:
    """The cached file of a pinned address, which is fetched unless it is there. Raises UserError."""
    place = parse(address)
    if not place.is_pinned():
        raise UserError(
            f"recipe={address} is not pinned, so that it could be another file tomorrow: the form is {place.form}. "
            f"`drivetrain recipe fetch {address}` shows what it is now, runs nothing, and prints the pinned address"
        )
    if (path := _kept(place)) is not None:
        return path
    with cache.lock():  # of ranks that were started together one fetches
        return _kept(place) or _fetch(place)[0]


def pin(address: str) -> tuple[str, Path]:
    """The pinned address of what an address gives now, and the file. Raises UserError."""
    place = parse(address)
    with cache.lock():
        path, pinned = _fetch(place)
    return pinned, path


def _kept(place: Place) -> Path | None:
    """The cached file of an address, if it was fetched before."""
    sha256 = place.sha256 or cache.sha256_at(place.address)
    return cache.kept(sha256, place.suffix) if sha256 is not None else None


def _fetch(place: Place) -> tuple[Path, str]:
    """Fetch a file, check it, show it and keep it; its place in the cache, and its pinned address. Raises UserError."""
    try:
        found = place.fetch(MAX_BUNDLE if place.suffix == ".zip" else MAX_BYTES)
        sha256 = cache.sha256_of(found.content)
        page = "it is a web page, not a recipe: name the file itself, which sites call its raw form"
        if place.sha256 not in (None, sha256):
            why = page if web.looks_like_a_page(found.content) else "the file has changed, or is not the one that was meant"
            raise web.Refused(f"it has another SHA-256, {sha256}: {why}")
        if web.looks_like_a_page(found.content):
            raise web.Refused(page)
    except web.Refused as error:
        raise UserError(f"recipe={place.address}: {error}") from None
    pinned = place.pinned(sha256)
    for show in cache.on_fetch:
        show(pinned, found)
    path = cache.keep(found.content, place.suffix)
    cache.remember(pinned, sha256)
    return path, pinned
