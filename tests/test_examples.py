"""The examples do what they say: examples/slow_loss, whose slow line the doctor finds, examples/extending and own_samples."""

import heapq
import re
import shlex
import shutil
import sqlite3
import sys
import textwrap
import tomllib
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

from drivetrain.cli.main import main
from drivetrain.core.errors import UserError
from drivetrain.core.machine.paths import add_import_paths
from drivetrain.core.options.horizon import Horizon
from drivetrain.launch import launcher
from drivetrain.launch.job import prepare
from drivetrain.recipe import reader as recipe
from drivetrain.sweeps import store
from drivetrain.testing import contract_problems
from tests.support.command import ROOT, checkpoints, only_run, records, run
from tests.support.put import put
from tests.support.to_end import continued, run_to_end

HERE = ROOT / "examples/slow_loss"
GIVEN = ("-cd", str(HERE / "conf"), f"recipe={HERE / 'find.yaml'}", "trust=[anomaly]", "runtime.threads=1")
SHORT = ("saving=none", "data.train={first: 0, count: 96}", "data.test={first: 96, count: 32}")


@pytest.fixture
def anomaly(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.delitem(sys.modules, "anomaly", raising=False)
    import anomaly

    return anomaly


def test_both_losses_are_the_same_with_their_gradients(anomaly, float64):
    target = torch.stack([anomaly.Textures(0, 4, 16)[n][1] for n in range(4)]).double()
    for scale in (1.0, 30.0):  # small margins, and such as are -1 and 1
        values, gradients = [], []
        for loss in (anomaly.Slow(16), anomaly.Mended(16)):
            torch.manual_seed(0)
            output = (scale * torch.randn(4, 16, 16)).requires_grad_()
            value = loss(output, target)
            value.backward()
            values.append(value.detach())
            gradients.append(output.grad)
        torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
        assert gradients[0].abs().sum() > 0


def test_the_third_term_wants_defects_above_the_rest(anomaly):
    loss, target = anomaly.Mended(), torch.zeros(1, 64)
    target[0, :32] = 1
    torch.manual_seed(0)
    good, bad = loss.apart(target, target), loss.apart(1 - target, target)
    assert 0 <= good < 0.01 < 0.9 < bad <= 1


def test_a_texture_and_where_its_defect_is(anomaly):
    sound, torn = (anomaly.Textures(0, 2)[n] for n in range(2))
    assert sound[0].shape == torn[0].shape == (1, 32, 32)
    assert sound[1].sum() == 0 < torn[1].sum() < 200
    assert torch.equal(anomaly.Textures(1, 1)[0][0], torn[0])


def test_both_train_through_the_command_and_come_to_the_same(tmp_path):
    found = []
    for loss in ("slow", "mended"):
        words = (f"loss={loss}", "loss.levels=8", "optimizer.lr=0.02", "log_every=1", "epochs=4", f"output_dir={loss}")
        run("train", "-q", *GIVEN, *SHORT, *words, cwd=tmp_path, code=0)
        found.append([record["loss"] for record in records(only_run(tmp_path / loss), "train")])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0][-1] < 0.9 * found[0][0]


@pytest.mark.slow
@pytest.mark.own_process  # a forked one has the server's frames, which the doctor takes for the user's own code
def test_the_doctor_names_the_line(tmp_path):
    done = run("doctor", *GIVEN, *SHORT, "loss=slow", "prove=false", "profile_s=0.3", "evaluate_every=1000", cwd=tmp_path, code=0)
    verdict, evidence = done.out.split("verdict: ")[1].splitlines()[:2]
    lines = (HERE / "anomaly.py").read_text().splitlines()
    named = int(re.search(r"anomaly\.py:(\d+) in graded", evidence)[1])
    assert "loop over elements" in verdict
    assert "costs = costs + inside" in lines[named - 1]


def test_the_commands_of_its_readme_are_good(monkeypatch):
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    add_import_paths(["conf"])
    commands = re.findall(r"^    drivetrain (train|compare|doctor) (.*)$", (HERE / "README.md").read_text(), re.M)
    assert {verb for verb, _ in commands} == {"train", "compare", "doctor"}
    for _, text in commands:
        words = [w for w in shlex.split(text.replace("-cd conf", "")) if not w.startswith(("prove=", "output_dir="))]
        for job in store.prepare(words, ["conf"]):
            assert job.problems == []
    assert recipe.read(Path("find.yaml")).description


# --- examples/extending: options and a verb of one's own, which docs/extending.md goes through ---

EXTENDING = ROOT / "examples/extending"
CONF = str(EXTENDING / "conf")
# One row for each option: what it needs beside it in a tiny run.
OPTIONS = {
    "optimizer=sign_sgd": [],
    "scheduler=sine": [],
    "precision=fp64": [],
    "loader=prefetch_one": ["data=digits"],
    "augment=[invert]": ["data=digits", "augment.invert.max_value=16"],
    "loss=poly1": [],
    "loss=cross_entropy_top2": [],
    "metrics=[balanced_error]": [],
    "parallel=local_sgd": [],
    "logger=[sqlite]": [],
}


@pytest.fixture
def my_pkg(monkeypatch):
    """The example's package can be imported, and is imported anew."""
    monkeypatch.syspath_prepend(EXTENDING)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_pkg"]:
        del sys.modules[name]


@pytest.fixture
def job(tiny, my_pkg):
    """`job(*overrides)`: a tiny run with the example's options, composed and validated."""
    return lambda *overrides: prepare(tiny("trust=[my_pkg]", *overrides), [CONF])


@pytest.fixture
def trainer(job, trainer_of):
    """`trainer(*overrides)`: the trainer of such a run, not started."""
    return lambda *overrides: trainer_of(job(*overrides))


def test_every_example_has_a_row():
    files = sorted(file.relative_to(CONF).with_suffix("") for file in Path(CONF).glob("*/*.yaml"))
    assert sorted(re.sub(r"[\[\]]", "", option).replace("=", "/") for option in OPTIONS) == list(map(str, files))


@pytest.mark.parametrize("option", OPTIONS)
def test_an_options_file_is_its_classs_signature(option, my_pkg):
    group, _, name = option.partition("=")
    assert contract_problems(group, name.strip("[]"), [CONF]) == []


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "parallel=local_sgd"])
def test_an_option_trains_saves_and_resumes(option, job):
    first = launcher.launch(job(option, *OPTIONS[option]), quiet=True)
    assert (first.status, first.updates) == ("completed", 2), first.error
    continued(first.run_dir, "updates=3", updates=3)


def test_sign_sgd_moves_every_weight_by_the_learning_rate(trainer):
    made = trainer("optimizer=sign_sgd", "optimizer.lr=0.25", "updates=1")
    before = [p.detach().clone() for p in made.model.parameters()]
    made.fit()
    moved = torch.cat([(p.detach() - old).abs().flatten() for p, old in zip(made.model.parameters(), before, strict=True)])
    assert set(moved[moved > 0.01].round(decimals=4).tolist()) == {0.25}  # a weight without a gradient stays
    assert (moved > 0.01).float().mean() > 0.5


def test_sine_falls_from_the_learning_rate_to_its_end(my_pkg):
    from my_pkg.scheduler import Sine

    schedule = Sine(final=0.5)
    schedule.set_horizon(Horizon(90, [90]))
    assert [schedule.lr_factor(update) for update in (0, 30, 90)] == pytest.approx([1, 0.75, 0.5])  # sin 30° is a half


def test_fp64_computes_in_float64_and_agrees_with_float32(trainer):
    double, single = trainer("precision=fp64"), trainer("precision=fp32")
    assert {p.dtype for p in double.model.parameters()} == {torch.float64}
    x = next(iter(single.loader.stream(single.train_data, single.requests(), single.device, single.memory_format))).x
    assert double.model(x).dtype == torch.float64
    torch.testing.assert_close(double.model(x).float(), single.model(x), rtol=1e-5, atol=1e-5)


def test_prefetch_one_streams_what_sync_streams(trainer):
    streams = []
    for loader in ("prefetch_one", "sync"):
        made = trainer("data=digits", f"loader={loader}", "epochs=1")
        streams.append(list(made.loader.stream(made.train_data, made.requests(), made.device, made.memory_format)))
    assert len(streams[0]) == len(streams[1]) > 90
    for ours, sync in zip(*streams, strict=True):
        assert torch.equal(ours.x, sync.x)
        assert torch.equal(ours.y, sync.y)
        assert (ours.last, ours.epoch_end) == (sync.last, sync.epoch_end)


def test_prefetch_one_passes_on_what_its_reader_raises(my_pkg):
    from my_pkg.loader import PrefetchOne

    pipeline = mock.Mock(side_effect=ValueError("a broken file"))
    with pytest.raises(ValueError, match="a broken file"):
        list(PrefetchOne().stream(pipeline, [mock.Mock()], torch.device("cpu"), torch.contiguous_format))


def test_invert_draws_for_each_sample_by_itself(my_pkg):
    from my_pkg.augment import Invert

    x = torch.randint(0, 256, (64, 3, 4, 4), dtype=torch.uint8)
    invert, numbers = Invert(0.5, 255.0), torch.arange(64)
    out = invert(x, 0, 1, numbers)
    inverted = (out == 255 - x).flatten(1).all(1)
    assert torch.equal(out, torch.where(inverted.view(-1, 1, 1, 1), 255 - x, x))
    assert 16 < inverted.sum() < 48
    assert torch.equal(invert(x[5:9], 0, 1, numbers[5:9]), out[5:9])  # whoever else is in its batch
    assert not torch.equal(invert(x, 0, 2, numbers), out)  # another epoch, another draw


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["augment=[invert]", "data=digits"], r"data=digits go up to 16: set augment\.invert\.max_value=16"),
        (["loss=poly1", "augment=[mixup]"], "loss=poly1"),
        (["parallel=local_sgd", "precision=amp"], "precision=bf16"),  # ranks could skip updates apart
    ],
)
def test_what_an_option_cannot_go_with_is_refused(words, says, job):
    with pytest.raises(UserError, match=says):
        job(*words)


def test_poly1_without_epsilon_is_cross_entropy(my_pkg):
    from my_pkg.loss import Poly1

    output, target = torch.randn(16, 5), torch.arange(16) % 5
    plain = torch.nn.functional.cross_entropy(output, target)
    torch.testing.assert_close(Poly1(0.0)(output, target), plain)
    assert Poly1(2.0)(output, target) > plain


def test_top2_accuracy(my_pkg):
    from my_pkg.loss import CrossEntropyTop2

    output = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    loss = CrossEntropyTop2()
    sums = dict(zip((*loss.metrics, "count"), loss.sums(output, torch.tensor([0, 1, 2])).tolist(), strict=True))
    assert (sums["accuracy"], sums["top2_accuracy"], sums["count"]) == (1, 2, 3)


def test_balanced_error_counts_each_class_the_same(my_pkg):
    from my_pkg.metric import BalancedError

    metric = BalancedError()
    metric.classes = 3  # of which the last one does not occur
    (sums,) = metric.prepare(torch.eye(3)[[0, 0, 0, 0, 1]], torch.tensor([0, 0, 0, 1, 1]))
    assert metric.figures(sums.double()) == {"balanced_error": pytest.approx((0 + 1 / 2) / 2)}


def test_averaging_every_update_is_plain_sgd_on_the_whole_batch(tiny, job, tmp_path):
    """The mean of two weights after one step each is the weight after one step along the mean gradient."""
    settings = ["trust=[my_pkg]", "optimizer.momentum=0", "optimizer.nesterov=false", "updates=3"]
    local = tiny(*settings, "parallel=local_sgd", "parallel.every=1", "output_dir=local")
    run("train", "-q", "--config-dir", CONF, *local, cwd=tmp_path, code=0)
    single = launcher.launch(job(*settings), quiet=True)
    weights = [
        safetensors.torch.load_file(checkpoints(run_dir)[-1] / "model.safetensors")
        for run_dir in (only_run(tmp_path / "local"), Path(single.run_dir))
    ]
    for name, averaged in weights[0].items():
        torch.testing.assert_close(averaged, weights[1][name], rtol=1e-4, atol=1e-6)


def test_when_local_sgd_averages(my_pkg):
    from my_pkg.parallel import AveragingStep

    inner, averaged = mock.Mock(), []
    inner.update.side_effect = [True, True, False, True]
    step = AveragingStep(
        inner, is_due=lambda: inner.update.call_count == 1, average=lambda: averaged.append(inner.update.call_count)
    )
    for epoch_end in (False, False, True, True):  # the third update, at an epoch's end, is skipped
        step.micro_batch(mock.Mock(epoch_end=epoch_end), torch.zeros(()))
        step.update()
    assert averaged == [1, 4]


def test_the_tracker_holds_what_metrics_jsonl_holds_once(job):
    """Also of a run that was killed after its last checkpoint: a resume takes back what it writes again."""
    run_dir = Path(launcher.launch(job("logger=[sqlite]", "log_every=1"), quiet=True).run_dir)
    with closing(sqlite3.connect("figures.db")) as database, database:
        database.execute("INSERT INTO figures VALUES (?, 3, 'train/loss', 9.9)", (run_dir.name,))
        database.execute("INSERT INTO figures VALUES ('another', 3, 'train/loss', 1.5)")
    launcher.launch(prepare([f"resume={run_dir}", "updates=3"]), quiet=True)
    with closing(sqlite3.connect("figures.db")) as database:
        losses = database.execute(
            'SELECT run, "update", value FROM figures WHERE name = ? ORDER BY 2, 1', ("train/loss",)
        ).fetchall()
    assert losses == [*((run_dir.name, r["update"], r["loss"]) for r in records(run_dir, "train")), ("another", 3, 1.5)]


def test_the_verb_counts_parameters(tiny, my_pkg, capsys):
    from my_pkg.parameters import command

    assert command(tiny("model=mlp", "model.hidden=[5]")) == 0
    count = (3 * 8 * 8 + 1) * 5 + (5 + 1) * 4
    assert capsys.readouterr().out == f"model=mlp: {count:,} parameters, {count:,} of them trainable\n"
    with pytest.raises(UserError, match="did you mean"):
        command(["model=mpl"])


def test_the_callback_logs_the_norm_of_the_weights(tiny, my_pkg):
    words = tiny("trust=[my_pkg]", "callbacks=[my_pkg.callback.WeightNorm]")
    result = launcher.launch(prepare(words), quiet=True)
    weights = safetensors.torch.load_file(checkpoints(Path(result.run_dir))[-1] / "model.safetensors")
    norm = sum(float(w.square().sum()) for w in weights.values()) ** 0.5
    logged = [record["weight_norm"] for record in records(Path(result.run_dir), "callback")]
    assert len(logged) == 2
    assert logged[-1] == pytest.approx(norm, rel=1e-5)
    assert (Path(result.run_dir) / "notes.txt").read_text().startswith("completed after 2 updates")


@pytest.fixture
def plugin(tmp_path, my_pkg, monkeypatch):
    """The package as `pip install examples/extending` leaves it in site-packages."""
    project = tomllib.loads((EXTENDING / "pyproject.toml").read_text())["project"]
    site, name = tmp_path / "site", project["name"].replace("-", "_")
    shutil.copytree(EXTENDING / "my_pkg", site / "my_pkg")
    info = site / f"{name}-{project['version']}.dist-info"
    put(info / "METADATA", f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(site)


def test_an_installed_plugin_needs_no_config_dir_and_no_trust_and_brings_a_verb(plugin, tiny, capsys):
    assert main(["train", "-q", *tiny("optimizer=sign_sgd", "precision=fp64", "loss=poly1", "callbacks=[weight_norm]")]) == 0
    for words, said in (
        (["list", "parallel"], "ranks train by themselves"),
        (["parameters", *tiny("model=mlp", "model.hidden=[5]")], "model=mlp: "),
        (["help"], "drivetrain parameters"),
    ):
        capsys.readouterr()
        assert main(words) == 0
        assert said in capsys.readouterr().out


def test_the_page_shows_the_code_that_runs():
    """Each block of docs/extending.md with a language is part of a file of the examples."""
    page = (ROOT / "docs/extending.md").read_text()
    blocks = re.findall(r"^```(python|yaml|toml)\n(.*?)^```", page, re.M | re.S)
    files = {kind: [p.read_text() for p in (ROOT / "examples").rglob(f"*.{kind}")] for kind in ("py", "yaml", "toml")}
    assert len(blocks) > 12
    for language, block in blocks:
        texts = files["py" if language == "python" else language]
        assert any(block in text for text in texts), f"no file in {EXTENDING} has this:\n{block}"


# --- the pages ---

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "examples").rglob("README.md"),
]
COMMAND = re.compile(r"^    (python -m src\.train|drivetrain (?:train|compare|show)) (.*)$", re.M)
# What only a reader's machine has: photographs, a packed folder, shards, runs, a recipe, an installed plugin.
READERS_OWN = (
    r"is no directory|is no packed folder|are not there|is no run's directory|recipe=mine is not known"
    r"|recipe=(./mine|RUN/recipe|RUN/planned).yaml: there is no such file"
    r"|(sign_sgd|fp64) is no option|is no file|has no folder (images|masks)"
)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_page_are_good(page, monkeypatch, my_pkg):
    """Each is composed and validated, as far as that goes without what the reader's machine has."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.chdir(HERE if page.parent == HERE else ROOT)
    for verb, text in COMMAND.findall(re.sub(r"\\\n *", "", page.read_text())):
        given = shlex.split(text, comments=True)
        if "…" in text.partition(" #")[0]:  # an address or a hash that is shortened on the page
            continue
        swept = "-m" in given or "compare" in verb
        dirs = [given.pop(i + 1) for i, word in enumerate(given) if word in ("-cd", "--config-dir")]
        for folder in dirs:  # the command finds packages beside it
            monkeypatch.syspath_prepend(Path(folder).resolve().parent)
        words = [w for w in given if "=" in w and not re.match(r"hydra|quality=|resume=auto|rounds=|block_s=", w)]
        if "hydra/sweeper=optuna" in given or "recipe=speed_ladder" in given:  # other grammars than a command's own
            continue
        try:
            problems = [p for job in store.prepare(words, dirs) for p in job.problems] if swept else prepare(words, dirs) and []
        except UserError as error:
            problems = error.problems
        assert [p for p in problems if not re.search(READERS_OWN, p)] == [], text


# --- examples/own_samples: dicts of lines of many lengths, which docs/data.md goes through ---

SAMPLES = ROOT / "examples/own_samples"


def test_the_docs_show_what_the_example_of_dicts_does():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.S)
    code = (SAMPLES / "my_lines.py").read_text()
    assert len(blocks) == 2
    assert all(block in code for block in blocks)


def test_the_command_of_the_docs_trains_on_dicts(monkeypatch, tmp_path):
    """Shortened: a few updates in buckets, on smaller modules, then evaluated."""
    text = re.search(r"drivetrain train (data=own data\.target=my_lines.*?)\n\n", (ROOT / "docs/data.md").read_text(), re.S)[1]
    monkeypatch.syspath_prepend(SAMPLES)
    monkeypatch.setattr("my_lines.MODULES", (heapq, textwrap, shlex))
    result = run_to_end([*shlex.split(text.replace("\\\n", " ")), "updates=20", "batch=bucketed", f"output_dir={tmp_path}"])
    assert result.judged("final")["accuracy"] > 0.5
    assert result.judged("final")["loss"] < 1.0  # of three modules by chance: 1.1
