"""Optimizers on flat vectors: many parameters are concatenated, so that one operation works on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.typed import StateDict

ROW = 64  # elements; each parameter begins a new row, so that norms and factors of single parameters are computed by rows
# Elements of a vector. On a CPU the vectors of an update should fit the cache; elsewhere a large vector saves kernel launches.
CPU_CHUNK, DEVICE_CHUNK = 1 << 18, 1 << 24


class Chunk:
    """Parameters of one group as one vector in memory order, padded with zeros to whole rows, and their optimizer state.

    A single parameter is its own vector of one row. `step` is 0-d on the device, so that an update never waits for the
    device. `vectors` has the state by name, and "work", a buffer to write to. The work buffer and the buffers of
    concatenated vectors are shared by all chunks.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        like = params[0]
        self.single = len(params) == 1
        self.dtype = torch.promote_types(like.dtype, torch.float32)  # 16-bit parameters are updated in float32
        self.row = like.numel() if self.single else ROW
        self.orders = [memory_order(p) for p in params]
        self.flat_params = [_flatten(p.detach(), order) for p, order in zip(params, self.orders, strict=True)]
        counts = [-(-p.numel() // self.row) for p in params]
        self.rows = torch.tensor(counts, device=like.device)  # (n,) rows of each parameter
        self.owner = torch.repeat_interleave(self.rows, output_size=sum(counts))  # (rows,) index of each row's parameter
        padding = [like.new_zeros(c * self.row - p.numel(), dtype=self.dtype) for c, p in zip(counts, params, strict=True)]
        self.parts = [part for pair in zip(self.flat_params, padding, strict=True) for part in pair]
        self.size = sum(part.numel() for part in self.parts)
        self.step = torch.zeros((), device=like.device)
        self.vectors: dict[str, Tensor] = {}  # (size,)
        self.numbers: dict[str, Tensor] = {}  # state that is (n,), a number for each parameter, or 0-d, one for all
        self.places: Tensor | None = None  # (n,) of the parameters among all, where norms of all are kept in one tensor
        self._pieces: dict[str, list[Tensor]] = {}
        self._shaped: dict[str, list[Tensor]] = {}
        # On a CPU a call for each tensor costs less than to copy all of them into one vector and back.
        self.by_tensors = like.device.type == "cpu" and like.dtype == self.dtype

    def share_buffers(self, work: Tensor, weights: Tensor, grads: Tensor) -> None:
        """Use these buffers, which are at least as large as the chunk. A single parameter needs only the first."""
        self.vectors["work"] = work[: self.size]
        if not self.single:
            self.vectors |= {"weights": weights[: self.size], "grads": grads[: self.size]}

    def storage_changed(self) -> bool:
        """True if a parameter's memory has been exchanged since the chunk's creation."""
        return [p.data_ptr() for p in self.params] != [flat.data_ptr() for flat in self.flat_params]

    def weights(self) -> Tensor:
        """The parameters as one vector: a copy, except for a single float32 parameter, which is returned itself."""
        if self.single:
            return self.flat_params[0].to(self.dtype)
        return torch.cat(self.parts, out=self.vectors["weights"])

    def grads(self) -> Tensor:
        """The gradients as one vector. Read it only: for a single parameter it may be the gradient itself."""
        flat = [_flatten(p.grad, o) for p, o in zip(self.params, self.orders, strict=True) if p.grad is not None]
        if self.single:
            return flat[0].to(self.dtype)
        self.parts[::2] = flat
        vector = torch.cat(self.parts, out=self.vectors["grads"])
        self.parts[::2] = self.flat_params
        return vector

    def shaped_grads(self) -> list[Tensor]:
        """The gradients themselves."""
        return [p.grad for p in self.params if p.grad is not None]

    def pieces(self, name: str) -> list[Tensor]:
        """The parts of a vector that belong to the parameters, as 1-d views."""
        if name not in self._pieces:
            sizes = [part.numel() for part in self.parts]
            self._pieces[name] = list(self.vectors[name].split_with_sizes(sizes)[::2])
        return self._pieces[name]

    def shaped(self, name: str) -> list[Tensor]:
        """The parts of a vector that belong to the parameters, as views of the parameters' shapes."""
        if name not in self._shaped:
            pieces = zip(self.pieces(name), self.params, self.orders, strict=True)
            self._shaped[name] = [_shape_like(piece, p, order) for piece, p, order in pieces]
        return self._shaped[name]

    def norms(self, vector: Tensor) -> Tensor:
        """(n,) the Euclidean norm of each parameter's part. The order of summation is fixed, so results are reproducible."""
        norms = torch.linalg.vector_norm(vector.view(-1, self.row), dim=1)
        return norms if self.single else torch.segment_reduce(norms.square(), "sum", lengths=self.rows, unsafe=True).sqrt()

    def scaled(self, vector: Tensor, factors: Tensor) -> Tensor:
        """Each parameter's part times its factor in `factors` (n,), written to "work", which may be the vector itself."""
        work = self.vectors["work"]
        torch.mul(vector.view(-1, self.row), factors[self.owner, None], out=work.view(-1, self.row))
        return work

    def subtract(self, name: str, lr: float | Tensor = 1.0) -> None:
        """parameters ← parameters - lr × the vector of this name."""
        if isinstance(lr, Tensor):
            pieces = torch._foreach_mul(self.pieces(name), lr)
            torch._foreach_sub_(self.flat_params, pieces)
        else:
            torch._foreach_add_(self.flat_params, self.pieces(name), alpha=-lr)

    def write(self, weights: Tensor) -> None:
        """parameters ← the vector that `weights()` returned, after changes to it."""
        if not self.single:
            torch._foreach_copy_(self.flat_params, self.pieces("weights"))
        elif weights is not self.flat_params[0]:
            self.flat_params[0].copy_(weights)


class FlatOptimizer(torch.optim.Optimizer):
    """The base of optimizers that update `Chunk`s. A subclass names its state and has its arithmetic in `update`.

    Parameters without a gradient are skipped; each parameter has its own count of steps. The state dict has torch's format,
    one entry for each parameter; its tensors are views of the vectors. Raises TypeError for sparse gradients.
    """

    state_vectors: tuple[str, ...] = ()  # names of state with a value for each element
    state_numbers: tuple[str, ...] = ()  # with one number for each parameter
    state_chunk_numbers: tuple[str, ...] = ()  # with one number for all parameters of a chunk, in float64 where there is that
    own_work = False  # each chunk keeps its "work" until the step ends

    def __init__(self, params: ParamsT, *, loop: bool = False, **settings: object) -> None:
        """`settings` are those that the formulas of the subclass name."""
        self.loop = loop  # every parameter is its own chunk
        self._chunks: dict[int, tuple[list[bool], list[Chunk]]] = {}  # group's index → (which have a gradient, chunks)
        super().__init__(params, settings)

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        """Update the chunk's parameters. `chunk.step` counts this update already."""
        raise NotImplementedError

    def init_state(self, state: dict[str, list[Tensor]], params: list[Tensor]) -> None:
        """Set the initial state of new parameters, if it is not zero. The tensors are views of vectors."""

    def before_updates(self, chunks: list[Chunk]) -> None:
        """Prepare a step from all gradients, before any parameter is updated."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. Returns the loss that `closure` returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(chunk, group) for n, group in enumerate(self.param_groups) for chunk in self._chunks_of(n, group["params"])]
        self.before_updates([chunk for chunk, _ in work])
        self.update_all(work)
        return loss

    def update_all(self, work: list[tuple[Chunk, dict[str, object]]]) -> None:
        """Update all chunks, each with its group."""
        for chunk, group in work:
            chunk.step += 1
            self.update(chunk, group)

    def _chunks_of(self, index: int, params: list[Tensor]) -> list[Chunk]:
        """The chunks of a group's parameters with a gradient; rebuilt when these or their storage change."""
        has_grad = [p.grad is not None for p in params]
        cached = self._chunks.get(index)
        if cached is None or cached[0] != has_grad or any(chunk.storage_changed() for chunk in cached[1]):
            self._init_empty(params)
            chunks = self._make_chunks([p for p in params if p.grad is not None and p.numel()])
            cached = self._chunks[index] = (has_grad, chunks)
        return cached[1]

    def _make_chunks(self, params: list[Tensor]) -> list[Chunk]:
        if any(p.grad.is_sparse for p in params if p.grad is not None):
            raise TypeError(f"{type(self).__name__} takes no sparse gradients: set sparse=False in the Embedding")
        parts: list[list[Tensor]] = []
        size, last = 0, None
        for p in params:
            limit = 0 if self.loop else CPU_CHUNK if p.device.type == "cpu" else DEVICE_CHUNK
            numbers = [float(self.state[p][name]) for name in ("step", *self.state_chunk_numbers) if p in self.state]
            kind = (p.device, p.dtype, *numbers)  # the same for all parameters of a chunk
            if kind != last or size + p.numel() > limit:
                parts.append([])
                size, last = 0, kind
            parts[-1].append(p)
            size += p.numel()
        chunks = [self._make_chunk(part) for part in parts]
        for device, dtype in {(chunk.step.device, chunk.dtype) for chunk in chunks}:
            alike = [chunk for chunk in chunks if (chunk.step.device, chunk.dtype) == (device, dtype)]
            largest = max(chunk.size for chunk in alike)
            concatenated = max((chunk.size for chunk in alike if not chunk.single), default=0)
            buffers = [torch.empty(n, device=device, dtype=dtype) for n in (largest, concatenated, concatenated)]
            for chunk in alike:
                work = torch.empty(chunk.size, device=device, dtype=dtype) if self.own_work else buffers[0]
                chunk.share_buffers(work, *buffers[1:])
        return chunks

    def _init_empty(self, params: list[Tensor]) -> None:
        """Give parameters without elements a state: a rank's part of a short vector may have none, and its state is saved."""
        numbers = ("step", *self.state_numbers, *self.state_chunk_numbers)
        for p in params:
            if p.grad is not None and not p.numel() and not self.state.get(p):
                self.state[p] = {name: torch.zeros_like(p) for name in self.state_vectors}
                self.state[p] |= {name: torch.zeros((), device=p.device) for name in numbers}

    def _make_chunk(self, params: list[Tensor]) -> Chunk:
        """A chunk that continues from the state of its parameters. That state becomes a view of the chunk's."""
        chunk, before = Chunk(params), [self.state.get(p) for p in params]
        device = chunk.step.device
        chunk.vectors = {name: torch.zeros(chunk.size, dtype=chunk.dtype, device=device) for name in self.state_vectors}
        chunk.numbers = {name: torch.zeros(len(params), dtype=chunk.dtype, device=device) for name in self.state_numbers}
        chunk.numbers |= {name: torch.zeros((), dtype=sum_dtype(device), device=device) for name in self.state_chunk_numbers}
        views: dict[str, list[Tensor]] = {
            **{name: chunk.shaped(name) for name in self.state_vectors},
            **{name: list(chunk.numbers[name].unbind()) for name in self.state_numbers},
            **{name: [chunk.numbers[name]] * len(params) for name in self.state_chunk_numbers},
            "step": [chunk.step] * len(params),
        }
        self.init_state(views, params)
        for n, (p, state) in enumerate(zip(params, before, strict=True)):
            for name, tensors in views.items():
                if state is not None:
                    tensors[n].copy_(state[name])
                self.state[p][name] = tensors[n]
        return chunk

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load `state_dict()`. The state keeps its dtypes; torch would cast them to those of the parameters."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for key, p in zip(saved["params"], group["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    self.state[p][name] = value.to(p.device, copy=True)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._chunks = {}


def _flatten(tensor: Tensor, order: list[int] | None) -> Tensor:
    """A dense tensor as a vector in memory order: a view if `order` is its own."""
    return tensor.reshape(-1) if order is None else tensor.permute(order).reshape(-1)


def _shape_like(piece: Tensor, p: Tensor, order: list[int] | None) -> Tensor:
    """A vector in a parameter's memory order, as a view of the parameter's shape."""
    if order is None:
        return piece.view(p.shape)
    return piece.view([p.shape[d] for d in order]).permute([order.index(d) for d in range(p.ndim)])


def memory_order(p: Tensor) -> list[int] | None:
    """The dimensions by decreasing stride, in which a dense tensor is contiguous; None if it is already contiguous."""
    if p.is_contiguous():
        return None
    order = sorted(range(p.ndim), key=p.stride, reverse=True)
    if not p.permute(order).is_contiguous():
        raise ValueError(f"a parameter of shape {list(p.shape)} and strides {p.stride()} is not dense: make it contiguous")
    return order


class Lion(FlatOptimizer):
    """Evolved sign momentum (Chen et al. 2023, algorithm 2), for each parameter w with gradient g:

    u = sign(β1 · m + (1 - β1) · g)
    w ← w - lr · (u + decay · w)
    m ← β2 · m + (1 - β2) · g
    """

    state_vectors = ("exp_avg",)

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        g, m = chunk.grads(), chunk.vectors["exp_avg"]
        beta1, beta2 = group["betas"]
        u = torch.lerp(m, g, 1 - beta1, out=chunk.vectors["work"]).sign_()
        if group["weight_decay"]:
            u.add_(chunk.weights(), alpha=group["weight_decay"])
        m.lerp_(g, 1 - beta2)
        chunk.subtract("work", group["lr"])


class ScheduleFree(FlatOptimizer):
    """Schedule-Free AdamW (Defazio et al. 2024, algorithm 1): gradients are taken at y, steps are made in z, x averages them.

        v ← β2 · v + (1 - β2) · g²,   u = g / (√(v / (1 - β2^t)) + ε) + decay · y
        z ← z - lr · u
        x ← (1 - c) · x + c · z,      c = lr² / Σ lr²
        y = (1 - β1) · z + β1 · x

    During training the parameters are y. x is computed from y and z when it is needed, so that the memory is AdamW's. y is
    updated directly, not through x, so that using x in between (`averaged`) does not change y, not even by rounding.
    """

    state_vectors = ("z", "exp_avg_sq")
    state_chunk_numbers = ("weight_sum",)

    def __init__(self, params: ParamsT, **settings: object) -> None:
        self._trained: dict[Tensor, Tensor] = {}  # y of each parameter that currently is x
        super().__init__(params, **settings)  # type: ignore[arg-type]

    def init_state(self, state: dict[str, list[Tensor]], params: list[Tensor]) -> None:
        torch._foreach_copy_(state["z"], [p.detach() for p in params])

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        y, g, u = chunk.weights(), chunk.grads(), chunk.vectors["work"]
        z, v, total = chunk.vectors["z"], chunk.vectors["exp_avg_sq"], chunk.numbers["weight_sum"]
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.div(v, 1 - beta2 ** chunk.step.to(total.dtype), out=u).sqrt_().add_(group["eps"])
        torch.div(g, u, out=u).add_(y, alpha=group["weight_decay"]).mul_(lr)
        total.add_(lr * lr)
        c = (lr * lr / total.clamp(min=torch.finfo(total.dtype).tiny)).to(y.dtype)
        y.lerp_(z, c).addcmul_(u, beta1 * (1 - c) - 1)
        chunk.write(y)
        z.sub_(u)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Set the parameters to x. On exit, also after an exception, they are y again, bit for bit."""
        updated = [
            (p, self.state[p]["z"], 1 - 1 / g["betas"][0]) for g in self.param_groups for p in g["params"] if p in self.state
        ]
        self._trained = {p: p.detach().clone() for p, _, _ in updated}
        try:
            with torch.no_grad():
                for p, z, weight in updated:
                    p.lerp_(z.to(p.dtype), weight)
            yield
        finally:
            if self._trained:  # none before the first update
                with torch.no_grad():
                    torch._foreach_copy_([p.detach() for p in self._trained], list(self._trained.values()))
            self._trained = {}

    def _parameters(self, groups: Sequence[StateDict]) -> dict[object, Tensor]:
        """The parameters by their numbers or names in the groups of a state_dict."""
        pairs = zip(groups, self.param_groups, strict=True)
        return {key: p for saved, group in pairs for key, p in zip(saved["params"], group["params"], strict=True)}

    def state_dict(self) -> StateDict:
        """torch's, with each parameter's y in its state, because the saved weights are x."""
        found = super().state_dict()
        parameters = self._parameters(found["param_groups"])
        trained = {i: self._trained.get(parameters[i]) for i in found["state"]}
        y = {i: parameters[i].detach().clone() if kept is None else kept for i, kept in trained.items()}
        return {**found, "state": {i: {**state, "y": y[i]} for i, state in found["state"].items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load `state_dict()`, and set the parameters to y."""
        states, parameters = state_dict["state"], self._parameters(state_dict["param_groups"])
        plain = {i: {key: value for key, value in state.items() if key != "y"} for i, state in states.items()}
        super().load_state_dict({**state_dict, "state": plain})
        for i, state in states.items():
            parameters[i].copy_(state["y"])
