"""`drivetrain report`: what any runs left, in one table, one CSV and one page."""

import csv
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import drivetrain
from drivetrain.cli import main
from drivetrain.core.options.selection import Reach
from drivetrain.data.tabular import data_file
from drivetrain.measure.report import report, samples
from drivetrain.measure.report.report import summarize_repeats
from drivetrain.run import directory
from drivetrain.run.reader import differing, find, read
from drivetrain.run.result import Result
from drivetrain.ui.pages.run_table import common_target, named, verdict
from tests.support import pages


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> tuple[Path, dict[tuple[str, ...], Path]]:
    """A folder of runs that several tests read, and those that are there, by their words."""
    return tmp_path_factory.mktemp("runs"), {}


@pytest.fixture
def train(known, tiny) -> Callable[..., Result]:
    """Train a tiny run with these words, or copy one that was trained for another test; it lies in outputs/."""
    folder, runs = known
    made = itertools.count()

    def trained(*words: str) -> Result:
        if words not in runs:
            result = drivetrain.train(tiny(*words))
            runs[words] = Path(shutil.copytree(result.run_dir, folder / str(len(runs))))
            return result
        return Result.read(Path(shutil.copytree(runs[words], f"outputs/known-{next(made)}")))

    return trained


@pytest.fixture
def two(train) -> list[Path]:
    """Two runs that differ in their optimizer."""
    words = ["data=digits", "epochs=2", "updates=null", "batch.global_batch=128", "log_every=4"]
    return [Path(train(*words, f"optimizer={name}").run_dir) for name in ("sgd", "adamw")]


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "report.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_table_a_csv_and_a_page(two, says):
    said = says("report", "outputs", "out=page", "target=0.1")
    rows = rows_of(Path("page"))
    assert {row["optimizer"] for row in rows} == {"sgd", "adamw"}
    assert {row["status"] for row in rows} == {"completed"}
    for row, run_dir in zip(sorted(rows, key=lambda row: row["folder"]), sorted(two), strict=True):
        result = json.loads((run_dir / "result.json").read_text())
        assert float(row["accuracy at the end"]) == pytest.approx(result["metrics"]["validation"]["final"]["accuracy"], abs=1e-4)
        assert row["folder"] in str(run_dir)
        assert row["time to 0.1"].endswith(" s")
    assert "adamw" in said
    shown, _, left_out = said.partition("not shown here: ")
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 100
    assert ("best accuracy" in shown, "folder" in left_out) == (True, True)
    page = (Path("page") / "report.html").read_text()
    assert "Of 2 runs, optimizer=" in said
    pages.check(page)
    assert re.findall(r'<button type="button">(.*?)</button>', page)[:4] == ["run", "time to 0.1", "best accuracy", "samples/s"]
    assert "The same for all: status completed" in page
    assert page.count("<tr class=winner>") == 1
    assert [page.count(f'<figure class="over{n}">') for n in range(3)] == [2, 2, 2]
    assert "samples and some others" in (two[0] / "report.html").read_text()  # as the run's end left it
    runs = find([Path("outputs")])
    assert {key.split(".")[0] for key in differing(runs)} == {"optimizer"}
    assert common_target(runs) == min(run.best() for run in runs)  # what all reached
    assert all(run.to_target(common_target(runs)) for run in runs)

    said = says("report", two[0], "samples=3")  # one run: its own page, in its own folder, with samples
    assert said.startswith("mlp on digits reached accuracy")
    page = (two[0] / "report.html").read_text()
    pages.check(page)
    assert page.count("<img alt=") == 6
    worst = [float(share) for share in re.findall(r'class="(?:right|wrong)">. \d+ \((\d+)%\)', page)]
    assert len(worst) == 6
    assert "of 359 of the test set" in page
    names = re.findall(r'<span class="soft">(test\[\d+\])', page)  # in sight
    assert len(names) == len({*names}) == 6  # those at random are others than the worst
    table = page[page.index("Confusion matrix, 359 of the test set") :]
    assert sum(map(int, re.findall(r'--share:[\d.]+">(\d+)<', table[: table.index("</table>")]))) == 359


def test_the_page_of_a_regression_draws_numbers_against_what_is_true(tiny, capsys):
    """The command's own page has samples, which the run left without; `report` makes it again."""
    words = ["task=regression", "data=diabetes", "model=mlp", "epochs=2", "updates=null", "batch.global_batch=64", "loss=mse"]
    assert main.main(["train", *tiny(*words)]) == 0
    (page,) = Path("outputs").glob("*/*/report.html")
    text = page.read_text()
    pages.check(text)
    rows = re.findall(r'<th scope="row">scikit-learn&#x27;s diabetes, row (\d+)</th><td>([\d.]+)</td><td>([-\d.]+)</td>', text)
    assert len(rows) == 24
    known = np.loadtxt(data_file("diabetes_target.csv.gz"))
    assert all(known[int(number) - 1] == pytest.approx(float(true), abs=0.1) for number, true, _ in rows)
    drawn = {chart[0]: chart[1].count("<circle") for chart in re.findall(r"<figcaption>(.*?)</figcaption>(.*?)</svg>", text)}
    assert drawn["Predicted against true"] == drawn["Residuals: predicted less true"] == 88


@pytest.mark.parametrize("kind", ["class", "labels"])
def test_probabilities_are_drawn_as_scikit_learn_measures_them(kind):
    """Equal probabilities are one point; a class that all samples have, or none, has no curve."""
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import precision_recall_curve, roc_auc_score

    draws = np.random.default_rng(0)
    shares, truth = draws.integers(1, 9, (60, 3)) / 10, np.eye(3)[draws.integers(0, 2, 60)]
    found = [
        samples.ShownSample("", None, "", "", None, 0.0, (), line.tolist(), of.tolist())
        for line, of in zip(shares, truth, strict=True)
    ]
    loaded = SimpleNamespace(classes=["a", "b", "c"], kind=kind)
    page = "".join(part.html for part in samples._ranked(found, loaded, loaded.classes, "60 of the test set"))
    areas = dict(re.findall(r"(\w) \(area ([\d.]+)\)</li>", page))
    assert areas == {name: f"{roc_auc_score(truth[:, n], shares[:, n]):.3f}" for n, name in enumerate("ab")}
    precision, recall, _ = precision_recall_curve(truth[:, 0], shares[:, 0])
    curve = re.search(r"Precision against recall.*?data-name=\"a\" points=\"([^\"]+)", page)[1].split()
    assert len(curve) == len({*zip(precision, recall, strict=True)}) - 1  # scikit-learn adds the point (1, 0)
    if kind == "labels":
        kept = calibration_curve(truth.ravel(), shares.ravel(), n_bins=10)[0]
        assert len(re.search(r"Calibration.*?data-name=\"the model\" points=\"([^\"]+)", page)[1].split()) == len(kept)
    alone = "".join(part.html for part in samples._ranked(found, loaded, ["b"], ""))
    assert re.findall(r"(\w) \(area [\d.]+\)</li>", alone) == ["b"]


def test_the_worst_rows_of_a_table_stand_with_their_values(train, tmp_path):
    rows = [
        f"{n},{n % 7 / 4},{'red' if n % 3 else 'blue'},20{10 + n % 9}-03-1{n % 9},{'yes' if n % 2 else 'no'}" for n in range(80)
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["amount,size,colour,day,kind", *rows]))
    words = ["data=tabular", f"data.path={tmp_path}/rows.csv", "data.target=kind", "epochs=1", "updates=2", "task=classification"]
    result = train(*words)
    report.add_samples(result)
    page = (Path(result.run_dir) / "report.html").read_text()
    pages.check(page)
    shown = re.findall(r"rows\.csv:(\d+)</th>((?:<td[^>]*>[^<]*</td>)+)", page.replace("<wbr>", ""))
    assert len(shown) > 10
    for line, cells in shown:
        number, size, colour, day, _ = rows[int(line) - 2].split(",")
        said = re.findall(r">([^<]*)</td>", cells)[3:]
        year, month, day = (str(int(part)) for part in day.split("-"))
        assert (said[:3], said[3].split(", ")[:3]) == ([number, f"{float(size):g}", colour], [year, month, day])


def test_runs_under_way_killed_and_half_written(two):
    """Looking at them leaves no trace."""
    under_way, killed = two
    (killed / "result.json").unlink()
    (killed / ".lock").unlink()
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "upd')
    before = sorted(Path("outputs").rglob("*"))
    assert [run.status for run in find([Path("outputs")])] == ["completed", "killed"]
    assert sorted(Path("outputs").rglob("*")) == before
    (under_way / "result.json").unlink()
    with directory.locked(under_way):
        assert [run.status for run in find([Path("outputs")])] == ["running", "killed"]
    assert main.main(["report", "outputs", "out=page"]) == 0


@pytest.mark.parametrize(
    ("words", "seeds", "completed", "word", "because"),
    [
        ("optimizer.lr=1e-9", 3, "3", "FAIL", ""),
        ("log_every=5", 3, "3", "PASS", ""),
        # A seed that did not come to an end is a FAIL.
        ("optimizer.lr=1e30", 2, "0 of 2 completed", "FAIL", "the run with seed 0 ended: diverged"),
    ],
)
def test_several_configs_over_the_same_seeds_have_a_verdict(train, words, seeds, completed, word, because, says):
    for more in ([], words.split()):
        for seed in range(seeds):
            train("data=digits", "epochs=2", "updates=null", "batch.global_batch=128", f"runtime.seed={seed}", *more)
    found = summarize_repeats(find([Path("outputs")]))
    assert found.header[:3] == ["config", "accuracy ± deviation", "seeds"]
    first, second = found.rows
    assert re.fullmatch(r"[\d.]+ ± [\d.]+", first[1])
    assert (first[2:], second[0], second[2:4]) == ([str(seeds), "", ""], words, [completed, word])
    assert second[4].startswith(because)
    assert re.search(rf"{words} +[\d.±– ]+ {completed} +{word}", says("report", "outputs", "out=page"))
    assert f'<td class="{word}">{word}</td>' in (Path("page") / "report.html").read_text()


def test_folds_are_summed_up_as_seeds_are(train, says, capsys):
    """A row for each config, in the terminal and on the page, whose answer is the best mean."""
    for rate in ("0.01", "1e-9"):
        for fold in range(2):
            words = ["data=digits", "epochs=2", "updates=null", "batch.global_batch=64", f"optimizer.lr={rate}"]
            train(*words, "data.folds=2", f"data.fold={fold}")
    found = summarize_repeats(find([Path("outputs")]))
    assert (found.name, found.header[:3]) == ("Over folds", ["config", "accuracy ± deviation", "folds"])
    assert [row[0] for row in found.rows] == ["optimizer.lr=0.01", "optimizer.lr=1e-9"]
    assert ([row[2] for row in found.rows], found.winner) == (["2", "2"], 0)
    said = " ".join(says("report", "outputs", "out=page").split())
    spread = found.rows[0][1]
    assert f"Over 2 folds optimizer.lr=0.01 has the mean accuracy {spread} on the validation set at the end" in said
    report.of_sweep(Path("outputs"))
    assert "Over folds, at the end of training:\n config " in capsys.readouterr().out


def test_configs_are_judged_on_the_same_data_alone(train):
    """An interrupted run says nothing, and of a seed that was run twice the completed one counts."""
    words = ["epochs=1", "updates=null", "batch.global_batch=64", "data.samples=128"]
    for noise in ("data.classes=3", "data.classes=4"):
        for seed in (0, 1, 1):
            last = train("data=synthetic", *words, noise, f"runtime.seed={seed}")
        result = Path(last.run_dir) / "result.json"
        result.write_text(json.dumps({**json.loads(result.read_text()), "status": "interrupted"}))
    assert [row[2:] for row in summarize_repeats(find([Path("outputs")])).rows] == [["2"], ["2"]]


def test_seconds_to_a_target_are_of_one_clock_or_the_report_says_so(train, says):
    """A run that has noted its target counts from the start of its process, and another one cannot."""
    words = ["data=digits", "epochs=2", "updates=null", "batch.global_batch=128"]
    noted, plain = (Path(train(*words, *more).run_dir) for more in (["target=accuracy>=0.1"], ["optimizer=adamw"]))
    result = json.loads((noted / "result.json").read_text())
    result["target"]["seconds"] = 77.5
    (noted / "result.json").write_text(json.dumps(result))
    run, of = read(noted), Reach.parse("accuracy>=0.1")
    assert run.to_target(of) == (77.5, result["target"]["update"])
    assert run.to_target(Reach.parse("accuracy>=0.1001"))[0] < 77  # of another one, since the first record
    told = []
    for runs, target in (([noted, plain], of), ([noted], of), ([plain], "accuracy>=1")):
        told.append(" ".join(says("report", *runs, "samples=0", "out=page", f"target={target}").split()))
    assert "The seconds to the target count from each run's first record" in told[0]
    assert "77.5" not in told[0]
    assert f"{noted.name} reached accuracy>=0.1 after {result['target']['update']} updates, 77.5 s after" in told[1]
    assert f"{plain.name} has not reached accuracy>=1" in told[2]
    result["target"] |= {"update": None, "seconds": None}
    (noted / "result.json").write_text(json.dumps(result))
    assert read(noted).noted(of) is None


def test_a_target_in_words_ranks_configs_by_the_time_to_it(says, refused):
    """Seeds that do not reach it count as endlessly long, and stay in the table."""
    made = {("adamw", 0): (0.5, 0.9), ("adamw", 1): (0.4, 0.6), ("sgd", 0): (0.9, 0.95), ("sgd", 1): (0.2, 0.85)}
    for (optimizer, seed), values in made.items():
        final = {"accuracy": values[-1], "loss": 1.0}
        selection = {"metric": "accuracy", "better": "max"}
        result = {"status": "completed", "metrics": {"validation": {"final": final}, "test": {}}, "selection": selection}
        records = [
            {"event": "evaluate", "set": "validation", "update": n, "time": 10.0 * n, "accuracy": value, "loss": 1.0}
            for n, value in enumerate(values, 1)
        ]
        files = {"result.json": json.dumps(result), "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records)}
        files["config.yaml"] = f"epochs: {len(optimizer)}\nruntime: {{seed: {seed}}}\n"
        a_run(Path(f"outputs/{optimizer}{seed}"), seed, **files)
    said = says("report", "outputs", "out=page", "target=accuracy>=0.8")
    times = {row["folder"].split("/")[-1]: row["time to accuracy>=0.8"] for row in rows_of(Path("page"))}
    *there, never = times
    assert (never, times[never]) == ("adamw1", "–")
    assert [times[name] for name in there] == sorted(times[name] for name in there if times[name].endswith(" s"))
    assert said.index("accuracy>=0.8 reached by") < said.index("2 of 2 seeds, after ") < said.index("1 of 2 seeds")
    page = (Path("page") / "report.html").read_text()
    assert next(csv.reader((Path("page") / "report.csv").open()))[:2] == ["run", "time to accuracy>=0.8"]
    assert "time to accuracy" in said  # the target's column is not left out for want of width
    assert "reached accuracy>=0.8 first, after 0.0 s; 3 of them reached it" in " ".join(said.split())
    assert page.index("<tr class=winner>") < page.index("</tr>", page.index("<tbody>"))
    assert "Of 4 runs, none reached accuracy>=0.99" in says("report", "outputs", "out=page", "target=accuracy>=0.99")
    assert "class=winner" not in (Path("page") / "report.html").read_text()
    assert "no run has evaluated f1" in refused("report", "outputs", "target=f1>=0.8")


def test_a_run_without_anything_but_a_result(tmp_path):
    (tmp_path / "outputs/job").mkdir(parents=True)
    (tmp_path / "outputs/job/result.json").write_text(json.dumps({"status": "failed", "error": "bad words"}))
    assert main.main(["report", "outputs", "out=page"]) == 0
    assert rows_of(Path("page"))[0]["error"] == "bad words"


GOOD = {"status": "completed", "metrics": {"validation": {"final": {"loss": 1.0}, "best": {"loss": 1.0}}}, "updates": 3}
DEEP = "[" * 3000
ALIASES = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
BAD_FILES = {
    "result.json": [
        "", "[]", "3", DEEP, "{", '{"status": 3}', '{"metrics": []}', '{"metrics": {"test": 3}}',
        '{"metrics": {"test": {"final": []}}}',
        '{"updates": "many"}', '{"updates": 1' + "0" * 400 + "}", '{"wall_s": null}', '{"overrides": [1]}', '{"error": ["a"]}',
        '{"tables": {"test": {"final": {"confusion": {"rows": 1, "columns": 1}}}}}', '{"samples_per_second": true}',
        '{"metrics": {"test": {"final": {"loss": NaN}}}, "samples_per_second": Infinity}', '{"selection": "loss"}', "\udcff",
    ],
    "config.yaml": ["[", "3", "[1, 2]", DEEP, ALIASES, "a: &a [*a]", "runtime: {seed: x}", "runtime: {seed: [1]}",
                    "d: 2026-13-01", "1: {2: 3}", "? [a, b]\n: 1", "x: " + "1" * 5000,
                    "a: !!python/object:os.system {}", "a: \x00",
                    "status: mine\nupdates: 5", "lr: .nan\nmodel: '<!--<script>'"],
    "recipe.yaml": ["3", "defaults: 5", "defaults: [1, [2], null, {3: 4}]", "defaults: {a: b}", ALIASES],
    "environment.json": ["3", "[]", '{"time": "now"}', '{"time": [1]}', '{"versions": 3}', '{"overrides": {"a": 1}}',
                         '{"selection": ["loss"]}', '{"selection": {"metric": 3}}', DEEP],
    "metrics.jsonl": ['{"event": "train", "update": 1, "loss": NaN, "samples_per_second": 1' + "0" * 400 + "}\n",
                      '{"event": "evaluate", "update": 1, "set": ["x"], "loss": -Infinity}\n', '{"event": [], "update": 2}\n'],
}  # fmt: skip


def a_run(folder: Path, seed: int, **files: str) -> Path:
    """A run's files by hand, some of them replaced."""
    folder.mkdir(parents=True)
    records = [{"event": "train", "update": n, "loss": 1.0, "samples_per_second": 10.0, "time": n} for n in range(3)]
    records.append({"event": "evaluate", "update": 3, "set": "validation", "loss": 1.0, "time": 4.0})
    selection = {"metric": "loss", "better": "min"}
    content = {
        "result.json": json.dumps({**GOOD, "selection": selection}),
        "config.yaml": f"updates: {3 + seed}\nruntime: {{seed: {seed}}}\n",
        "recipe.yaml": "defaults: [{override /optimizer: sgd}]\n",
        "environment.json": json.dumps({"time": float(seed), "selection": selection, "overrides": []}),
        "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records),
    } | files
    for name, text in content.items():
        (folder / name).write_text(text, errors="surrogateescape")
    return folder


def test_one_bad_run_does_not_spoil_the_report():
    """Each spoilt file in a run of its own, beside two good runs: all are listed, and the good ones with their figures."""
    spoilt = [(name, text) for name, texts in BAD_FILES.items() for text in texts]
    for n, (name, text) in enumerate(spoilt):
        a_run(Path(f"outputs/bad{n}"), 2 + n, **{name: text})
        assert main.main(["report", f"outputs/bad{n}", f"out=page{n}"]) == 0, (name, text[:80])
        pages.check((Path(f"page{n}") / "report.html").read_text())
    a_run(Path("outputs/good0"), 0), a_run(Path("outputs/good1"), 1)
    assert main.main(["report", "outputs", "out=page"]) == 0
    pages.check((Path("page") / "report.html").read_text())
    rows = rows_of(Path("page"))
    assert len(rows) == len(spoilt) + 2
    assert sum(row["status"] == "unreadable" for row in rows) > 10
    assert [row["run time"] for row in rows if "good" in row["folder"]] == ["0.0 s"] * 2
    with (Path("page") / "report.csv").open() as file:
        header = next(csv.reader(file))
    assert len(header) == len(set(header)), header


def test_the_cells_of_a_report_are_no_formulas():
    a_run(Path("outputs/0"), 0, **{"config.yaml": "'=cmd': '=1+1'"})
    a_run(
        Path("outputs/1"),
        1,
        **{"config.yaml": "'=cmd': '@x'", "result.json": json.dumps({"status": "=evil", "error": "=HYPERLINK(1)"})},
    )
    assert main.main(["report", "outputs", "out=page"]) == 0
    with (Path("page") / "report.csv").open() as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert {"'=cmd", "'=1+1", "'@x", "'=evil", "'=HYPERLINK(1)"} <= set(cells)
    assert not [cell for cell in cells if cell.startswith(("=", "@"))]


def test_runs_are_named_by_what_differs():
    for n, words in enumerate((["a=1", "b=1"], ["b=1", "a=2"], ["a=2", "b=1"], ["b=1"])):
        a_run(Path(f"outputs/{n}"), n, **{"result.json": json.dumps({**GOOD, "overrides": words})})
    assert named(find([Path("outputs")])) == ["a=1", "a=2 (run 1)", "a=2 (run 2)", "the default"]


def test_the_answer_names_the_best_run():
    for n, loss in enumerate((0.3, 0.1, 0.2, float("nan"))):
        record = {"event": "evaluate", "update": 3, "set": "validation", "loss": loss, "time": 4.0}
        result = {**GOOD, "selection": {"metric": "loss", "better": "min"}, "overrides": [f"lr={n}"]}
        a_run(Path(f"outputs/{n}"), n, **{"metrics.jsonl": json.dumps(record) + "\n", "result.json": json.dumps(result)})
    runs = find([Path("outputs")])
    said = "Of 4 runs, lr=1 is the best: it reached loss 0.1000 on the validation set, and the worst 0.3000"
    assert verdict(runs) == said


def test_of_runs_that_tie_the_loss_decides_and_averages_count():
    figures = [(0.9, 0.3, {}), (0.9, 0.2, {}), (0.5, 0.4, {"ema_accuracy": 0.9, "ema_loss": 0.1}), (0.9, 0.1, {})]
    for n, (accuracy, loss, more) in enumerate(figures):
        record = {"event": "evaluate", "update": 3, "set": "validation", "accuracy": accuracy, "loss": loss, "time": 4.0, **more}
        selection = {"metric": "ema_accuracy" if more else "accuracy", "better": "max"}
        result = {**GOOD, "selection": selection, "overrides": [f"lr={n}"]}
        a_run(Path(f"outputs/{n}"), n, **{"metrics.jsonl": json.dumps(record) + "\n", "result.json": json.dumps(result)})
    runs = find([Path("outputs")])
    same = "all reached the same: accuracy 0.9000 on the validation set"
    assert verdict(runs[:2]) == f"Of 2 runs, {same}, lr=1 with the lowest loss"
    assert verdict(runs) == f"Of 4 runs, {same}, 2 of them with the lowest loss"


def test_a_setting_over_decades_has_a_logarithmic_axis():
    for n, lr in enumerate((1e-4, 1e-3, 1e-2)):
        a_run(Path(f"outputs/{n}"), n, **{"config.yaml": f"optimizer: {{lr: {lr}, momentum: 0.{n + 1}}}\n"})
    assert main.main(["report", "outputs", "out=page"]) == 0
    page = (Path("page") / "report.html").read_text()
    assert "Best loss over optimizer.lr (logarithmic axis)" in page
    assert "<a href" not in page  # these runs have no pages
    assert "<figcaption>Best loss over optimizer.momentum</figcaption>" in page


def test_a_sweep_leaves_its_page_with_a_link_to_each_run(tiny, capsys):
    assert main.main(["train", "-m", *tiny("optimizer=sgd,adamw", "runtime.seed=0,1"), "-q"]) == 0
    (sweep,) = Path("outputs/multirun").glob("*/*")
    assert f"written to {sweep}/report.html and report.csv" in capsys.readouterr().out
    page = (sweep / "report.html").read_text()
    pages.check(page)
    assert sorted(re.findall(r'<a href="(.*?)">', page)) == [f"{n}/report.html" for n in range(4)]
    chart = re.search(r"<figcaption>Best accuracy over optimizer</figcaption>(.*?)</figure>", page)[1]
    assert chart.count("<circle") == 4
    assert chart.count("<polyline") == 1  # their mean
    assert {"adamw", "sgd"} <= set(re.findall(r">(\w+)</text>", chart))
    assert "Best accuracy over runtime.seed" not in page
    assert re.search(r"<h2>Over seeds</h2>.*optimizer=sgd</th><td>[\d.]+ ± [\d.]+</td><td>2</td>", page)


def test_samples_that_cannot_be_drawn_leave_the_page_as_it_is(train, monkeypatch):
    """A run has finished when its page gets samples: nothing that they raise may end it."""
    result = train("updates=1")
    monkeypatch.setattr(samples, "_drawn", lambda *_: {}["what a sample lacks"])
    report.add_samples(result)
    assert "There are none: KeyError" in (result.run_dir / "report.html").read_text()
