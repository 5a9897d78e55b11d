"""model=transformers takes the updates of Hugging Face's own Trainer: equal losses from equal weights and samples, in float32."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import later, slow

transformers = later.package("transformers")

UPDATES, SHORT, BATCH = 50, 4, 8
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MODELS = {  # architecture → its class, and a config without dropout
    "bert": ("BertForSequenceClassification", {**SIZES, "vocab_size": 40, "num_labels": 3, "hidden_dropout_prob": 0.0,
             "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 40, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 1, "vocab_size": 40}),
    "vit": ("ViTForImageClassification", {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": 3}),
}  # fmt: skip
LANGUAGE = ("gpt2", "llama")
ARMS = ("plain", "accumulated", "clipped", "lora")
SAMPLES = """
import torch

class Samples(torch.utils.data.Dataset):
    num_classes = {classes}

    def __init__(self, split):
        draw = torch.Generator().manual_seed(5)
        self.ids = [torch.randint(1, 40, (int(n),), generator=draw) for n in torch.randint(3, 13, ({count},), generator=draw)]
        self.images, self.labels = torch.randn({count}, 3, 8, 8, generator=draw), torch.randint(0, 3, ({count},), generator=draw)

    def __len__(self):
        return {count}

    def __getitem__(self, i):
        if "{kind}" == "vit":
            return self.images[i], self.labels[i]
        x = {{"input_ids": self.ids[i]}}
        return x, self.labels[i] if "{kind}" == "bert" else torch.cat([self.ids[i][1:], torch.tensor([-100])])
"""


def theirs(
    model: Any, samples: Any, collate: Any, updates: int, folder: Path, split: int = 1, max_norm: float = 0.0
) -> list[float]:
    """The losses that the Trainer of transformers logs at each update."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH // split, gradient_accumulation_steps=split,
        max_steps=updates, learning_rate=0.003, weight_decay=0.01, lr_scheduler_type="constant", optim="adamw_torch",
        logging_steps=1, max_grad_norm=max_norm, train_sampling_strategy="sequential", report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=samples, data_collator=collate)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def compare(trainer: Any, expected: list[float], updates: int) -> None:
    """Each update of the trained run has their loss."""
    own = trainer.log.writers[0].losses
    assert len(own) == len(expected) == updates
    assert own == pytest.approx(expected, rel=0, abs=1e-5)
    assert own[0] != own[-1]


def collated(kind: str, batch: list[Any]) -> dict[str, torch.Tensor]:
    """A batch of `Samples` as their model takes it."""
    x, y = zip(*batch, strict=True)
    if kind == "vit":
        return {"pixel_values": torch.stack(x), "labels": torch.stack(y)}
    ids = torch.nn.utils.rnn.pad_sequence([each["input_ids"] for each in x], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each["input_ids"]) for each in x], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100) if kind in LANGUAGE else torch.stack(y)
    if kind == "gpt2":  # of GPT-2 it counts the first token of a text, which is no target: this label tells it so
        labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def with_peft(model: Any, ours: torch.nn.Module, kind: str) -> Any:
    """The model with peft's adapters, which begin as ours."""
    from peft import LoraConfig, get_peft_model

    task = {"bert": "SEQ_CLS", "vit": None}.get(kind, "CAUSAL_LM")
    also = {"bert": ["classifier"], "vit": ["classifier"]}.get(kind)
    layers = r"vit.*\.(\w*proj|fc1|fc2|query|key|value|dense)" if kind == "vit" else "all-linear"
    config = LoraConfig(task_type=task, r=4, lora_alpha=8, target_modules=layers, modules_to_save=also)
    made = get_peft_model(model, config)
    parameters = dict(ours.named_parameters())
    found = 0
    for name, p in made.named_parameters():
        for mark, part in (("lora_A.default.weight", "lora_a"), ("lora_B.default.weight", "lora_b")):
            if name.endswith(mark):
                p.data.copy_(parameters[name.removeprefix("base_model.model.").replace(mark, part)].data)
                found += 1
    assert found == sum(name.endswith(("lora_a", "lora_b")) for name in parameters) > 0
    return made


IN_SHORT = {
    "bert": ("plain", "lora"),
    "gpt2": ("plain", "accumulated"),
    "llama": ("clipped", "lora"),
    "vit": ("plain", "clipped"),
}


def in_short(case: tuple[str, str, int]) -> bool:
    kind, variant, updates = case
    return updates == SHORT and variant in IN_SHORT[kind]


CASES = [(kind, variant, updates) for kind in MODELS for variant in ARMS for updates in (SHORT, UPDATES)]


@pytest.mark.parametrize(("kind", "variant", "updates"), slow.but(in_short, CASES, lambda case: " ".join(map(str, case))))
def test_each_update_has_the_loss_of_their_trainer(kind, variant, updates, make, monkeypatch, tmp_path, own_module):
    name, sizes = MODELS[kind]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    cls(cls.config_class(**sizes)).save_pretrained(tmp_path / "model")
    classes = 40 if kind in LANGUAGE else 3
    own_module("samples", SAMPLES.format(kind=kind, count=updates * BATCH, classes=classes))
    monkeypatch.delitem(__import__("sys").modules, "samples", raising=False)
    (tmp_path / "run").mkdir()
    trainer = make(
        "model=transformers", f"model.name={tmp_path / 'model'}", "model.pretrained=true", "data=own", "trust=[samples]",
        "data.target=samples.Samples", "data.order=sequential", "data.validation=null", f"updates={updates}", "epochs=1",
        f"batch.global_batch={BATCH}", "optimizer=adamw", "optimizer.lr=0.003", "optimizer.weight_decay=0.01",
        *(["loss=next_token", "data.targets=tokens"] if kind in LANGUAGE else ["data.targets=class"]),
        *(["batch=accumulate", "batch.accumulation_steps=4"] if variant == "accumulated" else []),
        *(["clip=norm", "clip.max_norm=0.3"] if variant == "clipped" else []),
        *(["adapter=lora", "adapter.rank=4", "adapter.alpha=8"] if variant == "lora" else []),
        *(["adapter.train_also=[]"] if variant == "lora" and kind in LANGUAGE else []),
    )  # fmt: skip
    import samples

    theirs_model = cls.from_pretrained(tmp_path / "model")
    if variant == "lora":
        theirs_model = with_peft(theirs_model, trainer.model, kind)
    start = copy.deepcopy(trainer.model.state_dict())
    trainer.fit()
    split = 4 if variant == "accumulated" and kind in LANGUAGE else 1  # of classification it logs 4 times the loss
    max_norm = 0.3 if variant == "clipped" else 0.0
    drawn, collate = samples.Samples("train"), functools.partial(collated, kind)
    compare(trainer, theirs(theirs_model, drawn, collate, updates, tmp_path / "theirs", split, max_norm), updates)
    assert any(not torch.equal(tensor, start[key]) for key, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("variant", "updates"),
    slow.but(
        lambda case: case[1] == SHORT,
        [
            (variant, updates)
            for variant in ("plain", "accumulated", "packed", "packed, accumulated")
            for updates in (SHORT, UPDATES)
        ],
        lambda case: " ".join(map(str, case)),
    ),
)
def test_answers_alone_are_learnt_as_their_trainer_learns_them(variant, updates, make, tmp_path):
    """The mean over the answers' tokens of an update, also where micro-batches have unlike many, and where rows are shared."""
    from tests.data.test_instructions import MARKS, folder_of

    (tmp_path / "run").mkdir()
    folder = folder_of("llama", tmp_path, MARKS)
    draw = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 9, (updates * BATCH, 2), generator=draw).tolist()
    talks = [
        [{"role": "user", "content": f"{n} " + "ab " * a}, {"role": "assistant", "content": f"{n} end" * b}]
        for n, (a, b) in enumerate(sizes)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    trainer = make(
        "task=instruction", "model=transformers", f"model.name={folder}", "model.pretrained=true", "data=instructions",
        "data.path=talks.jsonl", "data.test=talks.jsonl", "data.length=100", "data.order=sequential", "data.validation=null",
        "optimizer=adamw", "optimizer.lr=0.003", "optimizer.weight_decay=0.01", "clip=none", "epochs=1", f"updates={updates}",
        f"batch.global_batch={BATCH}", *(["data.packing=true"] if "packed" in variant else []),
        *(["batch=accumulate", "batch.accumulation_steps=4"] if "accumulated" in variant else []),
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for talk in talks:
        found = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        ids, answers = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"])
        rows.append((ids, torch.ones_like(ids), ids.masked_fill(answers == 0, -100)))

    def collate(batch: list[int]) -> dict[str, torch.Tensor]:
        parts = zip(*(rows[n] for n in batch), strict=True)  # their model shifts the labels itself
        pad, fillers = torch.nn.utils.rnn.pad_sequence, {"input_ids": 0, "attention_mask": 0, "labels": -100}
        padded = (pad(list(part), batch_first=True, padding_value=fillers[k]) for k, part in zip(fillers, parts, strict=True))
        return dict(zip(fillers, padded, strict=True))

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    split = 4 if "accumulated" in variant else 1
    expected = theirs(model, range(len(rows)), collate, updates, tmp_path / "theirs", split)
    trainer.fit()
    compare(trainer, expected, updates)
