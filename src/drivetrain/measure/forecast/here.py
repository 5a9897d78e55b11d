"""A short look at this machine: products, convolutions, copies, and what one operation costs the host. It is kept in a file."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drivetrain.core import limits
from drivetrain.core.files import write_json
from drivetrain.core.peak_flops import measured
from drivetrain.core.typed import fits
from drivetrain.core.user_state import user_state
from drivetrain.measure.forecast import replay
from drivetrain.measure.forecast.devices import HERE, Device, Figure
from drivetrain.run import environment

VERSION = 2  # of what is measured: raised where older files no longer serve
LAYERS, WIDTH, TIMES = 32, 16, 15  # of the network whose operations are too small to take time themselves
COPIED = 2**27  # bytes, more than every cache
# What a step took on this kind of device, divided by its forecast: median and range of the calibration's configurations
# (`python -m bench.forecast --pool calibration`), which are not those that the forecast is tested on.
CORRECTION = {"cpu": Figure(1.08, 0.63, 1.68)}


def state_file() -> Path:
    """The file of what was measured: below $XDG_STATE_HOME, else ~/.local/state."""
    return user_state() / "forecast.json"


def this_device(device: torch.device, formats: tuple[str, ...]) -> Device:
    """Return this machine's device, as it was measured now or before with the same software and threads."""
    software = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    key = f"{VERSION} {environment.device_name(device)} {platform.node()} {software}"
    known = _read()
    found = known.get(key, {})
    missing = {name: measure for name, measure in _measurements(device, formats).items() if name not in found}
    for name, measure in missing.items():
        found[name] = measure()
    if missing:
        _write({**known, key: found})
    return _described(device, found)


def _measurements(device: torch.device, formats: tuple[str, ...]) -> dict[str, Callable[[], float]]:
    flops = {f"flops {name}": lambda name=name: measured(device, name) for name in ("float32", *formats)}
    return {
        **flops,
        "convolution": lambda: _convolution_flops(device) / measured(device, "float32"),
        "bandwidth": lambda: _bandwidth(device),
        "host": lambda: _host_seconds(device),
    }


def _described(device: torch.device, found: dict[str, float]) -> Device:
    on_cpu = device.type == "cpu"
    memory = limits.memory_bytes() if on_cpu else torch.get_device_module(device).get_device_properties(device).total_memory
    convolution = max(0.05, min(1.0, found["convolution"]))
    efficiency = {
        "product": Figure(0.7, 0.4, 1.0),
        "convolution": Figure(convolution, convolution / 2, min(1.0, 1.5 * convolution)),
        "attention": Figure(0.4, 0.2, 0.8),
        "bandwidth": Figure(0.8, 0.5, 1.5),  # caches: some of it does not go to memory
    }
    host = found["host"]
    return Device(
        HERE, float(memory), {k.partition(" ")[2]: v for k, v in found.items() if k.startswith("flops ")}, found["bandwidth"],
        link=1e9 if on_cpu else 32e9, source=f"{environment.device_name(device)}, measured", asynchronous=not on_cpu,
        efficiency=efficiency, kernel_s=Figure(0.2 * host, 0.1 * host, 0.4 * host), host_s=Figure.within(host, 0.6, 1.5),
        view_s=Figure.within(0.3 * host, 0.5, 1.7), correction=CORRECTION.get(device.type, Figure(1.0, 0.6, 1.6)),
        **({"reserved": Figure.exactly(0.0), "fragmentation": Figure.exactly(1.0)} if on_cpu else {}),
    )  # fmt: skip


def _convolution_flops(device: torch.device) -> float:
    x, weight = torch.full((8, 64, 28, 28), 0.5, device=device), torch.full((64, 64, 3, 3), 0.5, device=device)
    return 2 * 8 * 28 * 28 * 64 * 64 * 9 / _best(lambda: torch.conv2d(x, weight, padding=1), device)


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / _best(lambda: target.copy_(source), device)


def _host_seconds(device: torch.device) -> float:
    """The host's time for one operation of a step beside the operation itself: modules, autograd and Python."""
    layers = [m for _ in range(LAYERS) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.GELU())]
    network = torch.nn.Sequential(*layers).to(device)
    x = torch.ones(2, WIDTH, device=device)

    def step() -> None:
        network(x).sum().backward()
        for p in network.parameters():
            p.grad = None

    def alone() -> None:
        for _ in range(LAYERS):
            y = torch.addmm(bias, x, weight)
            y = torch.nn.functional.gelu(torch.layer_norm(y, (WIDTH,), bias, bias))
            torch.mm(x, weight), torch.mm(x.t(), x), x.sum(0)

    weight, bias = torch.ones(WIDTH, WIDTH, device=device), torch.ones(WIDTH, device=device)
    with torch.no_grad():
        kernels = _best(alone, device)
    return max(1e-6, (_best(step, device) - kernels) / (LAYERS * 8))


def _best(work: Callable[[], object], device: torch.device) -> float:
    """The seconds of the fastest of several calls: other programs may disturb some."""
    now, taken = replay.clock(device), []
    work()
    for _ in range(TIMES):
        began = now()
        work()
        taken.append(now() - began)
    return max(1e-9, min(taken))


def _read() -> dict[str, dict[str, float]]:
    try:
        found = json.loads(state_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if fits(found, dict[str, dict[str, float]]) else {}


def _write(content: dict[str, Any]) -> None:
    try:
        state_file().parent.mkdir(parents=True, exist_ok=True)
        write_json(state_file(), content)
    except OSError:  # it is measured again the next time
        pass
