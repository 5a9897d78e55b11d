"""Reading one file of one commit of a repository on the Hugging Face hub: the library says where, `web` fetches."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from drivetrain.core.errors import UserError
from drivetrain.recipe import web

FORM = re.compile(r"(?:(datasets|spaces)/)?([\w.-]+/[\w.-]+?)(?:@([\w./-]+?))?/([^@#]+)$")


class File(NamedTuple):
    """A file on the hub; without a revision that of its main branch."""

    kind: str | None  # None for a repository of models
    repository: str
    revision: str | None
    path: str


def read(file: File, most: int) -> web.Fetched:
    """Fetch a file. Raises UserError or web.Refused."""
    import_hub()
    from huggingface_hub import hf_hub_url

    kind = file.kind and file.kind.removesuffix("s")
    url = hf_hub_url(file.repository, file.path, revision=file.revision, repo_type=kind, endpoint=_endpoint())
    try:
        return web.get(_checked(url), most, _token())
    except web.Refused as error:
        hint = (
            " (a private or gated repository needs `hf auth login` or HF_TOKEN)"
            if re.search("answered 40[13]", str(error))
            else ""
        )
        raise web.Refused(f"{error}{hint}") from None


def commit_of(file: File) -> str:
    """The commit of a branch or tag, or of the main branch. Raises UserError or web.Refused."""
    import json
    from urllib.parse import quote

    import_hub()
    name = quote(file.revision or "main", safe="")
    url = f"{_endpoint()}/api/{file.kind or 'models'}/{file.repository}/revision/{name}"
    try:
        commit = json.loads(web.get(_checked(url), 8 * 2**20, _token()).content)["sha"]
    except (ValueError, KeyError, TypeError, RecursionError):
        commit = None
    if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", commit):
        raise web.Refused("the hub did not say which commit it is")
    return commit


def import_hub() -> None:
    """Raise UserError where huggingface_hub is not installed."""
    try:
        import huggingface_hub as huggingface_hub
    except ImportError:
        raise UserError("hf:// needs huggingface_hub, which is not installed: pip install 'drivetrain[hub]'") from None


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _checked(url: str) -> str:
    if not url.startswith("https://") and not web.is_loopback(url):
        raise web.Refused(f"HF_ENDPOINT={_endpoint()} is not https, so that anybody on the way could change the file")
    return url


def _token() -> dict[str, str]:
    """The header with the user's token, where they have one. `web` sends it to the hub alone."""
    from huggingface_hub import get_token

    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}
