"""The call of the model's forward with a batch's inputs. Its form is decided once, when a run is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.step.trees import Forward, Tree, call, described, named_leaves, part

ForwardInput = Literal["auto", "keywords", "positions", "one"]  # the top-level value forward_input


@dataclass(frozen=True)
class ModelCall:
    """Calls a forward with a dict's values as keywords, a tuple's items as positions, or everything as one argument."""

    how: Literal["keywords", "positions", "one"]
    output: str | None = None  # the part of the returned value that is the output; None: all of it
    whole: bool = False  # the loss gets the whole returned value

    @classmethod
    def chosen(cls, setting: ForwardInput, x: Tree, output: str | None = None, whole: bool = False) -> ModelCall:
        """Return the call for inputs such as `x`. By default dicts are keywords and tuples are positions. Raises UserError."""
        is_dict, is_row = isinstance(x, dict), isinstance(x, tuple | list)
        if setting == "auto":
            return cls("keywords" if is_dict else "positions" if is_row else "one", output, whole)
        if (setting == "keywords" and not is_dict) or (setting == "positions" and not (is_dict or is_row)):
            given = "one tensor" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise UserError(f"forward_input={setting}, but the inputs of a sample are {given}: set forward_input=auto")
        return cls(setting, output, whole)

    def arguments(self, x: Tree) -> Tree:
        """Return the model's arguments for `trees.call`: a tensor, a tuple of positions or a dict of keywords."""
        if self.how == "positions":
            return tuple(x.values() if isinstance(x, dict) else x)
        return x if self.how == "keywords" or isinstance(x, torch.Tensor) else (x,)

    def taking_batches(self, forward: Callable[..., object]) -> Forward:
        """Return `forward` as a function of a batch's inputs, or of its own arguments, as a user's loss may call it.

        With one argument it is `forward` itself, which costs nothing.
        """
        if self.output is not None and not self.whole:
            forward, whole = (lambda *given, **keywords: part(whole(*given, **keywords), self.output or "")), forward
        if self.how == "one":
            return forward

        def called(*given: object, **keywords: object) -> Tree:
            if len(given) != 1 or keywords or isinstance(given[0], torch.Tensor):
                return forward(*given, **keywords)
            return call(forward, self.arguments(given[0]))

        return called

    def measured(self, output: Tree) -> Tree:
        """Return the part of the loss's input that metrics and predictions take. Raises UserError."""
        return self.output_of(output) if self.whole else output

    def output_of(self, returned: object) -> Tree:
        """Return the output within the value that the model returned. Raises UserError."""
        if self.output is None:
            return returned
        try:
            return part(returned, self.output)
        except LookupError:
            raise UserError(
                f"forward_output={self.output}: the model returns {described(returned)}, without such a part"
            ) from None

    def check(self, model: torch.nn.Module, x: Tree) -> None:
        """Raise UserError if the model's forward does not take these arguments."""
        if isinstance(x, torch.Tensor):
            return
        arguments = self.arguments(x)
        positions, keywords = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
        try:
            inspect.signature(model.forward).bind(*positions, **keywords)
        except TypeError as error:
            names = ", ".join(name for name, _ in named_leaves(x))
            raise UserError(
                f"{type(model).__name__}.forward cannot take the inputs of a sample ({names}) as {_AS[self.how]}: {error}. "
                f"Change the forward's arguments or the samples, or set forward_input to "
                f"{' or '.join(how for how in _AS if how != self.how)}"
            ) from None


_AS = {"keywords": "keywords", "positions": "positions", "one": "one argument"}
