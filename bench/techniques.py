"""Whether techniques that change training help: `python -m bench.techniques [--only TRIAL …] [--seeds N] [--out FILE]`.

Each trial trains a base and its variants with the same seeds (`drivetrain compare … quality=true asks=better`), on a task in
which they should help, and says what that found, also where it is nothing. The trials that the file has are not made again. It
writes bench/results/techniques-cpu.json, what the techniques' cards say (conf/measured.json, by bench.cards), and the table of
docs/optimizers.md.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import cards, harness

FILE = harness.RESULTS / "techniques-cpu.json"
PAGE = harness.ROOT / "docs" / "optimizers.md"
BEGIN, END = "<!-- python -m bench.techniques writes this table -->\n", "<!-- end of the table -->\n"
ROUNDS, UPDATES, MIN_SEEDS = 6, 20, 3
ALL = ("runtime.threads=1", "runtime.device=cpu", "saving=none")
GPT = ("loss=next_token", "model=gpt", "model.width=32", "model.depth=2", "model.heads=2", "batch.global_batch=16",
       "scheduler=wsd")  # fmt: skip
TEXT = ("data=stdlib", "data.max_files=10", "data.length=64", "data.test_samples=64", *GPT, "epochs=5")
MUON = (*TEXT, "optimizer=muon", "optimizer.weight_decay=0.1")
DIGITS = ("data=digits", "model=mlp", "model.hidden=[64,64]", "batch.global_batch=32", "epochs=8", "scheduler=wsd")
COLOURED = ("data=imagefolder", "data.root={photos}", "data.size=16", "model=resnet9", "model.width=4", "batch.global_batch=64",
            "epochs=5")  # fmt: skip
SCENES = ("data.samples=1000", "data.test_samples=200", "model.width=4", "epochs=6")
LORA = ("model.weights={weights}", "epochs=2", "scheduler=constant", "adapter=lora")
OPTIMIZERS = ("adamw", "sgd", "adam", "muon", "lion", "lamb", "lars", "nvlamb", "novograd", "schedulefree", "adafactor",
              "adagrad", "rmsprop", "adamw8bit", "soap", "shampoo", "sam")  # fmt: skip


class Trial(NamedTuple):
    """A base, the variants' words beside it, and what the figures are of."""

    base: tuple[str, ...]
    variants: tuple[str, ...]  # each may be several words; the first is the base's own, which may be none
    target: str | None = None
    before: tuple[str, ...] = ()  # a run from whose weights all start


def _optimizers(*names: str) -> tuple[str, ...]:
    """The words of optimizers with their default rates. Schedule-free AdamW has no schedule."""
    return tuple(f"optimizer={name}" + (" scheduler=constant" if name == "schedulefree" else "") for name in names)


TRIALS = {
    "muon on text": Trial(MUON, (
        "", "optimizer.normalize=neurons", "optimizer.cautious_decay=true", "optimizer=adamw", "scheduler=inverse_sqrt",
        "ema=merge scheduler=constant", "clip=spike", "model.embedding_noise=5",
    )),
    "digits": Trial((*DIGITS, "optimizer=adamw"), (
        "", "scheduler=inverse_sqrt", "ema=merge scheduler=constant", "clip=spike", "loss=arcface",
    )),
    "muon on digits": Trial((*DIGITS, "optimizer=muon", "optimizer.weight_decay=0.1"), (
        "", "optimizer.normalize=neurons", "optimizer.cautious_decay=true",
    )),
    "coloured digits": Trial(COLOURED, ("", "augment=[trivialaugment]", "augment=[three_augment]")),
    "labels": Trial(("task=multilabel", *SCENES), ("loss=bce", "loss=asymmetric")),
    "masks": Trial(("task=segmentation", *SCENES), ("loss=dice", "loss=tversky")),
    "views": Trial(("task=contrastive", "model.width=4", "epochs=5"), ("loss=contrastive", "loss=siglip")),
    "embeddings": Trial(("data=digits", "model=mlp", "model.hidden=[64]", "epochs=8"), ("loss=triplet", "loss=supcon")),
    "adapters on digits": Trial((*DIGITS, *LORA, "data.classes=[5,6,7,8,9]", "adapter.rank=32", "model.weights_skip=[head.*]"), (
        "", "adapter.scale=stabilized", "adapter.init=pissa", "adapter.lr_ratio=16",
    ), before=(*DIGITS, "data.classes=[0,1,2,3,4]")),
    "adapters on text": Trial((*GPT, *LORA, "data=text", "data.path={text}", "data.length=64", "adapter.rank=32"), (
        "", "adapter.scale=stabilized", "adapter.init=pissa", "adapter.lr_ratio=16",
    ), before=TEXT),
    "optimizers on digits": Trial(DIGITS, _optimizers(*OPTIMIZERS), "accuracy>=0.96"),
    "optimizers on text": Trial(TEXT, _optimizers(*OPTIMIZERS), "bits_per_byte<=4.2"),
}  # fmt: skip


def made(trial: Trial, folder: Path, seeds: int) -> dict[str, Any]:
    """Train a trial's variants: for each its figure beside the base's, or why it has none."""
    from drivetrain import train
    from drivetrain.measure.benchmark import quality, variants

    places = {"photos": str(folder / "photos"), "text": str(folder / "docs.txt")}
    if trial.before:
        saved = train([*ALL[:2], *trial.before, "saving=last", f"output_dir={folder}/before"])
        places["weights"] = str(saved.run_dir)
    base = [word.format(**places) for word in (*ALL, *trial.base, f"output_dir={folder}/runs")]
    last = {word.partition("=")[0]: word for word in base}  # the last one counts
    specs = [variants.compose(words or "as it is", [*_beside(last, words), *words.split()]) for words in trial.variants]
    began, load = time.monotonic(), harness.machine()["load"]
    if trial.target:
        rows = to_target(specs, trial.target, folder, seeds)
    else:
        settings = quality.QualitySettings(seeds=seeds, max_seeds=seeds, asks="better")
        verdicts = quality.judge(specs, settings, lambda text, *_: print(text, flush=True))
        rows = {spec.label: row_of(spec, verdict) for spec, verdict in zip(specs, verdicts, strict=True)}
    return {"base": " ".join(trial.base), "seeds": seeds, "target": trial.target, "load": load,
            "minutes": round((time.monotonic() - began) / 60, 1), "rows": rows}  # fmt: skip


def to_target(specs: Sequence[Any], target: str, folder: Path, seeds: int) -> dict[str, dict[str, Any]]:
    """Train the variants in this process, seed by seed: the updates after which each first reached the target, None for never.

    And the milliseconds of this process on its core for an update, in rounds of all: what others do beside does not count.
    """
    from drivetrain.core.options.selection import Reach

    reach = Reach.parse(target)
    found: dict[str, dict[str, Any]] = {
        spec.label: {"updates": [], "update_ms": [], "reason": next(iter(spec.problems), None)} for spec in specs
    }
    able = [spec for spec in specs if spec.job is not None]
    for seed in range(seeds):
        for spec in able:
            print(f"training {spec.label}: seed {seed}", flush=True)
            records = Records()
            with _built(spec, folder, records, f"runtime.seed={seed}", f"target={target}", "stop.at_target=true") as trainer:
                trainer.fit()
            there = (each["update"] for each in records if reach.metric in each and reach.reached(each[reach.metric]))
            found[spec.label]["updates"].append(next(there, None))
    with ExitStack() as stack:
        trainers = {spec.label: stack.enter_context(_built(spec, folder, Records())) for spec in able}
        streams = {label: trainer.read() for label, trainer in trainers.items()}
        for number in range(ROUNDS + 1):
            for label in [*trainers][:: (-1) ** number]:
                step, began = trainers[label].step, time.process_time()
                for batch in itertools.islice(streams[label], UPDATES):
                    step.micro_batch(batch, torch.zeros(()))
                    step.update()
                    step.zero_grad()
                if number:  # the first round makes the states
                    found[label]["update_ms"].append(1e3 * (time.process_time() - began) / UPDATES)
    return found


class Records(list[dict[str, Any]]):
    """A logger that keeps the records of a run."""

    def log(self, record: dict[str, Any]) -> None:
        """Keep one."""
        self.append(record)


@contextmanager
def _built(spec: Any, folder: Path, records: Records, *words: str) -> Iterator[Any]:
    from drivetrain.core.world import World
    from drivetrain.engine import build
    from drivetrain.engine.context import RunContext

    context = RunContext(spec.again(words).run, World(), folder / "run")
    with context.on_exit:
        yield build.build(context, [records])


def _beside(base: dict[str, str], words: str) -> list[str]:
    """The words of the base, without those keys of an option that another one takes the place of."""
    others = {group for group, _, _ in (word.partition("=") for word in words.split()) if "." not in group}
    return [word for key, word in base.items() if key not in others and key.partition(".")[0] not in others]


def row_of(spec: Any, verdict: Any) -> dict[str, Any]:
    """The figures of a variant's seeds, and by how much they are better than the base's: with a 95 % interval over the seeds."""
    from drivetrain.measure import intervals

    if verdict is None or any(run.error for run in verdict.runs) or not verdict.runs:
        said = spec.problems or [str(next(run.error for run in verdict.runs if run.error)) if verdict else "it did not run"]
        return {"reason": said[0].splitlines()[0]}
    row = {"metric": verdict.metric, "each": [run.figures.get(verdict.metric) for run in verdict.runs]}
    row |= {"mean": [*intervals.mean(row["each"])], "verdict": verdict.differs or verdict.outcome, "reason": None}
    if verdict.metric in verdict.degradation:
        row["worse_by"], row["confidence"] = [*verdict.degradation[verdict.metric]], verdict.confidence
    return row


def write_digits(folder: Path) -> None:
    """Write the digits as images of 32 × 32 pixels, a folder for each class; each image has an ink and a paper of its own."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits, draws = load_digits(), np.random.default_rng(0)
    for n, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        ink, paper = draws.uniform(128, 255, 3), draws.uniform(0, 96, 3)
        pixels = paper + (image / 16)[..., None] * (ink - paper)
        place = folder / ("test" if n % 5 == 0 else "train") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype("uint8")).resize((32, 32), Image.Resampling.BILINEAR).save(place / f"{n}.png")


def sentences(content: dict[str, Any]) -> dict[str, list[str]]:
    """Override → what the trials found of it, a sentence for each."""
    found: dict[str, list[str]] = {}
    for trial in (trial for name, trial in content.get("trials", {}).items() if not name.startswith("optimizers")):
        (base, first), *others = trial["rows"].items()
        for label, row in others:
            found.setdefault(card_of(label, trial["base"]), []).append(_sentence(label, row, base, first, trial))
    return found


def card_of(label: str, base: str) -> str:
    """The override whose card a variant belongs to: its option, or the option of the base whose key it sets."""
    word = label.split()[0]
    group = word.partition("=")[0].partition(".")[0]
    own = [given for given in base.split() if given.startswith(f"{group}=")]
    return f"{own[-1]} {word}" if "." in word.partition("=")[0] and own else word


def _sentence(label: str, row: dict[str, Any], base: str, first: dict[str, Any], trial: dict[str, Any]) -> str:
    given, group = {word.partition("=")[0]: word for word in trial["base"].split()}, label.partition("=")[0]
    task = " ".join(word for key, word in given.items() if key in ("data", "task", "model", "optimizer", "adapter.rank"))
    beside = f" with {' '.join(label.split()[1:])}" if " " in label else ""
    against = given.get(group, {"loss": "loss=cross_entropy"}.get(group, "without it")) if base == "as it is" else base
    if row.get("worse_by") is None:
        return f"result on {task}: {row['reason'] or 'none'}"
    worse, low, high = row["worse_by"]
    word, amount, least, most = ("better", -worse, -high, -low) if worse < 0 else ("worse", worse, low, high)
    by = "the same" if low == high == 0 else f"{word} by {amount:.2g} ({least:.2g} to {most:.2g})"
    known = "" if row["verdict"] in ("BETTER", "WORSE") or low == high == 0 else "no difference shown, "
    mean, of_base = row["mean"][0], first["mean"][0]
    return f"result{beside} on {task}, {trial['seeds']} seeds: {row['metric']} {mean:.4g}, {against} {of_base:.4g}: {known}{by}"


def table(content: dict[str, Any]) -> str:
    """The optimizers on both tasks: seeds that reached the target, updates, time of an update, seconds to the target."""
    from drivetrain.measure import intervals

    def cell(values: Sequence[float], form: str) -> str:
        if len(values) < MIN_SEEDS:
            return form.format(statistics.fmean(values)) if values else "–"
        middle, low, high = map(form.format, intervals.mean(values))
        return middle if low == high else f"{middle} ({low} to {high})"

    names = ("reached", "updates", "ms an update", "CPU s to it")
    lines = []
    for task in ("digits", "text"):
        if (trial := content.get("trials", {}).get(f"optimizers on {task}")) is None:
            continue
        lines += [
            f"**{task.capitalize()}**, `{trial['target']}`:",
            "",
            f"| optimizer | {' | '.join(names)} |",
            "|---|---|---|---|---|",
        ]
        found = []
        for words, row in trial["rows"].items():
            there = [updates for updates in row.get("updates", ()) if updates is not None]
            update_s = statistics.median(row["update_ms"]) / 1e3 if "update_ms" in row else 0.0
            seconds = [updates * update_s for updates in there]
            update_ms = cell(row.get("update_ms", ()), "{:.2f}")
            cells = f"{len(there)} of {len(row.get('updates', ()))}", cell(there, "{:,.0f}"), update_ms, cell(seconds, "{:.2f}")
            rank = -len(there), statistics.fmean(seconds) if seconds else 0.0
            found.append((rank, f"| `{words.split()[0].partition('=')[2]}` | {' | '.join(cells)} |"))
        lines += [line for _, line in sorted(found)] + [""]
    return "\n".join(lines)


def write(content: dict[str, Any], out: Path) -> None:
    """Write the record, the cards, and the page's table."""
    harness.write(out, json.loads(json.dumps(content, default=str), parse_constant=lambda _: None))
    if out == FILE:
        cards.write(harness.before(cards.FILE), cards.FILE)
        text = PAGE.read_text(encoding="utf-8")
        head, _, rest = text.partition(BEGIN)
        if rest:
            PAGE.write_text(f"{head}{BEGIN}\n{table(content)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Make the trials that the file does not hold yet."""
    given = harness.parse(__doc__, "techniques-cpu.json", argv, only=list(TRIALS), seeds=5)
    content: dict[str, Any] = {"trials": {}, **harness.before(given.out)}
    with tempfile.TemporaryDirectory() as name:
        write_digits(Path(name) / "photos")
        pages = sorted((harness.ROOT / "docs" / "guides").glob("*.md"))
        Path(name, "docs.txt").write_text("\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
        for trial in given.only:
            if trial not in content["trials"]:
                print(f"{trial}:")
                content["trials"][trial] = made(TRIALS[trial], Path(name), given.seeds)
                write(content, given.out)
    for card, said in sentences(content).items():
        print(card, *said, sep="\n    ")


if __name__ == "__main__":
    main()
