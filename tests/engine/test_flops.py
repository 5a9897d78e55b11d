"""A model's floating-point operations are counted as torch does, and nothing else happens; the peak comes from a table."""

import json
import time

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.engine import flops
from drivetrain.engine.flops import Mfu, number_format

CPU = torch.device("cpu")


def by_torch(model: torch.nn.Module, x: torch.Tensor) -> float:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x).sum().backward()
    return counter.get_total_flops() / len(x)


def test_a_layer_by_hand():
    counted = flops.count(torch.nn.Linear(64, 10), torch.zeros(2, 64))
    assert counted.per_sample == 2 * 64 * 10 * 2  # forward, and the gradient of the weight: the input has none


@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet18", 64), ("vit_tiny_patch16_224", 224), ("mixer_s32_224", 224)],
)
def test_it_is_torchs_count(name, size):
    model = timm.create_model(name)
    x = torch.zeros(2, 3, size, size, device="meta")
    assert flops.count(model, torch.zeros(2, 3, size, size)).per_sample == by_torch(model.to("meta"), x)


@pytest.mark.parametrize("name", ["convnext_atto", "efficientnet_b0"])
def test_grouped_convolutions_count_once_for_each_gradient(name):
    """torch's formula of their backward leaves the groups out: it counts the weight's gradient of all channels with all."""
    model, x = timm.create_model(name), torch.zeros(2, 3, 64, 64)
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        model(x)
    assert flops.count(model, x.requires_grad_()).per_sample == 3 * forward.get_total_flops() / len(x)


def test_it_is_torchs_count_of_a_text_model(make):
    trainer = make("data=stdlib", "data.length=32", "data.max_files=20", "data.test_samples=8", "loss=next_token", "model=gpt",
                   "model.width=32", "model.depth=2", "model.heads=2")  # fmt: skip
    assert trainer.log.mfu.model.per_sample == by_torch(trainer.model, torch.zeros(2, 32, dtype=torch.int64)) > 0


def test_texts_much_shorter_than_the_length_have_no_count(make, tmp_path):
    """A batch is padded to its longest text, not to data.length, at which a count would be several times too high."""
    chats = "".join(json.dumps({"prompt": f"{n} plus 1?", "completion": str(n + 1)}) + "\n" for n in range(200))
    (tmp_path / "run").mkdir()
    (tmp_path / "chats.jsonl").write_text(chats)
    words = ("data=instructions", f"data.path={tmp_path}/chats.jsonl", "loss=next_token", "model=gpt", "model.width=32")
    counted = make(*words).log.mfu.model
    assert counted.per_sample is None
    assert "different lengths" in counted.reason


def test_counting_changes_nothing():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5), torch.nn.Flatten())
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert flops.count(model, torch.zeros(2, 3, 8, 8)).per_sample > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and not p.is_meta for p in model.parameters())


class Refuses(torch.nn.Linear):
    def forward(self, x):
        if not x.any():
            raise ValueError("nothing but zeros")
        return super().forward(x)


def test_what_cannot_be_counted_has_a_reason(make, train, monkeypatch, caplog):
    refused = flops.count(Refuses(4, 4), torch.zeros(2, 4)).reason
    assert refused == "the model's operations cannot be counted: ValueError: nothing but zeros"
    assert flops.count(torch.nn.ReLU(), torch.zeros(2, 4)).reason == "torch counts no operations of this model"
    monkeypatch.setattr(flops, "_count", lambda *_: 1 / 0)
    result = train("updates=6", "epochs=3")
    assert (result.flops_per_sample, result.mfu) == (None, None)
    assert result.mfu_note == "the model's operations cannot be counted: ZeroDivisionError: division by zero"
    assert f"no MFU: {result.mfu_note}" in caplog.messages


def test_what_is_computed_twice_counts_once(make):
    model = ["model=resnet9", "model.width=8"]
    recomputed, plain = make(*model, "checkpointing=blocks"), make(*model)
    assert recomputed.log.mfu.model == plain.log.mfu.model


# --- the peak ---


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.5), ("NVIDIA H200 NVL", 835.5), ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA GH200 480GB", 989.5), ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500), ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA L4", 121), ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307.4), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA GeForce RTX 3090 Ti", None), ("Tesla T4", None), ("Apple M3", None),
    ],
)  # fmt: skip
def test_the_table_is_read_by_torchs_names(name, tflops):
    assert flops.from_table(name, "bfloat16") == tflops


def test_rows_of_the_table_are_found():
    """No row hides a later one, and each knows float32."""
    for key, formats in flops._TABLE:
        assert flops.from_table(f"NVIDIA {key}", "float32") == formats["float32"], key


def test_other_devices_are_measured(monkeypatch):
    class Module:
        @staticmethod
        def get_device_name(device):
            return "Some Accelerator"

    monkeypatch.setattr(flops.torch, "get_device_module", lambda device: Module, raising=False)
    monkeypatch.setattr(flops, "measured", lambda device, number_format: 5e12)
    found = flops.peak(torch.device("cuda", 0), "bfloat16")
    assert found == (5e12, "5 TFLOP/s in bfloat16, measured with matrix products")
    monkeypatch.setattr(Module, "get_device_name", lambda device: "NVIDIA H200")
    assert flops.peak(torch.device("cuda", 1), "bfloat16").flops == 989.5e12


def test_measuring_ends_when_a_product_takes_long_enough(monkeypatch):
    sizes = []
    monkeypatch.setattr(flops, "_best_seconds", lambda a, clock: sizes.append(len(a)) or len(a) ** 3 / 1e12)
    assert flops._products(CPU, "float32", time.thread_time) == pytest.approx(2e12)
    assert sizes == [256, 512, 1024, 2048]


def test_a_cpus_peak_is_one_threads_by_its_own_time(monkeypatch):
    threads, asked = torch.get_num_threads(), []
    monkeypatch.setattr(flops, "_products", lambda d, f, clock: asked.append((torch.get_num_threads(), clock)) or 1e12)
    try:
        torch.set_num_threads(2)
        assert flops.measured(CPU, "float32") == 2e12
        assert asked == [(1, time.thread_time)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_mfu_is_the_share_of_all_devices(monkeypatch):
    monkeypatch.setattr("drivetrain.engine.flops.peak", lambda *_: flops.Peak(1e12, "1 TFLOP/s, by decree"))
    mfu = Mfu(flops.ModelFlops(1e9), CPU, "float32", 4)
    assert mfu.at(1000.0) == 0.25
    assert mfu.at(None) is None
    assert mfu.note() == "of 4 × 1 TFLOP/s, by decree"


def test_a_peak_that_cannot_be_measured_is_no_error(monkeypatch):
    def fails(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr("drivetrain.engine.flops.peak", fails)
    mfu = Mfu(flops.ModelFlops(1e9), CPU, "float16", 1)
    assert mfu.at(1000.0) is None
    assert "neither be looked up nor measured" in mfu.note()


def test_the_number_format_is_that_of_the_products(make):
    for words, found in ((["precision=bf16"], "bfloat16"), (["precision=bf16_pure"], "bfloat16"), ([], "float32")):
        trainer = make(*words)
        assert trainer.log.mfu.number_format == found, words
    torch.set_float32_matmul_precision("high")
    try:
        assert number_format(trainer.model, None) == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_cudnn_counts_with_the_kernels_of_training_and_searches_for_none(monkeypatch):
    class Looks(torch.nn.Linear):
        def forward(self, x):
            seen.append((torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32))
            return super().forward(x)

    seen: list[tuple[bool, bool, bool]] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", True)
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        flops.count(Looks(4, 2), torch.zeros(2, 4))
        assert seen == [(True, False, False)]
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32) == (True, False)
