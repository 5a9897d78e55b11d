"""The samples of each update, and that splitting an update does not change it."""

import itertools
import json
import math
import re

import pytest
import torch

from drivetrain.batch import Batch
from drivetrain.batch.base import Accumulate
from drivetrain.batch.bucketed import Bucketed, padded, split_by_cost
from drivetrain.cli.show import show
from drivetrain.core import order as orders
from drivetrain.core.errors import UserError
from drivetrain.core.options.horizon import run_horizon
from drivetrain.core.order import Order, shuffled
from drivetrain.core.step import rng
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import Source
from drivetrain.core.step.tensors import Tensors
from drivetrain.core.world import World
from drivetrain.launch import launcher

WORLDS = (1, 2, 3)


def requests(batch: Batch, samples: int, size: int, drop_last: bool, **more: int) -> list[list[Request]]:
    """The requests of one epoch, a list for each rank."""
    return [list(batch.over(shuffled(samples)).requests(0, 0, World(rank, size), drop_last, **more)) for rank in range(size)]


def by_update(mine: list[Request]) -> list[list[Request]]:
    """One rank's requests as a list for each update."""
    ends = [0, *(i for i, request in enumerate(mine, 1) if request.last)]
    return [mine[a:b] for a, b in itertools.pairwise(ends)]


ORDERS = {
    "sequential": orders.sequential(64),
    "balanced": orders.balanced(torch.arange(64) % 3),
    "weighted": orders.weighted(torch.arange(64.0)),
    "repeated": orders.shuffled(64, 3),
    "in blocks": orders._keyed(64, 1),
    "repeated in blocks": orders._keyed(64, 3),
    "own, of another length": Order(80, lambda seed, epoch: torch.arange(80) % 64, repeats=True),
}


def test_ranks_and_a_resumed_run_take_their_parts_of_any_order():
    for name, order in ORDERS.items():
        whole, batch = order(5, 2), Batch(global_batch=16).over(order)
        for skip in (0, 2):
            ranks = [list(batch.requests(5, 2, World(rank, 2), True, skip)) for rank in range(2)]
            read = torch.cat([torch.cat([one.indices, other.indices]) for one, other in zip(*ranks, strict=True)])
            assert torch.equal(read, whole[16 * skip : len(whole) // 16 * 16]), name


@pytest.mark.parametrize("samples", [60, 61, 65, 71], ids=["no tail", "tail of 1", "tail of 5", "tail of 11"])
def test_ranks_and_micro_batches_split_each_update_and_cover_it(samples):
    for size, steps in itertools.product(WORLDS, (1, 2)):
        check_split(size, steps, samples)


def check_split(size: int, steps: int, samples: int) -> None:
    batch = Accumulate(global_batch=12, accumulation_steps=steps)
    ranks = [by_update(mine) for mine in requests(batch, samples, size, drop_last=False)]
    order = rng.permutation(0, 0, samples)
    assert {len(updates) for updates in ranks} == {math.ceil(samples / 12)}
    for u, updates in enumerate(zip(*ranks, strict=True)):
        real = [micro for mine in updates for micro in mine if micro.weight]
        read = torch.cat([micro.indices for micro in real]).tolist()
        assert sorted(read) == sorted(order[12 * u : 12 * u + 12].tolist())  # each sample once: disjoint and covering
        # A micro-batch weighs by its samples; DDP averages over the ranks, hence × size.
        for micro in real:
            assert float(micro.weight) == pytest.approx(len(micro.indices) * size / len(read), rel=1e-6)
            assert len(micro.indices) <= 12 // (steps * size)


def test_a_rank_without_a_share_of_the_tail_joins_in_with_weight_zero():
    for size in WORLDS:
        tails = [mine[-1] for mine in requests(Batch(global_batch=12), 13, size, drop_last=False)]
        assert [float(tail.weight) for tail in tails] == [float(size), *[0.0] * (size - 1)]
        assert all(len(tail.indices) == 1 and tail.last and tail.epoch_end for tail in tails)


def test_every_rank_makes_as_many_micro_batches_of_any_tail():
    """A rank with one more would wait for ever, as forwards may wait for each other."""
    batch = Accumulate(global_batch=24, accumulation_steps=3)
    for size, samples in itertools.product((2, 3, 4), range(25, 48)):
        ranks = [by_update(mine) for mine in requests(batch, samples, size, drop_last=False)]
        for updates in zip(*ranks, strict=True):
            assert len({len(micros) for micros in updates}) == 1, (size, samples)
            assert all(len(micro.indices) <= math.ceil(24 / (3 * size)) for micros in updates for micro in micros)


@pytest.mark.parametrize("drop_last", [True, False])
def test_only_the_last_micro_batch_ends_the_epoch(drop_last):
    for mine in requests(Accumulate(global_batch=12, accumulation_steps=2), 53, 2, drop_last):
        assert [request.epoch_end for request in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].last


def test_the_tail_is_left_out_where_asked_for():
    (mine,) = requests(Batch(global_batch=12), 53, 1, drop_last=True)
    assert [len(request.indices) for request in mine] == [12] * 4


def test_epochs_and_seeds_have_orders_of_their_own():
    def first(seed: int, epoch: int) -> list[int]:
        return next(iter(Batch(global_batch=12).over(shuffled(60)).requests(seed, epoch, World(), True))).indices.tolist()

    assert len({tuple(first(*key)) for key in ((0, 0), (0, 1), (1, 0))}) == 3
    assert first(0, 0) == first(0, 0)


@pytest.mark.parametrize("tail", [0, 1, 5], ids=lambda n: f"tail of {n}")
def test_accumulation_equals_one_big_batch(float64, make, tail):
    length = [f"data.samples={48 + tail}", "data.drop_last=false", "epochs=2", "updates=null"]
    whole, parts = make(*length), make(*length, "batch=accumulate", "batch.accumulation_steps=3")
    start = [p.clone() for p in whole.model.parameters()]
    forwards = {}
    for name, trainer in (("whole", whole), ("parts", parts)):
        trainer.model.register_forward_hook(lambda m, *_, name=name: forwards.update({name: forwards.get(name, 0) + m.training}))
        trainer.fit()
    updates = 8 + 2 * bool(tail)
    assert whole.progress.updates == parts.progress.updates == updates
    assert forwards == {"whole": updates, "parts": 24 + 2 * math.ceil(tail / 4)}
    losses = [t.log.writers[0].losses for t in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    for begun, a, b in zip(start, whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-14)
        assert not torch.equal(a, begun)


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(problems):
    (problem,) = problems("batch=accumulate", "batch.accumulation_steps=5")
    assert problem.startswith("batch.global_batch=12 does not divide")
    assert "set batch.global_batch to 10 or 15" in problem
    (problem,) = problems("parallel=ddp", "parallel.nproc=24")
    assert "set batch.global_batch to 24" in problem


@pytest.mark.parametrize(
    ("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)], ids=lambda v: v if isinstance(v, str) else ""
)
def test_the_learning_rate_follows_the_batch(make, rule, factor):
    for split in ([], ["batch=accumulate", "batch.accumulation_steps=3"]):
        trainer = make(f"batch.lr_scaling={rule}", "batch.base_batch=3", "optimizer.lr=0.01", *split)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * factor)


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
def test_the_timescale_of_weight_decay_stays_as_many_epochs(make, rule):
    """Wang & Aitchison 2024: 1 / (lr × decay) updates of a batch are as many samples at any batch."""
    words = [
        "optimizer=adamw",
        "optimizer.weight_decay=0.1",
        "optimizer.lr=0.01",
        f"batch.lr_scaling={rule}",
        "batch.base_batch=3",
    ]
    for size in (3, 12, 24, 48):
        trainer = make(*words, f"batch.global_batch={size}", "batch.decay_scaling=timescale")
        decaying, exempt = trainer.optimizer.param_groups
        assert size / (decaying["lr"] * decaying["weight_decay"]) == pytest.approx(3 / (0.01 * 0.1)), size
        assert exempt["weight_decay"] == 0.0
    assert make(*words).optimizer.param_groups[0]["weight_decay"] == 0.1


OF_TEXT = [
    "data=stdlib",
    "data.max_files=10",
    "data.length=64",
    "loss=next_token",
    "model=gpt",
    "model.width=16",
    "model.heads=2",
]
REFUSED = [
    *(([word], word) for word in ("batch.decay_scaling=linear", "batch.global_batch=0", "batch.global_batch=1.5")),
    *((["batch=accumulate", word], word) for word in ("batch.lr_scaling=cubic", "batch.accumulation_steps=0")),
    (["batch.grow_until=64"], "batch.grow_until=64 needs batch.grow_every"),
    (["batch.grow_until=13", "batch.grow_every=1"], "nothing would grow"),
    (["batch=bucketed"], "batch=bucketed sorts by length, but all samples of data=synthetic are equally long: set batch=fixed"),
    (["batch.tokens=300"], "batch.tokens=300 sorts by length, but all samples of data=synthetic are equally long"),
    ([*OF_TEXT, "batch.tokens=300", "data.order=repeated"], "data.order=repeated and batch.tokens=300 exclude each other"),
    ([*OF_TEXT, "batch.tokens=300", "batch=auto", "batch.memory_gb=1"], "batch.tokens and batch=auto exclude each other"),
    (["batch=auto", "runtime.device=cpu"], "set batch.memory_gb"),
    (["batch=critical", "batch.global_batch=32", "batch.max=50"], "set it to 64 or more"),
    (["batch=critical", "batch.global_batch=1"], "set it to 2 or more"),
    (["batch=critical", "loss=contrastive"], "no gradient noise scale"),
    (["batch=critical", "parallel=ddp", "parallel.nnodes=2", "parallel.rendezvous=there:29500"], "let one find it"),
]


def test_what_cannot_be_is_refused(problems):
    for words, problem in REFUSED:
        assert any(problem in line for line in problems(*words)), words


def test_a_decay_that_lr_does_not_scale_is_advised_against(tiny):
    def advice(*words: str) -> list[str]:
        run = launcher.prepare(tiny(*words)).run
        return list(run.batch.advise(run))

    says = "batch.decay_scaling is for a decay of lr × weight_decay, and optimizer=adam has another"
    assert advice("optimizer=adam", "batch.decay_scaling=timescale") == [says]
    assert advice("optimizer=adamw", "batch.decay_scaling=timescale") == advice("optimizer=adam") == []
    (said,) = advice("batch=critical", "batch.lr_scaling=none")
    assert "batch.lr_scaling=none keeps" in said


def test_a_split_that_was_halved_is_restored_unless_the_config_sets_another_one():
    saved = Accumulate(accumulation_steps=2).state_dict() | {"steps": 4}  # memory ran out once
    same, other = Accumulate(accumulation_steps=2).copied(), Accumulate(accumulation_steps=3).copied()
    same.load_state_dict(saved)
    other.load_state_dict(saved)
    assert (same.accumulation_steps, other.accumulation_steps) == (4, 3)


# --- batch=bucketed: similar lengths together, everything else as ever ---


BUDGETS = {"samples": {}, "tokens": {"tokens": 12 * 256}}


class Lengths(Source):
    """Samples that are nothing but lengths: many short ones, a few long."""

    fetch = None

    def __init__(self, n: int = 533) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = 1 + (255 * torch.rand(n, generator=generator) ** 3).long()

    def __len__(self) -> int:
        return len(self.lengths)


@pytest.fixture
def source() -> Lengths:
    return Lengths()


def bucketed(source: Lengths, size: int = 1, budget: str = "samples", **settings) -> Bucketed:
    batch = Bucketed(**{"global_batch": 12, **BUDGETS[budget], **settings}).over(shuffled(len(source)))
    batch.measure(source, 0, World(0, size))
    return batch


def epoch(
    batch: Batch, n: int, size: int = 1, epoch: int = 0, drop_last: bool = False, skip: int = 0
) -> list[list[list[Request]]]:
    """The requests of an epoch: rank → update → micro-batches."""
    ranks = [list(batch.over(shuffled(n)).requests(0, epoch, World(rank, size), drop_last, skip)) for rank in range(size)]
    return [by_update(mine) for mine in ranks]


def updates(ranks: list[list[list[Request]]]) -> list[list[int]]:
    """The samples of each update over all ranks, sorted."""
    return [sorted(i for mine in u for r in mine if r.weight for i in r.indices.tolist()) for u in zip(*ranks, strict=True)]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("size", "steps"), [(1, 1), (2, 1), (3, 1), (2, 3), (2, 6)])
def test_every_sample_once_and_the_same_updates_on_any_ranks(budget, size, steps, source):
    one = updates(epoch(bucketed(source, budget=budget), len(source)))
    of_ranks = epoch(bucketed(source, size, budget=budget, accumulation_steps=steps), len(source), size)
    assert updates(of_ranks) == one
    assert all(len({len(mine) for mine in u}) == 1 for u in zip(*of_ranks, strict=True)), "forwards may wait for each other"
    assert all(any(r.weight for r in turn) for u in zip(*of_ranks, strict=True) for turn in zip(*u, strict=True)), "no idle turn"
    assert sorted(itertools.chain(*one)) == list(range(len(source)))


@pytest.mark.parametrize("budget", BUDGETS)
def test_only_the_last_micro_batch_ends_an_update_and_the_epoch(budget, source):
    for mine in epoch(bucketed(source, 2, budget=budget, accumulation_steps=2), len(source), 2):
        flat = list(itertools.chain(*mine))
        assert [r.epoch_end for r in flat] == [False] * (len(flat) - 1) + [True]
        assert all([r.last for r in update] == [False] * (len(update) - 1) + [True] for update in mine)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("drop_last", [True, False])
def test_counts_are_known_beforehand_and_alike_in_every_epoch(budget, drop_last, source):
    batch = bucketed(source, budget=budget)
    before = 0
    for number in range(3):
        found = updates(epoch(batch, len(source), epoch=number, drop_last=drop_last))
        assert len(found) == batch.updates(len(source), number, drop_last)
        for window in (0, 1, len(found)):
            read = sum(map(len, found[:window]))
            assert batch.consumed(len(source), number, window, drop_last) == before + read
        before += sum(map(len, found))
    assert batch.total_updates(len(source), 3, drop_last) == 3 * len(found)
    assert before == 3 * (len(source) - (len(source) % 12 if drop_last and budget == "samples" else 0)) or budget == "tokens"


def test_epochs_differ_in_what_an_update_holds_and_in_their_order(source):
    first, second = (updates(epoch(bucketed(source), len(source), epoch=e)) for e in (0, 1))
    assert first == updates(epoch(bucketed(source), len(source)))
    assert len({tuple(u) for u in first} & {tuple(u) for u in second}) < len(first) / 4
    longest = [max(int(source.lengths[i]) for i in u) for u in first]
    assert longest != sorted(longest)


def test_a_report_counts_what_the_ranks_get():
    source = Lengths(288)
    for size, steps in itertools.product((1, 3), (1, 2)):
        batch = bucketed(source, size, global_batch=24, accumulation_steps=steps, pad_to=1)
        plain = Accumulate(24, accumulation_steps=steps)
        plain.lengths = source.lengths
        for each, said in ((plain, 0), (batch, 1)):
            share, longer = padding(each, source, size, 1)
            words = batch._report(World(0, size))
            assert f"{share:.1%}" == re.findall(r"[\d.]+%", words)[said]
            assert size == 1 or steps == 2 or f"{longer:.1%}" == re.findall(r"[\d.]+%", words)[2 + said]


def test_partners_are_the_same_in_blocks_on_ranks_and_in_parts():
    """Samples of positions 2i and 2i + 1 are mixed with each other, whoever reads them."""
    for order in (orders._keyed(75, 1), orders.shuffled(75)):
        numbers = order(0, 0)
        partner = {int(numbers[i]): int(numbers[min(i ^ 1, 74)]) for i in range(75)}
        for size, steps in itertools.product((1, 2, 3), (1, 2)):
            batch = Accumulate(global_batch=18, accumulation_steps=steps).over(order)
            batch.pairs = True
            for rank in range(size):
                for request in batch.requests(0, 0, World(rank, size), False):
                    pairs = zip(request.indices.tolist(), request.mix_with.tolist(), strict=True)
                    assert all(partner[one] == other for one, other in pairs)


def padding(batch: Batch, source: Lengths, size: int, pad_to: int) -> tuple[float, float]:
    """The share of padding, and how much longer the ranks' busiest works than all on average."""
    real = padded = busiest = 0
    for together in zip(*epoch(batch, len(source), size), strict=True):
        work = [
            sum(len(r.indices) * -(-int(source.lengths[r.indices].max()) // pad_to) * pad_to for r in mine) for mine in together
        ]
        real += sum(int(source.lengths[r.indices].sum()) for mine in together for r in mine)
        padded += sum(work)
        busiest += max(work)
    return 1 - real / padded, busiest * size / padded - 1


@pytest.mark.parametrize("budget", BUDGETS)
def test_there_is_less_padding_and_ranks_work_alike(budget):
    source = Lengths(2000)
    plain = Batch(32)
    plain.lengths = source.lengths
    before, after = (
        padding(plain, source, 2, 1),
        padding(bucketed(source, 2, global_batch=32, budget=budget, pad_to=16), source, 2, 16),
    )
    assert before[0] > 0.5
    assert after[0] < 0.15
    assert before[1] > 0.05
    assert after[1] < 0.02


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_compiler_sees_few_shapes(budget):
    source = Lengths(2000)
    batch = bucketed(source, budget=budget, pad_to=64)
    shapes = {
        (len(r.indices), -(-int(source.lengths[r.indices].max()) // 64))
        for u in epoch(batch, len(source), drop_last=True)[0]
        for r in u
    }
    assert len(shapes) <= (4 if budget == "samples" else 8)
    plain = Batch(12)
    plain.lengths = source.lengths
    assert len({int(source.lengths[r.indices].max()) for u in epoch(plain, len(source))[0] for r in u}) > 50


def test_a_budget_of_tokens_holds_and_is_used():
    source = Lengths(2000)
    batch = bucketed(source, budget="tokens")
    most = 12 * 256
    sizes = [len(u) * int(batch.padded[u].max()) for u in updates(epoch(batch, len(source)))]
    assert max(sizes) <= most
    assert sum(sizes) > 0.9 * most * (len(sizes) - 1)
    assert max(map(len, updates(epoch(batch, len(source))))) > 4 * 12  # many short ones at once


def test_a_sample_over_the_budget_goes_alone():
    assert split_by_cost([1, 1, 9, 9], 9).ends == [2, 3, 4]


def test_a_short_last_batch_is_known_as_one():
    assert split_by_cost([1] * 10, 5) == ([5, 10], False)
    assert split_by_cost([1] * 9, 5) == ([5, 9], True)  # one more would just fit
    assert split_by_cost([4] * 10, 20) == ([5, 10], False)
    assert split_by_cost([1, 1, 4], 7) == ([2, 3], False)  # one more costs as much as the longest
    assert split_by_cost([2] * 3 + [4] * 5, 12) == ([3, 6, 8], True)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("batch", ["bucketed", "fixed"])
def test_an_evaluation_has_every_sample_once_by_length(batch, budget, source):
    made = bucketed(source, budget=budget) if batch == "bucketed" else Batch(12)
    batches = made.evaluation(source, World())
    order = torch.cat(list(batches))
    assert sorted(order.tolist()) == list(range(len(source)))
    assert torch.equal(source.lengths[order], source.lengths.sort().values)
    assert min(map(len, batches)) > 0


def test_memory_is_claimed_by_the_longest(source):
    for made in (bucketed(source), bucketed(source, budget="tokens")):
        chosen = made.largest(len(source), made.micro_batch(World()))
        assert source.lengths[chosen].tolist() == source.lengths.sort(descending=True).values[: len(chosen)].tolist()
    assert len(made.largest(len(source), 1000)) == 1000


def test_ranks_without_a_share_join_in_with_weight_zero():
    source = Lengths(13)
    batch = bucketed(source, 5, global_batch=5)
    for u in zip(*epoch(batch, 13, 5), strict=True):
        assert sum(float(r.weight) for mine in u for r in mine) == pytest.approx(5)
        assert all(len(r.indices) for mine in u for r in mine)


def test_the_batch_grows(source):
    batch = bucketed(source, grow_every=1, accumulation_steps=2)
    small, large = (epoch(batch, len(source), epoch=e) for e in (0, 1))
    assert (len(small[0]), len(large[0])) == (45, 23)
    assert {len(r.indices) for u in large[0][:3] for r in u} <= {5, 6}
    assert batch.consumed(len(source), 1, 2, drop_last=False) == len(source) + sum(map(len, updates(large)[:2]))


# --- in a run ---

TEXT = ["data=stdlib", "data.max_files=10", "data.length=64", "data.test_samples=8", "loss=next_token"]
GPT = [*TEXT, "model=gpt", "model.width=16", "model.heads=2", "model.depth=1", "batch=bucketed", "runtime.device=cpu"]


def test_what_it_saves_is_said_at_the_start(make, caplog):
    make(*GPT, world=World(0, 2))
    (line,) = [s for s in caplog.messages if s.startswith("batch=bucketed")]
    assert "padding" in line
    assert "ranks wait for the busiest" in line
    caplog.clear()
    make(*GPT)
    assert "ranks" not in next(s for s in caplog.messages if s.startswith("batch=bucketed"))


def test_one_batch_learnt_by_heart_is_the_one_that_is_evaluated(train):
    result = train(*GPT, "debug=overfit", "debug.updates=30", "optimizer=adamw", "optimizer.lr=0.01", "updates=null")
    assert result.judged("final")["loss"] < 4


def test_cudnns_autotuner_and_compiling_for_every_length_are_warned_of(tiny):
    def notices(*words):
        return launcher.prepare(tiny(*words)).notices

    words = [w for w in GPT if not w.startswith("runtime")]
    assert any("runtime.cudnn_benchmark=true" in line for line in notices(*words))
    assert not notices(*words, "runtime.cudnn_benchmark=false")
    words = [w for w in GPT if w != "batch=bucketed"]
    assert any("batch=bucketed keeps to a few" in line for line in notices(*words, "compile=inductor"))
    assert not notices(*words)


def test_its_schedule_is_checked_when_the_data_was_read(make):
    with pytest.raises(UserError, match=r"scheduler\.warmup"):
        make(*GPT, "scheduler=wsd", "scheduler.warmup=100")


def test_its_schedule_can_be_shown(tiny, capsys):
    show(tiny(*GPT, "updates=null", "batch.tokens=3000"), [])
    assert "updates" in capsys.readouterr().out


def test_data_without_lengths_is_refused():
    with pytest.raises(UserError, match="these samples do not report it"):
        Bucketed().measure(Tensors(torch.zeros(4), torch.zeros(4)), 0, World())


def test_no_length_is_padded_beyond_the_longest():
    assert padded(torch.tensor([3, 4, 6]), 4, 7).tolist() == [4, 4, 7]


# --- batch.tokens: updates of as many tokens, whatever the lengths; ranks and micro-batches only split them ---


TOKENS = 1000


def of_tokens(source: Lengths, size: int = 1, **settings) -> Batch:
    batch = Accumulate(**{"tokens": TOKENS, "accumulation_steps": 1, **settings}).over(shuffled(len(source)))
    batch.measure(source, 0, World(0, size))
    return batch


@pytest.mark.parametrize(("size", "steps"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_update_has_as_many_tokens_and_every_epoch_as_many_updates(size, steps, drop_last, source):
    total, longest = int(source.lengths.sum()), int(source.lengths.max())
    wanted = total // TOKENS if drop_last else math.ceil(total / TOKENS)
    before = 0
    for number in range(3):
        batch = of_tokens(source, size, accumulation_steps=steps)
        ranks = epoch(batch, len(source), size, number, drop_last)
        found = updates(ranks)
        assert len(found) == wanted == batch.updates(len(source), number, drop_last)
        assert all(abs(int(source.lengths[u].sum()) - TOKENS) < longest for u in found[:-1])
        assert found == updates(epoch(of_tokens(source), len(source), 1, number, drop_last)), "ranks only split"
        for window in (0, 1, wanted):
            assert batch.consumed(len(source), number, window, drop_last) == before + sum(map(len, found[:window]))
        before += sum(map(len, found))
        assert drop_last or sorted(i for u in found for i in u) == list(range(len(source)))
        for together in zip(*ranks, strict=True):
            assert len({len(mine) for mine in together}) == 1, "forwards may wait for each other"
            tokens = [int(source.lengths[r.indices].sum()) for mine in together for r in mine if r.weight]
            weights = [r.weight for mine in together for r in mine if r.weight]
            assert weights == pytest.approx([size * n / sum(tokens) for n in tokens])
    assert of_tokens(source).total_updates(len(source), 3, drop_last) == 3 * wanted


def test_going_on_at_update_k_gives_what_the_whole_epoch_gives_from_there(source):
    batch = of_tokens(source, 2, accumulation_steps=2)
    whole, rest = (updates(epoch(batch, len(source), 2, 1, skip=k)) for k in (0, 4))
    assert rest == whole[4:] != []


def test_it_grows(source):
    batch = of_tokens(source, grow_every=1)
    total = int(source.lengths.sum())
    assert [batch.updates(len(source), e, True) for e in range(3)] == [total // (TOKENS << e) for e in range(3)]


def test_an_evaluation_has_as_many_tokens_at_once_as_a_micro_batch(source):
    batches = of_tokens(source, accumulation_steps=2).evaluation(source, World())
    assert sorted(torch.cat(list(batches)).tolist()) == list(range(len(source)))
    assert max(len(b) * int(source.lengths[b].max()) for b in batches) <= TOKENS // 2


def test_less_than_the_longest_sample_is_refused():
    with pytest.raises(UserError, match=r"batch\.tokens=20 is less than the longest sample, of 25\d tokens"):
        of_tokens(Lengths(), tokens=20)


LANGUAGE = ["data=jsonl", "data.path=texts.jsonl", "data.length=32", "loss=next_token", "model=gpt", "model.width=16",
            "model.heads=2", "batch.tokens=300", "updates=4"]  # fmt: skip


@pytest.fixture
def language(tmp_path):
    """The words of a run on texts of 4 to 30 bytes."""
    (tmp_path / "run").mkdir()  # of what `make` builds
    texts = [f"{n:03d} {'ab' * (n * 7 % 14)}" for n in range(200)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return LANGUAGE


def test_accumulated_it_is_the_update_of_the_whole_and_the_run_goes_on_where_it_stopped(float64, fitted, language):
    """The mean over all tokens of the update: of one forward, or of three of unlike lengths."""
    whole, parts = fitted(*language), fitted(*language, "batch=accumulate", "batch.accumulation_steps=3")
    assert whole.log.writers[0].losses == pytest.approx(parts.log.writers[0].losses, rel=1e-10)
    assert len(whole.log.writers[0].losses) == 4


def test_more_tokens_than_there_are_is_refused(make, language):
    with pytest.raises(UserError, match=r"batch\.tokens=\d+ is more than the training samples have"):
        make(*language, "batch.tokens=100000000", "data.drop_last=true")


@pytest.mark.parametrize("words", [(), ("parallel=ddp", "parallel.nproc=2"), ("precision=bf16_pure",)])
def test_an_evaluation_has_a_batch_of_its_own(train, words):
    """Its figures are the same, and training does not notice."""
    few, many = (train("data.test_samples=30", *words, f"evaluate_batch={size}") for size in (4, 30))
    plain = train("data.test_samples=30", *words)
    for name, value in plain.judged("final").items():
        assert few.judged("final")[name] == pytest.approx(value, rel=1e-2 if "bf16" in str(words) else 1e-5)
        assert many.judged("final")[name] == pytest.approx(value, rel=1e-2 if "bf16" in str(words) else 1e-5)


def test_the_batch_of_an_evaluation(make):
    trainer = make("data.test_samples=30", "evaluate_batch=7")
    seen = []
    trainer.model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    trainer.evaluator.evaluate()
    assert seen == [7, 7, 7, 7, 2]


@pytest.mark.parametrize("samples", [1, 50, 1000])
@pytest.mark.parametrize("epochs", [1, 2, 7, 50])
@pytest.mark.parametrize("growth", [{}, {"grow_every": 1}, {"grow_every": 3, "grow_by": 3}, {"grow_every": 2, "grow_until": 100}])
def test_epochs_of_one_size_are_counted_together(samples: int, epochs: int, growth: dict[str, int]) -> None:
    """The sums are those of a loop over the epochs."""
    batch = Batch(global_batch=16, **growth)
    assert [epoch for stretch in batch.stretches(epochs) for epoch in stretch] == list(range(epochs))
    each = [batch.updates(samples, epoch, False) for epoch in range(epochs)]
    assert batch.total_updates(samples, epochs, False) == sum(each)
    seen = [min(samples, updates * batch.size(epoch)) for epoch, updates in enumerate(each)]
    assert batch.consumed(samples, epochs, 0, False) == sum(seen)


def test_a_horizon_ends_each_epoch_where_a_loop_does() -> None:
    run = launcher.prepare(["epochs=9", "batch.grow_every=2", "batch.global_batch=100", "data.drop_last=false"]).run
    horizon = run_horizon(run)
    assert horizon is not None
    samples = run.data.train_samples()
    assert list(horizon.ends) == list(itertools.accumulate(run.batch.updates(samples, epoch, False) for epoch in range(9)))
