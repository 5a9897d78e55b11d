"""The record of made-up steps whose operations, bytes and peaks are known exactly."""

import pytest
import torch

from drivetrain.checkpointing.recompute import checkpoint_forward
from drivetrain.engine.rehearsal import (
    HEAP,
    OTHER,
    CudaAutocast,
    Fakes,
    Operation,
    Rehearsal,
    WorkCounter,
    furthest,
    largest_micro_batch,
)

FLOAT = 4  # bytes


def operations(recorder: WorkCounter, name: str) -> dict[str, Operation]:
    """Phase → operation of this name."""
    return {o.phase: o for o in recorder.operations if o.call[0]._overloadpacket.__name__ == name}


def test_a_linear_layers_operations_and_bytes():
    layer, samples, inputs, outputs = torch.nn.Linear(8, 4), 16, 8, 4
    with Fakes() as fakes, WorkCounter(fakes) as recorder:
        layer(torch.ones(samples, inputs)).sum().backward()
    forward, backward = operations(recorder, "addmm")["forward"], operations(recorder, "mm")["backward"]
    assert forward.flops == backward.flops == 2 * samples * inputs * outputs
    weights = inputs * outputs
    assert forward.nbytes == FLOAT * (samples * inputs + weights + outputs + samples * outputs)
    # The gradient of the outputs is a single number, expanded: it is read once.
    assert backward.nbytes == FLOAT * (1 + samples * inputs + weights)
    assert forward.kind == "product"
    assert operations(recorder, "t")["forward"].kind == "view"


def test_the_peak_has_what_lives_at_the_same_time():
    with Fakes() as fakes, WorkCounter(fakes) as recorder:
        first = torch.empty(1000)
        recorder.note(first, "batch")
        second = first + 1
        del first
        third = second * 2
        del second, third
        torch.empty(10)
    assert sum(recorder.at_peak().values()) == 2000 * FLOAT
    assert recorder.at_peak() == {"batch": 1000 * FLOAT, OTHER: 1000 * FLOAT}
    assert recorder.now_bytes == 0


def test_views_and_changes_in_place_allocate_nothing():
    with Fakes() as fakes, WorkCounter(fakes) as recorder:
        x = torch.empty(10, 100)
        x.view(-1)[5:].add_(1)
        x.t().mul_(2)
    assert sum(recorder.at_peak().values()) == 1000 * FLOAT


def test_what_the_forward_keeps_lives_until_its_backward():
    layers = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Sigmoid()) for _ in range(5))
    )
    with Fakes() as fakes, WorkCounter(fakes) as recorder:
        for parameter in layers.parameters():
            recorder.note(fakes.standing_for(parameter), "parameters")
        output = layers(torch.ones(256, 64)).sum()
        kept = recorder.now_bytes
        output.backward()
    activation = 256 * 64 * FLOAT
    assert kept == 5 * 64 * 64 * FLOAT + (1 + 5) * activation + FLOAT  # the batch, each sigmoid's output, the sum
    assert recorder.at_peak()["parameters"] == 5 * 64 * 64 * FLOAT


def peak_and_flops(*, recomputed: bool = False, autocast: bool = False) -> tuple[int, int]:
    """Of forward and backward of six blocks of two layers each."""
    width = 64
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)) for _ in range(6)
    ]
    for block in blocks if recomputed else []:
        checkpoint_forward(block)
    with Fakes() as fakes, WorkCounter(fakes) as recorder, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.nn.Sequential(*blocks)(torch.ones(4096, 64)).sum().backward()
    return sum(recorder.at_peak().values()), sum(o.flops * n for o, n in recorder.operations.items())


def test_recomputation_lowers_the_peak_and_computes_the_forward_twice():
    (plain, flops), (again, more) = peak_and_flops(), peak_and_flops(recomputed=True)
    assert again < 0.6 * plain
    # The forward is a third of the work; of the inputs' gradients the first layer's is not computed, nor each block's last layer
    # a second time, since nothing needs its output.
    assert 1.1 * flops < more < 4 / 3 * flops + flops / 36


def test_bfloat16_nearly_halves_what_is_kept():
    assert 0.4 < peak_and_flops(autocast=True)[0] / peak_and_flops()[0] < 0.75


def test_real_tensors_are_not_changed():
    layer = torch.nn.BatchNorm1d(4)
    with Fakes() as fakes, WorkCounter(fakes):
        layer(torch.ones(8, 4)).sum().backward()
    assert torch.equal(layer.running_mean, torch.zeros(4))
    assert layer.num_batches_tracked == 0


def test_a_host_read_of_a_fake_is_no_overflow_and_of_a_real_tensor_its_value():
    real = torch.tensor(3.0)
    with Fakes() as fakes, WorkCounter(fakes):
        assert torch.ones(2).sum().item() == 0.0
        assert real.item() == 3.0


def test_cudas_autocast_keeps_layer_norm_in_float32():
    norm, x = torch.nn.LayerNorm(8), torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
        with CudaAutocast():
            assert norm(x).dtype == torch.float32
    with CudaAutocast():
        assert torch.softmax(x, 0).dtype == torch.bfloat16  # autocast is off


@pytest.mark.parametrize(
    "count", [lambda: torch.tensor(0.0), lambda: torch.zeros(()), lambda: torch.full((), 0, dtype=torch.int64)]
)
def test_a_count_that_is_made_of_numbers_has_its_value(count):
    """Optimizers count their updates so, and divide by what follows of the count."""
    with Fakes() as fakes, WorkCounter(fakes):
        steps = [count(), count()]
        torch._foreach_add_(steps, 1)
        steps[1] += 2
        assert [step.item() for step in steps] == [1, 3]
        steps[0] += torch.ones(3).sum().to(steps[0].dtype)  # not a number any more
        assert steps[0].item() == 0


@pytest.mark.parametrize("limit", [90, 101, 300, 5000, 10**6])
@pytest.mark.parametrize(
    "peak", [lambda n: 100 + 3 * n, lambda n: 100 + n**1.3, lambda n: 3 * max(n, 40), lambda n: 100 + n // 64 * 200]
)
def test_the_largest_size_below_a_limit(peak, limit):
    """By a few peaks, whatever the curve: the next sizes would not fit, or it is the largest that is asked for."""
    asked = []
    found, at = furthest(lambda n: asked.append(n) or peak(n), 2, 1000, limit)
    assert len(asked) <= 6
    assert 2 <= found <= 1000
    assert at == peak(found)
    if at <= limit:
        assert found == 1000 or peak(found + max(1, 0.25 * found)) > 0.98 * limit
    else:
        assert peak(2) > limit


def test_the_largest_micro_batch_of_a_trainer(make):
    limit = 4 * 2**20
    trainer = make("model.hidden=[64]", "data.shape=[3,16,16]")
    size = largest_micro_batch(trainer, 10**5, limit)
    rehearsal = Rehearsal(trainer)

    def peak(n):
        record = rehearsal.record(n, 2)
        return sum(record.peak.values()) + HEAP * record.peak[OTHER]

    assert 0.97 * limit < peak(size) <= limit
    assert largest_micro_batch(trainer, 8, limit) == 8
    assert largest_micro_batch(trainer, 8, 1.0) == 0
