"""Folders of strangers whose files were changed: models of transformers with their tokenizers, and adapters of peft."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from hypothesis import note
from hypothesis import strategies as st

from drivetrain.core.world import World
from drivetrain.engine import build
from drivetrain.engine.context import RunContext
from drivetrain.launch import launcher
from tests.data.test_fuzz import linked
from tests.data.test_model_tokenizer import CLASSES, _files, bert  # noqa: F401 - fixtures
from tests.support import later, odd

peft = later.package("peft")
FILES = {"bert": ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"),
         "adapter": ("adapter_config.json", "adapter_model.safetensors")}  # fmt: skip


@odd.fuzz
def test_odd_folders_are_read_or_refused(bert: Path, tiny: Callable[..., list[str]], tmp_path: Path) -> None:  # noqa: F811
    import transformers

    case = tmp_path / "case"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(bert)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules="all-linear", modules_to_save=["classifier"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    words = tiny("model=transformers", f"model.name={case / 'bert'}", "model.pretrained=true", *CLASSES,
                 "adapter=lora", "adapter.rank=4", "adapter.alpha=8", f"adapter.weights={case / 'adapter'}")  # fmt: skip

    def read() -> None:
        context = RunContext(launcher.prepare(words).run, World(), tmp_path / "run")
        with context.on_exit:
            build.build(context, [])

    def judged(drawn: tuple[str, random.Random]) -> str:
        name, draw = drawn
        odd.remove(case)
        case.mkdir()
        for each in FILES:
            shutil.copytree(tmp_path / each, case / each)
        file = case / name / draw.choice(FILES[name])
        note(f"{name}: {file.name} {odd.damage(draw, file)}")
        links = {place for file in linked(case) for place in (file, file.parent)}  # files of the hub's cache are links
        return odd.outcome(read, tmp_path, *links, writable=(tmp_path,), seconds=5.0)

    shutil.copytree(tmp_path, case, ignore=shutil.ignore_patterns("case"))
    read()
    odd.tried(st.tuples(st.sampled_from(sorted(FILES)), odd.dice), judged)
