"""The kinds of targets of data, and of losses and metrics."""

from __future__ import annotations

from typing import Literal

TargetKind = Literal["class", "labels", "values", "mask", "tokens", "words", "pair", "sequence"]
DESCRIPTIONS: dict[TargetKind, str] = {
    "class": "one class for each sample",
    "labels": "any number of labels for each sample",
    "values": "numbers for each sample (regression)",
    "mask": "a class for each pixel",
    "tokens": "the next token at each position",
    "words": "a class for each word",
    "pair": "two views of each sample",
    "sequence": "a sequence of classes for each sample",
}
FITTING_LOSS: dict[TargetKind, str] = {  # named in messages
    "class": "cross_entropy", "labels": "bce", "values": "mse", "mask": "cross_entropy", "tokens": "next_token",
    "words": "token", "pair": "contrastive", "sequence": "ctc",
}  # fmt: skip


def unsaid(name: str) -> str:
    """Return the problem of a loss's or metric's class without `takes`."""
    return f"{name} does not say what targets it can be computed from: give the class takes = (…), of {', '.join(DESCRIPTIONS)}"


def describe(kinds: tuple[TargetKind, ...]) -> str:
    """Return the kinds in words, for messages."""
    return " or ".join(DESCRIPTIONS[kind] for kind in kinds)
