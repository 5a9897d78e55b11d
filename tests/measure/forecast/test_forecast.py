"""Forecasts of small runs, in process: what techniques change, the measured peak, and the arithmetic on made-up figures."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench import forecast as bench

from drivetrain.checkpointing.base import rounded_up
from drivetrain.cli.measuring import forecast as verb
from drivetrain.config import validate
from drivetrain.config.catalog import options
from drivetrain.core.errors import UserError
from drivetrain.core.step.blocks import repeated_blocks
from drivetrain.engine import child
from drivetrain.engine.rehearsal import GRADIENTS, OTHER, PARAMETERS, STATE, Operation, StepRecord, peak_bytes
from drivetrain.measure.forecast import forecast, roofline
from drivetrain.measure.forecast.forecast import ForecastSettings, PlannedRun, Ranks, answer, plan
from drivetrain.measure.forecast.roofline import _TABLE, FORECAST_ONLY, NOTHING, ONE, DeviceLimits, Timed, Uncertain, known
from tests.support import json_keys, pages

built: dict[tuple[str, ...], forecast.Subject] = {}
undone = ExitStack()
SMALL = [
    "data=synthetic", "data.samples=64", "data.shape=[1,8,8]", "batch.global_batch=8", "runtime.device=cpu", "runtime.threads=1",
]  # fmt: skip
TEXT = [
    "task=language_modelling", "data.tokens=true", "data.shape=[16]", "model=gpt", "model.width=16", "model.heads=2",
    "model.depth=2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """What building changed for the whole process is put back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    undone.close()


def subject(*overrides: str) -> forecast.Subject:
    """Built once for a device of the table, so that nothing is timed here; its records are kept."""
    return subject_of(plan([*SMALL, *overrides], (), "h100"))


def subject_of(planned: PlannedRun) -> forecast.Subject:
    if planned.overrides not in built:
        trainer = child.built(planned.look(), planned.values, undone)
        built[planned.overrides] = forecast.Subject.of(planned, trainer)
    return built[planned.overrides]


def answered(planned: PlannedRun, settings: ForecastSettings) -> forecast.Forecast:
    return answer(planned, settings, float("inf"), subject_of(planned).rehearsal.trainer)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question to a process of its own is answered by what this one has built."""
    ask = lambda run, question, failed, values: question(subject_of(question.args[0]).rehearsal.trainer)  # noqa: E731
    monkeypatch.setattr(child, "ask", ask)


def recorded(*overrides: str) -> StepRecord:
    return record(subject(*overrides), 8, 1)


def record(made: forecast.Subject, size: int, micro_batches: int, blocks: Sequence[torch.nn.Module] = ()) -> StepRecord:
    return replace(made, plan=replace(made.plan, steps=micro_batches)).record(size, blocks)


def peak(made: forecast.Subject, size: int) -> float:
    return forecast.peak_memory(record(made, size, 1).peak, 0, False, made.ranks, made.device)[1].value


def test_adam_keeps_two_tensors_for_each_parameter_and_sgd_one():
    adam, sgd = recorded("model=mlp", "optimizer=adamw").peak, recorded("model=mlp", "optimizer=sgd").peak
    steps = 6 * 4  # Adam's count of updates, for each of the parameters
    assert adam[STATE] == 2 * adam[PARAMETERS] + steps
    assert sgd[STATE] == sgd[PARAMETERS]
    assert adam[GRADIENTS] == adam[PARAMETERS]


NEEDS = {"schedulefree": ["scheduler=constant"], "lbfgs": ["optimizer.max_iter=2"]}


@pytest.mark.parametrize("name", sorted(options()["optimizer"]))
def test_every_optimizers_update_is_recorded(name):
    """One that reads its count of updates, to divide by it, too."""
    try:
        record = recorded("model=mlp", "model.hidden=[8,8]", f"optimizer={name}", *NEEDS.get(name, []))
    except UserError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))
    passes = 2 if name == "sam" else 1  # whose gradients are there at once
    assert passes * record.peak[PARAMETERS] == record.peak[GRADIENTS] > 0
    assert any(operation.phase == "update" for operation in record.operations)


def test_accumulation_does_not_raise_activations_and_repeats_operations():
    made = subject("model=mlp")
    once, four = record(made, 8, 1), record(made, 8, 4)
    assert four.peak[OTHER] <= once.peak[OTHER] + once.peak[GRADIENTS]
    products = [sum(n for o, n in r.operations.items() if o.kind == "product") for r in (once, four)]
    assert products[1] == 4 * products[0]


def test_memory_of_a_second_record_is_that_of_the_first():
    made = subject("model=mlp", "optimizer=lamb")  # it keeps its state in vectors of its own
    first = sum(record(made, 8, 1).peak.values())
    made.rehearsal.records.clear()
    assert sum(record(made, 8, 1).peak.values()) == pytest.approx(first, rel=0.02)


def test_the_largest_micro_batch_fits_and_one_tenth_more_does_not():
    made = subject("model=mlp", "batch.global_batch=64")
    size = forecast.examine(made, 0.0, largest=True).largest_micro_batch
    assert size is not None
    assert size.low < size.value < size.high
    limit = forecast._room(made.device, made.device.memory)
    at, more = (peak(made, int(n)) for n in (size.value, 1.1 * size.value))
    assert at <= 1.01 * limit < 1.08 * limit < more


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_the_largest_micro_batch_of_a_run_that_does_not_fit_is_smaller_than_its_own(share):
    made = subject("model=mlp", "batch.global_batch=64")
    memory = {n: peak(made, n) for n in (2, 64)}
    room = memory[2] + share * (memory[64] - memory[2])
    made = replace(made, device=replace(made.device, memory=(room + made.device.reserved.value) / forecast.FILLED))
    found = forecast.examine(made, 0.0, largest=True)
    assert not found.fits
    assert found.largest_micro_batch.value == pytest.approx(2 + share * 62, abs=1)


BLOCKS = [*TEXT, "model.depth=3", "data.shape=[64]", "checkpointing=blocks"]


def test_a_limit_of_memory_is_forecast_with_the_blocks_that_it_makes_the_run_recompute():
    made = subject(*BLOCKS, "checkpointing.memory_gb=1000")
    notes = forecast.examine(made, 0.0).notes
    assert notes[:-1] == ["checkpointing.memory_gb: 0 of 3 blocks are recomputed"]
    assert "µs for an operation" in notes[-1]
    blocks = repeated_blocks(made.rehearsal.trainer.model)
    peaks = [peak_bytes(record(made, 8, 1, blocks[:count])) for count in range(4)]

    def limited(memory_gb: float) -> forecast.Forecast:
        option = made.plan.run.checkpointing.with_values(memory_gb=memory_gb)
        made.plan = replace(made.plan, job=replace(made.plan.job, run=made.plan.run.with_parts(checkpointing=option)))
        return forecast.examine(made, 0.0)

    fewest = next(count for count, peak in enumerate(peaks) if peak <= peaks[2])
    found = limited(peaks[2] / 2**30)
    assert found.fits
    assert found.notes[:-1] == [f"checkpointing.memory_gb: {fewest} of 3 blocks are recomputed"]
    with pytest.raises(UserError, match=r"is too little: .* with 3 of 3 blocks recomputed"):
        limited(1e-6)


def test_the_peak_that_is_forecast_on_a_cpu_is_that_of_the_process_as_the_run_prints_it():
    made = subject_of(plan([*SMALL, "model=mlp", "batch.global_batch=64", "runtime.seed=7"], (), "here"))
    found = forecast.examine(made, 0.0)
    tensors = found.tensors_bytes.value
    assert made.beside.value > 100 * tensors, "Python and torch beside a small model"
    assert found.peak_bytes.low < made.beside.value + tensors < found.peak_bytes.value < found.peak_bytes.high
    told = forecast._facts(found)
    assert told["peak memory"].endswith("of the process, as the run prints it")
    assert "outside them" in told["peak of its tensors"]
    assert forecast.of_process(Uncertain.exactly(100.0), NOTHING) == (100, 100, 100), "an accelerator's allocator"


def test_the_time_of_a_run_whose_batch_grows_counts_its_samples():
    """Epochs of 8, 4, 2 and 2 updates, since it grows to 32 samples."""
    alike, grows = (subject("model=mlp", "epochs=4", *more) for more in ([], ["batch.grow_every=1", "batch.grow_until=32"]))
    assert [forecast._first_updates(made.rehearsal.trainer) for made in (alike, grows)] == [32.0, 32.0]
    assert [forecast.examine(made, 0.0).updates for made in (alike, grows)] == [32, 16]


def test_batch_auto_is_forecast_with_the_split_that_it_will_find():
    words = ["data.samples=1024", "data.shape=[3,32,32]", "batch=auto", "batch.global_batch=1024", "batch.memory_gb=1"]
    found = answered(subject(*words).plan, ForecastSettings(what_if=False))
    assert found.fits
    assert 1 < found.micro_batches <= 1024 / found.largest_micro_batch.value + 2
    assert found.micro_batch <= found.largest_micro_batch.value
    assert "1,024 samples: 1,024 on each rank in" in forecast.sheet_of([found]).page()


def test_what_a_forecast_leaves_out_is_said():
    with pytest.raises(UserError, match="batch=auto on a CPU needs a limit"):
        plan([*SMALL, "model=mlp", "batch=auto"], (), "here")
    with pytest.raises(UserError, match=r"batch\.tokens=300: only reading the samples shows how many that is"):
        plan(["task=language_modelling", "batch.tokens=300"], (), "h100")
    assert "chooses a batch of 8 to 64 samples" in plan([*SMALL, "batch=critical", "batch.max=64"], (), "h100").notes[0]
    assert "the whole process" in plan([*SMALL, "batch=auto", "batch.memory_gb=1"], (), "here").notes[0]


def test_the_least_memory_that_is_named_is_enough():
    assert rounded_up(0.0085643) == 0.00857
    assert rounded_up(0.00856) == 0.00856
    assert rounded_up(9.999) == 10.0
    assert rounded_up(123.4) == 124.0


@pytest.mark.usefixtures("in_this_process")
def test_a_run_with_stages_is_forecast_stage_by_stage():
    """Each as a run that is like it; the time of the whole run is the stages' by their shares."""
    words = [*SMALL, "model=mlp", "stages=[{until: 0.25, batch.global_batch: 16}, {model.freeze: ['layers.*']}]", "epochs=4"]
    _, found = forecast.forecast(words, (), ForecastSettings(device="h100", seconds=2))
    first, second = found
    assert [each.stage for each in found] == [
        "until 0.25: batch.global_batch=16",
        "to the end: model.freeze=[layers.*]",
    ]
    assert (first.micro_batch, second.micro_batch) == (16, 8)
    assert second.memory[GRADIENTS] < second.memory[PARAMETERS] == first.memory[GRADIENTS]
    assert [each.share for each in found] == pytest.approx([4 / 28, 24 / 28])
    assert forecast.whole(found).value == pytest.approx(4 / 28 * first.run_s.value + 24 / 28 * second.run_s.value)
    assert forecast.fits(found)
    shown, values = forecast.sheet_of(found).page(), json.loads(json.dumps(forecast.as_dict(found)))
    assert "stage 2 of 2, 86 % of the updates: to the end: model.freeze" in shown
    assert values["stages"][0]["memory"] == first.memory
    json_keys.check(values, top="fits run_s stages", stages=f"stage share {json_keys.FORECAST}")


def test_an_answer_as_text_and_as_json():
    planned = plan([*SMALL, "model=mlp"], (), "a100")
    found = [answered(planned, ForecastSettings(device="a100"))]
    shown, values = forecast.sheet_of(found).page(), json.loads(json.dumps(forecast.as_dict(found)))
    for words in ("peak memory", "largest micro-batch", ">launch: ", "what if", "parallel=fsdp", "never measured here"):
        assert words in shown
    json_keys.check(values, top=json_keys.FORECAST, what_if="override speed memory step_s peak_bytes fits why_not")
    assert values["fits"]
    assert values["peak_bytes"][1] < values["peak_bytes"][0] < values["peak_bytes"][2]
    assert {row["override"] for row in values["what_if"]} >= {
        "precision=bf16",
        "compile=inductor",
        "parallel=fsdp parallel.nproc=8",
    }
    assert sum(values["shares"].values()) == pytest.approx(1.0)


def test_what_if_keeps_the_batch_of_a_preset_and_records_no_step_twice(monkeypatch):
    """Another option of `batch` misses what the task's preset sets for the first one."""
    words = [*(word for word in SMALL if not word.startswith("batch.")), *TEXT, "model.depth=1"]
    own = subject_of(plan(words, (), "h100"))
    monkeypatch.setattr(forecast, "candidates", lambda _: ["compile=inductor", "batch=accumulate batch.accumulation_steps=2"])
    base = forecast.examine(own, 0.0)
    recorded = list(own.rehearsal.records)
    compiled, accumulated = forecast.table(base, own, float("inf"))
    assert base.micro_batch == 16
    assert accumulated.override == "batch=accumulate batch.accumulation_steps=2 batch.global_batch=16"
    assert [*recorded, (8, 2, 0)] == list(own.rehearsal.records), "a compiled step has the record of the plain one"
    assert compiled.memory == 1
    assert all("the time was up" in row.why_not for row in forecast.table(base, own, 0.0))


def test_ranks_divide_the_batch_and_fsdp_the_state():
    alone = forecast.examine(subject("model=mlp"), 0.0)
    ranks = forecast.examine(subject("model=mlp", "parallel=fsdp", "parallel.nproc=8"), 0.0)
    assert (alone.micro_batch, ranks.micro_batch, ranks.ranks) == (8, 1, 8)
    assert ranks.memory[STATE] == pytest.approx(alone.memory[STATE] / 8)
    assert ranks.network_s.high > 0
    assert alone.network_s.high == 0


def test_offloading_to_the_host_is_forecast_for_a_device_that_is_not_here():
    planned = plan([*SMALL, "runtime.device=auto", "model=mlp", "checkpointing=offload"], (), "h100")
    validate.validate_device(planned.look())
    assert any("checkpointing=offload is not recorded" in note for note in planned.notes)
    sharded = plan([*SMALL, "model=mlp", "parallel=fsdp", "parallel.nproc=2", "parallel.offload=true"], (), "h100")
    assert any("the copies to the host" in note for note in sharded.notes)
    assert sharded.ranks(torch.nn.Linear(2, 2)).offloaded


def test_a_run_that_needs_checkpoints_is_forecast_with_them():
    assert plan([*SMALL, "model=mlp"], (), "h100").run.saving.active is False
    assert plan([*SMALL, "model=mlp", "ema=post_hoc"], (), "h100").run.saving.active
    assert forecast.examine(subject("model=mlp", "ema=post_hoc"), 0.0).tensors_bytes.value > 0
    with pytest.raises(UserError, match=r"^ema.wider=0.01 is not above ema.width=0.05"):
        plan([*SMALL, "model=mlp", "ema=post_hoc", "ema.wider=0.01"], (), "h100")


@pytest.mark.usefixtures("in_this_process")
def test_a_forecast_leaves_its_page_and_its_figures(capsys):
    assert verb([*SMALL, "model=mlp", "device=h100", "seconds=1"]) == 0
    (left,) = Path("outputs/forecast").glob("*/*/forecast.html")
    assert f"written to {left.parent}/forecast.json and forecast.html" in capsys.readouterr().out
    assert pages.check(left.read_text()).texts[0][1].startswith("The run fits: its peak memory is ")
    json_keys.check(json.loads(left.with_suffix(".json").read_text()), top=json_keys.FORECAST)


def test_a_strategy_whose_memory_is_not_forecast_is_told():
    planned = plan([*SMALL, *TEXT, "parallel=tensor", "parallel.nproc=2"], (), "h100")
    with pytest.raises(UserError, match="not forecast"):
        planned.ranks(None)


def test_the_measured_peak_lies_in_the_forecasts_interval(monkeypatch: pytest.MonkeyPatch):
    """The short form of `python -m bench.forecast`: memory alone, since a time is no test."""
    monkeypatch.setattr(bench, "ENOUGH_S", 0.0)
    words = [*SMALL, "model=resnet9", "model.width=4"]
    found = {"forecast": bench.predict(words), "measured": bench.measure(words)}
    bench.judge(found)
    assert found["peak_bytes"]["held"]
    assert found["peak_bytes"]["error"] < 0.05
    assert found["forecast"]["ms"][0] > 0
    assert found["measured"]["ms"] > 0


def test_the_benchmarks_configurations_are_seeded_and_apart():
    first, again, other = (next(bench.configurations("test", seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert not set(bench.NETWORKS["test"]) & set(bench.NETWORKS["calibration"])


# --- memory over ranks, the roofline and devices, on made-up figures ---


KINDS = ("product", "convolution", "attention", "bandwidth")
# A device of 1 TFLOP/s and 1 GB/s, whose host takes no time.
DEVICE = DeviceLimits(
    "made up", 1e9, {"float32": 1e12}, 1e9, 1e9, "a test", efficiency=dict.fromkeys(KINDS, ONE),
    kernel_s=NOTHING, host_s=NOTHING, view_s=NOTHING,
)  # fmt: skip
PARTS = {PARAMETERS: 800, GRADIENTS: 800, STATE: 1600, OTHER: 1000, "batch": 100}


def operations(*made: tuple[str, int, int], phase: str = "forward", times: int = 1) -> dict[Operation, int]:
    """Operations of these kinds, FLOP and bytes, each so many times."""
    sum_ = torch.ops.aten.mm.default, (), {}
    return {
        Operation(f"{phase} {number}", kind, phase, flops, nbytes, 0, torch.float32, sum_): times  # type: ignore[arg-type]
        for number, (kind, flops, nbytes) in enumerate(made)
    }


PRODUCT, LARGE = ("product", 10**12, 0), ("product", 10**13, 0)


def seconds(made: dict[Operation, int], device: DeviceLimits = DEVICE, **more: object) -> float:
    return roofline.step_time(made, {}, device, **more).seconds.value  # type: ignore[arg-type]


SLOW_HOST = replace(DEVICE, host_s=Uncertain(0.1, 0.05, 0.2))
WITH_TF32 = replace(DEVICE, flops={"float32": 1e12, "tf32": 1e13})
COMPILED = {"compiled": roofline.CompiledShares(Uncertain.exactly(0.5))}


@pytest.mark.parametrize(
    ("made", "device", "more", "expected"),
    [
        # An operation takes as long as its arithmetic or its traffic.
        (operations(("product", 2 * 10**12, 0)), DEVICE, {}, 2.0),
        (operations(("product", 10**12, 3 * 10**9)), DEVICE, {}, 3.0),
        (operations(PRODUCT, ("view", 0, 10**12), times=4), DEVICE, {}, 4.0),
        # A step of small operations is limited by their launch; on a CPU nothing is queued: both take their time.
        (operations(("product", 10**9, 0), times=10), SLOW_HOST, {}, 1.0),
        (operations(PRODUCT), replace(SLOW_HOST, asynchronous=False), {}, pytest.approx(1.1)),
        # Compiling saves traffic of pointwise operations alone, and none of the update.
        (
            operations(("pointwise", 0, 10**9), ("product", 0, 10**9)) | operations(("pointwise", 0, 10**9), phase="update"),
            DEVICE, COMPILED, 2.5,
        ),
        # Tensor cores compute float32 where tf32 is on.
        (operations(LARGE), WITH_TF32, {}, 10.0),
        (operations(LARGE), WITH_TF32, {"tf32": ("product",)}, 1.0),
        (operations(LARGE), WITH_TF32, {"tf32": ("convolution",)}, 10.0),
    ],
)  # fmt: skip
def test_a_step_takes_as_long_as_what_limits_its_operations(made, device, more, expected):
    assert seconds(made, device, **more) == expected


def test_the_shares_and_the_interval_of_what_limits_a_step():
    """The least and the most time go by the highest and the lowest efficiency."""
    found = roofline.step_time(operations(PRODUCT, ("pointwise", 0, 3 * 10**9)), {}, DEVICE)
    assert (found.shares, found.timed_share) == ({"compute": 0.25, "memory bandwidth": 0.75}, 0)
    found = roofline.step_time(operations(("product", 10**9, 0), times=10), {}, SLOW_HOST)
    assert (found.seconds, found.shares) == (pytest.approx((1.0, 0.5, 2.0)), {"launch": 1.0})
    device = replace(DEVICE, efficiency={"product": Uncertain(0.5, 0.25, 1.0), "bandwidth": Uncertain(0.5, 0.1, 1.0)})
    assert roofline.step_time(operations(("product", 10**12, 10**8)), {}, device).seconds == (2.0, 1.0, 4.0)
    assert roofline.step_time(operations(("pointwise", 0, 10**9)), {}, device).seconds == (2.0, 1.0, 10.0)


def test_what_was_measured_here_counts_in_place_of_the_roofline():
    found = roofline.step_time(operations(LARGE, ("product", 10**12, 0), times=2), {"forward 0": Timed(0.5, 7)}, DEVICE)
    assert found.seconds.value == 3.0
    assert found.timed_share == pytest.approx(1 / 3)
    assert (found.forward_s, found.backward_s) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # fsdp divides what the ranks share, and gathers two blocks or keeps all.
        *(
            (Ranks(n, n, largest_block=0.0), {PARAMETERS: 800 / n, GRADIENTS: 800 / n, STATE: 1600 / n}) for n in (1, 2, 8)
        ),
        (Ranks(4, owners=4), {PARAMETERS: 800, GRADIENTS: 800, STATE: 1600 / 4}),  # ddp that shares its states
        (Ranks(4, 4, largest_block=100.0), {PARAMETERS: 200 + 2 * 100, GRADIENTS: 200 + 100, STATE: 400}),
        (
            Ranks(4, 4, keeps_gathered=True, largest_block=100.0),
            {PARAMETERS: 200 + 800, GRADIENTS: 200 + 100, STATE: 400},
        ),
        (Ranks(4, 4, whole_gradients=True), {PARAMETERS: 200, GRADIENTS: 800, STATE: 400}),
        (Ranks(4), {}),  # ddp
        # What is offloaded is not on the device.
        (Ranks(4, 4, offloaded=True, largest_block=100.0), {PARAMETERS: 200, GRADIENTS: 100, STATE: 0}),
        (Ranks(1, 1, offloaded=True), {PARAMETERS: 0, GRADIENTS: 0, STATE: 0}),
    ],
)  # fmt: skip
def test_what_ranks_hold(ranks, expected):
    assert forecast.sharded(PARTS, ranks) == PARTS | expected


def test_a_short_run_has_a_time():
    assert [forecast.seconds(s) for s in (0.004, 0.25, 1.0, 75.0)] == ["4 ms", "250 ms", "1.0 s", "75 s"]


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "sent"),
    [
        (Ranks(), 1, 0),
        (Ranks(4), 3, 2 * 0.75 * 800),  # one all-reduce, whatever the micro-batches
        (Ranks(4, 4), 1, 3 * 0.75 * 800),  # gathered twice, reduced once
        (Ranks(4, 4, keeps_gathered=True), 1, 2 * 0.75 * 800),
    ],
)
def test_bytes_that_ranks_send(ranks, micro_batches, sent):
    assert forecast.sent_bytes(800.0, ranks, micro_batches) == sent


def test_the_peak_has_kernels_own_buffers_where_they_were_measured_else_an_allowance():
    counted = dict.fromkeys(PARTS, 1000)
    device = replace(DEVICE, workspaces=NOTHING, fragmentation=ONE)
    parts, measured = forecast.peak_memory(counted, 6000, True, Ranks(), device)
    assert parts["workspace"] == 1000
    assert measured == (6000, 0.97 * 5000 + 1000, 1.04 * 5000 + 1000)
    parts, allowed = forecast.peak_memory(counted, 6000, False, Ranks(), device)
    assert parts["workspace"] == 0.05 * 1000
    assert allowed.low < measured.low
    assert allowed.high - allowed.low > measured.high - measured.low


def test_network_time_hides_behind_the_backward():
    nothing_hidden = roofline.network_seconds(0.7e9, DEVICE, 0.0)
    assert nothing_hidden.value == nothing_hidden.high == pytest.approx(1.0)
    hidden = roofline.network_seconds(0.7e9, DEVICE, 10.0)
    assert hidden.value == hidden.low == 0.0
    assert hidden.high == pytest.approx(1.0)


def test_figures_add_with_their_intervals():
    assert (Uncertain(1, 0, 2) + Uncertain(2, 2, 3)).times(3) == (9, 6, 15)
    assert Uncertain(1, 0.5, 2).times(Uncertain(10, 10, 20)) == (10, 5, 40)
    assert Uncertain(1, 0, 2).at_least(Uncertain(0, 1, 3)) == (1, 1, 3)


@pytest.mark.parametrize("name", list(_TABLE))
def test_every_device_of_the_table_says_that_it_was_not_measured(name: str):
    device = known(name)
    assert FORECAST_ONLY in device.source
    assert device.flops["float32"] > 1e12
    assert device.memory >= 16e9
    assert device.bandwidth < 1e13
    assert device.link <= device.bandwidth
    assert ("as seen on one machine" in roofline.host_note(name)) == (name == "h200")
    assert device.host_s.low <= device.host_s.value <= device.host_s.high
    assert forecast._room(device, device.memory) == 0.97 * device.memory - device.reserved.value  # the driver's part


def test_this_machine_is_looked_at_once(monkeypatch):
    monkeypatch.setattr(roofline, "_convolution_flops", lambda device: 5e11)
    monkeypatch.setattr(roofline, "_host_seconds", lambda device: 1e-5)
    monkeypatch.setattr(roofline, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(roofline, "_products", lambda device, number: {"float32": 1e12, "bfloat16": 4e12}[number])
    found = roofline.this_device(torch.device("cpu"), ("bfloat16",))
    assert (found.bandwidth, found.flops, found.host_s.value) == (1e10, {"float32": 1e12, "bfloat16": 4e12}, 1e-5)
    assert found.efficiency["convolution"] == (0.5, 0.25, 0.75)
