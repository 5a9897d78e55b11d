"""The time of a step of a model of transformers: ours against Hugging Face's Trainer and a hand-written loop.

`python -m bench.transformers [--quick] [--bf16] [--variants ours trainer] [--out FILE]`

A small BERT that classifies texts, and a small Llama that continues them, both made from configs; AdamW at a constant rate, no
clipping, no dropout, samples of one length in memory. The variants live in processes of their own and take turns, a block of
updates each. It runs on the accelerator where there is one, else on one thread of the CPU. Only each block's last loss is logged.

`hand` is the loop that one would write: batches cut from tensors, the model's own loss. `trainer` is `transformers.Trainer` on a
Dataset with its default collator. `ours` is `Trainer.fit()` of a checked config on the same Dataset.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import harness
from bench.harness import BlockSync
from drivetrain.run import environment

LR, CLASSES, TOKENS = 0.001, 8, 512
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES},
    "llama": {"num_key_value_heads": 4, "use_cache": False},
}


@dataclass(frozen=True)
class Work:
    """The work of every variant of a model."""

    kind: str
    updates: int  # of a block
    bf16: bool
    width: int = 128
    layers: int = 2
    length: int = 64
    batch: int = 16
    samples: int = 512

    def config(self) -> dict[str, Any]:
        """The model's config."""
        sizes = {"hidden_size": self.width, "num_hidden_layers": self.layers, "num_attention_heads": 4, "vocab_size": TOKENS}
        return {**sizes, "intermediate_size": 4 * self.width, "max_position_embeddings": self.length, **CONFIGS[self.kind]}


class Sentences:
    """Samples in memory, as ours takes them: the tokens, and a class or the next tokens."""

    def __init__(self, split: str, kind: str, samples: int, length: int) -> None:
        import torch

        draw = torch.Generator().manual_seed(0)
        text = torch.randint(1, TOKENS, (samples, length + 1), generator=draw)
        self.ids, following = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        self.y = text[:, 0] % CLASSES if kind == "bert" else following
        self.num_classes = CLASSES if kind == "bert" else TOKENS

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> tuple[dict[str, Any], Any]:
        return {"input_ids": self.ids[i]}, self.y[i]


def device() -> Any:
    """The accelerator, else the CPU, with one thread."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def loss_of(model: Any, data: Sentences, where: Any) -> float:
    """The marker that a variant trained: its loss on the first samples."""
    import torch
    from torch.nn.functional import cross_entropy

    with torch.no_grad():
        output = model(input_ids=data.ids[:64].to(where))
        logits = output if isinstance(output, torch.Tensor) else output.logits
        return float(cross_entropy(logits.float().flatten(0, -2), data.y[:64].to(where).flatten()))


def made(work: Work, where: Any) -> Any:
    """The model as transformers makes it."""
    import transformers

    name = "BertForSequenceClassification" if work.kind == "bert" else "LlamaForCausalLM"
    cls = getattr(transformers, name)
    return cls(cls.config_class(**work.config())).to(where).train()


def hand(work: Work, sync: BlockSync) -> None:
    """By hand."""
    import torch
    from torch.nn.functional import cross_entropy

    where = device()
    model, data = made(work, where), Sentences("train", work.kind, work.samples, work.length)
    x, y = data.ids.to(where), data.y.to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    sync.watch(lambda: loss_of(model, data, where))
    updates = 0
    for _ in itertools.count():
        order = torch.randperm(len(x), device=where)
        for begin in range(0, len(x), work.batch):
            if updates % work.updates == 0:
                sync(updates)
            picked = order[begin : begin + work.batch]
            with torch.autocast(where.type, torch.bfloat16, enabled=work.bf16):
                logits = model(input_ids=x[picked]).logits
            loss = cross_entropy(logits.float().flatten(0, -2), y[picked].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            updates += 1


def trainer(work: Work, sync: BlockSync) -> None:
    """Hugging Face's Trainer."""
    import transformers

    where = device()
    model, data = made(work, where), Sentences("train", work.kind, work.samples, work.length)

    class Rows:
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"input_ids": data.ids[i], "labels": data.ids[i] if work.kind == "llama" else data.y[i]}

    class Blocks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % work.updates == 0:
                sync(state.global_step)

    sync.watch(lambda: loss_of(model, data, where))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=work.batch, max_steps=10**6, learning_rate=LR, weight_decay=0.0,
            lr_scheduler_type="constant", max_grad_norm=0.0, logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=where.type == "cpu", bf16=work.bf16,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[Blocks()]).train()


def ours(work: Work, sync: BlockSync) -> None:
    """drivetrain."""
    where, data = device(), Sentences("train", work.kind, work.samples, work.length)
    config = ", ".join(f"{key}: {str(value).lower()}" for key, value in work.config().items() if key != "num_labels")
    harness.ours([
        "model=transformers", f"model.name={work.kind}", f"model.config={{{config}}}", "data=own", "trust=[bench]",
        "data.target=bench.transformers.Sentences", "data.validation=null",
        f"data.kwargs={{kind: {work.kind}, samples: {work.samples}, length: {work.length}}}",
        *(["loss=cross_entropy", "data.targets=class"] if work.kind == "bert" else ["loss=next_token", "data.targets=tokens"]),
        "optimizer=adamw", f"optimizer.lr={LR}", "optimizer.weight_decay=0", "scheduler=constant", "saving=none",
        f"runtime.device={where.type}", "runtime.threads=1", f"batch.global_batch={work.batch}", "epochs=100000",
        "evaluate_every=100000", f"log_every={work.updates}", *(["precision=bf16"] if work.bf16 else []),
    ], work.updates, lambda trainer: loss_of(trainer.model, data, where), sync)  # fmt: skip


ARMS: dict[str, Callable[[Work, BlockSync], None]] = {"hand": hand, "ours": ours, "trainer": trainer}


def main() -> int:
    """Measure both models; exit code 1 if a variant did not train."""
    given = harness.parse(
        __doc__, "transformers-cpu.json", quick=False, bf16=False, variants=ARMS, models=CONFIGS, rounds=int, updates=int
    )
    names = list(dict.fromkeys(["hand", *given.variants]))
    rounds, warmup, updates = (2, 1, 4) if given.quick else (20, 2, 32)
    found = {}
    for kind in given.models:
        work = Work(kind, given.updates or updates, given.bf16, **({"samples": 64} if given.quick else {}))
        arms = {name: ARMS[name] for name in names}
        found[kind] = harness.steps(kind, arms, work, work.updates, given.rounds or rounds, warmup, "ms")
    versions = {name: environment.version(name) for name in ("transformers", "tokenizers", "peft")}
    harness.write(given.out, {"unit": "ms per update", "device": str(device()), "versions": versions, "models": found})
    return harness.untrained(found)


if __name__ == "__main__":
    raise SystemExit(main())
