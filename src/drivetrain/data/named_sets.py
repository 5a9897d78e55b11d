"""Several validation or test sets, each with a name: what is wrong with them, and how they are loaded.

Whatever a data option's setting takes for one set, it takes for each of several: the option is asked with each of them alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drivetrain.core.allowed import PLAIN_NAME
from drivetrain.core.errors import DataError
from drivetrain.core.option import RunSpec
from drivetrain.core.source import Source
from drivetrain.data.validation import hold_out

if TYPE_CHECKING:
    import torch

    from drivetrain.data.base import Data, Splits

SPLITS = ("validation", "test")  # what is evaluated


def problems(option: Data, run: RunSpec) -> Iterator[str]:
    """Yield what is wrong with the named sets, or else what the option's rules say of each of them."""
    wrong = list(_name_problems(option))
    yield from wrong
    if not wrong:
        yield from option.alone().validate(run)
        for split in SPLITS:
            for name in option.several(split):
                yield from option.alone(split, name).validate(run)


def _name_problems(option: Data) -> Iterator[str]:
    for split, given in (("validation", option.validation), ("test", option.test)):
        if given == {}:
            yield f"data.{split}={{}} names no set: set it to null, to one set, or to several as {{clean: …, noisy: …}}"
        for name in option.several(split):
            if not PLAIN_NAME.takes(str(name)):
                yield f"data.{split}: '{name}' is no name of a set: take letters, digits and _"
    shares = [name for name, setting in option.several("validation").items() if isinstance(setting, float)]
    if len(shares) > 1:
        yield f"data.validation: {' and '.join(shares)} are shares of training, and one can be held out: name files for others"


def load(option: Data, device: torch.device) -> Splits:
    """Load the data with all its sets, and hold out what is a share of the training set. Raises UserError."""
    data, share = option.alone().load(device), option.share()
    sets: dict[str, Any] = {split: data.sets(split) for split in SPLITS}
    for split in SPLITS:
        if named := option.several(split):
            own = [name for name, setting in named.items() if not isinstance(setting, float)]
            first = {name: source for name, source in zip(named, sets[split].values(), strict=False) if name in own}
            sets[split] = {n: first.get(n) or option.alone(split, n).load_set(split, data, device) for n in own}
    named = option.several("validation")
    if share is not None and (named or not sets["validation"]):
        train, held = hold_out(data.train, share)
        data = replace(data, train=train, origins={"validation": f"{share:g} of training", **data.origins})
        sets["validation"] = {name: sets["validation"].get(name, held) for name in named or ("",)}
    return replace(data, **{split: found.get("", found or None) for split, found in sets.items()})


def load_beside(option: Data, split: str, beside: Splits, device: torch.device) -> Source:
    """Load the one set that an option has of a split, for data that is loaded. Raises UserError where it does not fit that."""
    data = option.load(device)
    if (data.classes, data.names, data.shape) != (beside.classes, beside.names, beside.shape):
        raise DataError(
            f"data.{split}={option.test if split == 'test' else option.validation} has {data.classes} classes and the shape "
            f"{data.shape}, and other sets have {beside.classes} and {beside.shape}: all sets must be of one kind"
        )
    return data.sets(split)[""]


def expanded(path: str | Mapping[str, str] | None) -> Any:
    """Return a path, or those of several sets, with ~ as the home directory; None where there is none."""
    if isinstance(path, Mapping):
        return {name: os.path.expanduser(each) for name, each in path.items()}
    return os.path.expanduser(path) if path else None
