"""Sets up the process: device, seeds, threads, and the flags of torch's backends."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Literal, TypeGuard

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine import accelerators
from drivetrain.core.machine.accelerators import Accelerator
from drivetrain.core.machine.device import keep_freed_memory
from drivetrain.core.machine.guards import too_many, usable_cores
from drivetrain.core.options import groups
from drivetrain.core.options.option import Count, CountOrZero, Effect, Option, RunSpec
from drivetrain.core.options.protocols import Trials
from drivetrain.core.step import rng, streams
from drivetrain.core.typed import JsonObject, fits
from drivetrain.core.world import World

DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")
ATTENTION = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}  # kernel → name in torch's flags
CHOSEN_BY_AUTO = ("cuda", "xpu")  # not mps, which has no float64: it must be set by name

OWN_LAUNCH = "drivetrain"  # TORCHELASTIC_RUN_ID of ranks that drivetrain has started itself
OPENMP = re.compile(r"\s*0*([1-9]\d*)\s*(,.*)?")  # a number of threads, perhaps followed by those of nested regions

AS_FAST = 1.05  # times the seconds of the fastest number of threads: a smaller number within it is chosen

logger = logging.getLogger(__name__)


class Runtime(Option, groups.Runtime):
    """The device, the seed, the CPU threads and the backend flags of a run."""

    why_fixed: ClassVar[str] = "the device and the seed are those of the whole run"
    effect: ClassVar[Effect] = "exact"
    key_effects: ClassVar[Mapping[str, Effect]] = {
        "device": "close",
        "seed": "changes",
        "threads": "close",
        "cudnn_benchmark": "close",
        "deterministic": "close",
        "attention": "close",
    }
    machine_local_keys = ("device", "threads")

    def __init__(
        self,
        device: str = "auto",
        seed: CountOrZero = 0,
        threads: Count | Literal["auto"] | None = None,
        cudnn_benchmark: bool = True,
        deterministic: bool = False,
        zero_grad: Literal["none", "memset"] = "none",
        keep_memory: bool = True,
        attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto",
    ) -> None:
        self.device, self.seed, self.threads, self.zero_grad = device, seed, threads, zero_grad
        self.cudnn_benchmark, self.deterministic = cudnn_benchmark, deterministic
        self.keep_memory, self.attention = keep_memory, attention
        self.found: JsonObject | None = None  # the basis of the number of threads, if trials chose it

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not DEVICE.fullmatch(self.device):
            yield f"runtime.device={self.device} must be auto, cpu, cuda, xpu, mps, or one of several devices, such as cuda:1"
        if ":" in self.device and not run.parallel.one_process:
            yield (
                f"runtime.device={self.device} is one device, and {run.named('parallel')} uses several: set "
                f"runtime.device={self.device.partition(':')[0]}, or parallel=single"
            )
        if self.threads is not None and self.threads != "auto":
            yield from too_many("threads", f"runtime.threads={self.threads}", self.threads)
        if self.threads is None and (given := asked_of_openmp()):
            if OPENMP.fullmatch(given):
                yield from too_many("threads", f"OMP_NUM_THREADS={given}", self.thread_count(1))
            else:
                yield f"OMP_NUM_THREADS={given} in the environment is no number of threads: set it to one, or unset it"
        if self.deterministic and self.cudnn_benchmark:
            yield (
                "runtime.deterministic=true and runtime.cudnn_benchmark=true exclude each other "
                "(the autotuner picks kernels by timing): set runtime.cudnn_benchmark=false"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        type_, _, number = self.device.partition(":")
        if type_ in ("auto", "cpu"):
            return
        found = accelerators.find()
        if found.type != type_:
            why = f" ({found.problem})" if found.problem else ""
            yield f"runtime.device={self.device}, but torch finds no {type_.upper()} device{why}: set runtime.device=cpu or auto"
        elif number and int(number) >= found.count:
            last = f"{type_}:{found.count - 1}"
            yield f"runtime.device={self.device}, but torch finds {found.count} {type_.upper()} devices: the last one is {last}"

    @property
    def untried(self) -> str:  # type: ignore[override]
        return "runtime.threads=1" if self.threads == "auto" else ""

    @property
    def needs_trial(self) -> bool:  # type: ignore[override]
        return self.threads == "auto"

    def choose(self, trials: Trials, recorded: object = None) -> Runtime:
        parallel = trials.run.parallel
        cores = usable_cores(max(1, parallel.ranks() // parallel.nnodes))
        counts = [*(2**n for n in range((cores - 1).bit_length())), cores]
        if not _is_choice(recorded, cores):
            seconds = trials.thread_seconds(counts) if self.device_type() == "cpu" and cores > 1 else []
            # The smallest of the fast ones: more would only take cores from others. A large model takes all without a trial.
            fast = [n for n, s in zip(counts, seconds, strict=False) if s <= AS_FAST * min(seconds)] or [cores]
            recorded = {"threads": fast[0], "cores": cores, "update_seconds": seconds}
        chosen = self.with_values(threads=recorded["threads"], found=recorded)
        measured = ", ".join(f"{1e3 * s:.1f} ms with {n}" for n, s in zip(counts, recorded["update_seconds"], strict=False))
        logger.info("runtime.threads=auto: %d of %d%s", chosen.threads, cores, measured and f": an update takes {measured}")
        return chosen

    def device_type(self) -> str:
        """Return the device type as torch names it, with `auto` resolved. It starts no device, so that ranks can be forked."""
        return self.accelerator().type

    def accelerator(self) -> Accelerator:
        """Return the facts about the devices of the run's type."""
        if self.device == "auto":
            found = accelerators.find()
            return found if found.type in CHOSEN_BY_AUTO else Accelerator()
        type_ = self.device.partition(":")[0]
        return Accelerator() if type_ == "cpu" else replace(accelerators.find(), type=type_)

    def _device(self, world: World) -> torch.device:
        """Return the device of this rank. Raises UserError if it cannot be used."""
        type_, number = self.device_type(), self.device.partition(":")[2]
        if self.device == "auto" and type_ == "cpu" and (problem := accelerators.find().problem):
            logger.warning("runtime.device=auto: this run is on the CPU, because torch cannot use the device here: %s", problem)
        if type_ in ("cpu", "mps"):
            return torch.device(type_)
        try:
            # If a launcher shows each rank only its own devices, as Slurm can, their numbers start from 0 on every rank.
            index = int(number) if number else world.local_rank % torch.accelerator.device_count()
            torch.accelerator.set_device_index(index)
        except (RuntimeError, AssertionError, ZeroDivisionError) as error:
            raise UserError(
                f"runtime.device={self.device}: {type_.upper()} does not start: {str(error).splitlines()[0]}: set "
                "runtime.device=cpu"
            ) from None
        return torch.device(type_, index)

    def set_up_process(self, world: World) -> torch.device:
        """Set up the process and return its device."""
        device = self._device(world)
        torch.set_num_threads(self.thread_count(world.local_size))
        if self.keep_memory and device.type == "cpu":
            keep_freed_memory()
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        for kernel, name in ATTENTION.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(self.attention in ("auto", kernel))  # on a CPU too
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if self.deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(self.deterministic)
            # Filling memory before its use finds kernels that read uninitialized values; it makes none deterministic.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        _seed(rng.mix(self.seed, 3))  # the model starts the same on every rank
        return device

    def thread_count(self, ranks: int) -> int:
        """Return the CPU threads of each of the machine's `ranks`: the setting, OMP_NUM_THREADS, or its share of the cores."""
        given = OPENMP.fullmatch(asked_of_openmp())
        if self.threads is None and given:
            return int(given[1])
        return usable_cores(ranks) if self.threads in (None, "auto") else int(self.threads)

    def seed_rank(self, world: World) -> int:
        """Seed each rank differently from here on, for dropout. Returns the seed."""
        _seed(number := rng.mix(self.seed, 4, world.rank))
        return number

    def zero(self, parameters: list[torch.nn.Parameter]) -> None:
        """Clear the gradients. None instead of zero saves the memset, and the next backward writes instead of adding."""
        if self.zero_grad == "memset":
            if gradients := [p.grad for p in parameters if p.grad is not None]:  # there are none before the first backward
                torch._foreach_zero_(gradients)
        else:
            for p in parameters:
                p.grad = None


def _is_choice(recorded: object, cores: int) -> TypeGuard[JsonObject]:
    """True if this is the choice of a resumed run, made with as many cores."""
    return (
        isinstance(recorded, dict)
        and recorded.get("cores") == cores
        and fits(recorded.get("threads"), int)
        and 1 <= recorded["threads"] <= cores
        and fits(recorded.get("update_seconds"), list[float])
    )


def _seed(number: int) -> None:
    torch.manual_seed(number)  # also seeds a device that is not started yet
    streams.seed_all(number)


def asked_of_openmp() -> str:
    """Return OMP_NUM_THREADS; "" if it is unset, or set by torchrun.

    torchrun sets it to 1 for several ranks, which would leave cores unused: this 1 is ignored.
    """
    given, launch = os.environ.get("OMP_NUM_THREADS", ""), os.environ.get("TORCHELASTIC_RUN_ID", OWN_LAUNCH)
    return given if given != "1" or launch == OWN_LAUNCH else ""
