"""Loaders and augmentations on a device: the host waits for nothing, no devices mix, streams wait for each other."""

import copy
import io
import pickle
from functools import cache

import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

import drivetrain
from drivetrain.augment import Augment
from drivetrain.augment.erasing import RandomErasing
from drivetrain.augment.geometry import FlipCrop, RandomResizedCrop
from drivetrain.augment.mixing import CutMix, Mixup
from drivetrain.batch import Batch
from drivetrain.batch.base import Accumulate
from drivetrain.config.catalog import options
from drivetrain.core.order import shuffled
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.world import World
from drivetrain.data import Normalize, Tensors
from drivetrain.data.text import Texts
from drivetrain.launch import launcher
from drivetrain.loader import Loader, Pipeline, base, dali
from drivetrain.loader.dali import Dali
from drivetrain.loader.device import DeviceLoader, Resident
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from drivetrain.precision.base import Bf16
from tests.support import sets
from tests.support.cuda_streams import CUDA, Event, Stream, StreamedDevice, streamed_device
from tests.support.sets import images_of
from tests.test_contract import NET, words_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]
CPU, SIZE, SAMPLES = torch.device("cpu"), 6, 24
NAMES = options()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that options read: images, a class of one's own, small data sets."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "outside.py").write_text(NET)
    for label, name in enumerate(("cat", "dog")):
        (folder / "images" / name).mkdir(parents=True)
        for i in range(25):
            Image.new("RGB", (12, 10), (100 * label, 5 * i, 50)).save(folder / "images" / name / f"{i}.png")
    sets.write(folder)
    return folder


@pytest.fixture(autouse=True)
def _beside_the_sets(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def device(monkeypatch):
    with streamed_device(monkeypatch) as simulated:
        yield simulated


@cache
def prepared(*words: str):
    return launcher.prepare(list(words)).run


def option(tiny, group: str, name: str):
    """An option as its YAML has it; a loader with one worker."""
    found = getattr(prepared(*tiny(*words_of((group, name)))), group)
    found = copy.deepcopy(found[0] if isinstance(found, list) else found)
    return found.with_values(num_workers=1) if name == "workers" else found


def images(dtype=torch.uint8) -> Tensors:
    values = torch.randint(256, (SAMPLES, 3, 16, 16), generator=torch.Generator().manual_seed(0)).to(dtype)
    return Tensors(values / 255 if dtype.is_floating_point else values, torch.arange(SAMPLES) % 4)


def pipeline(source, steps=()) -> Pipeline:
    return Pipeline(source, tuple(steps), Normalize([100.0] * 3, [50.0] * 3), 0, 4)


def requests(pipeline: Pipeline, size: int = SIZE) -> list[Request]:
    batch = Batch(global_batch=size)
    batch.pairs = any(step.mixes for step in pipeline.steps)
    return list(batch.over(shuffled(len(pipeline.source))).requests(0, 0, World(), True))


def train(device: StreamedDevice, loader: Loader, work: Pipeline) -> set[torch.dtype]:
    """Do as a training loop does: it keeps a micro-batch until it has the next one, and queues work that reads all of it.

    What is made once, such as a table, may be copied while the first micro-batch is made.
    """
    kinds, device.strict = [], False
    for micro in loader.stream(work, requests(work), CUDA, torch.contiguous_format):
        device.strict = type(getattr(loader, "_chosen", loader)) is not Loader  # loader=sync waits for its copies
        for tensor in (*trees.leaves(micro.x), *trees.leaves(micro.y), micro.weight):
            assert tensor.device == CUDA
            tensor.mul(2)
        kinds.append(trees.first(micro.x).dtype)
    assert len(kinds) == SAMPLES // SIZE
    assert device.problems == []
    return set(kinds)


def all_augmentations(tiny) -> list[Augment]:
    """Every option of the group at once, in an order that is allowed."""
    chosen = [option(tiny, "augment", name) for name in NAMES["augment"] if name != "none"]
    return sorted(chosen, key=lambda step: (step.mixes, type(step).crop_boxes is Augment.crop_boxes))


@pytest.mark.parametrize("name", NAMES["loader"])
def test_every_loader_with_all_augmentations(tiny, device, monkeypatch, name):
    loader, steps = option(tiny, "loader", name), all_augmentations(tiny)
    work = pipeline(images(), steps if name in ("device", "resident") else [steps[0], steps[-1]])  # on the device, or before
    if name == "auto":
        monkeypatch.setattr("drivetrain.loader.auto.usable_cores", lambda: 1)
        loader, device.strict = loader.with_values(budget_s=1e-9), False
        loader.autotune(work._replace(steps=()), SIZE, 10**9, CUDA)
    assert train(device, loader, work) == {torch.float32}


@pytest.mark.parametrize("name", [name for name in NAMES["loader"] if name != "auto"])
def test_every_loader_with_text_dicts_and_tuples_whose_images_cross_as_bytes(tiny, device, name):
    texts = Texts([bytes(range(n)) for n in range(4, 4 + SAMPLES)], 64)
    if name == "resident":  # holds samples of one shape
        texts = Tensors(torch.zeros(SAMPLES, 9, dtype=torch.int64), torch.zeros(SAMPLES, 9, dtype=torch.int64))
    assert train(device, option(tiny, "loader", name), Pipeline(texts, (), None, 0)) == {torch.int64}
    x = {"image": images().x, "person": (torch.rand(SAMPLES), torch.rand(SAMPLES, 3))}
    trees_ = pipeline(Tensors(x, {"label": torch.arange(SAMPLES) % 4}), [FlipCrop()])._replace(images="image")
    for work in (pipeline(images(), [RandomErasing(prob=1.0)]), trees_)[: 1 if name == "dali" else 2]:
        device.copied.clear()
        assert train(device, option(tiny, "loader", name), work) == {torch.float32}
        assert {dtype for shape, dtype in device.copied if len(shape) == 4} == {torch.uint8}


@pytest.mark.parametrize("name", NAMES["data"])
def test_every_data_set(tiny, device, name):
    if name == "huggingface":
        pytest.importorskip("datasets")
    data = option(tiny, "data", name)
    device.strict = False
    splits = data.load(CUDA if data.on_device else CPU)
    loader = Loader() if data.on_device else DeviceLoader("sync")
    for source in (splits.train, next(iter(splits.sets("test").values()))):
        work, device.strict = Pipeline(source, (), splits.normalize, 0), False
        asked, given = requests(work, min(SIZE, len(source)))[:3], 0
        for micro in loader.stream(work, asked, CUDA, torch.contiguous_format):
            device.strict = True
            micro.x.mul(2)
            given += 1
        assert given == len(asked)
    assert device.problems == []


# --- what is prepared at once ---


class Launches(TorchDispatchMode):
    """Counts operations that write something: on a device each is a launch at least."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        return func(*args, **(kwargs or {}))


def resident(monkeypatch, work: Pipeline, samples_at_once: int, epochs: int = 2) -> tuple[list[MicroBatch], int]:
    """The micro-batches of a resident set, and the operations that it took to make them."""
    monkeypatch.setattr("drivetrain.loader.pieces.samples_at_once", lambda *_: samples_at_once)
    batch = Accumulate(global_batch=SIZE, accumulation_steps=2)
    batch.pairs = any(step.mixes for step in work.steps)
    asked = [r for epoch in range(epochs) for r in batch.over(shuffled(len(work.source))).requests(0, epoch, World(), True)]
    with Launches() as launches:
        return list(Resident().stream(work, asked, CPU, torch.channels_last)), launches.count


@pytest.mark.parametrize("samples_at_once", [2 * SIZE + 1, 10**6])
@pytest.mark.parametrize("name", NAMES["augment"])
def test_what_is_augmented_at_once_is_the_same_bit_for_bit(tiny, monkeypatch, name, samples_at_once):
    steps = [] if name == "none" else [option(tiny, "augment", name)]
    work = pipeline(images(), steps)
    alone, together = (resident(monkeypatch, work, most)[0] for most in (0, samples_at_once))
    assert len(alone) == len(together) == 2 * SAMPLES // (SIZE // 2)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)
        assert other.x.is_contiguous(memory_format=torch.channels_last)
        assert (one.weight, one.last, one.epoch_end, one.filler) == (other.weight, other.last, other.epoch_end, other.filler)


def test_batches_of_an_epoch_take_few_launches(monkeypatch):
    """Crops and flips of all batches of an epoch take as many as those of one; each batch is a view then."""
    work = pipeline(images(), [FlipCrop()])
    _, alone = resident(monkeypatch, work, 0)
    _, first = resident(monkeypatch, work._replace(source=work.source.subset(torch.arange(SIZE))), 0, epochs=1)
    batches, together = resident(monkeypatch, work, 10**6)
    assert alone > 10 * len(batches)
    assert together <= first + len(batches)


def test_images_are_handed_over_in_the_steps_format(monkeypatch):
    work = pipeline(images(), [FlipCrop()])
    plain, rounded = (resident(monkeypatch, each, 10**6)[0] for each in (work, work._replace(computes_in=torch.bfloat16)))
    for one, other in zip(plain, rounded, strict=True):
        assert torch.equal(one.x.bfloat16(), other.x)
        assert other.x.dtype is torch.bfloat16
        assert other.x.is_contiguous(memory_format=torch.channels_last)


def test_a_first_layer_that_rounds_its_inputs_trains_on_them_as_on_floats(monkeypatch):
    monkeypatch.setattr(Bf16, "looks_for_slow_layers", False)  # which are kept in float32
    words = ["data=digits", "model=mlp", "precision=bf16", "updates=4", "epochs=1", "batch.global_batch=64", "saving=none"]
    handed_over, rounded = [], Normalize.rounded
    monkeypatch.setattr(Normalize, "rounded", lambda self, dtype: handed_over.append(dtype) or rounded(self, dtype))
    results = [drivetrain.train([*words, f"loader={name}", "runtime.device=cpu"]) for name in ("device", "resident")]
    assert results[0].metrics == results[1].metrics
    assert set(handed_over) == {torch.bfloat16}


# --- what crosses to the device ---


class Pieces(Tensors):
    """A source that threads share."""

    parallel_read = True


@pytest.mark.parametrize("steps", [(), (RandomErasing(prob=1.0),)], ids=["raw", "augmented"])
@pytest.mark.parametrize("source", [Tensors, Pieces])
def test_threads_pin_the_batch_that_is_copied(device, source, steps):
    work = pipeline(source(images().x, images().y), steps)
    for finish in (True, False):
        for x, y, _ in Threads(2).batches(work._replace(normalize_later=True), requests(work), CUDA, finish):
            assert x.dtype == torch.uint8
            assert (x.pinned, y.pinned) == (True, True)
    for x, _, _ in Threads(2, pin_memory=False).batches(work, requests(work), CUDA):
        assert not hasattr(x, "pinned")


@pytest.mark.parametrize("loader", [Threads(1, pin_memory=False), Workers(1, pin_memory=False), Workers(1, non_blocking=False)])
def test_a_copy_that_waits_is_made_where_it_is_asked_for(device, loader):
    assert loader.copies_ahead() == 0
    device.strict = False
    work = pipeline(images())
    for micro in loader.stream(work, requests(work)[:2], CUDA, torch.contiguous_format):
        micro.x.mul(2)
    assert device.problems == []


def test_the_order_of_memory_is_changed_on_the_device(device):
    """A CPU would write the other order to memory that is not pinned."""
    nhwc = Tensors(images().x.contiguous(memory_format=torch.channels_last), images().y)
    train(device, DeviceLoader("sync"), pipeline(nhwc))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        work = pipeline(images())
        (micro, *_) = Threads(1).stream(work, requests(work), CUDA, memory_format)
        assert micro.x.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_host_far_ahead_of_the_device_keeps_few_batches_pinned(device, monkeypatch, ahead):
    """Each holds its memory until its copy is done, so the host waits for the oldest one: not before there are many."""
    waited: list[int] = []  # for each event that is waited for: how many copies there were by then
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(len(copied)))
    copied: list[Event] = []
    batch = (torch.zeros(2), torch.zeros(2), Request(0, torch.arange(2), 1.0))
    ready = base.copy_ahead([batch] * 30, lambda *_: copied.append(Event()), CUDA, ahead)
    assert len(list(ready)) == len(copied) == 30
    assert waited == list(range(base.IN_FLIGHT + ahead, 30))


# --- dali on the device ---


class Graph:
    """DALI's pipeline on a device: its images lie there."""

    def __init__(self, files) -> None:
        self.files = files

    def run(self, cuda_stream: Stream, /):
        contents, _, _ = self.files()
        self.shape = (len(contents), 16, 16, 3)
        return (self,)

    def as_tensor(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=torch.uint8, device=CUDA)


@pytest.mark.parametrize("mixed", [True, False])
def test_dali_mixes_images_and_labels_where_they_are(device, tmp_path, monkeypatch, mixed):
    """Images that DALI decodes on the device meet their labels there; one that it cannot decode comes from the CPU."""
    named = []
    for n in range(SAMPLES):
        path = tmp_path / f"{n}.{'png' if n % 5 == 4 else 'jpg'}"
        Image.new("RGB", (20, 20), (n, 2 * n, 0)).save(path)
        named.append((path, n % 4))
    from drivetrain.core.lazy import torch as seen

    if mixed:
        monkeypatch.setattr(dali, "_build_graph", lambda files, *_: Graph(files))
        monkeypatch.setattr(seen, "from_dlpack", lambda tensor: tensor)
    else:
        pytest.importorskip("nvidia.dali")
    loader = Dali(num_threads=1, decoder="mixed" if mixed else "cpu")
    train(
        device, loader, pipeline(images_of(named, 16, 10**6), [RandomResizedCrop(), RandomErasing(prob=1.0), CutMix(), Mixup()])
    )


# --- what travels to workers ---


def devices_of(value: object) -> set[str]:
    """The devices of all tensors that pickle finds in a value."""
    found = set()

    class Walk(pickle.Pickler):
        def persistent_id(self, item):
            if isinstance(item, torch.Tensor):
                found.add(item.device.type)
                return "tensor"
            return None

    Walk(io.BytesIO()).dump(value)
    return found


def test_requests_hold_only_tensors_of_the_cpu(make, device):
    trainer = make("augment=[mixup]", "data.samples=50", "data.drop_last=false")
    trainer.device = CUDA
    evaluated = trainer.batch.evaluation_requests(trainer.evaluator.data.source, World(), None)
    assert not devices_of([*trainer.requests(), *evaluated]), "requests travel as arrays"


def test_workers_get_only_tensors_of_the_cpu(device, monkeypatch):
    """Also once the same pipeline has been used on the device."""
    sent = set()

    class InThisProcess:
        def __init__(self, dataset, sampler, **_):
            self.dataset, self.sampler = dataset, sampler

        def __iter__(self):
            for request in self.sampler:
                sent.update(devices_of((self.dataset, request)))
                yield self.dataset[request]

    work = pipeline(images(), [RandomErasing(prob=1.0, fill="mean"), CutMix()])
    train(device, DeviceLoader("sync"), work)
    monkeypatch.setattr(torch.utils.data, "DataLoader", InThisProcess)
    train(device, Workers(2), work)
    assert sent == {"cpu"}


# --- the simulation finds what it is for ---


@pytest.mark.parametrize("forgotten", ["wait_event", "wait_stream"])
def test_a_stream_that_does_not_wait_is_found(device, monkeypatch, forgotten):
    monkeypatch.setattr(Stream, forgotten, lambda *_: None)
    with pytest.raises(AssertionError, match="before the stream that wrote it" if forgotten == "wait_event" else "still uses"):
        train(device, Threads(1), pipeline(images())._replace(normalize=None))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: bool(x.any()), lambda x: x.tolist(),
        lambda x: x + torch.ones(6),
    ],
)  # fmt: skip
def test_reading_a_value_or_mixing_devices_fails(device, call):
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException, RuntimeError)):
        call(torch.zeros(6, device=CUDA))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.cpu(),
        lambda x: torch.tensor(1.0, device=CUDA),
        lambda x: torch.ones(6).to(CUDA),
        lambda x: x[torch.ones(2).long()],
    ],
)
def test_a_copy_that_waits_is_found(device, call):
    call(torch.zeros(6, device=CUDA))
    assert device.problems
