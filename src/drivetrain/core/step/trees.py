"""Trees: inputs, targets and outputs that are a tensor, or nested tuples, dicts and dataclasses of tensors.

They are torch's pytrees, so that torch's compiler, wrappers and tracing handle them like this module.
A plain tensor, the usual case, costs one type check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from drivetrain.core.lazy import pytree, torch

Tree = Any  # a torch.Tensor, or a pytree of them
Forward = Callable[[Tree], Tree]  # of a model, with a batch's inputs


_seen: set[type] = set()


def _no_leaf(node: object) -> bool:
    """Return False, and register a user's dataclass as a node before torch takes it for a leaf."""
    kind = type(node)
    if kind not in _seen:
        _seen.add(kind)
        if is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
            pytree.register_dataclass(kind)
    return False


def map_tensors(function: Callable[[torch.Tensor], object], tree: Tree) -> Tree:
    """Return the tree with `function` applied to each of its tensors."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    return pytree.tree_map_only(torch.Tensor, function, tree, is_leaf=_no_leaf)


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    """Return the tree with its floating-point tensors in another format."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def to(tree: Tree, device: torch.device) -> Tree:
    """Return the tree on a device."""
    return tree.to(device) if isinstance(tree, torch.Tensor) else map_tensors(lambda tensor: tensor.to(device), tree)


def select(tree: Tree, indices: torch.Tensor) -> Tree:
    """Return the samples `indices` (n,), which are on the tree's device; a tensor without dimensions belongs to all samples."""
    return map_tensors(lambda tensor: tensor.index_select(0, indices) if tensor.dim() else tensor, tree)


def leaves(tree: Tree) -> list[torch.Tensor]:
    """Return the tree's tensors, in its order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=_no_leaf) if isinstance(leaf, torch.Tensor)]


def only_tensors(tree: Tree) -> bool:
    """Return whether nothing but tensors is in a tree of dicts and tuples."""
    if isinstance(tree, dict):
        return all(map(only_tensors, tree.values()))
    return all(map(only_tensors, tree)) if isinstance(tree, tuple | list) else isinstance(tree, torch.Tensor)


def first(tree: Tree) -> torch.Tensor:
    """Return the tree's first tensor."""
    return tree if isinstance(tree, torch.Tensor) else leaves(tree)[0]


def length(tree: Tree) -> int:
    """Return the number of samples of a batch."""
    return len(first(tree))


def nbytes(tree: Tree) -> int:
    """Return the bytes of all its tensors."""
    return sum(leaf.nbytes for leaf in leaves(tree))


def unflatten(tensors: Sequence[torch.Tensor], like: Tree) -> Tree:
    """Return a tree of the same structure as `like`, with these tensors, in the order of `leaves`."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), like)


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Return batches of one structure as one batch. A tensor without dimensions belongs to all samples and becomes its mean."""
    each = [torch.cat(t) if t[0].dim() else sum(t) / len(t) for t in zip(*map(leaves, trees), strict=True)]
    return unflatten(each, trees[0])


def named_leaves(tree: Tree) -> list[tuple[str, torch.Tensor]]:
    """Return each tensor with its place in the tree in the user's notation, such as "text.ids" or "0"; "" for a plain one."""
    found = pytree.tree_flatten_with_path(tree, is_leaf=_no_leaf)[0]
    return [(".".join(map(_written, path)), leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]


def _written(key: object) -> str:
    """Return one step of a path: a dict's key, a tuple's position, or a field's name."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def shape_of(tensor: torch.Tensor) -> str:
    """Return a batch's shape in words, such as (n, 3, 8)."""
    return "(" + ", ".join(["n", *map(str, tensor.shape[1:])]) + ("" if tensor.dim() > 1 else ",") + ")"


def described(tree: Tree) -> str:
    """Return a tree in words, such as "a dict of ids (n, 8), mask (n, 8)"."""
    if isinstance(tree, torch.Tensor):
        return f"a tensor {shape_of(tree)}"
    parts = ", ".join(f"{name} {shape_of(leaf)}" for name, leaf in named_leaves(tree))
    return f"a {type(tree).__name__} of {parts}" if parts else f"a {type(tree).__name__}, in which no tensors are found"


def part(tree: Tree, path: str) -> Tree:
    """Return a part of a tree by its name, as in `named_leaves`, or of an object by its attribute. Raises LookupError."""
    for key in path.split("."):
        try:
            if isinstance(tree, Mapping):
                tree = tree[key]
            elif isinstance(tree, tuple | list) and key.isdigit():
                tree = tree[int(key)]
            else:
                tree = getattr(tree, key)
        except (LookupError, AttributeError):
            raise LookupError(path) from None
    return tree


def signature(tree: Tree) -> tuple[object, ...]:
    """Return the key of the compiled graph for a batch: structure, shapes, dtypes and memory order."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.dtype, tree.stride()
    if isinstance(tree, dict):
        return (type(tree), *((key, signature(value)) for key, value in tree.items()))
    if isinstance(tree, tuple | list):
        return (type(tree), *map(signature, tree))
    return (type(tree), *map(signature, leaves(tree)))


def call(model: Callable[..., Tree], arguments: Tree) -> Tree:
    """Call a model with a dict's values as keywords, with a tuple's items as positions, or with a tensor.

    A function is called with the model, and runs parts of it.
    """
    if callable(arguments) and not isinstance(arguments, torch.Tensor):
        return arguments(model)
    if isinstance(arguments, dict):
        return model(**arguments)
    if isinstance(arguments, tuple):
        return model(*arguments)
    return model(arguments)
