"""The parts of a network by name: its input and output layers, the matrices between them, and modules its author froze."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from drivetrain.core.lazy import torch
from drivetrain.core.step.trees import Tree, leaves

TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")  # the linear layer of GPT-2
HEADS = ("head", "heads", "lm_head", "classifier", "score")  # usual names of the output layers, in networks of no library


class Matrix(NamedTuple):
    """The form of a parameter of two or more dimensions that is a layer's factor."""

    stacked: bool = False  # (n, rows, columns): a matrix for each expert
    transposed: bool = False  # (inputs, outputs), unlike torch's own order


@dataclass(frozen=True)
class Architecture:
    """The roles of a model's layers and parameters. A tied parameter has its first name, and the roles of all its layers.

    The heads are known from timm and transformers, or by their usual names; else the last layer of the model is the head.
    """

    heads: Sequence[str]  # modules that a new task replaces
    outputs: Sequence[str]  # the last layer of each head, which gives the outputs
    of_outputs: Collection[str]  # the parameters of these layers
    embeddings: Collection[str]  # the parameters of embeddings
    hidden: Mapping[str, Matrix]  # the matrices that neither read the inputs nor give the outputs, in the model's order

    @classmethod
    def of(cls, model: torch.nn.Module, inputs: Tree = (), among: Collection[str] | None = None) -> Self:
        """Return the roles in a model with such inputs; only of the parameters `among`, if they are given.

        The first layer reads the inputs, unless these are whole numbers and there is an embedding.
        """
        first = {id(p): name for name, p in model.named_parameters() if among is None or name in among}
        modules, embeddings = dict(model.named_modules()), set()
        layers: dict[str, dict[str, Matrix]] = defaultdict(dict)
        for layer, module in modules.items():
            for own, p in module.named_parameters(recurse=False):
                if id(p) in first and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
                    embeddings.add(first[id(p)])
                elif id(p) in first and (matrix := _matrix(module, own, p)) is not None:
                    layers[layer][first[id(p)]] = matrix
        known = [name for name in _known_heads(model) if name in modules]
        of_heads = [[layer for layer in layers if f"{layer}.".startswith(f"{head}.")] for head in known]
        outputs = [found[-1] for found in of_heads if found]
        if not outputs and not (known and among is None):  # a trunk's head may be an Identity
            outputs = [*layers][-1:]
        of_outputs = {first[id(p)] for name in outputs for p in modules[name].parameters() if id(p) in first}
        hidden = {n: m for layer in layers.values() for n, m in layer.items() if n not in embeddings | of_outputs}
        if hidden and (not embeddings or any(x.is_floating_point() for x in leaves(inputs))):
            del hidden[next(iter(hidden))]
        return cls(known or outputs, outputs, of_outputs, embeddings, hidden)


def is_transposed(module: torch.nn.Module) -> bool:
    """True if it is a linear layer whose weight is (inputs, outputs)."""
    return (type(module).__module__, type(module).__name__) == TRANSPOSED


def _matrix(module: torch.nn.Module, name: str, p: torch.Tensor) -> Matrix | None:
    """The form of a module's own parameter; None where it is no matrix."""
    nn = torch.nn
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase):
        return Matrix() if p.ndim > 1 and "bias" not in name else None
    if is_transposed(module) and p.ndim == 2:
        return Matrix(transposed=True)
    own = not type(module).__module__.startswith("torch.")
    # Experts are held in one parameter. Positions and tokens of a batch of one, and gains of channels, have sizes of 1.
    stacked = own and p.ndim == 3 and min(p.shape) > 1
    return Matrix(stacked=True, transposed=bool(getattr(module, "is_transposed", False))) if stacked else None


def _known_heads(model: torch.nn.Module) -> Sequence[str]:
    """The modules that give the outputs: timm's own, for transformers all but the body, else the modules with the usual names."""
    names = {id(module): name for name, module in model.named_modules()}
    if hasattr(model, body := getattr(model, "base_model_prefix", "") or "?"):
        return [name for name, module in model.named_children() if name != body and any(True for _ in module.parameters())]
    asked = [getattr(model, name, lambda: None)() for name in ("get_output_embeddings", "get_classifier")]
    given = [module for found in asked for module in (found if isinstance(found, tuple | list) else (found,))]
    config = getattr(model, "pretrained_cfg", None)
    named = (config.get("classifier") or () if isinstance(config, Mapping) else ()) if names else ()
    found = [*([named] if isinstance(named, str) else named), *(names[id(m)] for m in given if id(m) in names)]
    return list(dict.fromkeys(found)) or [name for name in HEADS if name in names.values()]


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the further names of shared parameters, each with its first name."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}


def sparse_parameters(model: torch.nn.Module) -> dict[int, str]:
    """Return the weights that train by sparse gradients: their ids and names."""
    tables = (m for m in model.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag) and m.sparse)
    ids = {id(table.weight) for table in tables}
    return {id(p): name for name, p in model.named_parameters() if id(p) in ids and p.requires_grad}


def resting(model: torch.nn.Module) -> list[str]:
    """Return the outermost modules of a model in training that its author has put into evaluation mode and frozen.

    Modules that train are not included, because `from_pretrained` of transformers also returns models in evaluation mode.
    """
    modes = {name: module for name, module in model.named_modules() if model.training and not module.training}
    outermost = [n for n in modes if not any(n.startswith(f"{other}.") for other in modes)]
    weights = {name: [p.requires_grad for p in modes[name].parameters()] for name in outermost}
    return [name for name, trained in weights.items() if trained and not any(trained)]
