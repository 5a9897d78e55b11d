"""The changes to torch that drivetrain needs.

No other module of drivetrain changes an object or a class of torch. Each function gives its reason, torch's issue where there
is one, and the change in torch that makes it unnecessary; tests/core/test_torch_patches.py fails then.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from drivetrain.core.lazy import torch

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor

Forward = TypeVar("Forward", bound=Callable[..., object])
Method = TypeVar("Method", bound=Callable[..., object])


def wrap_forward(module: torch.nn.Module, wrapped: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Let a module run `wrapped(its forward)`, and return what undoes it. Names, class, parameters and hooks stay as they are.

    Hooks cannot run a forward twice, within a context, or not at all (pytorch#103997, closed with hooks that
    run after an error). A hook around the whole forward in torch would end this.
    """
    own = vars(module).get("forward")
    vars(module)["forward"] = wrapped(module.forward)  # type: ignore[arg-type]  # where torch looks first

    def undo() -> None:
        vars(module).pop("forward") if own is None else vars(module).update(forward=own)

    return undo


@contextmanager
def fake_addresses(address: Callable[[FakeTensor], int]) -> Iterator[None]:
    """Within the context a fake tensor's `data_ptr()` is `address(tensor)`.

    torch deprecates `data_ptr()` of fake tensors (pytorch#122806), and its optimizers call it to find views of one storage.
    Optimizers that compare storages, or fake tensors with an address, end this.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    def data_ptr(tensor: FakeTensor) -> int:
        return address(tensor)

    own = FakeTensor.data_ptr
    type.__setattr__(FakeTensor, "data_ptr", data_ptr)
    try:
        yield
    finally:
        type.__setattr__(FakeTensor, "data_ptr", own)


def keep_compiler_unimported() -> None:
    """Keep torch.optim from importing the compiler, which takes 1.4 s.

    At their first call, methods of torch.optim.Optimizer import torch._dynamo to mark themselves as not to be compiled
    (pytorch#89902). They are never compiled here, so each function is set as its own marked version. Marking without the import
    in torch ends this.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            vars(method).setdefault("__dynamo_disable", method)


def remove_step_wrappers(optimizer: torch.optim.Optimizer) -> None:
    """Make `optimizer.step()` run only the optimizer's arithmetic, unless a hook is registered.

    torch wraps it in a profiler range, hooks and graph breaks for the compiler: about 10 µs a step, and the import. An unwrapped
    `step` in torch ends this.
    """
    wrapped, base = type(optimizer).step, sys.modules[torch.optim.Optimizer.__module__]
    arithmetic = inspect.unwrap(wrapped)
    ours = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    hooks = (base._global_optimizer_pre_hooks, base._global_optimizer_post_hooks, *ours)

    def step(*closure: Callable[[], float]) -> None:
        with torch.no_grad():
            (wrapped if any(hooks) else arithmetic)(optimizer, *closure)

    vars(optimizer)["step"] = step


@contextmanager
def given_overflow(optimizer: torch.optim.Optimizer, found: torch.Tensor) -> Iterator[None]:
    """Within the context the fused step does nothing where `found` > 0, by the attributes that torch's GradScaler sets."""
    vars(optimizer).update(grad_scale=None, found_inf=found)
    try:
        yield
    finally:
        vars(optimizer).update(found_inf=None)


def before_steps(optimizer: torch.optim.Optimizer, look: Callable[[], None]) -> None:
    """Call `look()` before each step of an optimizer without wrappers: torch's own hooks need the wrappers."""
    arithmetic = optimizer.step

    def step() -> None:
        look()
        arithmetic()

    vars(optimizer)["step"] = step


def wrap_state(optimizer: torch.optim.Optimizer, wrap: Callable[[Method], Method]) -> None:
    """Make an optimizer's `state_dict` and `load_state_dict` run as `wrap` returns them.

    torch's hooks run within its own two methods. The code of an optimizer that extends these methods runs outside the hooks.
    Hooks around the whole method would end this.
    """
    for name, method in (("state_dict", optimizer.state_dict), ("load_state_dict", optimizer.load_state_dict)):
        vars(optimizer)[name] = wrap(method)  # type: ignore[arg-type]  # either of the two


def ignore_profiler_ranges() -> None:
    """Let selective checkpointing ignore the profiler ranges of FSDP's hooks.

    In a block with its own shards, recomputation runs them another number of times than the forward, which torch takes for an
    error (pytorch#196862). The first release with that change ends this.
    """
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    ranges = torch.ops.profiler
    SAC_IGNORED_OPS.update({ranges._record_function_enter_new.default, ranges._record_function_exit._RecordFunction})


@contextmanager
def compiling() -> Iterator[None]:
    """Make torch.compiler.is_compiling() true within the context, as torch's own export does; newer torch has a second flag.

    make_fx does not, so its recording would take eager branches, such as reads from the device. A make_fx that sets it ends this.
    """
    flags = [f for f in ("_is_compiling_flag", "_is_non_strict_tracing_flag") if hasattr(torch.compiler, f)]
    saved = [vars(torch.compiler)[f] for f in flags]
    try:
        vars(torch.compiler).update(dict.fromkeys(flags, True))
        yield
    finally:
        vars(torch.compiler).update(zip(flags, saved, strict=True))


CONVOLUTIONS = (*(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)), "conv_tbc", "convolution")
_users = 0  # open contexts of `wide_convolutions` on a CPU: several runs of a process end in any order


@contextmanager
def wide_convolutions(device: torch.device) -> Iterator[None]:
    """Within the context convolutions on a CPU compute in float32 instead of 16 bits, and some 3D convolutions in float64.

    oneDNN's bfloat16 gradients of weights read and write memory outside of their operands (torch 2.15, oneDNN 3.13), and its
    float32 gradients are wrong where a kernel is larger than the volume; for float64 torch has its own kernels. This can go once
    `python -m bench.kernels` finds no wrong convolution on a CPU with AVX-512.
    """
    import torch  # the module itself, where other code looks functions up
    from torch.nn import functional

    global _users
    places = [vars(torch), vars(functional)] if device.type == "cpu" else []
    for place in places if not _users else ():
        place.update({name: _wide(place[name]) for name in CONVOLUTIONS if name in place})
    _users += bool(places)
    try:
        yield
    finally:
        _users -= bool(places)
        for place in places if not _users else ():
            place.update({name: place[name].__wrapped__ for name in CONVOLUTIONS if name in place})


def _wide(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(own)
    def convolution(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: object, **kwargs: object
    ) -> torch.Tensor:
        cast = torch.is_autocast_enabled("cpu")
        large = weight.dim() == 5 and any(k > n for k, n in zip(weight.shape[2:], input.shape[-3:], strict=True))
        if (
            input.device.type != "cpu"
            or input.dtype.is_complex
            or input.dtype.itemsize > 4
            or not (cast or large or input.dtype.itemsize == 2)
        ):
            return own(input, weight, bias, *args, **kwargs)
        dtype = torch.float64 if large else torch.float32
        with torch.autocast("cpu", enabled=False):
            out = own(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), *args, **kwargs)
        return out.to(torch.float32 if cast else input.dtype)

    return convolution
