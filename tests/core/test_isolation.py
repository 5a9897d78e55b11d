"""A run has a process as if it were new, and its caller has what he had set."""

import logging
import os
import random
import sys
import threading
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.machine import forking, isolation
from drivetrain.core.step import streams
from tests.support.to_end import run_to_end

CUDA, CUDNN, MKLDNN = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn


def attribute(place, name, odd):
    return (lambda: getattr(place, name)), (lambda value: setattr(place, name, value)), odd


def in_context(make):
    """A setting that only a context sets."""
    entered = []

    def write(on):
        if on:
            entered.append(make())
            entered[-1].__enter__()
        else:
            entered.pop().__exit__(None, None, None)

    return write


def nested():
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def top(of):
    return of(True) is not None


@contextmanager
def hooked():
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.zero_(), lambda x: x):
        yield


# How it is read and written, and an odd value. A run must come to the same result, and leave the odd value.
SETTINGS = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": (torch.get_default_device, torch.set_default_device, torch.device("meta")),
    "threads": (torch.get_num_threads, torch.set_num_threads, 2),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 2),
    "fill": attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "cudnn.enabled": attribute(CUDNN, "enabled", False),
    "cudnn.benchmark": attribute(CUDNN, "benchmark", True),
    "cudnn.benchmark_limit": attribute(CUDNN, "benchmark_limit", 3),
    "cudnn.deterministic": attribute(CUDNN, "deterministic", True),
    "mkldnn.enabled": attribute(MKLDNN, "enabled", False),
    "mkldnn.deterministic": attribute(MKLDNN, "deterministic", True),
    "fp16 reduction": attribute(CUDA.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reduction": attribute(CUDA.matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16 accumulation": attribute(CUDA.matmul, "allow_fp16_accumulation", True),
    "older precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "older convolutions": attribute(CUDNN, "allow_tf32", False),
    "math attention": (CUDA.math_sdp_enabled, CUDA.enable_math_sdp, False),
    "flash attention": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, False),
    "efficient attention": (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp, False),
    "cudnn attention": (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp, False),
    "half attention": (CUDA.fp16_bf16_reduction_math_sdp_allowed, CUDA.allow_fp16_bf16_reduction_math_sdp, True),
    "order of attention": (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, [2, 0, 1, 3, 4]),
    "fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
    "overwrite": (
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
        True,
    ),
    "swap": (torch.__future__.get_swap_module_params_on_conversion, torch.__future__.set_swap_module_params_on_conversion, True),
    "anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True),
    "sparse": (
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        lambda on: getattr(torch.sparse.check_sparse_tensor_invariants, "enable" if on else "disable")(),
        True,
    ),
    "always warn": (torch.is_warn_always_enabled, torch.set_warn_always, True),
    "printing": (
        lambda: torch._tensor_str.PRINT_OPTS.precision, lambda precision: torch.set_printoptions(precision=precision), 9
    ),
    "grad mode": (torch.is_grad_enabled, torch._C._set_grad_enabled, False),
    "inference mode": (torch.is_inference_mode_enabled, in_context(torch.inference_mode), True),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"), in_context(lambda: torch.autocast("cpu", torch.bfloat16)), True
    ),
    "autocast type": (
        lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype), torch.float16
    ),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
    "autocast depth": (nested, in_context(lambda: torch.autocast("cpu", enabled=False)), 1),
    "saved tensors": (lambda: top(torch._C._autograd._top_saved_tensors_default_hooks), in_context(hooked), True),
    "function mode": (
        torch.overrides._len_torch_function_stack, in_context(lambda: torch.device("meta")), 1
    ),
    "dispatch mode": (
        lambda: len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        in_context(lambda: torch.utils.flop_counter.FlopCounterMode(display=False)),
        1,
    ),
    "threads of backward": (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled, False),
    "denormals": (lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal, True),
    "numpy's errors": (
        np.geterr, lambda given: np.seterr(**given), dict.fromkeys(("divide", "over", "under", "invalid"), "raise")
    ),
    "variables": (lambda: os.environ.get("CUBLAS_WORKSPACE_CONFIG"), lambda value: os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        if value is None else os.environ.update(CUBLAS_WORKSPACE_CONFIG=value), ":16:8"),
    "showwarning": attribute(warnings, "showwarning", lambda *_, **__: None),
    "random": (random.getstate, random.setstate, random.Random(5).getstate()),
    "torch's random": (
        lambda: tuple(torch.random.default_generator.get_state().tolist()),
        lambda words: torch.random.default_generator.set_state(torch.tensor(words, dtype=torch.uint8, device="cpu")),
        tuple(torch.Generator().manual_seed(5).get_state().tolist()),
    ),
    "numpy's random": (
        lambda: (np.random.get_state()[1].tolist(), np.random.get_state()[2:]),
        lambda state: np.random.set_state(("MT19937", np.array(state[0], np.uint32), *state[1])),
        (np.random.RandomState(5).get_state()[1].tolist(), np.random.RandomState(5).get_state()[2:]),
    ),
}  # fmt: skip
NEWER = {
    f"{name}.fp32_precision": attribute(place, "fp32_precision", odd)
    for name, place, odd in (
        ("backends", torch.backends, "tf32"), ("cudnn", CUDNN, "ieee"), ("conv", CUDNN.conv, "ieee"), ("rnn", CUDNN.rnn, "ieee"),
        ("matmul", CUDA.matmul, "tf32"), ("mkldnn", MKLDNN, "bf16"), ("mkldnn matmul", MKLDNN.matmul, "bf16"),
        ("mkldnn conv", MKLDNN.conv, "bf16"), ("mkldnn rnn", MKLDNN.rnn, "bf16"),
    )
}  # fmt: skip
# A context undoes what was set in it: these are set last.
CONTEXTS = ("inference mode", "autocast", "autocast depth", "saved tensors", "function mode", "dispatch mode", "default device")


@contextmanager
def odd(settings):
    """Each setting has its odd value. Yields what to call to know which of them another one has."""
    before, precisions = {}, isolation._precisions()
    try:
        for name, (read, write, value) in settings.items():
            before[name] = read()
            write(value)
        given = {name: read() for name, (read, *_) in settings.items()}
        yield lambda: {name for name, (read, *_) in settings.items() if read() != given[name]}
    finally:
        for name, value in reversed(before.items()):
            if name in CONTEXTS[:-1]:
                settings[name][1](False)
            else:
                settings[name][1](value if name != "default device" else None)
        isolation._set_precisions(precisions)


def losses(result):
    return result.metrics["test"]["final"]["loss"]


def together(settings):
    """All of them at once, but for those that exclude another one of them."""
    last = [name for name in CONTEXTS if name in settings and name not in ("inference mode", "function mode")]
    return {name: settings[name] for name in [*(name for name in settings if name not in CONTEXTS), *last]}


@pytest.mark.parametrize(
    "names", [SETTINGS, NEWER, ["inference mode"], ["function mode"]], ids=["all", "newer", "inference", "mode"]
)
def test_a_run_is_the_same_whatever_its_caller_has_set(tiny, names):
    plain = losses(drivetrain.train(tiny("saving=none", "precision=fp32")))
    settings = {**SETTINGS, **NEWER}
    chosen = together({name: settings[name] for name in names}) if len(names) > 1 else {name: settings[name] for name in names}
    with odd(chosen) as changed:
        result = run_to_end(tiny("saving=none", "precision=fp32"))
        left = changed()
    assert losses(result) == plain
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETTINGS, *NEWER])
def test_each_setting_of_the_caller_is_left_alone(tiny, name):
    plain = losses(drivetrain.train(tiny("saving=none", "precision=fp32")))
    with odd({name: {**SETTINGS, **NEWER}[name]}) as changed:
        assert losses(drivetrain.train(tiny("saving=none", "precision=fp32"))) == plain
        assert not changed()


def test_all_that_torch_can_list_is_known():
    """A new version of torch may keep more for a process: a function `set_…` that no test above calls is named here."""
    elsewhere = {
        "set_autocast_dtype",
        "set_autocast_enabled", "set_autocast_cpu_enabled", "set_autocast_cpu_dtype", "set_autocast_gpu_dtype",  # autocast
        "set_autocast_ipu_enabled", "set_autocast_ipu_dtype", "set_autocast_xla_enabled", "set_autocast_xla_dtype",
        "set_anomaly_enabled", "set_rng_state", "set_grad_enabled", "set_printoptions",
        "set_default_tensor_type",  # dtype and device
        "set_num_interop_threads",  # can be set once
    }  # fmt: skip
    known = {write.__name__ for _, write, _ in SETTINGS.values()}
    assert {name for name in dir(torch) if name.startswith("set_")} <= known | elsewhere


def test_what_has_two_values_in_torchs_core_is_given_back(tiny):
    """Each flag of torch._C that can be read and written is turned over."""
    names = [name.removeprefix("_get_") for name in dir(torch._C) if name.startswith("_get_")]
    pairs = {name: (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}", None)) for name in names}
    found = {}
    for name, (read, write) in pairs.items():
        try:
            if write is not None and isinstance(value := read(), bool):
                found[name] = (read, write, not value)
        except (TypeError, RuntimeError):  # it takes an argument
            continue
    assert len(found) > 15
    plain = losses(drivetrain.train(tiny("saving=none", "precision=fp32")))
    # Those depend on each other, and are set above; or this machine cannot have them.
    left_out = {name for name in found if "tf32" in name or name == "cpu_allow_fp16_reduced_precision_reduction"}
    with odd({name: setting for name, setting in found.items() if name not in left_out}) as changed:
        assert losses(drivetrain.train(tiny("saving=none", "precision=fp32"))) == plain
        assert not changed()


@isolation.isolated()
def fails(error):
    streams.seed_all(7)
    torch.set_default_dtype(torch.float16)
    torch.autograd.set_detect_anomaly(True)
    np.seterr(all="print")
    os.environ["SET_BY_A_RUN"] = "1"
    warnings.simplefilter("ignore")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_all_is_given_back_after_an_exception(error):
    with odd(together(SETTINGS)) as changed:
        with pytest.raises(error):
            fails(error)
        assert not changed()
    assert "SET_BY_A_RUN" not in os.environ


def test_an_interrupted_run_gives_all_back(tiny, monkeypatch):
    from drivetrain.launch import launcher

    def interrupted(*_):
        streams.seed_all(7)
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "run_rank", interrupted)
    with odd(together(SETTINGS)) as changed:
        with pytest.raises(KeyboardInterrupt):
            drivetrain.train(tiny("saving=none"))
        assert not changed()


def test_a_finished_run_predicts_the_same_whatever_its_caller_has_set(tiny):
    run = drivetrain.train(tiny("precision=bf16"))
    x = torch.rand(4, 3, 8, 8)
    plain = drivetrain.load(run.run_dir).predict(x).probabilities
    with odd(together(SETTINGS)) as changed:
        loaded = drivetrain.load(run.run_dir)
        scores = loaded.predict(x).probabilities
        assert not changed()
    assert torch.equal(scores, plain)
    assert torch.equal(loaded.predict(x).probabilities, plain)


def test_a_finished_run_computes_with_its_own_settings(tiny):
    run = drivetrain.train(tiny("runtime.deterministic=true", "runtime.cudnn_benchmark=false"))
    loaded = drivetrain.load(run.run_dir)
    assert not torch.are_deterministic_algorithms_enabled()
    with loaded.computing():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def found_in_child():
    read = {**SETTINGS, **NEWER}
    return {name: setting[0]() for name, setting in read.items() if "random" not in name and name != "showwarning"}


def test_a_forked_process_is_as_new():
    """Such are the arms of a comparison, the jobs of a sweep, and the trials of a run."""
    kept = {"threads", "order of attention", "always warn", "printing", "autocast type", "variables"}
    plain = forking.answer_of(lambda answer: answer(found_in_child()), "it fails")
    with odd(together(SETTINGS)):
        found = forking.answer_of(lambda answer: answer(found_in_child()), "it fails")
    assert {name for name in plain if found[name] != plain[name]} <= kept


@pytest.fixture
def outside(monkeypatch):
    """Every test is isolated itself; one that asks for this is not."""
    with monkeypatch.context() as patch:
        patch.setattr(isolation, "_inside", [])
        yield


@pytest.mark.usefixtures("outside")
def test_the_last_of_several_threads_gives_back():
    """A prediction may begin before a run in another thread and end within it, or the other way round."""
    first, second = threading.Event(), threading.Event()
    seen = []

    def predicts():
        with isolation.isolated():
            first.set()
            second.wait()
            seen.append(torch.get_default_dtype())
        seen.append(torch.get_default_dtype())  # the run goes on

    torch.set_default_dtype(torch.float64)
    try:
        other = threading.Thread(target=predicts)
        other.start()
        first.wait()
        with isolation.isolated():
            second.set()
            other.join()
            seen.append(torch.get_default_dtype())
        assert seen == [torch.float32] * 3
        assert torch.get_default_dtype() == torch.float64
        assert not isolation._inside
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_device_that_starts_within_a_run_is_seeded_as_the_caller_did(monkeypatch):
    """torch seeds a device when it starts: with the caller's seed, not with the run's."""
    seeds = []
    torch.manual_seed(11)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with isolation.isolated():
        torch.manual_seed(5)
        torch.rand(3)
    assert seeds == [5, 11]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_caller_without_standard_streams_gets_his_run(tiny, monkeypatch, stream):
    monkeypatch.setattr(sys, stream, None)
    assert drivetrain.train(tiny("saving=none")).status == "completed"
    assert getattr(sys, stream) is None
    with pytest.raises(UserError):
        drivetrain.train(tiny("model=nothing"))
    assert getattr(sys, stream) is None


def test_the_root_logger_is_left_alone(tiny):
    said = []

    class Keeps(logging.Handler):
        def emit(self, record):
            said.append(record.name)

    root, handler = logging.getLogger(), Keeps()
    before = root.level, [*root.handlers], logging.root.manager.disable
    root.addHandler(handler)
    try:
        drivetrain.train(tiny("saving=none"))
    finally:
        root.removeHandler(handler)
    assert (root.level, root.handlers, logging.root.manager.disable) == before
    assert "root" not in said
