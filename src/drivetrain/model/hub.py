"""Tests whether Hugging Face's hub can be reached, because the hub's own client would try for a minute or more."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Sequence

from drivetrain.core.errors import UserError, did_you_mean

PROBE_S = 3  # seconds for the hub's answer


def only_cached(name: str, file: str, setting: str, instead: str, known: Sequence[str] = ()) -> bool:
    """True if the hub does not answer, and this file of its model is in the cache.

    Raises UserError if neither has it, with the remedy `instead` and the nearest of the `known` names.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        cached = isinstance(try_to_load_from_cache(name, file), str)
    except ValueError:  # not a name of the hub, but of a folder
        raise UserError(f"{setting} is no folder: {instead}") from None
    answer: list[int] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(f"{constants.ENDPOINT}/{name}/resolve/main/{file}", method="HEAD")
            with urllib.request.urlopen(request, timeout=PROBE_S):
                answer.append(200)
        except urllib.error.HTTPError as error:
            answer.append(error.code)
        except (OSError, ValueError):
            pass

    if not constants.HF_HUB_OFFLINE:
        asking = threading.Thread(target=ask, daemon=True)  # a name's look-up has no time limit
        asking.start()
        asking.join(PROBE_S)
    if answer and answer[0] != 404:
        return False
    if cached:
        return True
    what = "no model of the hub" if answer else "neither a folder nor reachable"
    near = f"; {did_you_mean(name, known)}" if known else ""
    raise UserError(f"{setting} is {what}: {instead}{near}")
