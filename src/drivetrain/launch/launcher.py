"""Runs one job: its directory, its processes and its end. `worker` trains one rank of it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config.catalog import LISTS, content, option_files
from drivetrain.config.keys import OPEN
from drivetrain.core.errors import BAD_CONFIG, FAILED, PEER_GONE, UserError, collecting, did_you_mean, is_peer_failure, refuse
from drivetrain.core.machine import isolation, process
from drivetrain.core.machine.forking import end_with_users_parent
from drivetrain.core.machine.paths import add_import_paths
from drivetrain.core.machine.signals import SignalForwarder, StopFlag
from drivetrain.core.options.context import NO_RUN_DIR
from drivetrain.core.options.overrides import format_value, words_of
from drivetrain.core.user import given
from drivetrain.core.world import World
from drivetrain.launch import elastic, trials
from drivetrain.launch.job import Job, device_problems, prepare_run
from drivetrain.launch.job import prepare as prepare
from drivetrain.launch.worker import run_rank
from drivetrain.parallel.environment import launched, world_of_environment
from drivetrain.recipe import fetch
from drivetrain.run import directory, recipe_file
from drivetrain.run.directory import RunDirHandle
from drivetrain.run.result import Result
from drivetrain.saving import space
from drivetrain.saving.space import NoRoom
from drivetrain.ui import logs, output, recipe_tree
from drivetrain.ui.pages import runs as run_pages

RUN_DIR_FILE = "DRIVETRAIN_RUN_DIR_FILE"  # in a child's environment: the file for the path of its run's directory

logger = logging.getLogger(__name__)


@isolation.standard_streams()
def train(
    config: Sequence[str] | Mapping[str, object], config_dirs: Sequence[str] = (), keywords: Mapping[str, object] | None = None
) -> Result:
    """`drivetrain.train`: train in this process, or in a new one if the run has ranks or trials.

    A signal that stopped the run is raised again afterwards: it ends the caller's program, unless that handles it.
    """
    process.restart_clock()
    end_with_users_parent()
    if config_dirs:
        add_import_paths(config_dirs)
    if isinstance(config, Mapping):
        config = [*overrides_of(config, config_dirs), *_into_hydras_directory(config)]
    config, plain = given.words(config, keywords or {})
    overrides = words_of("drivetrain.train", config, plain)
    fetch.on_fetch[:] = [output.show]
    job = prepare_run(overrides, config_dirs)
    forks = launched() is None and bool(job.run.parallel.distributed or job.run.tried())
    objects = given.objects_in(overrides)
    if forks and objects and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise UserError(
            f"{objects[0]} is an object of this program, which has used CUDA and so cannot fork what the run needs: train before "
            "anything uses CUDA, or put the object's class or function into a module"
        )
    if objects or not forks:
        ended = launch(job)
        if ended.signal:
            signal.raise_signal(ended.signal)
        return ended
    # Ranks and trials are forked, if possible from a process that has run nothing of torch; this one may have.
    with directory.temporary() as folder, SignalForwarder() as signals:
        run_dir_file = folder / "run_dir"
        errors = in_new_interpreter("drivetrain", overrides, config_dirs, signals, {RUN_DIR_FILE: str(run_dir_file)})
        result = Result.read(Path(run_dir_file.read_text(encoding="utf-8"))) if run_dir_file.exists() else None
    if signals.raised:
        signal.raise_signal(signals.raised)
    if result is None:
        raise UserError(errors)
    return result


def in_new_interpreter(
    module: str, words: Sequence[str], config_dirs: Sequence[str], signals: SignalForwarder,
    variables: Mapping[str, str] | None = None, quiet: bool = False,
) -> list[str]:  # fmt: skip
    """Run `train` of a module in a new interpreter, with these variables in its environment; its errors, or its exit code.

    A `quiet` one shows nothing. Its standard input stays open as long as this process lives.
    """
    folders = [word for folder in config_dirs for word in ("--config-dir", str(folder))]
    env = {**os.environ, "PYTHONPATH": process.import_path(), **(variables or {})}
    command, errors = [*process.command(module), "train", *folders, *words], []
    stdin, stdout = (subprocess.PIPE, subprocess.DEVNULL) if quiet else (None, None)
    started = subprocess.Popen(command, env=env, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    with started as child, signals.to(child.send_signal):
        for line in child.stderr or ():
            if not quiet:
                sys.stderr.write(line)
            if line.startswith("error: "):
                errors.append(line.removeprefix("error: ").rstrip("\n"))
        child.wait()  # `communicate` would close the input, which ends the child
    return errors or [f"the run ended with code {child.returncode}"]


def _into_hydras_directory(config: Mapping[str, object]) -> list[str]:
    """The override for the output directory of the surrounding Hydra job, if that has no run and no directory is set."""
    from drivetrain.core.options.hydra_parts import HydraConfig

    if not HydraConfig.initialized() or config.get("output_dir", "outputs") != "outputs":
        return []
    folder = Path(HydraConfig.get().runtime.output_dir)
    return [] if any(directory.cannot_take(folder, "hydra.run.dir")) else [f"hydra.run.dir={format_value(str(folder))}"]


def launch(job: Job, run_dir: Path | None = None, quiet: bool = False, stop: StopFlag | None = None) -> Result:
    """Run a job to its end, in `run_dir` or a new directory. Raises UserError if it cannot begin, and then leaves no files.

    `stop` takes its signals, until the result is written.
    """
    import torch  # noqa: F401 - the run changes its settings and restores them

    with isolation.isolated(), directory.temporary():
        return _launch(job, run_dir, quiet, stop or StopFlag())


def _launch(job: Job, run_dir: Path | None, quiet: bool, stop: StopFlag) -> Result:
    world = world_of_environment()
    logs.configure(quiet, world.rank)
    refuse(device_problems([job]))
    refuse(
        f"{job.run.named(group)} has settings that trials choose before the ranks start, and another launcher has started "
        f"them: let drivetrain start them (parallel=ddp alone), or set {option.untried}"
        for group, option in job.run.tried().items()
        if world.size > 1 and option.needs_trial
    )
    if world.rank != 0:  # started by another launcher along with rank 0, which has the run's directory
        with stop:
            return run_rank(job, world, NO_RUN_DIR, stop, quiet=True)
    if world.size == 1 and job.work is None:  # which does not train
        trials.choose(job)
    run_dir = job.run_dir or run_dir
    if job.run.parallel.nnodes > 1 and launched() is None:
        return _launch_on_several_machines(job, run_dir or job.new_run_dir(), quiet, stop)
    if is_new := run_dir is None:
        run_dir = job.make_run_dir()
    try:
        with directory.locked(run_dir):
            result = _launch_in(run_dir, job, world, quiet, stop)
    except (OSError, NoRoom, KeyboardInterrupt):  # OSError: standard output is a file on a full disk
        if is_new and not (run_dir / "metrics.jsonl").exists():  # nothing was trained
            directory.remove(run_dir)
        raise
    if result.code == BAD_CONFIG and not result.updates and is_new:
        directory.remove(run_dir)  # it never became a run
        raise UserError(str(result.error).splitlines())
    return result


def _launch_in(run_dir: Path, job: Job, world: World, quiet: bool, stop: StopFlag) -> Result:
    """Run a job on this machine, in a directory that this process has locked."""
    held = RunDirHandle(run_dir)
    if job.work is None:  # otherwise the directory would be gone after the work
        with space.reserved(run_dir):
            job.write_files(run_dir)
    _tell_parent(run_dir)
    (run_dir / "result.json").unlink(missing_ok=True)
    with logs.to_file(run_dir / "log.txt"):
        _announce(job, quiet)
        with stop:  # from now on a signal interrupts the run, with a result
            if job.run.parallel.distributed and launched() is None:
                result = elastic.run(job, run_dir, quiet)
            else:
                result = run_rank(job, world, run_dir, stop, quiet)
            # Under torchrun or Slurm a rank outlives a lost peer, and only torch's error shows the loss.
            if world.size > 1 and result.code == FAILED and is_peer_failure(result.error):
                elastic.end_without_peers(result, run_dir, PEER_GONE)
            _write_end(result, job, held)
            result.signal = stop.raised
    return result


def _write_end(result: Result, job: Job, held: RunDirHandle) -> None:
    """Write the result to the current path of the run's directory. A newly made directory gets all files for resuming."""
    try:
        run_dir = held.place()
        space.release(run_dir)
        if result.status == "failed" and held.folder() != held.path and f"resume={run_dir}" not in str(result.error):
            result.error = f"{held.path} was moved away or removed while the run trained: the rest of it is in {run_dir}"
        if run_dir != held.path and not (run_dir / "environment.json").exists():
            job.write_files(run_dir)
        _write_result(result, job, run_dir)
    except OSError as error:
        logger.error("result.json could not be written to %s (%s)", held.path, error.strerror)


def _launch_on_several_machines(job: Job, run_dir: Path, quiet: bool, stop: StopFlag) -> Result:
    """Run this machine's ranks. The process that becomes rank 0 makes the run's directory on its machine."""
    _announce(job, quiet)
    directory.remember_missing_folders(run_dir)

    def before_exit(result: Result) -> None:
        if result.run_dir is not None:  # rank 0 was here
            _write_result(result, job, run_dir)
        if result.code:
            logger.error("%s", result.error)
        sys.stdout.flush()

    with stop:
        result = elastic.run(job, run_dir, quiet, before_exit)
        if result.code == BAD_CONFIG and not result.updates:
            if job.run_dir is None and run_dir.is_dir():
                directory.remove(run_dir)
            raise UserError(str(result.error).splitlines())
        if result.run_dir is not None:
            _write_result(result, job, run_dir)
    if result.run_dir is None and not result.code:
        logger.warning("this machine's ranks are done; the run's directory is where rank 0 is")
    return result


def _announce(job: Job, quiet: bool) -> None:
    """Log the job's notices and show its recipe."""
    job.log_notices()
    if not quiet:
        recipe_tree.show_recipe(job.composed, job.run)


def started_from_python() -> bool:
    """True if `drivetrain.train` started this process for a run of several ranks: the caller shows the result."""
    return RUN_DIR_FILE in os.environ


def _tell_parent(run_dir: Path) -> None:
    """Write the path of the run's directory to the file requested by a parent process."""
    if started_from_python():
        Path(os.environ[RUN_DIR_FILE]).write_text(str(run_dir), encoding="utf-8")


def _write_result(result: Result, job: Job, run_dir: Path) -> None:
    """Complete the result of a run, write its file and page, and pass the path to a parent process."""
    _tell_parent(run_dir)
    result.wall_s = time.monotonic() - process.started
    result.run_dir = run_dir
    result.write(run_dir)
    if job.work is None:
        run_pages.write(run_dir, recipe_file.compared(job.composed, job.machine_local_keys))


# --- a config that a user's own program composed, such as a script with @hydra.main ---


def overrides_of(config: Mapping[str, object] | DictConfig, config_dirs: Sequence[str] = ()) -> list[str]:
    """The overrides that make this config.

    A group is the name of an option (`optimizer: sgd`), or a section that Hydra composed from drivetrain's conf/ (`_target_`
    identifies the option), or keys of the default option. References are resolved, except those to the environment, so that
    no secret is written. Raises UserError with every problem.
    """
    plain = _resolved(config if isinstance(config, DictConfig) else OmegaConf.create(dict(config)))
    plain.pop("hydra", None)  # shown by `--cfg all` in addition to the run's own config
    words: list[str] = []
    problems: list[str] = []
    for key, value in plain.items():
        with collecting(problems):
            words += _group(key, value, config_dirs) if key in option_files(config_dirs) else _values(key, value)
    refuse(problems)
    return words


def _resolved(config: DictConfig) -> dict[str, object]:
    """The config as plain dicts and lists. Raises UserError."""
    from drivetrain.core.options.hydra_parts import oc, register_resolver

    try:  # a reference to the environment stays unresolved
        reference = "${{oc.env:{}}}".format
        register_resolver("oc.env", lambda *given: reference(",".join(map(str, given))), replace=True)
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(f"the config cannot be resolved: {str(error).splitlines()[0]}") from None
    finally:
        register_resolver("oc.env", oc.env, replace=True)


def _group(group: str, value: object, config_dirs: Sequence[str]) -> Iterator[str]:
    """The overrides of one group: its options, and the settings that differ from those of the options' files."""
    if not isinstance(value, Mapping):
        yield f"{group}={format_value(value)}"
        return
    known = {name: content(file) for name, file in option_files(config_dirs)[group].items()}
    parts: list[tuple[str, Mapping[str, object], Mapping[str, object]]] = [(group, {}, value)]
    if group in LISTS:
        chosen = {name: section for name, section in value.items() if name != "_target_"}
        yield f"{group}={format_value([*chosen])}"
        parts = [(f"{group}.{name}", known.get(name, {}), section or {}) for name, section in chosen.items()]
    elif "_target_" in value:
        option = _option_of(group, value, known)
        yield f"{group}={option}"
        parts = [(group, known[option], value)]
    for place, own, section in parts:
        for setting, each in section.items():
            if setting != "_target_" and (setting not in own or own[setting] != each):
                yield from _values(f"{place}.{setting}", each)


def _option_of(group: str, section: Mapping[str, object], known: Mapping[str, Mapping[str, object]]) -> str:
    """The option behind a section: among options of its class, the one with the most equal values."""
    same = [name for name, own in known.items() if own.get("_target_") == section["_target_"]]
    if not same:
        hint = did_you_mean(str(section["_target_"]).rpartition(".")[2].lower(), known)
        raise UserError(
            f"{group}._target_={section['_target_']} is the class of no option of {group}: choose one by {group}: NAME ({hint}), "
            "or add your own by config_dirs"
        )
    return max(same, key=lambda name: sum(section.get(setting) == value for setting, value in known[name].items()))


def _values(key: str, value: object) -> Iterator[str]:
    """A value, or each value of a mapping, as overrides; a mapping with the user's own keys stays whole."""
    if isinstance(value, Mapping) and value and key.rpartition(".")[2] not in OPEN:
        for name, inner in value.items():
            yield from _values(f"{key}.{name}", inner)
    else:
        yield f"{key}={format_value(value)}"
