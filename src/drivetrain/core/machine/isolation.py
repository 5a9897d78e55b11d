"""Isolates a run from the program that calls it: settings of torch, numpy and Python for a whole process or thread."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from drivetrain.core.lazy import torch
from drivetrain.core.step import streams

AS_IT_IS = object()  # the value of the caller, until the run sets another one

# Names below torch, and their values in a new process.
NEW = {
    "backends.cudnn.enabled": True, "backends.cudnn.benchmark": False, "backends.cudnn.benchmark_limit": 10,
    "backends.cudnn.deterministic": False, "backends.mkldnn.enabled": True, "backends.mkldnn.deterministic": False,
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "backends.cuda.matmul.allow_fp16_accumulation": False, "backends.quantized.engine": AS_IT_IS,
    "utils.deterministic.fill_uninitialized_memory": True,
}  # fmt: skip
# In torch's newer names of precisions "none" takes the value for all operations, or for all backends.
PRECISIONS = {
    ("generic", "all"): "none", ("cuda", "all"): "none", ("mkldnn", "all"): "none", ("cuda", "matmul"): "ieee",
    ("cuda", "conv"): "tf32", ("cuda", "rnn"): "tf32", ("mkldnn", "matmul"): "ieee", ("mkldnn", "conv"): "none",
    ("mkldnn", "rnn"): "none",
}  # fmt: skip
ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}

_lock = threading.RLock()
_inside: list[int] = []  # the threads inside `isolated`, once for each entry
_left = ExitStack()  # restored when the last of several threads leaves


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], object]
    new: Any = AS_IT_IS  # in a new process


@contextmanager
def isolated(settings: Sequence[object] | None = None) -> Iterator[None]:
    """Within the context this process has the settings of a new process, or `settings`; afterwards the caller's again.

    Settings that change no result, such as the number of threads or how tensors are printed, stay until the run sets them. With
    several threads inside, the first to enter sets the process's settings, and the last to leave restores them.
    """
    me, process = threading.get_ident(), ExitStack()
    with ExitStack() as thread:
        thread.enter_context(standard_streams())
        thread.callback(_leave, me, process)
        with _lock:
            _inside.append(me)
            if {*_inside} == {me}:
                process.enter_context(warnings.catch_warnings())
                process.callback(_set_environment, dict(os.environ))
                if "torch" in sys.modules:  # else none of its settings was changed
                    _devices_apart(process)
                    process.enter_context(streams.apart())
                    process.callback(_seed_again, torch.initial_seed())
                    _enter(process, _of_process(), settings)
        if "torch" in sys.modules:
            _enter(thread, _of_thread())
            thread.enter_context(_without_modes())
            thread.enter_context(torch.inference_mode(False))  # sets grad mode too
            thread.enter_context(_without_autocast())
        yield


def settings() -> list[object]:
    """Return this process's settings of torch, for `isolated`."""
    return [_value(setting) for setting in _of_process()]


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Within the context torch computes with `number` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Within the context a standard output or error of None (a program without a terminal) accepts text and drops it."""
    with ExitStack() as given_back:
        for stream, redirected in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:
                given_back.enter_context(redirected(given_back.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        yield


def _leave(me: int, process: ExitStack) -> None:
    with _lock:
        _inside.remove(me)
        if {*_inside} <= {me}:
            process.close()
        else:
            _left.push(process)
        if not _inside:
            _left.close()


def _forget_other_threads() -> None:
    """In a forked process: forget the parent's other threads."""
    global _lock
    _lock = threading.RLock()
    _inside[:] = [each for each in _inside if each == threading.get_ident()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


def _enter(given_back: ExitStack, found: Sequence[_Setting], values: Sequence[object] | None = None) -> None:
    """Read each setting and write its value, in this order: a later one is read after the settings that it depends on are new."""
    for n, setting in enumerate(found):
        if (before := _value(setting)) is not AS_IT_IS:
            given_back.callback(_set, setting, before)
            _set(setting, setting.new if values is None else values[n])


def _value(setting: _Setting) -> object:
    with suppress(AttributeError, RuntimeError):  # missing in this torch, or on this machine
        return setting.read()
    return AS_IT_IS


def _set(setting: _Setting, value: object) -> None:
    if value is not AS_IT_IS and value != _value(setting):
        setting.write(value)


def _of_process() -> list[_Setting]:
    """Return the settings that all threads share. Those that others overwrite come first."""
    cuda, conversions, shown = torch.backends.cuda, torch.__future__, vars(torch._tensor_str.PRINT_OPTS)
    einsum = {"enabled": True, "strategy": "auto"} if torch.backends.opt_einsum.is_available() else {}
    converting = ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion")
    return [
        _Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        _Setting(torch.get_num_threads, torch.set_num_threads),
        _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        *(_attribute(name, value) for name, value in NEW.items()),
        *(_attribute(f"backends.opt_einsum.{name}", value) for name, value in einsum.items()),
        *(_Setting(getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"), True) for name in ATTENTION),
        _Setting(cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp, False),
        _Setting(torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
        _Setting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, True),
        _Setting(_precisions, _set_precisions, ("highest", True, PRECISIONS)),
        *(_Setting(getattr(conversions, f"get_{name}"), getattr(conversions, f"set_{name}"), False) for name in converting),
        _Setting(
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda given: torch.set_anomaly_enabled(*given),
            (False, True),
        ),
        _Setting(torch._C._check_sparse_tensor_invariants, torch._C._set_check_sparse_tensor_invariants, False),
        _Setting(torch.is_warn_always_enabled, torch.set_warn_always),
        _Setting(shown.copy, shown.update),
    ]


def _of_thread() -> list[_Setting]:
    """Return the settings that are kept per thread."""
    import numpy as np

    return [
        _Setting(np.geterr, lambda given: np.seterr(**given), NUMPY_ERRORS),
        _Setting(lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal, False),  # torch has no getter
        _Setting(torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled, True),
    ]


def _attribute(name: str, new: object) -> _Setting:
    path, _, last = name.rpartition(".")
    place = partial(attrgetter(path), torch)
    return _Setting(lambda: getattr(place(), last), lambda given: setattr(place(), last, given), new)


def _precisions() -> tuple[str, bool, dict[tuple[str, str], str]]:
    """Return the precision of matrix products and convolutions by torch's older and newer names.

    Writing an older name sets both; writing a newer one sets only itself, and reading the older name raises an error where the
    two disagree.
    """
    matmul, convolutions = "highest", True
    with suppress(RuntimeError):  # the process uses the newer names
        matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return matmul, convolutions, {name: torch._C._get_fp32_precision_getter(*name) for name in PRECISIONS}


def _set_precisions(given: tuple[str, bool, dict[tuple[str, str], str]]) -> None:
    matmul, convolutions, newer = given
    for older in (True, False):
        for name, value in newer.items():  # a value for all operations overwrites the value of each
            if torch._C._get_fp32_precision_getter(*name) != value:
                torch._C._set_fp32_precision_setter(*name, value)
        if older:
            torch.set_float32_matmul_precision(matmul)
            torch.backends.cudnn.allow_tf32 = convolutions


def _set_environment(given: dict[str, str]) -> None:
    for name in os.environ.keys() - given.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in given.items() if os.environ.get(name) != value})


def _seed_again(seed: int) -> None:
    """Seed a device that was started meanwhile, or will be, as the caller did. The streams in use are restored afterwards."""
    if torch.initial_seed() != seed:
        torch.manual_seed(seed)


def _devices_apart(given_back: ExitStack) -> None:
    """Restore the current device and the generators of all devices."""
    in_use = streams.devices_in_use()
    index = torch.accelerator.current_device_index() if in_use else 0
    given_back.callback(lambda: torch.accelerator.set_device_index(index) if streams.devices_in_use() else None)
    for module in in_use.values():
        if hasattr(module, "get_rng_state_all"):  # not mps
            given_back.callback(module.set_rng_state_all, module.get_rng_state_all())


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Within the context the run's own autocast is the outermost one: torch caches cast weights until the outermost one ends."""
    device = torch.accelerator.current_accelerator()
    kinds = ["cpu", *([device.type] if device is not None else [])]
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    cached, depth = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting() - 1
    _set_autocast([(kind, False, dtype) for kind, _, dtype in before], True, 0)
    try:
        yield
    finally:
        torch.autocast_increment_nesting()
        _set_autocast(before, cached, depth)


def _set_autocast(kinds: Sequence[tuple[str, bool, torch.dtype]], cached: bool, depth: int) -> None:
    """Set autocast of each device type, nested at least once."""
    for kind, enabled, dtype in kinds:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(cached)
    while torch.autocast_decrement_nesting():
        pass
    for _ in range(depth):
        torch.autocast_increment_nesting()


@contextmanager
def _without_modes() -> Iterator[None]:
    """Within the context there is no default device, no other mode of torch's functions, and no hook on saved tensors."""
    from torch import _GLOBAL_DEVICE_CONTEXT as of_thread
    from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
    from torch.utils import _device
    from torch.utils._python_dispatch import _disable_current_modes

    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    default, current = getattr(of_thread, "device_context", None), _device.CURRENT_DEVICE
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    of_thread.device_context = _device.CURRENT_DEVICE = None
    try:
        with _disable_current_modes():
            yield
    finally:
        for _ in range(_len_torch_function_stack()):
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)
        of_thread.device_context, _device.CURRENT_DEVICE = default, current
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
