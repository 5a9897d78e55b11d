# ruff: noqa: E501
"""Faults of what a run leaves and reads: saving, resuming, run directories, recipes, configs, sweeps, the terminal."""

from __future__ import annotations

from bench.mutations.fault import Fault

ASYNC = "tests/saving/test_asynchronous.py tests/saving/test_host_copy.py"
SAVING = "tests/saving/test_saving.py tests/saving/test_best.py"
RESUME = "tests/saving/test_resume.py"
MALFORMED = "tests/saving/test_malformed.py"
SHARDED = "tests/saving/test_sharded_checkpoint.py"
DISK = "tests/saving/test_full_disk.py"
RUN = "tests/run/test_run_dir.py tests/run/test_records.py"
SWEEP = "tests/sweeps/test_sweep.py"
FORMAT = "tests/recipe/test_format.py"
ATTACKS = "tests/recipe/test_attacks.py tests/recipe/test_limits.py " + FORMAT

FAULTS = (
    Fault("saving: a thread writes the weights of a later update", "saving/host_copy.py", 'value.detach().to("cpu", copy=True, non_blocking=True)', 'value.detach().to("cpu", non_blocking=True)', "tests/saving/test_asynchronous.py"),
    Fault("saving: does not wait for the write before", "saving/writer.py", "            self.wait()\n            gone = None", "            gone = None", "tests/saving/test_asynchronous.py"),
    Fault("saving: the error of a thread is lost", "saving/writer.py", "            self._error = error\n", "            pass\n", "tests/saving/test_asynchronous.py"),
    Fault("saving: weights to train are saved", "saving/writer.py", "        with self._eval_weights():\n", "        if True:\n", "tests/optimizer/test_training.py", "schedulefree"),
    Fault("saving: ranks write their own buffers", "saving/writer.py", "            self._parallel.broadcast_buffers(trainer.model)\n", "            pass\n", "tests/saving/test_host_copy.py", "buffers"),
    Fault("saving: files are not synced", "saving/checkpoint_io.py", "    for file in temporary.iterdir():\n        _fsync(file)\n", "", "tests/saving/test_malformed.py", "order_of_syncs"),
    Fault("saving: the folder is renamed before its files are synced", "saving/checkpoint_io.py", "    temporary.rename(target)\n    _fsync(root)\n", "    _fsync(root)\n    temporary.rename(target)\n", "tests/saving/test_malformed.py", "order_of_syncs"),
    Fault("saving: what was replaced is removed first", "saving/checkpoint_io.py", "        target.rename(replaced)\n", "        shutil.rmtree(target)\n", "tests/saving/test_malformed.py", "replaced"),
    Fault("saving: the newest checkpoint is pruned", "saving/checkpoint_io.py", "{*saved[:-1]}.difference(chosen(saved))", "{*saved}.difference(chosen(saved))", "tests/saving/test_resume.py", "pruning"),
    Fault("saving: names are sorted as texts", "saving/checkpoint_io.py", "return sorted(int(p.name) for p in checkpoints(run_dir))", "return [int(n) for n in sorted(p.name for p in checkpoints(run_dir))]", "tests/saving/test_resume.py", "pruning"),
    Fault("saving: one checkpoint too many is kept", "saving/options.py", "list(saved[-self.keep :])", "list(saved[-self.keep - 1 :])", "tests/saving/test_saving.py"),
    Fault("saving: the worst are kept", "saving/options.py", "sorted([update for update in ranked if update in saved][: self.keep])", "sorted([update for update in ranked if update in saved][-self.keep :])", "tests/saving/test_best.py tests/saving/test_saving.py", "best"),
    Fault("saving: one update too late", "saving/options.py", "update - self._update >= self.every_updates", "update - self._update > self.every_updates", "tests/saving/test_saving.py"),
    Fault("saving: minutes are seconds", "saving/options.py", ">= 60 * self.every_minutes", ">= self.every_minutes", "tests/saving/test_saving.py"),
    Fault("saving: both intervals must be over", "saving/options.py", "return by_count or by_clock", "return by_count and by_clock", "tests/saving/test_saving.py"),
    Fault("progress: a worse evaluation becomes the best", "core/progress.py", "better(metrics[name], self.best[name]) != self.best[name]", "better(metrics[name], self.best[name]) == self.best[name]", "tests/saving/test_saving.py tests/saving/test_best.py", "best or equals or lowest"),
    Fault("progress: the lowest is always ranked first", "core/progress.py", "reverse=better(0.0, 1.0) == 1.0)", "reverse=False)", "tests/saving/test_saving.py tests/saving/test_best.py", "best or equals or lowest"),
    Fault("progress: skipped updates do not count as steps", "core/progress.py", "return self.updates + self.skipped", "return self.updates", "tests/precision/test_precision.py tests/engine/test_trainer.py", "is_null or in_a_row or moves_nothing"),
    Fault("manifest: hashes are not compared", "saving/manifest.py", 'hashlib.file_digest(opened, "sha256").hexdigest() != expected:', 'hashlib.file_digest(opened, "sha256").hexdigest() == "":', "tests/saving/test_resume.py", "damaged"),
    Fault("manifest: its own hash is not compared", "saving/manifest.py", "        sealed.check(written, found)\n", "        pass\n", "tests/saving/test_malformed.py", "flipped"),
    Fault("manifest: the oldest checkpoint is taken", "saving/manifest.py", "key=lambda p: int(p.name), reverse=True)", "key=lambda p: int(p.name))", "tests/saving/test_resume.py", "newest or damaged or uninterrupted"),
    Fault("manifest: an incomplete checkpoint passes", "saving/manifest.py", "any(kind <= set(hashes) for kind in (FULL, SHARDED))", "any(kind & set(hashes) for kind in (FULL, SHARDED))", "tests/saving/test_malformed.py", "is_incomplete"),
    Fault("manifest: a replaced checkpoint is not put back", "saving/manifest.py", "        recover(run_dir)\n    problems", "        pass\n    problems", "tests/saving/test_malformed.py", "kill_while"),
    Fault("resume: states are matched by their place", "saving/checkpoint_io.py", "saved = {i: saved_index[name] for i, name in zip(indices, names, strict=True)}", "saved = {i: i for i, name in zip(indices, names, strict=True)}", "tests/saving/test_resume.py", "matched_by"),
    Fault("resume: settings of the checkpoint win", "saving/checkpoint_io.py", "{**settings[names[0]], **own,", "{**own, **settings[names[0]],", "tests/saving/test_resume.py", "insisted or takes_effect"),
    Fault("resume: a shorter run is taken", "run/identity.py", "if _length(b.get(k)) < _length(a.get(k))]", "if _length(b.get(k)) > _length(a.get(k))]", "tests/saving/test_resume_command.py tests/saving/test_resume.py", "shorter or longer"),
    Fault("resume: a changed config is taken", "run/identity.py", "keys = [k for k in {**a, **b} if a.get(k) != b.get(k) and not is_machine_local(k, skip)]", "keys = [k for k in a if k not in b and not is_machine_local(k, skip)]", "tests/saving/test_resume.py", "changed_config"),
    Fault("identity: machine-local keys are in the hash", "run/identity.py", "for k, v in flatten(composed.plain).items() if not is_machine_local(k, machine_local_keys)}", "for k, v in flatten(composed.plain).items()}", "tests/saving/test_resume.py", "place_of_a_run"),
    Fault("sharded: groups of parts are not merged", "saving/sharded_checkpoint.py", "if _settings(g) == settings), None)", "if g is group), None)", SHARDED),
    Fault("sharded: a state is given to another weight", "saving/sharded_checkpoint.py", 'shards.divided("optimizer", names[i], parameter_state[k])', 'shards.divided("optimizer", names[min(names)], parameter_state[k])', SHARDED),
    Fault("sharded: what is on other ranks is written", "saving/sharded_checkpoint.py", "for key, divided in tensors.items() if divided.parts}, rest", "for key, divided in tensors.items()}, rest", SHARDED),
    Fault("sharded: parts of a fused projection have the place of one matrix", "parallel/shard_parts.py", "(first + i) * tensor.shape[1] + row", "first + i + row", "tests/parallel/test_saved_parts.py", "fused"),
    Fault("sharded: rank 0's optimizer state is that of all", "saving/writer.py", "                state = self._parallel.with_states_of_all(state)\n", "", "tests/parallel/test_saved_parts.py"),
    Fault("sharded: parts that overlap pass", "saving/sharded_checkpoint.py", "!= math.prod(shape):", "< math.prod(shape):", SHARDED),
    Fault("sharded: a part outside of its file is read", "saving/sharded_checkpoint.py", "0 <= start <= start + size <= lengths[name]", "0 <= start <= start + size", SHARDED),
    Fault("disk: the reserve is not given back", "saving/space.py", "        (run_dir / RESERVE).unlink(missing_ok=True)\n", "        pass\n", "tests/saving/test_full_disk.py", "run_on or keeps"),
    Fault("disk: half a checkpoint stays", "saving/space.py", "            shutil.rmtree(temporary, ignore_errors=True)\n", "            pass\n", "tests/saving/test_full_disk.py", "no_part or keeps"),
    Fault("files: a link is followed", "core/files.py", '("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")', '("O_NONBLOCK", "O_CLOEXEC")', "tests/core/test_files.py"),
    Fault("files: a FIFO holds its reader up", "core/files.py", '("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")', '("O_NOFOLLOW", "O_CLOEXEC")', "tests/core/test_files.py"),
    Fault("files: one byte more than the limit is read", "core/files.py", "or len(content) > most:", "or len(content) > most + 1:", "tests/core/test_files.py"),
    Fault("files: a text is renamed before it is synced", "core/files.py", "            file.flush()\n            os.fsync(file.fileno())\n", "", "tests/saving/test_malformed.py", "order_of_syncs"),
    Fault("directory: two processes write one run", "run/directory.py", "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)", "tests/sweeps/test_sweep.py", "twice_at_once"),
    Fault("directory: a removed run takes what was there before", "run/directory.py", 'for name in (*FILES, ".lock", ".hydra") if name not in kept]', 'for name in (*FILES, ".lock", ".hydra")]', "tests/config/test_hydra_words.py tests/sweeps/test_sweep.py tests/run", "dir or folder or stays or kept or place"),
    Fault("directory: it is not found where it was moved", "run/held.py", "        return self._moved_to(self._handle)\n", "        return None\n", "tests/saving/test_moved.py"),
    Fault("result: an unfinished run has the best figure", "sweeps/objective.py", 'if result is not None and result.status == "completed" else None', "if result is not None else None", "tests/sweeps/test_sweep.py", "best_job"),
    Fault("sweep: the worst job is the best", "sweeps/objective.py", "return (max if self.maximize else min)(values", "return (min if self.maximize else max)(values", "tests/sweeps/test_sweep.py", "best_job"),
    Fault("sweep: jobs that failed are not run again", "sweeps/store.py", 'FINAL = ("completed", "diverged")', 'FINAL = ("completed", "diverged", "failed")', "tests/sweeps/test_sweep.py", "kept"),
    Fault("sweep: a job's checkpoints are lost", "sweeps/store.py", "        if manifest.checkpoints(self.run_dir):\n            (self", "        if not manifest.checkpoints(self.run_dir):\n            (self", "tests/sweeps/test_sweep.py", "checkpoint"),
    Fault("sweep: a changed jobs.json is taken", "sweeps/store.py", "if not signature.is_own(content,", "if signature.is_own(None,", "tests/launch/test_strangers.py", "changed_sweep"),
    Fault("sweep: a finished sweep goes on", "sweeps/store.py", "and not is_finished(path) and not directory.is_locked(path)", "and not directory.is_locked(path)", "tests/sweeps/test_sweep.py", "newest_unfinished"),
    Fault("sweep: one number of a range is left out", "sweeps/search_space.py", "low + (len(numbers) - 1) * step, step", "low + (len(numbers) - 2) * step, step", "tests/sweeps/test_sweep.py", "grammar"),
    Fault("sweep: the middle of a logarithmic interval is the mean", "sweeps/search_space.py", "math.sqrt(self.low * self.high) if self.log", "(self.low + self.high) / 2 if self.log", "tests/sweeps/test_sweep.py", "grammar or space or middle"),
    Fault("sweep: more jobs than there may be", "sweeps/grid.py", "(count := math.prod(map(len, axes))) > MAX_JOBS", "(count := sum(map(len, axes))) > MAX_JOBS", "tests/sweeps/test_bounds.py tests/recipe/test_limits.py", "sweep or jobs or combinations or values"),
    Fault("recipe: aliases are taken", "recipe/safe_yaml.py", 'if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):', "if isinstance(event, yaml.MarkedYAMLError if False else ()):", "tests/recipe/test_allowed.py tests/recipe/test_limits.py"),
    Fault("recipe: tags are taken", "recipe/safe_yaml.py", 'if tag := getattr(event, "tag", None):', 'if (tag := getattr(event, "tag", None)) and tag == "!":', "tests/recipe/test_allowed.py tests/recipe/test_limits.py"),
    Fault("recipe: larger than it may be", "recipe/safe_yaml.py", "    if len(raw) > MAX_BYTES:", "    if len(raw) > 2 * MAX_BYTES:", "tests/recipe/test_allowed.py tests/recipe/test_limits.py"),
    Fault("recipe: values without end", "recipe/safe_yaml.py", "if nodes > MAX_NODES or depth > MAX_DEPTH:", "if nodes > MAX_NODES and depth > MAX_DEPTH:", "tests/recipe/test_allowed.py tests/recipe/test_limits.py"),
    Fault("recipe: octal numbers are read otherwise than by a person", "recipe/safe_yaml.py", "and _OTHER_NOTATION.match(text):", "and _OTHER_NOTATION.match(text + ' ' * 9) is None and False:", "tests/recipe/test_attacks.py", "otherwise"),
    Fault("recipe: references to the environment are taken", "recipe/safe_yaml.py", 'if "${" in value and ("${" in REFERENCE.sub("", value) or', 'if "${" in value and (', "tests/recipe/test_format.py tests/recipe/test_allowed.py", "wrong or hostile"),
    Fault("recipe: 1e-3 is a text", "recipe/safe_yaml.py", "        return float(node.value)\n", "        return node.value\n", "tests/recipe/test_format.py", "values_are_read"),
    Fault("recipe: texts without a rule are taken", "core/allowed.py", "        if isinstance(part, str | dict) and OPEN in known:\n", "        if isinstance(part, dict) and OPEN in known:\n", "tests/recipe/test_allowed.py"),
    Fault("recipe: a part of a text is enough", "core/allowed.py", "return re.fullmatch(self.pattern, value) is not None", "return re.match(self.pattern, value) is not None", "tests/recipe/test_allowed.py"),
    Fault("recipe: arguments of any size", "core/allowed.py", "not abs(part) <= LARGEST", "abs(part) <= -1", "tests/recipe/test_allowed.py"),
    Fault("claim: a ratio outside of its interval", "recipe/claim.py", "if not self.interval[0] <= self.ratio <= self.interval[1]:", "if not self.interval[0] <= self.ratio:", "tests/recipe/test_claim.py"),
    Fault("claim: a target is reached from the wrong side", "core/target.py", "value >= self.value if self.more else value <= self.value", "value <= self.value if self.more else value >= self.value", "tests/stop/test_target.py", "read_and_compared"),
    Fault("claim: an interval from high to low", "recipe/sections.py", "all(map(is_number, value)) and value[0] <= value[1]", "all(map(is_number, value))", "tests/recipe/test_claim.py"),
    Fault("hash: the order of keys counts", "run/drift.py", "sort_keys=True, separators=", "sort_keys=False, separators=", "tests/recipe/test_format.py", "any_order"),
    Fault("config: a text is a number", "config/values.py", "ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)", "ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)", "tests/cli/test_errors.py", "not slow"),
    Fault("config: infinite values are taken", "config/values.py", "ConfigDict(strict=True, allow_inf_nan=False,", "ConfigDict(strict=True, allow_inf_nan=True,", "tests/config/test_values.py"),
    Fault("config: an unknown knob is ignored", "config/validate.py", "unknown = [k for k in knobs if k not in parameters]", "unknown = [k for k in knobs if k not in parameters and False]", "tests/config/test_values.py"),
    Fault("config: any number may be as large as it likes", "config/values.py", "abs(value) > MAX_WHOLE", "abs(value) > MAX_WHOLE**9", "tests/config/test_values.py"),
    Fault("overrides: secrets are kept", "core/overrides.py", "if equals and SECRET.search(key) else override", "if equals and SECRET.fullmatch(key) else override", "tests/run/test_run_dir.py tests/core/test_overrides.py", "secret"),
    Fault("patterns: a module's name matches nothing inside", "core/patterns.py", 'fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")', "fnmatchcase(name, pattern)", "tests/optimizer/test_groups.py", "multiplies or listed"),
    Fault("selection: the metric that is asked for is not taken", "core/selection.py", "return Selection(name, better) if name is not None and better is not None else", "return Selection(name, min) if name is not None and better is not None else", "tests/metrics/test_runs.py", "selected"),
    Fault("limits: for one rank alone", "core/limits.py", "if count * times > most", "if count > most", "tests/core/test_limits.py"),
    Fault("limits: a model is counted too late", "core/limits.py", "        if total > most_bytes:", "        if total > 4 * most_bytes:", "tests/core/test_limits.py"),
    Fault("signals: a run that is told to stop waits for ever", "core/signals.py", "time.monotonic() - max(flag._at, since) > flag._patience + grace", "time.monotonic() - max(flag._at, since) > 1e9", "tests/loader/test_loader.py", "told_to_stop"),
    Fault("terminal: escape sequences reach it", "ui/output.py", "    print(plain(str(text)), end=end", "    print(str(text), end=end", "tests/ui/test_output.py"),
    Fault("terminal: percentages of a confusion are those of all", "core/tables.py", 'f"{count / sum(values[row]):.1%}"', 'f"{count / sum(map(sum, values)):.1%}"', "tests/metrics/test_tables.py"),
    Fault("terminal: the best classes are shown as the worst", "core/tables.py", "key=lambda n: values[n][key])[:most]", "key=lambda n: -values[n][key])[:most]", "tests/metrics/test_tables.py"),
    Fault("report: the last figure is the best", "run/reader.py", "return (max if more else min)(values) if values else None", "return values[-1] if values else None", "tests/run/test_records.py"),
    Fault("report: figures of the test set are evaluations", "run/reader.py", 'if event == "evaluate" and "weights" in record:', 'if event == "evaluate" and "weight" in record:', "tests/data/test_validation.py tests/measure/report/test_report.py", "reads or reports or table"),
    Fault("report: the warm-up counts as a rate", "run/reader.py", 'self.train.curve("samples_per_second")[1:] if r', 'self.train.curve("samples_per_second") if r', "tests/run/test_records.py"),
    Fault("report: a target is reached at the evaluation after", "run/reader.py", "                return seconds, update\n        return None", "                return seconds, update + 1\n        return None", "tests/measure/claims/test_export.py tests/measure/report/test_report.py", "target"),
)  # fmt: skip
