"""What `--help` of each command says."""

TRAIN = """\
drivetrain train [group=option] [key=value] …      (the same: python -m src.train …)

  drivetrain train                                     the default recipe, on real data
  drivetrain train precision=amp parallel=ddp          techniques are overrides
  drivetrain train optimizer.lr=0.01 epochs=30         so are values
  drivetrain train -m precision=fp32,bf16 optimizer=sgd,adamw   every combination, compared in a table
  drivetrain train recipe=fast                         a shared recipe, by name or path
  drivetrain train resume=outputs/<date>/<run>         go on where a run was (resume=auto: the newest)

  -m, --multirun        run every combination of a=x,y  b=range(1,4); resume=<its folder> goes on with what is left of it
       hydra/launcher=joblib hydra.launcher.n_jobs=2        several at a time (also: submitit_slurm, submitit_local)
       hydra/sweeper=optuna hydra.sweeper.n_trials=20       search: optimizer.lr=tag(log,interval(1e-4,1e-1))
  -c, --cfg job         show the composed config and stop (--resolve: with references resolved)
  -p, --package KEY     with --cfg: that part of it
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
  -q, --quiet           only the result
  -h, --help            this

exit codes: 0 done · 1 an error while training · 2 bad config or recipe · 3 diverged · 75 interrupted, saved, resumable
"""

SHOW = """\
drivetrain show [group=option] [key=value] …      the learning rate (and momentum) over the run that these words compose

  drivetrain show scheduler=cosine scheduler.cycles=3
  drivetrain show recipe=fast epochs=90
  drivetrain show scheduler=onecycle scheduler.momentum=[0.85,0.95] --png schedule.png

  --png FILE            as an image, by matplotlib
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
"""

COMPARE = """\
drivetrain compare key=a,b [group=x,y] [key=value] …      techniques side by side, measured by the first

  drivetrain compare precision=fp32,bf16 surgery=[],[channels_last]
  drivetrain compare recipe=naive,fast data=digits
  drivetrain compare optimizer=adamw,lamb quality=true      is the result still right? seeds=5 trainings of each arm

  rounds=20             at most, each with fresh processes of all arms; an arm that is known to 2 % takes no more
  block_s=0.4           seconds of a block of timed updates, two blocks for each round and arm
  quality=true          train each arm to its end too: PASS, FAIL or INCONCLUSIVE against the first arm's own spread
  seeds=5               trainings of each arm for that
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

Each arm is a live process, and only one runs at a time, in the order A B B A, so that the machine's drift cancels.
"""

ABLATE = """\
drivetrain ablate recipe=fast baseline=naive [key=value] …      what each technique of a recipe brings, and what its loss costs

  drivetrain ablate recipe=fast baseline=naive data=digits model=resnet9
  drivetrain ablate recipe=mine.yaml quality=true          is the result still right, technique by technique?

The arms follow from the recipes: the baseline with each technique, the recipe without each, and the way from one to the
other, the best first. rounds=8, block_s, quality, seeds: as for `drivetrain compare`.

  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
"""

TUNE = """\
drivetrain tune [what=all] [group=option] [key=value] …      what makes this run faster on this machine, kept where proven

  drivetrain tune model=resnet9                        loaders, precision, layout, optimizer, micro-batch, compiling; then lr
  drivetrain tune what=workers data=imagefolder data.root=photos
  drivetrain tune what=lr optimizer=sgd                the range test, with a plot: advice, nothing is set

  what=all              or workers (loaders and their counts), batch (micro-batches of the same global batch), lr
  budget_s=600          seconds that it may take, about
  rounds=8, block_s=0.3 of each comparison; candidates that fall behind run no further rounds
  quality=true          is the result still right? seeds=5 trainings of each, as far as the budget goes
  lr_updates=150        updates of the range test
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

Leaves a recipe with what it rests on, tune.json and a page under outputs/tune. The run itself is not touched.
"""

REPORT = """\
drivetrain report [DIR …]      any runs and sweeps, finished or under way, in one table, one CSV and one page

  drivetrain report                                    all below outputs/
  drivetrain report outputs/multirun/2026-11-21/…      one sweep
  drivetrain report runs/a runs/b target=0.97 out=page

  target=VALUE          time is taken until the metric is there; else what all completed runs reached
  out=DIR               where report.html and report.csv go; else a new folder under outputs/report
"""

DOCTOR = """\
drivetrain doctor [group=option] [key=value] …      where a step's time goes, what is wrong, and what is proven to help

  drivetrain doctor model=own model.target=my_pkg.Net data=own data.target=my_pkg.Data trust=[my_pkg]
  drivetrain doctor recipe=naive rounds=16

  prove=false           only profile
  profile_s=2           seconds of each kind of profile of the step
  rounds=8, block_s=0.4 of the comparison that proves the overrides
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
"""
