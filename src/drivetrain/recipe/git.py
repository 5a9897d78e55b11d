"""Reading one file of one commit of a git repository, without checking anything out and without running anything of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from drivetrain.recipe.web import Refused

TOTAL_S, MAX_FETCHED = 60.0, 64 * 2**20  # of the whole fetch; git brings the folders' lists of files too
POLL_S = 0.02
PROTOCOLS = "https:http"  # plain http only where the place allows it: on this machine
_OFF = {  # in a repository that is ours, empty and bare; the rest of the user's git config (proxy, certificates) holds
    "core.hooksPath": os.devnull, "core.fsmonitor": "false", "core.askPass": "", "protocol.ext.allow": "never",
    "protocol.file.allow": "never", "submodule.recurse": "false", "fetch.recurseSubmodules": "false", "gc.auto": "0",
    "maintenance.auto": "false", "http.followRedirects": "false", "http.cookieFile": "", "fetch.writeCommitGraph": "false",
    "transfer.fsckObjects": "true", "fetch.fsckObjects": "true",
}  # fmt: skip


def read(url: str, commit: str, path: str, most: int) -> bytes:
    """The bytes of a file. Raises Refused."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-git-") as folder:
        ends = time.monotonic() + TOTAL_S
        form = "sha256" if len(commit) == 64 else "sha1"
        _git(["init", "-q", "--bare", "--template=", f"--object-format={form}", folder], None, ends)
        fetch = [
            "fetch",
            "-q",
            "--depth=1",
            "--no-tags",
            "--no-recurse-submodules",
            "--no-write-fetch-head",
            "--filter=blob:none",
        ]
        _git([*fetch, url, commit], folder, ends)
        found = _git(["ls-tree", "-z", commit, "--", path], folder, ends).decode(errors="replace")
        if not found.startswith(("100644 blob", "100755 blob")):
            raise Refused(f"the commit {commit[:12]} has no file {path}")
        content = _git(["cat-file", "blob", f"{commit}:{path}"], folder, ends)  # which fetches it
    if len(content) > most:
        raise Refused(f"it is larger than {most // 1024} KiB, the most that is fetched")
    return content


def commit_of(url: str, name: str) -> str:
    """The commit that a branch or tag stands for now. Raises Refused."""
    wanted = [name] if name == "HEAD" else [f"refs/heads/{name}", f"refs/tags/{name}^{{}}", f"refs/tags/{name}"]
    lines = _git(["ls-remote", "-q", url, *wanted], None, time.monotonic() + TOTAL_S).decode(errors="replace").split("\n")
    found = {ref: commit for commit, _, ref in (line.partition("\t") for line in lines)}
    commit = next((found[ref] for ref in wanted if ref in found), None)
    if commit is None:
        raise Refused(f"the repository has no branch and no tag {name}")
    return commit


def _git(words: list[str], folder: str | None, ends: float) -> bytes:
    """Run git within the time, and within the bytes that its folder may take; its output. Raises Refused."""
    settings = [word for key, value in _OFF.items() for word in ("-c", f"{key}={value}")]
    place = ["-C", folder] if folder is not None else []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            running = subprocess.Popen(
                ["git", *settings, *place, *words], env=_environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True, cwd=folder or tempfile.gettempdir(),
            )  # fmt: skip
        except OSError as error:
            raise Refused(f"git cannot be run ({error.strerror}): install it") from None
        try:
            while (code := running.poll()) is None:
                size = os.fstat(out.fileno()).st_size + _bytes_in(folder)
                if time.monotonic() > ends:
                    raise Refused(f"git did not deliver it within {TOTAL_S:g} s")
                if size > MAX_FETCHED:
                    raise Refused(f"git fetches more than {MAX_FETCHED // 2**20} MiB for it, the most that is fetched")
                time.sleep(POLL_S)
        finally:
            _end(running)
        out.seek(0)
        err.seek(0)
        if code:
            raise Refused(_reason(err.read(64 * 1024).decode(errors="replace")))
        return out.read(MAX_FETCHED)


def _environment() -> dict[str, str]:
    """The environment without what steers git, but for certificates; nothing is asked for on the terminal."""
    kept = {k: v for k, v in os.environ.items() if k.startswith("GIT_SSL_") or not k.startswith(("GIT_", "SSH_ASKPASS"))}
    return {**kept, "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": PROTOCOLS, "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}


def _bytes_in(folder: str | None) -> int:
    total = 0
    for path in Path(folder).rglob("*") if folder is not None else ():
        with contextlib.suppress(OSError):  # git has moved it meanwhile
            total += path.stat().st_size
    return total


def _end(running: subprocess.Popen[bytes]) -> None:
    """End git and the helpers that it started, if they still run."""
    if running.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _reason(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(("fatal:", "error:"))] or text.splitlines()
    line = "".join(c if c.isprintable() else " " for c in lines[0]) if lines else "no reason given"
    if re.search("error: 30[12378]", line):
        line += " (it redirects, which is not followed: name the address itself, which on some hosts ends in .git)"
    return f"git: {line.removeprefix('fatal: ').removeprefix('error: ')[:300]}"
