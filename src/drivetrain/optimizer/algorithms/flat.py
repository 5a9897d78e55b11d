"""Optimizers on vectors: many parameters end to end, so that one operation works on all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROW = 64  # elements; a parameter starts on a new row, so that norms and factors of single parameters go row by row
AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements per vector: a CPU's cache holds its working set, a GPU launches little


class Chunk:
    """Parameters of one group as one vector in memory order, filled up with zeros to whole rows, and their state.

    A parameter alone is its own vector, one row. `step` is 0-d on the device: an update waits for nothing. `vectors` has the
    state by name and `work`, one to write to, which like the memory of gathered vectors all chunks share.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        like = params[0]
        self.alone = len(params) == 1
        self.dtype = torch.promote_types(like.dtype, torch.float32)  # 16-bit parameters are updated in float32
        self.row = like.numel() if self.alone else ROW
        self.orders = [_order(p) for p in params]
        self.lines = [self._line(p.detach(), order) for p, order in zip(params, self.orders, strict=True)]
        counts = [-(-p.numel() // self.row) for p in params]
        self.rows = torch.tensor(counts, device=like.device)  # (n,) of each parameter
        self.owner = torch.repeat_interleave(self.rows)  # (rows,) the parameter each row belongs to
        fill = [like.new_zeros(c * self.row - p.numel(), dtype=self.dtype) for c, p in zip(counts, params, strict=True)]
        self.parts = [part for pair in zip(self.lines, fill, strict=True) for part in pair]
        self.size = sum(part.numel() for part in self.parts)
        self.step = torch.zeros((), device=like.device)
        self.vectors: dict[str, Tensor] = {}  # (size,)
        self.numbers: dict[str, Tensor] = {}  # state that is (n,), a number per parameter, or 0-d, one for all
        self._pieces: dict[str, list[Tensor]] = {}

    def take_memory(self, work: Tensor, weights: Tensor, grads: Tensor) -> None:
        """Share this memory; a parameter alone needs but the first."""
        self.vectors["work"] = work[: self.size]
        if not self.alone:
            self.vectors |= {"weights": weights[: self.size], "grads": grads[: self.size]}

    def moved(self) -> bool:
        """Whether a parameter has been given other memory."""
        return [p.data_ptr() for p in self.params] != [line.data_ptr() for line in self.lines]

    @staticmethod
    def _line(tensor: Tensor, order: list[int] | None) -> Tensor:
        """A dense tensor in memory order, 1-d: a view where its order is `order`."""
        return tensor.reshape(-1) if order is None else tensor.permute(order).reshape(-1)

    def weights(self) -> Tensor:
        """The parameters as one vector: a copy, but of one float32 parameter alone that itself."""
        if self.alone:
            return self.lines[0].to(self.dtype)
        return torch.cat(self.parts, out=self.vectors["weights"])

    def grads(self) -> Tensor:
        """The gradients as one vector, only to be read: of one parameter alone it is the gradient itself."""
        lines = [self._line(p.grad, o) for p, o in zip(self.params, self.orders, strict=True) if p.grad is not None]
        if self.alone:
            return lines[0].to(self.dtype)
        self.parts[::2] = lines
        vector = torch.cat(self.parts, out=self.vectors["grads"])
        self.parts[::2] = self.lines
        return vector

    def pieces(self, name: str) -> list[Tensor]:
        """The parts of a vector that belong to the parameters, 1-d views."""
        if name not in self._pieces:
            sizes = [part.numel() for part in self.parts]
            self._pieces[name] = list(self.vectors[name].split_with_sizes(sizes)[::2])
        return self._pieces[name]

    def shaped(self, name: str) -> list[Tensor]:
        """The parts of a vector as views of the parameters' shapes."""
        shaped = []
        for piece, p, order in zip(self.pieces(name), self.params, self.orders, strict=True):
            if order is None:
                shaped.append(piece.view(p.shape))
            else:
                back = [order.index(d) for d in range(p.ndim)]
                shaped.append(piece.view([p.shape[d] for d in order]).permute(back))
        return shaped

    def norms(self, vector: Tensor) -> Tensor:
        """(n,) the Euclidean norm of each parameter's part. The order of summation is fixed: bit for bit the same again."""
        norms = torch.linalg.vector_norm(vector.view(-1, self.row), dim=1)
        return norms if self.alone else torch.segment_reduce(norms.square(), "sum", lengths=self.rows, unsafe=True).sqrt()

    def scaled(self, vector: Tensor, factors: Tensor) -> Tensor:
        """Each parameter's part times its factor of (n,), in `work`, which may be the vector itself."""
        work = self.vectors["work"]
        torch.mul(vector.view(-1, self.row), factors[self.owner, None], out=work.view(-1, self.row))
        return work

    def subtract(self, name: str, lr: float | Tensor = 1.0) -> None:
        """parameters ← parameters - lr × the vector of this name."""
        if isinstance(lr, Tensor):
            pieces = torch._foreach_mul(self.pieces(name), lr)
            torch._foreach_sub_(self.lines, pieces)
        else:
            torch._foreach_add_(self.lines, self.pieces(name), alpha=-lr)

    def write(self, weights: Tensor) -> None:
        """parameters ← what `weights()` gave, changed."""
        if not self.alone:
            torch._foreach_copy_(self.lines, self.pieces("weights"))
        elif weights is not self.lines[0]:
            self.lines[0].copy_(weights)


class Flat(torch.optim.Optimizer):
    """The base of optimizers that work on `Chunk`s: `kept` names their state, `update` is their arithmetic.

    Parameters without a gradient are skipped and keep their own count of steps. The state dict is torch's: one entry per
    parameter, its tensors views of the vectors. Raises TypeError for sparse gradients.
    """

    kept: tuple[str, ...] = ()  # state of a parameter's size
    kept_per_parameter: tuple[str, ...] = ()  # one number for each
    kept_per_chunk: tuple[str, ...] = ()  # one float64 number for all parameters that began together

    def __init__(self, params: Any, defaults: dict[str, Any], loop: bool = False) -> None:
        self.loop = loop  # every parameter on its own
        self._layouts: dict[int, tuple[list[bool], list[Chunk]]] = {}  # group's number → (who has a gradient, chunks)
        super().__init__(params, defaults)

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        """One step of the chunk's parameters, whose `step` has just been counted."""
        raise NotImplementedError

    def begin(self, state: dict[str, list[Tensor]], params: list[Tensor]) -> None:
        """Change the state that new parameters start with from zero; each name's tensors are views of a vector."""

    def before(self, chunks: list[Chunk]) -> None:
        """Look at all gradients before the first update."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update; of `closure`, if there is one, the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(chunk, group) for n, group in enumerate(self.param_groups) for chunk in self._chunks(n, group["params"])]
        self.before([chunk for chunk, _ in work])
        for chunk, group in work:
            chunk.step += 1
            self.update(chunk, group)
        return loss

    def _chunks(self, number: int, params: list[Tensor]) -> list[Chunk]:
        """The group's parameters that have a gradient; laid out anew when those, or their storage, have changed."""
        graded = [p.grad is not None for p in params]
        held = self._layouts.get(number)
        if held is None or held[0] != graded or any(chunk.moved() for chunk in held[1]):
            chunks = self._lay_out([p for p in params if p.grad is not None and p.numel()])
            held = self._layouts[number] = (graded, chunks)
        return held[1]

    def _lay_out(self, params: list[Tensor]) -> list[Chunk]:
        if any(p.grad.is_sparse for p in params if p.grad is not None):
            raise TypeError(f"{type(self).__name__} takes no sparse gradients: set sparse=False in the Embedding")
        parts: list[list[Tensor]] = []
        size, last = 0, None
        for p in params:
            limit = 0 if self.loop else AT_ONCE.get(p.device.type, AT_ONCE["cpu"])
            kind = (
                p.device,
                p.dtype,
                *(float(self.state[p][name]) for name in ("step", *self.kept_per_chunk) if p in self.state),
            )
            if kind != last or size + p.numel() > limit:
                parts.append([])
                size, last = 0, kind
            parts[-1].append(p)
            size += p.numel()
        chunks = [self._chunk(part) for part in parts]
        for kind in {(chunk.step.device, chunk.dtype) for chunk in chunks}:
            alike = [chunk for chunk in chunks if (chunk.step.device, chunk.dtype) == kind]
            largest = max(chunk.size for chunk in alike)
            gathered = max((chunk.size for chunk in alike if not chunk.alone), default=0)
            memory = [torch.empty(n, device=kind[0], dtype=kind[1]) for n in (largest, gathered, gathered)]
            for chunk in alike:
                chunk.take_memory(*memory)
        return chunks

    def _chunk(self, params: list[Tensor]) -> Chunk:
        """A chunk that goes on from its parameters' state, which from now on is a view of the chunk's."""
        chunk, before = Chunk(params), [self.state.get(p) for p in params]
        device = chunk.step.device
        chunk.vectors = {name: torch.zeros(chunk.size, dtype=chunk.dtype, device=device) for name in self.kept}
        chunk.numbers = {name: torch.zeros(len(params), dtype=chunk.dtype, device=device) for name in self.kept_per_parameter}
        chunk.numbers |= {name: torch.zeros((), dtype=torch.float64, device=device) for name in self.kept_per_chunk}
        views: dict[str, list[Tensor]] = {
            **{name: chunk.shaped(name) for name in self.kept},
            **{name: list(chunk.numbers[name].unbind()) for name in self.kept_per_parameter},
            **{name: [chunk.numbers[name]] * len(params) for name in self.kept_per_chunk},
            "step": [chunk.step] * len(params),
        }
        self.begin(views, params)
        for n, (p, state) in enumerate(zip(params, before, strict=True)):
            for name, tensors in views.items():
                if state is not None:
                    tensors[n].copy_(state[name])
                self.state[p][name] = tensors[n]
        return chunk

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take `state_dict()` back in its own precision, where torch would cast it to the parameters'."""
        super().load_state_dict(state_dict)
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for index, p in enumerate(params):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[p][name] = value.to(p.device, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layouts = {}


def _order(p: Tensor) -> list[int] | None:
    """The dimensions by falling stride, in which a dense tensor is contiguous; None where they are so already."""
    if p.is_contiguous():
        return None
    order = sorted(range(p.ndim), key=p.stride, reverse=True)
    if not p.permute(order).is_contiguous():
        raise ValueError(f"a parameter of shape {list(p.shape)} and strides {p.stride()} is not dense: make it contiguous")
    return order
