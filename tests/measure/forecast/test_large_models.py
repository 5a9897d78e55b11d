"""Models whose weights this machine would have no room for: their forecast is made of shapes alone, from a config file."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import forecast as bench
from torch._subclasses.fake_tensor import FakeTensor

from drivetrain.engine import child
from drivetrain.engine.rehearsal import GRADIENTS, OTHER, PARAMETERS, STATE
from drivetrain.measure.forecast import forecast
from drivetrain.measure.forecast.forecast import plan
from tests.support import later, slow
from tests.support.put import put

later.package("transformers")

LENGTH, RANK, TOKENS = 2048, 16, 32000
LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": TOKENS, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def build() -> Iterator[Callable[..., forecast.Subject]]:
    """The subject of a run that is built here, with fake weights or with values; what it changed is put back."""
    threads = torch.get_num_threads()
    with ExitStack() as undone:

        def built(words: list[str], values: float = 0) -> forecast.Subject:
            planned = plan(words, (), "h100")
            return forecast.Subject.of(planned, child.built(planned.look(), values, undone))

        yield built
    torch.set_num_threads(threads)


def folder(tmp_path: Path, layers: int, **more: int) -> Path:
    """A folder with a config file and nothing else."""
    put(tmp_path / "model" / "config.json", json.dumps({**LLAMA_7B, "num_hidden_layers": layers, **more}))
    return tmp_path / "model"


def test_weights_that_are_too_large_for_this_machine_are_not_made(tmp_path, monkeypatch):
    """The process holds nothing for them, and the forecast says so."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    given = [*words(folder(tmp_path, 1, **small), length=16, tokens=64), "model.pretrained=false", "precision=bf16"]
    monkeypatch.setattr(forecast, "MOST_VALUES", 2.0**10)
    planned = plan(given, (), "here")
    with ExitStack() as undone:
        trainer = child.built(planned.look(), planned.values, undone)
        assert all(isinstance(p, FakeTensor) for p in trainer.model.parameters())
        found = forecast.answer(planned, forecast.ForecastSettings(seconds=2.0), 0.0, trainer)
    assert found.peak_bytes.value > found.tensors_bytes.value > sum(p.nbytes for p in trainer.model.parameters())
    assert any("were not made" in note for note in found.notes)


def words(model: Path, length: int = LENGTH, tokens: int = TOKENS, batch: int = 1) -> list[str]:
    return [
        "model=transformers", f"model.name={model}", "model.pretrained=true", "loss=next_token", "data=synthetic",
        "data.tokens=true", f"data.classes={tokens}", f"data.shape=[{length}]", "data.samples=64", "epochs=1",
        f"batch.global_batch={batch}", "runtime.device=cpu", "runtime.threads=1", "optimizer=adamw",
    ]  # fmt: skip


def matrices(config: dict[str, Any]) -> list[tuple[int, int]]:
    """The sides of a layer's matrices: queries, keys, values, output, gate, up, down."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    return [*[(width, width)] * 4, *[(width, inner)] * 2, (inner, width)]


@pytest.mark.parametrize("layers", slow.but(lambda n: n == 2, [2, 32], str))
def test_lora_on_a_7b_by_hand(layers, tmp_path, build):
    """From a config file alone, and in less memory than its weights take: parameters, state and operations as by hand."""
    lora = ["adapter=lora", f"adapter.rank={RANK}", "precision=bf16_pure"]
    made = build([*words(folder(tmp_path, layers)), *lora])
    record = made.record(1, ())
    sides, width, ends = matrices(LLAMA_7B), 4096, TOKENS * 4096
    base = layers * (sum(a * b for a, b in sides) + 2 * width) + width + 2 * ends
    adapters = layers * RANK * sum(a + b for a, b in sides)
    assert record.peak[PARAMETERS] == pytest.approx(2 * (base + adapters), rel=1e-3)  # beside: scales, tables of angles
    trained = adapters + ends  # the layer that gives the outputs trains as a whole
    assert record.peak[STATE] == pytest.approx((4 + 4 + 4) * trained, rel=1e-3)  # a master weight and two moments
    assert all(isinstance(p, FakeTensor) for p in made.rehearsal.trainer.model.parameters()), "the weights were made"
    products = LENGTH * layers * sum(a * b for a, b in sides)
    unneeded = LENGTH * 3 * width * width  # no gradient of the first layer's inputs: the embedding does not train
    attention = LENGTH * LENGTH * width * layers
    by_hand = 4 * products - 2 * unneeded + 6 * LENGTH * adapters + 6 * LENGTH * ends + (4 + 10) * attention
    assert sum(o.flops * n for o, n in record.operations.items()) == pytest.approx(by_hand, rel=0.01)
    assert record.peak[OTHER] > layers * LENGTH * 2 * (8 * width + 3 * 11008)  # what each layer keeps, at the least
    assert record.peak[GRADIENTS] <= 2 * trained


def small(tmp_path: Path) -> list[str]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100}
    return [*words(folder(tmp_path, 2, **sizes), 32, 100, 4), "adapter=lora", "model.pretrained=false"]


def test_a_record_of_shapes_is_that_of_weights_with_values_and_the_peak_that_was_measured(tmp_path, monkeypatch, build):
    monkeypatch.setattr(bench, "ENOUGH_S", 0.0)
    given = small(tmp_path)
    shapes, values = (build(given, with_values) for with_values in (0, math.inf))
    without, having = (made.record(4, ()) for made in (shapes, values))
    assert all(isinstance(p, FakeTensor) for p in shapes.rehearsal.trainer.model.parameters())
    assert not any(isinstance(p, FakeTensor) for p in values.rehearsal.trainer.model.parameters())
    assert without.peak == having.peak
    assert without.operations == having.operations
    assert sum(without.peak.values()) == pytest.approx(bench.measure(given)["peak_bytes"], rel=0.05)


def test_what_makes_a_run_fit_is_found_first_and_named(tmp_path, build):
    made = build(small(tmp_path))
    base = forecast.examine(made, 0.0)
    low = forecast._row(forecast.RECOMPUTED, base, made).peak_bytes
    room = math.sqrt(base.tensors_bytes.value * low)
    made.device = replace(made.device, memory=(room + made.device.reserved.value) / forecast.FILLED)
    base = forecast.examine(made, 0.0)
    rows = forecast.table(base, made, 0.0)
    assert not base.fits
    assert (rows[0].override, rows[0].fits) == (forecast.RECOMPUTED, True)
    assert all("the time was up" in row.why_not for row in rows[1:])
    assert f"it fits with: {forecast.RECOMPUTED}" in forecast.sheet_of([replace(base, what_if=rows)]).page()
