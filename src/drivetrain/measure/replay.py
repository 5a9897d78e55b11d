"""`drivetrain replay RUN`: repeats an update of a run exactly, with its samples, its layers and the likely cause of a fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from drivetrain.core.errors import DONE, Diverged, UserError
from drivetrain.core.machine import forking
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.machine.paths import expanded
from drivetrain.core.machine.signals import ended_by_signals
from drivetrain.core.options.option import Count
from drivetrain.core.order import index_of
from drivetrain.core.step import streams, trees
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.source import original
from drivetrain.core.step.step import Stream, WrappingStep
from drivetrain.data.base import Data
from drivetrain.engine.trainer import Trainer
from drivetrain.launch import job as jobs
from drivetrain.logger.drawing import in_words, pixels
from drivetrain.measure import verbs
from drivetrain.measure.replay_cause import (
    INPUTS,
    LEAST,
    LOSS,
    RECENT,
    SPIKE,
    WORTH,
    Found,
    LookedAt,
    Sizes,
    cause,
    height,
    ranges,
    ranked,
    worse,
)
from drivetrain.run import directory, records
from drivetrain.run.result import Result
from drivetrain.saving import manifest
from drivetrain.saving.options import Saving
from drivetrain.saving.writer import Writer
from drivetrain.ui import sheet
from drivetrain.ui.pages import charts
from drivetrain.ui.progress import Steps

SHOWN, CHARACTERS, NUMBERS = 12, 80, 16  # samples and layers in the terminal; characters of a text; numbers of a target
MOST = 64  # samples of a micro-batch whose gradients are taken: those with the largest losses
Windows = dict[int, tuple[int, float | None]]  # a record's last update → its first update, and the mean loss
Plan = tuple[int, int, int]  # the first and the last update to observe, and the end of their record


@dataclass
class ReplaySettings:
    """The settings of `drivetrain replay`."""

    update: Count | None = None  # None: where it diverged, else its largest spike
    back: Count = 50  # earlier updates to observe too


# --- on each rank ---


@dataclass
class Moment:
    """The weights and buffers before an update, with its micro-batches and the random states."""

    update: int
    weights: dict[str, torch.Tensor]
    batches: list[tuple[MicroBatch, Request, dict[str, torch.Tensor]]] = field(default_factory=list)


class Recorder(WrappingStep):
    """The run's own step, with an observer of the model and its tensors in the updates of a plan."""

    now: Moment | None = None  # of the current update
    first: Moment | None = None
    chosen: Moment | None = None
    over = False  # the weights are not finite from here on

    def __init__(self, trainer: Trainer, plan: Plan, back: int) -> None:
        super().__init__(trainer.step)
        (self.low, self.high, self.until), self.back, self.model = plan, back, trainer.model
        self.history: dict[int, Sizes] = {}
        self.waiting: list[tuple[MicroBatch, Request]] = []
        writer = Writer(trainer.run_dir, Saving(), trainer.parallel, nullcontext)  # which saves nothing
        self.trainer = replace(trainer, step=self, writer=writer, stream_watchers=[*trainer.stream_watchers, self._watch])

    def run(self) -> Found | None:
        """Train to the update, and return its record; None if the run ends before it."""
        unseen = list[str]()
        with ExitStack() as hooks:
            if self.trainer.compile_seconds() is not None:
                unseen.append("the layers' outputs: the model is compiled")
            else:
                hooks.callback(self.model.register_forward_pre_hook(partial(self._see, INPUTS)).remove)
                for name, module in self.model.named_modules():
                    hooks.callback(module.register_forward_hook(partial(self._see, f"output of {name or 'the model'}")).remove)
            with suppress(Diverged):
                self.trainer.fit()
        if (now := self.chosen or self.now) is None or self.first is None:
            return None
        samples = [self._sample(batch, request, n) for batch, request, _ in now.batches for n in range(trees.length(batch.x))]
        try:
            self._own_losses(now, self.first, samples)
        except (UserError, RuntimeError) as error:
            unseen.append(f"the samples' own losses: {str(error).splitlines()[0]}")
        samples = ranked(samples)
        for n, sample in enumerate(samples):
            self._draw(sample)
            sample.alone, sample.picture = None, sample.picture if n < SHOWN else None  # not sent to the parent process
        return Found(now.update, self.first.update, samples, self.history, unseen)

    def _watch(self, stream: Stream) -> Stream:
        for batch, request in zip(stream, self.trainer.requests(), strict=False):
            self.waiting.append((batch, request))
            yield batch

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        update = self.trainer.progress.updates + 1
        if len(self.waiting) == 1:
            self.now, self.before = None, loss_sum.clone()
            if self.low - self.back <= update <= self.high:
                self.now = Moment(update, {name: tensor.detach().clone() for name, tensor in self._tensors()})
                self.first, self.history[update] = self.first or self.now, {}
        if self.now is not None and self.waiting[-1][1].weight:  # others only fill up the batch
            self.now.batches.append((*self.waiting[-1], streams.state()))
        self.inner.micro_batch(batch, loss_sum)
        self.loss_sum = loss_sum

    def update(self) -> bool:
        if (now := self.now) is None:
            return bool(self.inner.update())
        here, parameters, parallel = self.history[now.update], dict(self.model.named_parameters()), self.trainer.parallel
        precision, one = self.trainer.precision, torch.ones((), device=self.trainer.device)
        scale = float(precision.scaled(one, one.clone())) if precision.scales_loss else 1.0
        gradients = {name: p.grad for name, p in reversed(parameters.items()) if p.grad is not None}
        here |= {f"gradient of {name}": size(gradient) / scale for name, gradient in gradients.items()}
        made = bool(self.inner.update())
        matrices = {name: p.detach() for name, p in parameters.items() if p.requires_grad and p.ndim > 1}
        moved = {name: size(p - now.weights[name]) / max(size(now.weights[name]), 1e-12) for name, p in matrices.items()}
        here |= {f"update of {name}": share for name, share in moved.items()}
        here[LOSS] = float(parallel.all_reduce_sum(self.loss_sum - self.before) / parallel.data_world.size)
        if now.update >= self.low:
            all_finite = parallel.gather_object(all(map(math.isfinite, here.values())))
            self.over = parallel.broadcast_object(not all(all_finite)) and (made or not math.isfinite(here[LOSS]))
            if self.chosen is None or self.over or here[LOSS] > self.history[self.chosen.update][LOSS]:
                self.chosen = now
        return made

    def zero_grad(self) -> None:
        self.inner.zero_grad()
        self.waiting.clear()
        if self.over or self.trainer.progress.updates >= self.until:
            self.trainer.record()
            raise Diverged("there is no more to look at")

    def _see(self, what: str, *call: object) -> None:
        """Keep the size of a hook's last value: a module's output, or the model's inputs."""
        if self.now is not None and self.model.training:
            here, leaves = self.history[self.now.update], [leaf for leaf in trees.leaves(call[-1]) if leaf.is_floating_point()]
            sizes = [size(leaf) / math.sqrt(max(1, leaf.numel())) for leaf in leaves]
            here |= {what: worse(here.get(what, 0.0), *sizes)} if sizes else {}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return chain(self.model.named_parameters(), self.model.named_buffers())

    def _sample(self, batch: MicroBatch, request: Request, place: int) -> LookedAt:
        one, data = torch.tensor([place], device=self.trainer.device), self.trainer.train_data.source
        x, y = trees.select(batch.x, one), trees.select(batch.y, one)
        largest = [worse(float(leaf.abs().max())) for leaf in trees.leaves((x, y)) if leaf.is_floating_point() and leaf.numel()]
        name = f"sample {place} of its batch"
        if len(request.indices) == trees.length(batch.x):  # else a user's function has left some out
            number = int(index_of(request.indices)[place])
            name = data.name(number) or f"row {original(data, number)[1]}"
            if request.mix_with is not None:
                name += f", mixed with row {original(data, int(request.mix_with[place]))[1]}"
        alone = replace(batch, x=x, y=y, weight=torch.ones_like(batch.weight), shares=None)
        return LookedAt(name, max(largest, default=0.0), alone)

    def _draw(self, sample: LookedAt) -> None:
        """Add a sample's target in words, and its text or picture as seen by the model."""
        context, alone = self.trainer.callbacks.context, sample.alone
        assert alone is not None
        x, targets = trees.first(alone.x)[0].cpu(), trees.leaves(alone.y)
        if len(targets) == 1 and targets[0][0].numel() <= NUMBERS:
            sample.target = ", ".join(in_words(targets[0][0].cpu(), context.run.data.targets, context.data.names))
        if x.ndim == 3 and x.shape[0] in (1, 3):
            sample.picture = pixels(torch.nan_to_num(x.float(), posinf=0, neginf=0).numpy(), None)
        elif not x.is_floating_point() and x.ndim == 1:
            text = Data.of(context.run).decode(x.tolist(), context.data) or str(x.tolist())
            sample.text = " ".join(text.split())[:CHARACTERS]

    def _own_losses(self, now: Moment, first: Moment, samples: Sequence[LookedAt]) -> None:
        """Fill in each sample's loss, at the weights before the update and at earlier ones, and the norms of gradients."""
        run, loss = self.trainer.callbacks.context.run, self.trainer.evaluator.loss
        if loss.compares_samples:
            raise UserError(f"{run.named('loss')} compares samples")
        if not run.parallel.whole_model:
            raise UserError(f"with {run.named('parallel')} a rank has a part of the weights")
        if hasattr(loss, "head"):
            loss.head = None  # the output layer gives its logits
        both = zip(samples, [*self._at(now, now, samples)], self._at(first, now, samples), strict=True)
        for sample, (sample_loss, gradient), (earlier, _) in both:
            sample.loss, sample.gradient, sample.earlier = sample_loss, gradient, earlier

    def _at(self, weights: Moment, now: Moment, samples: Sequence[LookedAt]) -> Iterator[tuple[float, float | None]]:
        """Yield each sample's loss at some weights, and the norm of its gradient for the worst samples of each micro-batch."""
        for name, tensor in self._tensors():
            tensor.data.copy_(weights.weights[name])
        parameters, alone = [p for p in self.model.parameters() if p.requires_grad], iter(samples)
        loss, most = self.trainer.evaluator.loss, MOST if weights is now else 0
        for batch, _, random in now.batches:
            streams.restore(random)
            with torch.set_grad_enabled(most > 0), self.trainer.precision.autocast():
                output, count = self.trainer.evaluator.forward(loss.joined(batch.x)), trees.length(batch.x)
                if any(leaf.ndim and len(leaf) != count for leaf in trees.leaves(output)):
                    raise UserError("the model's output has not a row for each sample")
                places = torch.arange(count, device=self.trainer.device).split(1)
                own = [self._own_loss(trees.select(output, place), next(alone).alone) for place in places]
            worst = sorted(range(count), key=lambda n: -worse(float(own[n])))[:most]
            for n, value in enumerate(own):
                gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True) if n in worst else ()
                yield float(value), math.hypot(*(size(g) for g in gradients if g is not None)) if n in worst else None

    def _own_loss(self, output: trees.Tree, alone: MicroBatch | None) -> torch.Tensor:
        """The loss of one sample, given its row of the output."""
        assert alone is not None
        loss, once = self.trainer.evaluator.loss, iter([output])
        try:
            return loss.step(lambda *_, **__: next(once), alone)
        except StopIteration:
            named = getattr(loss, "target", None) or type(loss).__name__
            raise UserError(f"{named} runs the model more than once in a step") from None


def size(tensor: torch.Tensor) -> float:
    """The norm of a tensor, even if this rank has only a part."""
    norm = torch.linalg.vector_norm(tensor.detach(), dtype=sum_dtype(tensor.device))
    return float(getattr(norm, "full_tensor", lambda: norm)())


# --- the command ---


def windows_of(run_dir: Path, begin: int = 0) -> Windows:
    """The records of a run's training losses."""
    found: Windows = {}
    for record in records.read(run_dir / "metrics.jsonl").records:
        if record.get("event") == "train":
            found[record["update"]] = begin, record.get("loss")
        if record.get("event") in ("train", "resume"):
            begin = record["update"]
    return found


def spike(windows: Windows) -> int | None:
    """The record whose loss is furthest above the earlier ones, in units of their spread; None if none is far above."""
    losses = {update: loss for update in sorted(windows) if (loss := windows[update][1]) is not None}
    each = list(losses.values())
    heights = {u: height(each[n], each[max(0, n - RECENT) : n], LEAST * abs(each[0])) for n, u in enumerate(losses) if n}
    highest = max(heights, key=lambda update: heights[update], default=None)
    return highest if highest is not None and heights[highest] >= SPIKE else None


def planned(run_dir: Path, update: int | None) -> Plan:
    """The updates to look at. Raises UserError."""
    windows, result = windows_of(run_dir), Result.read(run_dir)
    last = max([*windows, result.updates if result is not None else 0], default=0)
    if not last or (update or 0) > last:
        raise UserError(f"update={update}: {run_dir} has made {last} updates: name one of them")
    low = high = update or last
    if update is None and result is not None and result.status == "diverged":
        low = min(max(windows, default=0) + 1, last)
    elif update is None and (known := {u: windows[u][1] or 0.0 for u in windows if u > 1}):
        high = spike(windows) or max(known, key=lambda update: known[update])
        low = max(2, windows[high][0] + 1)
    return low, high, min((u for u in windows if u >= high), default=high)


def replay(
    run_dir: Path, overrides: Sequence[str], config_dirs: Sequence[str], settings: ReplaySettings
) -> tuple[jobs.Job, Found]:
    """Train a run again up to an update, in a folder that is removed. Raises UserError."""
    plan = planned(run_dir, settings.update)
    job = jobs.prepare([*overrides, "logger=[]", f"resume={run_dir}", "resume_changed=true"], config_dirs)
    if job.run.stages or not job.run.parallel.own_forward:
        what = "a run with stages" if job.run.stages else f"{job.run.named('parallel')}, which runs parts of the model,"
        raise UserError(f"{run_dir}: {what} cannot be replayed: resume a copy of it with debug=anomaly")
    point, _ = manifest.newest_valid(run_dir, below=max(1, plan[0] - settings.back))
    start = int(point.name) if point is not None else 0

    def work(answer: Callable[[list[Found | None]], None]) -> None:
        from drivetrain.launch import launcher

        def on_rank(trainer: Trainer) -> None:
            found = trainer.parallel.gather_object(Recorder(trainer, plan, settings.back).run())
            if trainer.parallel.world.rank == 0:
                answer(found)

        again = replace(job, run_dir=None, checkpoint=point, work=on_rank, notices=[])
        (folder / "run").mkdir()
        if (result := launcher.launch(again, folder / "run", quiet=True)).code:
            raise UserError(str(result.error).partition(" (traceback in")[0])  # the traceback's file is removed

    root = Path(job.run.values["output_dir"]) / "replay"
    with directory.working(root) as folder, ended_by_signals(), Steps() as progress:
        progress(f"training again from {f'the checkpoint of update {start:,}' if start else 'the start'} to update {plan[2]:,}")
        ranks = [each for each in forking.answer_of(work, "the run cannot be replayed", 7 * 86_400.0) if each is not None]
        recorded, again = windows_of(run_dir), windows_of(folder / "run", start)
    if not ranks:
        raise UserError(f"trained again from update {start}, the run ended before update {plan[0]}: it is another run now")
    common = [update for update in again if update in recorded and recorded[update][0] == again[update][0]]
    same = [update for update in common if recorded[update] == again[update]]
    for update, sizes in ranks[0].history.items():
        sizes |= {what: worse(*(rank.history[update].get(what, 0.0) for rank in ranks)) for what in sizes}
    samples = ranked([sample for rank in ranks for sample in rank.samples])
    return job, replace(ranks[0], samples=samples, start=start, same=same, other=[u for u in common if u not in same])


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if math.isfinite(value) else "not finite"


def sheet_of(found: Found) -> sheet.Sheet:
    """The report on the update: whether its repetition is exact, the samples, the layers, the cause."""
    came = f"trained again from {f'the checkpoint of update {found.start:,}' if found.start else 'the start'}"
    said = f"all {len(found.same):,} recorded losses since are the run's own, bit for bit"
    if found.other:
        several = f"{len(found.other)} of {len(found.same) + len(found.other)} recorded losses are others"
        said = f"{several}, from update {found.other[0]:,} on, so this explains another run: another machine, torch, data or code"
    elif not found.same:
        said = "no record of the run can be compared, so nothing shows that this is the same run (log_every=1 records each)"
    rows = []
    for s in found.samples:
        figures = (s.input or None, s.loss, s.gradient, s.earlier if found.earlier < found.update else None)
        rows.append([s.name, s.target, s.text, *map(_figure, figures)])
    header = ["sample", "is", "text", "largest value", "loss", "gradient", f"at update {found.earlier:,}"]
    samples = sheet.Table(header, rows, "samples", ("sample", "text"), spare=("text", "is", "largest value"), most=SHOWN).used()
    sizes = sorted(ranges(found.history, found.update), key=lambda each: -each.times)
    of_layers = [
        [
            r.what,
            _figure(r.size),
            "–" if math.isnan(r.low) else f"{r.low:.4g} to {r.high:.4g}",
            f"{r.times:.3g}" if r.times > WORTH else "–",
        ]
        for r in sizes
    ]
    layers = sheet.Table(["what", "size", "in the updates before", "times beyond"], of_layers, "layers", most=SHOWN)
    tiles = [
        charts.tile(s.picture, s.name, s.target, f"loss {_figure(s.loss)}", "") for s in found.samples if s.picture is not None
    ]
    sections: list[sheet.Section] = [
        sheet.words(f"{came}: {said}"),
        *sheet.under(f"The samples of update {found.update:,}, the worst first", samples),
    ]
    sections += [charts.tiles(tiles)] if tiles else []
    sections += sheet.under(f"The layers in update {found.update:,}, what is furthest beyond its range first", layers)
    sections += [sheet.words(*(f"not looked into: {line}" for line in found.unseen))]
    of = " of another run" if found.other else ""
    return sheet.Sheet("What happened? – drivetrain replay", f"update {found.update:,}{of}: {cause(found).said}", sections)


def command(argv: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain replay`; its exit code."""
    settings, given = verbs.split(argv, ReplaySettings)
    runs = [word for word in given if "=" not in word or Path(word).exists()]
    if len(runs) != 1:
        raise UserError(f"drivetrain replay takes one run, such as outputs/<date>/<time>-<id>, and was given {len(runs)}")
    run_dir = directory.named(expanded(runs[0]))
    jobs.recorded_environment(run_dir)
    job, found = replay(run_dir, [word for word in given if word not in runs], config_dirs, settings)
    about = {
        "update": found.update,
        "cause": cause(found)._asdict(),
        "from": found.start,
        "same": found.same,
        "other": found.other,
    }
    verbs.leave(job, "replay", shown := sheet_of(found), ["replay", *argv], {**about, **shown.as_dict()})
    return DONE
