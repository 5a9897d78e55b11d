"""The verbs that measure: a row for each, with its function below drivetrain.measure, its further options and its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from drivetrain.cli.arguments import FILE, FLAG, WORDS, Command, overrides, runs


def measuring(
    name: str, target: str, text: str, options: Mapping[str, Mapping[str, Any]] | None = None, settings: Sequence[str] = (),
    offers: Callable[[Sequence[str], str], Sequence[str]] | None = None,
) -> Command:  # fmt: skip
    """A verb on a config. Its function, "module:function" below drivetrain.measure, is imported when the verb is run.

    The function takes the overrides, the config dirs and the values of the options.
    """
    module, _, function = target.partition(":")

    def work(given: argparse.Namespace) -> int:
        from drivetrain.measure import verbs

        values = [getattr(given, flag.removeprefix("--").replace("-", "_")) for flag in options or ()]
        with verbs.into(getattr(given, "out", None)):
            called = getattr(import_module(f"drivetrain.measure.{module}"), function)
            return int(called(given.overrides, given.config_dir, *values))

    out = {"--out": FILE} if "  --out " in text and "out" not in settings else {}
    return Command(name, work, text, {**out, **(options or {})}, settings, offers=offers)


def _certify_words(words: Sequence[str], last: str) -> list[str]:
    """The words that TAB offers: overrides, and once `against`."""
    offered = overrides([word for word in words if word != "against"], last)
    return offered if "against" in words or "=" in last else ["against", *offered]


def _bisect_words(words: Sequence[str], last: str) -> Sequence[str]:
    """The words that TAB offers: recipes and runs for GOOD and BAD, then overrides."""
    from drivetrain.recipe import lookup

    if len([word for word in words if not word.startswith("-")]) >= 2 or "=" in last:
        return overrides(words, last)
    return [*lookup.names(), *runs()]


def _forecast_words(words: Sequence[str], last: str) -> list[str]:
    """The words that TAB offers: devices after `device=`, settings and overrides."""
    from drivetrain.measure.forecast.roofline import NAMES

    if last.startswith("device="):
        return [f"device={name}" for name in NAMES]
    return ["device=", "seconds=", "what_if=", "--json", *overrides(words, last)]


compare = measuring("compare", "claims.export:compare", """\
drivetrain compare key=a,b [group=x,y] [key=value] …      techniques side by side, relative to the first

  drivetrain compare precision=fp32,bf16 surgery=[],[channels_last]
  drivetrain compare recipe=naive,fast data=digits
  drivetrain compare optimizer=adamw,lamb quality=true      is the result still right?
  drivetrain compare --program 'python train.py --seed {seed} {variant}' --variant '--lr 0.1' --variant '--lr 0.1 --amp' \
      --metric 'val_acc: ([\d.]+)' --higher                 any program, unchanged
  drivetrain compare --program '… --seed {seed}' --code HEAD~1 --code HEAD --metric results.json:accuracy --higher
  drivetrain compare --code HEAD~1 --code HEAD model=own model.target=my_pkg.Net trust=[my_pkg]     revisions of your code

  rounds=20             at most; each starts fresh processes of all variants; a variant known to 2 % stops early
  block_s=0.4            seconds of a block of timed updates; each variant has two in a round
  quality=true          also train each variant to its end: PASS, FAIL or INCONCLUSIVE against the first one's own spread
  seeds=5               trainings of each variant for quality=true before the first look, and before each further one
  max_seeds=20          the most seeds, while a variant is INCONCLUSIVE
  quality_s=600         no further seeds after these seconds of training
  asks=better           for quality=true: further seeds until each is BETTER or WORSE, too
  margin=0.01           for quality=true: the largest difference of the metric that counts as none; else measured
  judge=[accuracy]      evaluated figures that decide; else the metric that ranks models, and the loss
  target=0.95           of that metric: the seconds until it is reached are compared too
  --recipe FILE         write the fastest variant as a recipe that claims the measured figures, if it is clearly faster;
                        a better result alone is not written
  --out DIR             where to write, instead of a new folder below output_dir
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

A key that only one variant's option has goes to that one: optimizer=sgd,adamw optimizer.momentum=0.9. Where the options claim
the same mathematics (exact or close in `drivetrain list`), the training loss decides too.

Each variant is a separate process, and only one runs at a time. They take turns, A B B A, so that the machine's drift cancels.

Of programs:
  --program COMMAND     a whole training; {seed} and {variant} are filled in, {out} is a folder for each run, {code} the code's
  --variant WORDS       for {variant}, once for each
  --code REVISION       as of git revisions, in worktrees that are removed; without --program a run of drivetrain's with your code
  --metric WHERE        a pattern of the output with brackets around the number, FILE.json:key, FILE.jsonl:key or FILE.csv:column
  --higher, --lower     which of two values is better
  --pick last           of several values in a run: last, first or best
  --asks better         until each is BETTER or WORSE; or 'as good'
  --budget 30m          no further seeds after this time; --limit 10m: a run that takes longer has failed
  --ledger FILE         all tries on the same validation data, which share one level: the hundredth does not win by chance
  --holdout-metric M    read only at the end, where a variant is kept

exit codes of programs: 0 better (or as good) · 1 the first program failed · 2 a bad command line · 4 worse · 5 undecided
""", {
    "--recipe": FILE, "--program": {}, "--variant": WORDS, "--code": WORDS, "--metric": {}, "--higher": FLAG, "--lower": FLAG,
    "--pick": {"choices": ["last", "first", "best"], "default": "last"},
    "--asks": {"choices": ["better", "as good"], "default": "better"},
    "--budget": {}, "--limit": {}, "--ledger": FILE, "--holdout-metric": {},
})  # fmt: skip

certify = measuring("certify", "certify.certify:command", """\
drivetrain certify [group=option] [key=value] … [against [group=option] …]     is this the same mathematics?

  drivetrain certify recipe=fast                          against the same run without its exact and close techniques
  drivetrain certify model=gpt task=language_modelling data=stdlib precision=bf16 against precision=fp32
  drivetrain certify model=mlp parallel=ddp batch=accumulate against parallel=single batch=fixed

Both runs make a few updates from one state with the same samples. Answers:
  exact                 bit for bit the same, or only the order of sums differs
  no effect             bit for bit the same, although one should round more coarsely: nothing was tested on this machine
  within rounding       the differences fit the run's number format
  differs               with the first differing layer or phase, and its update

After `against`: the settings of the other run that differ; the rest is the same. Without it, each technique of the run that
claims to be exact or close (`drivetrain list`) is switched off in the other run.

  steps=4               updates that are compared
  --out DIR             where to write, instead of a new folder below output_dir
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

exit codes: 0 exact, within rounding or no effect · 1 differs · 2 cannot be compared, or a bad command line
""", offers=_certify_words)  # fmt: skip

ablate = measuring("ablate", "claims.export:ablate", """\
drivetrain ablate recipe=fast baseline=naive [key=value] …   what each technique of a recipe brings, and what leaving it out costs

  drivetrain ablate recipe=fast baseline=naive data=digits model=resnet9
  drivetrain ablate recipe=mine.yaml quality=true          is the result still right, technique by technique?

The variants are the baseline with each technique (alone), the recipe without each (without), and the techniques added one after
another to the baseline, the best first (steps). tables=[steps] measures those alone, in the order of the config.

  only=[precision,clip]  these techniques alone, by their groups or settings
  --format markdown     print each table for a paper, too; or latex

  rounds=8              as for `drivetrain compare`, and so is block_s
  quality=true          a second column: is the result still as good? seeds, max_seeds, quality_s, judge and target are
                        compare's; a config that several tables have is trained once
  --recipe FILE         write the recipe with the claim measured by the last of the steps
  --out DIR             where to write, instead of a new folder below output_dir
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
""", {"--recipe": FILE}, ("format",))  # fmt: skip

bisect = measuring("bisect", "bisect.bisect:command", """\
drivetrain bisect GOOD BAD [key=value] …      which of their differing settings makes BAD slower, or its result worse?

  drivetrain bisect naive fast data=digits                              two recipes
  drivetrain bisect outputs/2026-01-05/11-02-40-1f3c9a mine.yaml        a run, and a recipe's file
  drivetrain bisect 'precision=fp32' 'precision=bf16 compile=inductor' model=resnet9
                        overrides in quotes; words after GOOD and BAD apply to both

  quality=true          bisect the result: the final metric, by trainings with the same seeds; without it, samples a second
  rounds=40             of each comparison, at most: a comparison ends when its interval is clear
  seeds=16              trainings of each config for quality=true, at most
  block_s=0.4           seconds of a block of timed updates; each config has two in a round
  budget_s=3600         seconds for all comparisons, approximately
  --out DIR             where to write, instead of a new folder below output_dir
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

Subsets of the changes are put on top of GOOD, and compared with GOOD in turns as `drivetrain compare` does it. The answer is
the smallest set that makes the difference, also where several changes do so only together. A group's option and its keys are
one change. If BAD fails, the search finds the cause of the failure.

exit codes: 0 named, or they do not differ · 1 not resolved within the budget, or GOOD fails · 2 a bad command line
""", offers=_bisect_words)  # fmt: skip

doctor = measuring("doctor", "profile.doctor:command", """\
drivetrain doctor [group=option] [key=value] …      where a step's time goes, what is wrong, and what is proven to help

  drivetrain doctor model=own model.target=my_pkg.Net data=own data.target=my_pkg.Data trust=[my_pkg]
  drivetrain doctor recipe=naive rounds=16

  prove=false           only examine the step
  profile_s=2           seconds of each examination of the step
  rounds=8, block_s=0.4  of the comparison that proves the overrides
  --recipe FILE         where to write the recipe with its claim, instead of a file below outputs/doctor
  --out DIR             where to write, instead of a new folder below output_dir
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
""", {"--recipe": FILE})  # fmt: skip

tune = measuring("tune", "tune.tune:command", """\
drivetrain tune [what=all] [group=option] [key=value] …      what makes this run faster on this machine, kept where proven

  drivetrain tune model=resnet9                        loaders, precision, layout, optimizer, micro-batch, compiling; then lr
  drivetrain tune what=workers data=imagefolder data.root=photos
  drivetrain tune what=lr optimizer=sgd                the range test, with a plot: advice, nothing is set

  what=all              or workers (loaders and their counts), batch (micro-batches of the same global batch), lr
  budget_s=600          about the seconds that it may take
  rounds=8, block_s=0.3  of each comparison; candidates that fall behind stop early
  quality=true          is the result still right? seeds=5 trainings of each, as far as the budget goes
  lr_updates=150        updates of the range test
  'target=accuracy>=0.98'  instead of speed: the global batch near the gradient noise scale that gets there soonest, over seeds=5
                        (or --target 'accuracy>=0.98')
  --recipe FILE         where to write the recipe with its claim, instead of a file below outputs/tune
  --out DIR             where to write, instead of a new folder below output_dir
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

Writes a recipe with its measurements, tune.json and a page under outputs/tune. The run itself is not changed.
""", {"--recipe": FILE}, ("target",))  # fmt: skip

forecast = measuring("forecast", "forecast.forecast:command", """\
drivetrain forecast [device=NAME] [group=option] [key=value] …      peak memory, time and limits of a run, before it starts

  drivetrain forecast model=gpt task=language_modelling data=stdlib precision=bf16
  drivetrain forecast recipe=imagenet_resnet50 data=synthetic data.shape=[3,224,224] device=h100
  drivetrain forecast model=resnet9 parallel=fsdp parallel.nproc=8 device=a100 what_if=false

  device=here           this machine, measured for a moment; or h100, h200, a100, 4090, … (TAB names them)
  seconds=20            about the seconds that it may take once the run is built
  what_if=true          the further override that would help most: precision, recomputation, compiling, ranks
  --json                the figures as JSON: each with its interval, as [value, low, high]
  --out DIR             where to write, instead of a new folder below output_dir
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

The run's own step runs on tensors without values: nothing is trained and nothing is written. Figures for absent devices come
from data sheets, not from measurements.

exit codes: 0 it fits the device's memory · 1 it does not · 2 a bad command line, or a step that cannot be forecast
""", {"--json": FLAG}, ("device",), _forecast_words)  # fmt: skip

report = measuring("report", "report.report:command", """\
drivetrain report [RUN | DIR …]      one run on a page; or runs and sweeps, finished or under way, in a table, a CSV and a page

  drivetrain report                                    all below outputs/
  drivetrain report outputs/2026-11-21/…/…             one run, with the samples that it gets most wrong
  drivetrain report outputs/multirun/2026-11-21/…      one sweep
  drivetrain report runs/a runs/b target=0.97 out=page

  target=VALUE          the metric value to reach, or 'target=accuracy>=0.98'; default: the value that all completed runs reached
  samples=12            on the page of one run: the worst samples, and as many others; 0 loads no model
  --out DIR             where report.html and report.csv go; else the folder of the one run, or a new one under outputs/report
""", settings=("out",), offers=lambda words, last: runs())  # fmt: skip

rehearse = measuring(
    "rehearse",
    "rehearse:command",
    """\
drivetrain rehearse [recipe=NAME] [group=option] [key=value] …     will this run survive? One of everything, small

  drivetrain rehearse recipe=mine.yaml
  drivetrain rehearse recipe=mine.yaml parallel=fsdp budget=10m

With the run's own config, data and code: every sample is read, memory, time and disk are forecast; some updates, saves
and a stop by SIGTERM; the same again; a SIGKILL and a resume, which must give the same bits; fewer ranks where there
are several; the checkpoints are loaded, predict, and are evaluated and exported; the trackers are reached. The runs go
into a folder that is removed.

  budget=5m             no further step begins after it
  --out DIR             where to write, instead of a new folder below output_dir
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

exit codes: 0 all holds · 1 a step fails: the setting to change stands next to it · 2 an invalid config
""",
)

replay = measuring("replay", "replay:command", """\
drivetrain replay RUN [update=N] [key=value] …      what happened at an update: a sample, a layer, or the learning rate?

  drivetrain replay last                               where the newest run diverged, or its largest spike
  drivetrain replay outputs/2026-11-21/…/… update=8812

The run is trained again from its nearest checkpoint, exactly, in a folder that is removed. Of the update it shows the samples,
the worst first, with their losses and gradients, now and at the weights of some updates before, and the sizes of layers,
gradients and updates next to those of the updates before. It reports whether the recorded losses were repeated bit for bit.

  update=N              by default where the run diverged, else the largest spike of its recorded losses
  back=50               earlier updates to examine too: training begins at a checkpoint before them
  --out DIR             where to write, instead of a new folder below output_dir
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

exit codes: 0 it was replayed · 1 it failed · 2 a bad command line, or a run that cannot be replayed
""", offers=lambda words, last: overrides(words, last) if words else runs())  # fmt: skip
