"""Mixtures: the source of each position, what a run over several sources reads, and what cannot be mixed."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.order import index_of
from drivetrain.data import mix
from drivetrain.data.mixture import Mixture
from drivetrain.inference.evaluation import evaluate
from drivetrain.launch.job import prepare
from tests.support import same_end
from tests.support.put import put
from tests.support.to_end import run_to_end

SHORT = ["data=mix", "model=gpt", "model.width=8", "model.depth=1", "model.heads=2", "task=language_modelling", "optimizer=adamw",
         "batch.global_batch=8", "epochs=2", "log_every=1", "scheduler=constant"]  # fmt: skip


def by_counting(weights: list[float], positions: int) -> torch.Tensor:
    """The largest distance of any prefix's count from a source's share, by counting one position after the other."""
    source, index = Mixture([weights]).at(0, torch.arange(positions))
    counts = torch.nn.functional.one_hot(source, len(weights)).cumsum(0)
    assert torch.equal(index, counts[torch.arange(positions), source] - 1)
    share = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return (counts - torch.arange(1, positions + 1).unsqueeze(1) * share).abs().max()


def test_each_prefix_keeps_every_source_within_a_sample_and_a_half_of_its_share():
    drawn = random.Random(0)
    for _ in range(40):
        weights = [drawn.choice([0.0, 1.0, 7.0, drawn.random(), drawn.random() ** 6]) for _ in range(drawn.randint(2, 9))]
        if any(weights):
            assert by_counting(weights, 2_000) <= 1.5
    assert by_counting([1.0, 1.0], 2_000) <= 0.5


@pytest.mark.parametrize("window", [1, 16, 100])
def test_a_windows_members_are_shuffled_and_stages_change_the_weights(window):
    mixture = Mixture([[3.0, 1.0, 0.0], [0.0, 1.0, 1.0]], [0, 1_600], window)
    positions = torch.randperm(3_200, generator=torch.Generator().manual_seed(0))
    source, index = torch.empty(3_200, dtype=torch.long), torch.empty(3_200, dtype=torch.long)
    for block in positions.split(37):  # whichever positions are asked together
        source[block], index[block] = mixture.at(5, block)
    for number in range(3):
        assert torch.equal(index[source == number].sort().values, torch.arange(int((source == number).sum())))
    for end in range(0, 3_201, 1_600):
        assert torch.bincount(source[:end], minlength=3).tolist() == mixture.counts(end)
    assert mixture.counts(3_200) == [1_200, 400 + 800, 800]


def test_ranks_do_not_meet_one_source_only():
    source, _ = Mixture([[1.0, 1.0]], window=16).at(3, torch.arange(4_000))
    assert all(0.4 < float(source[rank::2].float().mean()) < 0.6 for rank in range(2))


def test_an_order_is_read_in_parts_and_each_source_goes_on_where_it_was():
    order = mix.mixed([50, 7], Mixture([[0.5, 0.5]], window=16), 32)
    every = [order(1, epoch) for epoch in range(10)]
    for epoch, whole in enumerate(every):
        parts = [(0, 5), (5, 6), (20, 32)]
        assert [p.tolist() for p in order.reader(1, epoch)(parts)] == [whole[a:b].tolist() for a, b in parts]
        assert len(whole.unique()) == 32  # what comes again has a number of its own
        assert (whole >= 0).all()
    samples = index_of(torch.cat(every))
    first = samples[:96]  # whole windows
    assert len(first[first < 50].unique()) == 48  # none comes again before all have come
    times = torch.bincount(samples[samples >= 50] - 50)
    assert times.max() - times.min() <= 1


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Two sources of texts that are told apart by their letters."""
    found = {}
    for name, letter in (("web", "w"), ("code", "c")):
        lines = [json.dumps({"text": letter * 4 + f" {n}"}) for n in range(60 if name == "web" else 20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        found[name] = {"option": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), "length": 8, "holdout": 0.2, "validation": 0.2}
    return found


def words(sources: dict[str, Any], *more: str) -> list[str]:
    return [*SHORT, f"data.sources={json.dumps(sources)}".replace('"', ""), *more]


def test_a_run_over_two_sources_has_figures_of_each_and_says_their_shares(texts):
    run = run_to_end(words(texts, "data.weights={web: 1, code: 3}"))
    assert {name.partition("/")[0] for name in run.metrics["test"]["final"]} == {"web", "code"}
    assert evaluate(run.run_dir).metrics == run.metrics["test"]["final"]
    assert "data=mix: web 25.0 % (read " in (run.run_dir / "log.txt").read_text()
    assert "data.sources" not in (run.run_dir / "recipe.yaml").read_text().partition("#")[0]


def test_a_run_whose_stages_change_the_weights_is_resumed_bit_for_bit(texts):
    stages = "stages=[{until: 3, data.weights: {web: 1, code: 0}}, {data.weights: {web: 1, code: 1}}]"
    whole, _ = same_end.resumed(words(texts, "data.samples=24", stages), 4, 6)
    ranks = run_to_end(words(texts, "data.samples=24", stages, "updates=6", "parallel=ddp", "parallel.nproc=2"))
    assert ranks.metrics["test"]["final"]["web/loss"] == pytest.approx(whole.metrics["test"]["final"]["web/loss"], rel=1e-5)


def test_a_source_of_weight_0_beside_one_of_the_same_size_is_not_read(texts):
    run = run_to_end(words(texts | {"code": texts["web"]}, "data.weights={web: 0, code: 1}", "updates=1"))
    assert "web 0.0 % (read 0.00 times), code 100.0 %" in (run.run_dir / "log.txt").read_text()


def test_stages_of_other_weights_want_updates_in_the_order_of_the_mix(texts):
    stages = "stages=[{until: 1ep, data.weights: {web: 1, code: 0}}, {data.weights: {web: 1, code: 1}}]"
    for batch in (["batch=bucketed"], ["batch.tokens=64"]):
        with pytest.raises(UserError, match=r"stages with other data\.weights"):
            drivetrain.train(words(texts, stages, *batch))


def test_image_folders_of_the_same_classes_are_normalised_together(tmp_path):
    for source, grey in (("day", 200), ("night", 20)):
        for n in range(24):
            folder = tmp_path / source / "train" / "ab"[n % 2]
            put(folder / f"{n}.png", Image.new("RGB", (8, 8), (grey + n, grey, grey)))
    sources = {
        name: {"option": "imagefolder", "root": str(tmp_path / name), "normalize": "measured", "size": 8}
        for name in ("day", "night")
    }
    run = run_to_end([
        "data=mix", f"data.sources={json.dumps(sources)}".replace('"', ""), "model=mlp", "model.hidden=[4]", "epochs=1",
        "batch.global_batch=8", "optimizer=adamw", "augment=[]",
    ])  # fmt: skip
    assert {name.partition("/")[0] for name in run.metrics["validation"]["final"]} == {"day", "night"}


def tables(tmp_path: Path, columns: str = "size,kind,label") -> list[str]:
    """The words of a run over two tables, of which the second one has other sizes and a kind of its own."""
    sources = {}
    for name, first, kinds in (("near", 0, "ab"), ("far", 1000, "ac")):
        lines = [f"{first + n},{kinds[n % 2]},{'no' if n % 3 else 'yes'}" for n in range(60)]
        header = columns if name == "far" else "size,kind,label"
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *lines]) + "\n")
        sources[name] = {"option": "tabular", "path": str(tmp_path / f"{name}.csv"), "target": "label"}
    return ["data=mix", f"data.sources={json.dumps(sources)}".replace('"', ""), "model=mlp", "model.hidden=[4]", "epochs=1",
            "batch.global_batch=8", "optimizer=adamw"]  # fmt: skip


def test_tables_are_read_by_what_the_first_one_taught(tmp_path):
    run = run_to_end(tables(tmp_path))
    log = (run.run_dir / "log.txt").read_text()
    assert "all tables are read by the columns, means and categories of near's training rows" in log
    assert "have a value of kind that no training row has (c)" in log
    x = prepare(tables(tmp_path)).run.data.load_sets(torch.device("cpu")).train
    near, far = (x.parts[number][1].fetch(torch.arange(40))[0][:, 0] for number in range(2))
    assert abs(float(near.mean())) < 0.3
    assert float(far.min()) > 30  # as many deviations of near's sizes
    assert evaluate(run.run_dir).metrics == run.metrics["test"]["final"]
    with pytest.raises(UserError, match="has no column kind, which the run's own table has"):
        drivetrain.train(tables(tmp_path, "size,sort,label"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": "{web: 1}"}, "data.weights says nothing of code"),
        ({"weights": "{web: 1, cod: 1}"}, "data.weights.cod names no source: did you mean 'code'"),
        ({"weights": "{web: 0, code: 0}"}, "data.weights are all 0"),
        ({"at_most": "{code: 2}", "weights": "{web: 1, code: 9}"}, "data.at_most.code=2: the run reads code "),
        ({"validation": "0.1"}, "data.validation and data.folds are of one source"),
        (
            {"sources": "{web: {option: stdlib}, code: {option: stdlib, order: sequential}}"},
            "data.sources.code.order has no effect",
        ),
        (
            {"sources": "{web: {option: stdlib}, code: {option: stdlib, drop_last: false}}"},
            "data.sources.code.drop_last has no effect",
        ),
        ({"order": "sequential"}, "data.order=sequential: data=mix has an order of its own"),
        ({"sources.code.option": "jsonll"}, "data.sources.code.option=jsonll is no option of data: did you mean 'jsonl'"),
        ({"sources": "{web: {option: stdlib}, code: {option: stream}}"}, "data.sources.code cannot be mixed"),
        ({"sources.code.lenght": "8"}, "lenght"),
        ({"sources.code.length": "0"}, "data.sources.code.length=0"),
        ({"sources.code.length": "16"}, "data.sources: code and web differ in shape"),
        ({"sources.code.path": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"sources": "{web: {option: digits}, code: {option: stdlib}}"}, "data.sources.code has tokens=True"),
    ],
)
def test_what_cannot_be_mixed_is_refused(texts, tmp_path, change, said):
    with pytest.raises(UserError) as refused:
        drivetrain.train(words(texts, *(f"data.{key}={value}" for key, value in change.items())))
    assert said in str(refused.value)
    assert not (tmp_path / "outputs").exists()
