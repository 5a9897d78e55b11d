"""Three sets: which samples are held out to select by, that nothing selects by the test set, and the fingerprint of training."""

import csv
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import Source, Subset
from drivetrain.core.step.tensors import Tensors
from drivetrain.core.world import World
from drivetrain.data import base as module
from drivetrain.data.base import Splits, chosen, count_held_out, fingerprint, hash_of, hold_out, in_fold
from drivetrain.data.collation import Stack
from drivetrain.data.digits import Digits, DigitScenes
from drivetrain.data.images import ImageFolder
from drivetrain.data.jsonl import Jsonl
from drivetrain.data.masks import Masks
from drivetrain.data.own import OwnDataset, OwnSource
from drivetrain.data.synthetic import Synthetic
from drivetrain.data.tabular import Tabular, Wine
from drivetrain.data.text import Stdlib, Texts
from drivetrain.launch.job import prepare
from drivetrain.loader.base import Loader, Pipeline
from drivetrain.run.result import Result
from drivetrain.saving import checkpoint_io
from tests.support.command import records
from tests.support.put import put

CPU = torch.device("cpu")


class Numbers:
    """A user's Dataset: samples of several lengths, whose target is their number."""

    num_classes = 40

    def __init__(self, split: str) -> None:
        self.first, self.count = (0, 30) if split == "train" else (30, 6)
        self.targets = [n % 3 for n in range(self.count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = self.first + index
        return torch.full((1 + number % 5, 2), float(number)), number


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images by class, of masks, a table, texts, and Python files."""
    root = tmp_path_factory.mktemp("sets")
    shades = np.random.default_rng(0)
    for name in ("images/cat", "images/dog", "pairs/images", "pairs/masks", "code/a", "code/b"):
        (root / name).mkdir(parents=True)
    for n in range(30):
        picture = Image.fromarray(shades.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        picture.save(root / f"images/{'cat' if n % 3 else 'dog'}/{n}.png")
        picture.save(root / f"pairs/images/{n}.png")
        Image.fromarray(np.full((8, 8), n % 2, np.uint8)).save(root / f"pairs/masks/{n}.png")
        (root / f"code/{'ab'[n % 2]}/{n}.py").write_text("".join(f"x = {n} + {i}\n" for i in range(n + 3)))
    with (root / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "kind"], *([n, n * n % 7, "xyz"[n % 3]] for n in range(60))])
    lines = (f'{{"text": "{f"{n:03}" * (3 + n % 4)}", "label": "{n % 2}"}}' for n in range(60))
    (root / "texts.jsonl").write_text("\n".join(lines))
    return root


OPTIONS = {
    "digits": lambda place: Digits(),
    "wine": lambda place: Wine(),
    "synthetic": lambda place: Synthetic([4], samples=64, validation=0.25),
    "digit_scenes": lambda place: DigitScenes(samples=40, test_samples=10, validation=0.25),
    "imagefolder": lambda place: ImageFolder(root=str(place / "images"), size=8, validation=0.2),
    "masks": lambda place: Masks(root=str(place / "pairs"), size=8, validation=0.2),
    "tabular": lambda place: Tabular(path=str(place / "table.csv"), target="kind", validation=0.2),
    "jsonl": lambda place: Jsonl(path=str(place / "texts.jsonl"), length=6, validation=0.2),
    "jsonl, labelled": lambda place: Jsonl(path=str(place / "texts.jsonl"), label="label", validation=0.2),
    "stdlib": lambda place: Stdlib(root=str(place / "code"), length=16, validation=0.2),
    "own": lambda place: OwnDataset(target=f"{__name__}.Numbers", validation=0.2),
}  # fmt: skip


def contents(source: Source) -> list[bytes]:
    x, y = source.fetch(torch.arange(len(source)))
    return [a.numpy().tobytes() + b.numpy().tobytes() for a, b in zip(x, y, strict=True)]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_sample_is_in_one_set_the_same_in_every_run(place, name):
    option, other = OPTIONS[name](place), OPTIONS[name](place)
    data, again = option.load_sets(CPU), other.load_sets(CPU)
    train, validation, test = (contents(source) for source in (data.train, data.validation, data.test))
    assert contents(again.validation) == validation
    assert validation
    assert not set(validation) & set(train)
    assert not set(validation) & set(test)
    if name != "digit_scenes":  # whose scenes are made for each set
        whole = contents(OPTIONS[name](place).load(CPU).train)
        assert Counter(train + validation) == Counter(whole), "the set is taken from the training set"
        assert [c for c in whole if c in set(train)] == train, "in its order"
    assert option.train_samples() in (None, len(train))


def test_classes_have_their_share():
    for option in (Digits(), Wine()):
        data = option.load_sets(CPU)
        counts = [torch.bincount(source.fetch(torch.arange(len(source)))[1]) for source in (data.train, data.validation)]
        wanted = (counts[0] + counts[1]) * option.validation
        assert (counts[1] - wanted).abs().max() <= 1
        assert len(data.validation) == count_held_out(len(data.train) + len(data.validation), option.validation)


def test_the_set_depends_on_what_samples_are_not_where_they_are():
    """In another order the same samples are held out; with one more, all but one of them."""
    x, y = torch.rand(200, 3), torch.arange(200) % 4
    order = torch.randperm(200)
    held = set(contents(hold_out(Tensors(x, y), 0.1)[1]))
    assert set(contents(hold_out(Tensors(x[order], y[order]), 0.1)[1])) == held
    more = Tensors(torch.cat([x, torch.rand(1, 3)]), torch.cat([y, torch.tensor([2])]))
    assert len(set(contents(hold_out(more, 0.1)[1])) & held) >= len(held) - 1


@pytest.mark.parametrize("make", [Digits, Wine, lambda **at: Synthetic([4], samples=50, **at)])
def test_folds_divide_the_training_samples(make):
    """Each sample is in one fold, the classes have their shares in each, and the test set is the same beside all of them."""
    folds, whole = [make(folds=5, fold=n) for n in range(5)], make().load(CPU)
    sets = [option.load_sets(CPU) for option in folds]
    assert Counter(c for data in sets for c in contents(data.validation)) == Counter(contents(whole.train))
    assert all(contents(data.test) == contents(whole.test) for data in sets)
    for option, data in zip(folds, sets, strict=True):
        assert option.train_samples() == len(data.train) == len(whole.train) - len(data.validation)
        counts = [torch.bincount(each.fetch(torch.arange(len(each)))[1], minlength=10) for each in (whole.train, data.validation)]
        assert (counts[1] - counts[0] / 5).abs().max() < 2 or option.on_device, "whose classes are not known before"
    assert sets[2].origins["validation"] == "fold 2 of 5 of training"


def test_folds_keep_groups_together_and_are_refused_where_there_are_too_few():
    keys = hash_of([f"document {n // 7}" for n in range(210)])
    folds = [in_fold(keys, None, None, 4, n) for n in range(4)]
    assert np.all(sum(fold.astype(int) for fold in folds) == 1)
    assert {int(fold[7 * n : 7 * n + 7].sum()) for fold in folds for n in range(30)} == {0, 7}
    assert [int(fold.sum()) for fold in folds] == [56, 49, 56, 49]
    source = Tensors(torch.tensor([[0.0], [1.0]]).repeat(6, 1), torch.zeros(12))
    with pytest.raises(UserError, match=r"data.folds=3 data.fold=2 takes 0 of 12 training samples.*set fewer folds"):
        hold_out(source, 1 / 3, 3, 2)


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["data=digits", "data.fold=1"], "data.fold=1: there is no such fold: set data.folds=5"),
        (["data=digits", "data.folds=3", "data.fold=3"], "they are numbered 0 to 2"),
        (["data=own", "data.folds=3", "data.validation=val"], "data.folds=3 divides the training samples"),
    ],
)
def test_folds_that_there_are_not(words, because, problems):
    assert because in "".join(problems(*words, "model=mlp"))


def test_data_that_makes_its_own_validation_set_has_no_folds():
    with pytest.raises(UserError, match=r"data.folds=3 divides the training samples, and this data makes"):
        DigitScenes(samples=40, test_samples=10, folds=3).load_sets(CPU)


def test_what_belongs_together_stays_together():
    keys = hash_of([f"document {n // 7}" for n in range(210)])
    apart = chosen(keys, None, 0.2)
    assert {apart[7 * n : 7 * n + 7].sum() for n in range(30)} == {0, 7}
    assert apart.sum() == 42
    twice = torch.rand(20, 2).repeat(3, 1)
    train, validation = hold_out(Tensors(twice, torch.zeros(60, dtype=torch.int64)), 0.2)
    assert not set(contents(train)) & set(contents(validation)), "equal samples are in one set"
    assert 0 < chosen(hash_of(["a"] * 90 + ["b"] * 8 + ["c"] * 9), None, 0.05).sum() <= 9


def test_holding_out_of_many_names_says_how_long_it_will_take(caplog, monkeypatch):
    """Before the first name is hashed, and how far it has come."""
    monkeypatch.setattr(module, "MANY", 1000)
    names = [str(n) for n in range(1005)]
    with caplog.at_level("INFO"):
        left = module.told(names, len(names))
        first = next(left)
        (before,) = caplog.messages
        again = [first, *left]
    assert re.search(r"1,005 names are hashed and sorted, about \d+\.\d minutes", before)
    assert again == names
    assert [line.split()[3] for line in caplog.messages[1:]] == [str(10 * n) for n in range(1, 11)]
    caplog.clear()
    assert list(module.told(names[:999], 999)) == names[:999]
    assert not caplog.messages


def test_a_set_that_would_be_empty_is_refused():
    with pytest.raises(UserError, match="takes 0 of 5 training samples"):
        hold_out(Tensors(torch.ones(5, 1), torch.zeros(5)), 0.2)  # all the same
    assert len(hold_out(Tensors(torch.rand(4, 1), torch.zeros(4)), 0.01)[1]) == 1


def test_the_folders_of_a_data_set(place, tmp_path):
    """Of val/ and test/ the first selects; where there is one of them, it is the test set."""
    for name in ("train", "val", "test"):
        (tmp_path / name).symlink_to(place / "images")
    both = ImageFolder(root=str(tmp_path), size=8).load_sets(CPU)
    assert "val" in both.validation.name(0)
    assert "/test/" in both.test.name(0)
    assert len(both.train) == 30
    (tmp_path / "test").unlink()
    one = ImageFolder(root=str(tmp_path), size=8).load_sets(CPU)
    assert "/val/" in one.test.name(0)
    assert "/train/" in one.validation.name(0)
    assert len(one.train) == 27
    named = ImageFolder(root=str(tmp_path), size=8, validation="val").load_sets(CPU)
    assert "/val/" in named.validation.name(0)
    assert "/train/" in named.test.name(0)


def test_a_file_beside_the_training_file(place, problems):
    words = ["task=classification", f"data.path={place / 'table.csv'}", "data.target=kind", "model=mlp"]
    (problem,) = problems("data=tabular", *words, "data.validation=none.csv")
    assert "none.csv is no file" in problem
    assert problems("data=tabular", *words, "data.validation=1.5")


@pytest.mark.parametrize("name", ["digits", "imagefolder", "own"])
@pytest.mark.parametrize("loader", ["loader=threads", "loader=workers", "loader=resident", "loader=device", "loader=auto"])
def test_loaders_read_a_held_out_set_alike(place, name, loader):
    if name == "own" and loader == "loader=resident":
        pytest.skip("it pads to the longest")
    option = OPTIONS[name](place)
    source = option.load_sets(CPU).validation
    requests = [Request(0, indices, 1.0) for indices in torch.arange(len(source)).split(4)][:3]
    pipeline = Pipeline(source, (), None, 0)
    run = prepare([loader, *(["loader.num_workers=1"] if loader == "loader=workers" else [])]).run
    made: Loader = run.loader
    if loader == "loader=auto":
        made = made.with_values(budget_s=0.01, _in_run=True)
        made.autotune(pipeline, 4, 1_000, CPU)
    batches = list(made.stream(pipeline, requests, CPU, torch.contiguous_format))
    for request, batch in zip(requests, batches, strict=True):
        x, y = source.fetch(request.indices)
        assert torch.equal(batch.x, x)
        assert torch.equal(batch.y, y)


def test_views_know_what_their_source_knows():
    class Ordered(Tensors):
        lengths = torch.arange(10)

        def order(self, seed, epoch):
            return torch.arange(10).flip(0)

        def name(self, index):
            return f"n{index}"

    view = Subset(Ordered(torch.arange(10), torch.arange(10)), torch.tensor([1, 4, 8]))
    assert view.order(0, 0).tolist() == [2, 1, 0]
    assert (view.name(1), view.lengths.tolist(), len(view)) == ("n4", [1, 4, 8], 3)
    assert view.fetch(torch.tensor([2, 0]))[0].tolist() == [8, 1]
    again = Tensors(torch.arange(10), torch.arange(10)).subset(torch.tensor([1, 4, 8])).subset(torch.tensor([2]))
    assert again.x.tolist() == [8]
    assert again.nbytes() == 8


def test_a_broken_sample_is_replaced_by_one_of_its_own_set(place, tmp_path):
    for n in range(10):
        (tmp_path / "one").mkdir(exist_ok=True)
        (tmp_path / "two").mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), n, np.uint8)).save(tmp_path / f"{'one' if n % 2 else 'two'}/{n}.png")
    option = ImageFolder(root=str(tmp_path), size=8, holdout=0.3, validation=0.4, on_error="skip", max_skipped=5, verify=0)
    data = option.load_sets(CPU)
    broken = Path(data.train.name(1))
    broken.write_bytes(b"")
    x, _ = data.train.fetch(torch.arange(len(data.train)))
    assert not set(contents(data.validation)) & {row.numpy().tobytes() for row in x}
    assert data.train.skipped() == [str(broken)]
    assert data.validation.skipped() == []


@pytest.mark.parametrize("words", [["batch=bucketed", "batch.global_batch=4"], ["batch.global_batch=4"]])
def test_texts_of_different_lengths_are_held_out_by_documents(place, make, words):
    trainer = make("task=language_modelling", "data=stdlib", f"data.root={place}/code", "data.length=16", "model=gpt",
                   "model.width=16", "model.depth=1", "model.heads=1", "updates=3", *words)  # fmt: skip
    train, validation = trainer.train_data.source, trainer.evaluator.data.source
    assert not set(train.identities()) & set(validation.identities())
    for source in (train, validation):
        _, y = source.fetch(torch.arange(len(source)))
        assert torch.equal((y >= 0).sum(1), source.lengths)
    trainer.fit()
    assert trainer.evaluator.set == "validation"
    assert trainer.progress.final


# --- in a run ---


def test_the_sets_are_those_of_any_seed_and_any_rank(make):
    made = [make("data=digits", f"runtime.seed={seed}", world=World(rank, 2)) for seed, rank in ((0, 0), (7, 1))]
    first, second = ([t.train_data.source, t.evaluator.data.source] for t in made)
    assert [contents(s) for s in first] == [contents(s) for s in second]


def test_a_run_on_three_sets_resumes_exactly(make, tmp_path):
    words = ["data=digits", "model=mlp", "batch.global_batch=128", "saving.every_updates=3", "saving.keep=9", "updates=12"]
    whole, resumed = make(*words), make(*words, run_dir=tmp_path / "resumed")
    whole.fit()
    resumed.restore(*checkpoint_io.load(tmp_path / "run/checkpoints/6"))
    resumed.fit()
    assert resumed.progress.state_dict() == whole.progress.state_dict()
    assert resumed.evaluator.on("test").evaluate() == whole.evaluator.on("test").evaluate()


def test_nothing_that_a_run_selects_depends_on_the_test_set(fitted, monkeypatch):
    """Best checkpoint, plateau, early stopping and weights are the same whatever the labels of the test set are."""
    load, seen = Digits.load, []

    def other_labels(self: Digits, device: torch.device) -> Splits:
        data = load(self, device)
        data.test = Tensors(data.test.x, (data.test.y + 1) % 10)
        return data

    words = ["data=digits", "model=mlp", "optimizer.lr=0.4", "updates=null", "epochs=5", "saving=best", "scheduler=plateau",
             "scheduler.patience=0", "stop=early", "stop.patience=3", "batch.global_batch=128"]  # fmt: skip
    for changed in (load, other_labels):
        monkeypatch.setattr(Digits, "load", changed)
        trainer = fitted(*words)
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        seen.append((trainer.progress.state_dict(), trainer.scheduler.state_dict(), trainer.stopping.state_dict(), weights))
        tested = trainer.evaluator.on("test").evaluate()["accuracy"]
        assert (tested < 0.5) is (changed is other_labels), "the test sees the difference"
    assert seen[0][:3] == seen[1][:3]
    assert torch.equal(seen[0][3], seen[1][3])


def test_only_what_reports_reads_the_figures_of_the_test_set():
    """Whatever selects asks Result.judged, or the records of the judging set."""
    reports = {
        "run/result.py", "ui/terminal.py", "launch/worker.py", "inference/evaluation.py", "engine/evaluator.py",
        "ui/plots.py", "engine/summary.py", "ui/pages/runs.py", "run/remarks.py", "inference/card.py", "launch/judgement.py",
        "data/base.py", "data/own.py", "data/mix.py",  # which make the sets
    }  # fmt: skip
    root = Path(drivetrain.__file__).parent
    reading = re.compile(r"""\.tested\(|\[["']test["']\]|get\(["']test["']|\.metrics\[""")
    found = {p.relative_to(root).as_posix() for p in root.rglob("*.py") if reading.search(p.read_text())}
    assert found - reports == set()


def test_a_run_without_a_validation_set_says_so_once(make):
    told = list(prepare(["data.validation=null"]).run.data.advise(None))
    assert len(told) == 1
    assert "test set" in told[0]
    assert not list(prepare([]).run.data.advise(None))
    trainer = make("data=digits", "model=mlp", "data.validation=null")
    assert (trainer.evaluator.set, len(trainer.evaluator.data.source)) == ("test", 359)


def test_the_figures_of_a_run_and_what_it_is_judged_by(train):
    """The test set is evaluated once, at the end; without a validation set it is what the run is judged by."""
    result = train("data=digits", "model=mlp", "batch.global_batch=128", "updates=null", "epochs=2", "saving=best")
    assert {name: set(figures) for name, figures in result.metrics.items()} == {
        "validation": {"final", "best"},
        "test": {"final", "best"},
    }
    assert result.judged() is result.metrics["validation"]["final"]
    told = [(r["set"], r.get("weights")) for r in records(result.run_dir, "evaluate")]
    assert told[:3] == [("validation", None), ("validation", None), ("test", "final")]
    assert Result("completed", metrics={"test": {"best": {"loss": 1.0}}}).judged("best") == {"loss": 1.0}


def test_a_group_is_held_out_where_half_of_it_is_wanted():
    keys = np.array([0] * 4 + list(range(1, 17)), np.uint64)
    assert chosen(keys, None, 0.1).nonzero()[0].tolist() == [0, 1, 2, 3]
    assert chosen(keys, None, 0.05).nonzero()[0].tolist() == [4]


@pytest.mark.parametrize("data", ["digits", "wine", "diabetes", "digit_scenes"])
@pytest.mark.parametrize("holdout", ["1e-300", "0.9999999999999999"])
def test_a_share_that_leaves_one_of_the_sets_empty(data, holdout):
    loss = ["task=regression"] if data == "diabetes" else ["task=multilabel"] if data == "digit_scenes" else []

    def load() -> None:
        prepare([*loss, f"data={data}", "model=mlp", f"data.holdout={holdout}"]).run.data.load_sets(CPU)

    with pytest.raises(UserError, match=r"data.holdout=.* holds \d+ of [\d,]+ samples out, and both sets need some"):
        load()


def tensors(**changed: torch.Tensor) -> Tensors:
    found = {"x": torch.arange(24.0).reshape(6, 4), "y": torch.arange(6) % 2, **changed}
    return Tensors(found["x"], found["y"])


def of_option(*words: str) -> dict[str, object]:
    """The fingerprint of a run's training data, as it was split."""
    return fingerprint(prepare(["model=mlp", *words]).run.data.load_sets(torch.device("cpu")).train)


def test_tensors_are_hashed_as_a_whole():
    found = fingerprint(tensors())
    assert (found["of"], found["samples"], len(found["hash"])) == ("content", 6, 32)
    assert fingerprint(tensors()) == found
    turned = torch.arange(24.0).reshape(6, 4).t().contiguous().t()
    assert fingerprint(tensors(x=turned)) == found, "the order in memory is no content"
    last = torch.arange(24.0).reshape(6, 4)
    last[5, 3] = 0.5
    others = [tensors(x=last), tensors(y=torch.zeros(6, dtype=torch.int64)), tensors(x=torch.arange(24.0).reshape(6, 2, 2))]
    others.append(tensors(x=torch.arange(24).reshape(6, 4)))
    hashes = {fingerprint(other)["hash"] for other in others}
    assert len(hashes) == 4
    assert found["hash"] not in hashes


def test_a_part_of_them_is_that_part():
    part = tensors().subset(torch.tensor([0, 1, 2]))
    whole = Tensors(torch.arange(12.0).reshape(3, 4), torch.tensor([0, 1, 0]))
    assert fingerprint(part) == fingerprint(whole)


def test_of_many_bytes_some_samples_are_read(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    monkeypatch.setattr(module, "SAMPLES", 3)
    found = fingerprint(tensors())
    assert found["of"] == "3 samples"
    between, at = torch.arange(24.0).reshape(6, 4), torch.arange(24.0).reshape(6, 4)
    between[1], at[4] = 0, 0
    assert fingerprint(tensors(x=between)) == found
    assert fingerprint(tensors(x=at))["hash"] != found["hash"]


def test_documents_are_hashed_by_their_content():
    found = fingerprint(Texts([b"first", b"second one"], 4))
    assert (found["of"], found["samples"]) == ("content", 5)
    assert fingerprint(Texts([b"first", b"second two"], 4))["hash"] != found["hash"]


class Drawing(torch.utils.data.Dataset):
    """Augments its own samples, with every generator there is."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3) + random.random() + np.random.rand(), index % 2


def test_a_set_that_draws_at_random_has_one_too_and_draws_the_same_afterwards():
    source = OwnSource(Drawing(), "data.target", Stack())
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        expected = [torch.rand(1).item(), random.random(), np.random.rand()]
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        found.append(fingerprint(source))
        assert [torch.rand(1).item(), random.random(), np.random.rand()] == expected
    assert found[0] == found[1]
    assert found[0]["of"] == "32 samples"


class Broken(Drawing):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise RuntimeError("the disk is gone")


def test_what_cannot_be_read_has_none():
    assert fingerprint(OwnSource(Broken(), "data.target", Stack())) is None


def test_it_is_the_datas_and_not_the_seeds():
    words = ["data=digits"]
    assert of_option(*words, "runtime.seed=1") == of_option(*words, "runtime.seed=2", "batch.global_batch=16")
    assert of_option(*words)["hash"] != of_option(*words, "data.validation=0.1")["hash"]


def test_a_table_is_its_rows_as_they_were_written(tmp_path):
    """And not as they were standardised, which CPUs of other kinds round otherwise. Held-out rows are not among them."""
    rows = [f"{n},{n * n % 7},{'ab'[n % 2]}" for n in range(40)]
    words = ["data=tabular", "data.path=table.csv", "data.target=t", "data.validation=0.2"]
    found = []
    for lines in (rows, [*rows[:39], "39,0.5,b"], rows):
        (tmp_path / "table.csv").write_text("\n".join(["a,b,t", *lines]))
        found.append(of_option(*words, f"data.normalize={str(len(found) < 2).lower()}"))
    assert found[0]["of"] == "content"
    assert found[0]["samples"] < of_option(*words[:-1], "data.validation=null")["samples"] < 40
    assert found[0] == found[2]
    assert found[0] != found[1]


@pytest.fixture
def photos(tmp_path):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            for number in range(3):
                folder = tmp_path / "photos" / split / name
                put(folder / f"{number}.png", Image.new("RGB", (8, 8), (number * 40, 0, 80)))
    return tmp_path / "photos"


def test_image_files_are_their_names_and_some_of_their_bytes(photos):
    words = ["data=imagefolder", f"data.root={photos}", "data.validation=null", "model=resnet9"]
    found = of_option(*words)
    assert (found["of"], found["samples"]) == ("names and 6 files", 6)
    moved = photos.rename(photos.parent / "elsewhere")
    words[1] = f"data.root={moved}"
    assert of_option(*words) == found
    (moved / "train/cat/0.png").write_bytes((moved / "train/cat/1.png").read_bytes())
    assert of_option(*words) != found
