"""The weights that a model starts from: every kind of file, what is adapted, what is refused, and where in the build order."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from drivetrain.core.errors import UserError
from drivetrain.model.shipped import Mlp, ResNet9
from drivetrain.model.timm import TimmModel
from drivetrain.model.weights import load_into
from tests.support.to_end import continued

SHAPE, CLASSES = (3, 8, 8), 4
VIT = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 2}


def mlp(seed: int = 0, hidden: int = 6, classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(seed)
    return Mlp(hidden=[hidden]).create(SHAPE, classes)


def load(model: nn.Module, path: object, skip: tuple[str, ...] = (), shape=SHAPE, classes: int = CLASSES) -> list[str]:
    return list(load_into(model, Path(str(path)), skip, shape, classes))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "w.pt"


def refused(*args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        load(*args, **kwargs)
    assert len(error.value.problems) == 1
    return str(error.value)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def prefixed(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in weights.items()}


# --- files ---


def within_itself() -> dict[str, object]:
    found: dict[str, object] = {}
    found["state_dict"] = found
    return found


FILES = {
    "safetensors": ("w.safetensors", lambda w: w),
    "torch": ("w.pt", lambda w: w),
    "state_dict beside an optimizer": ("w.pth", lambda w: {"epoch": 3, "state_dict": w, "optimizer": {"state": {}}}),
    "model, from DDP": ("w.bin", lambda w: {"model": prefixed(w, "module.")}),
    "LightningModule": ("w.ckpt", lambda w: {"state_dict": prefixed(w, "model."), "global_step": 7}),
    "DDP of a compiled model": ("w.safetensors", lambda w: prefixed(w, "module._orig_mod.")),
    "compiled blocks": ("w.pt", lambda w: {name.replace(".linear", "._orig_mod.linear"): t for name, t in w.items()}),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_others_write(tmp_path, kind):
    name, written = FILES[kind]
    source, model = mlp(1), mlp(2)
    save = safetensors.torch.save_file if name.endswith("safetensors") else torch.save
    save(written(source.state_dict()), tmp_path / name)
    assert load(model, tmp_path / name) == [f"weights of {tmp_path / name}: 4 tensors"]
    assert same(model.state_dict(), source.state_dict())
    assert not same(model.state_dict(), mlp(2).state_dict())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (mlp(), "is not a file of weights alone (Weights only load failed"),
        ({"epoch": 3, "best": 0.5}, "holds no tensors by name (its keys are epoch, best)"),
        ([torch.zeros(2)], "holds no tensors by name (it holds a list)"),
        (within_itself(), "holds itself, or 8 keys in one another"),
        (b"nothing of torch's", "is not a file of weights alone"),
    ],
)
def test_files_without_weights_are_refused(content, says, file):
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    assert f"model.weights={file} {says}" in refused(mlp(), file)
    assert "\n" not in refused(mlp(), file)


def test_places_without_weights_are_refused(tmp_path):
    assert "there is no such file" in refused(mlp(), tmp_path / "nowhere.pt")
    assert "is no run's directory" in refused(mlp(), tmp_path)
    (tmp_path / "checkpoints").mkdir()
    assert "has no checkpoint" in refused(mlp(), tmp_path)


# --- strict: names and shapes ---


def test_what_does_not_fit_is_one_line_with_the_first_ten_names(tmp_path):
    file = tmp_path / "w.safetensors"
    weights = {f"extra.{i:02d}": torch.zeros(1) for i in range(12)} | mlp(hidden=7).state_dict()
    safetensors.torch.save_file({name: t for name, t in weights.items() if name != "layers.0.linear.bias"}, file)
    model, before = mlp(), mlp().state_dict()
    message = refused(model, file)
    assert "2 tensors are of another shape than the model wants (layers.0.linear.weight: 7×192 for 6×192, head.weight:" in message
    assert "1 tensor is not in the file (layers.0.linear.bias)" not in message  # a layer without bias: zeros
    assert "12 tensors are not in the model (extra.00, extra.01" in message
    assert "extra.09 and 2 more)" in message
    assert "extra.10" not in message
    assert "\n" not in message
    assert same(model.state_dict(), before)  # nothing was loaded


def test_another_models_weights_are_refused_without_a_list_to_skip(file):
    torch.save(nn.Sequential(nn.Linear(2, 2)).state_dict(), file)
    assert "no name is in both. The file has 0.weight, 0.bias; the model has layers.0.linear.weight" in refused(mlp(), file)


def test_integers_are_no_weights(file):
    torch.save({name: t.to(torch.int8) for name, t in mlp().state_dict().items()}, file)
    assert "layers.0.linear.weight: int8 for float32" in refused(mlp(), file)


def test_skipped_names_start_anew(file):
    torch.save({**mlp(1).state_dict(), "other.weight": torch.zeros(3)}, file)
    model = mlp(2)
    assert "let them start anew: model.weights_skip=[other.*]" in refused(model, file)
    load(model, file, ("other.*", "head"))
    expected = {**mlp(1).state_dict(), **{n: t for n, t in mlp(2).state_dict().items() if n.startswith("head")}}
    assert same(model.state_dict(), expected)
    assert "model.weights_skip: 'heads' matches no" in refused(model, file, ("heads", "other"))


def test_a_weight_that_two_names_share_may_be_in_a_file_once(tmp_path):
    model = mlp(1)
    model.copy_of_head = model.head
    file = tmp_path / "w.safetensors"
    safetensors.torch.save_model(model, str(file))  # drops one of the names
    assert len(safetensors.torch.load_file(file)) == 4
    fresh = mlp(2)
    fresh.copy_of_head = fresh.head
    load(fresh, file)
    assert same(fresh.state_dict(), model.state_dict())


# --- the head ---


def test_the_head_starts_anew_for_another_number_of_classes(file):
    torch.save(mlp(1, classes=9).state_dict(), file)
    model = mlp(2)
    assert load(model, file)[1:] == ["the head (head.weight, head.bias) starts anew: 9 classes in the file, 4 in the data"]
    assert torch.equal(model.layers[0].linear.weight, mlp(1, classes=9).layers[0].linear.weight)
    assert torch.equal(model.head.weight, mlp(2).head.weight)
    torch.save(mlp(1, hidden=7, classes=9).state_dict(), file)  # of another width too: not the number of classes alone
    assert "head.weight: 9×7 for 4×6" in refused(mlp(2), file)


class Named(nn.Module):
    """A network that says what its head is, as timm's do."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head, self.last = nn.Linear(3, classes), nn.Linear(3, classes)

    def get_classifier(self) -> nn.Module:
        return self.last


def test_what_the_model_names_as_its_head_is_the_head(file):
    torch.save(Named(9).state_dict(), file)
    message = refused(Named(4), file)
    assert "head.weight: 9×3 for 4×3" in message
    assert "last" not in message


def test_a_head_of_timm(file):
    source = TimmModel("resnet10t").create((3, 32, 32), 9)
    torch.save(source.state_dict(), file)
    model = TimmModel("resnet10t").create((3, 32, 32), 4)
    fresh = {name: t.clone() for name, t in model.state_dict().items()}
    assert load(model, file, shape=(3, 32, 32))[1:] == [
        "the head (fc.weight, fc.bias) starts anew: 9 classes in the file, 4 in the data"
    ]
    loaded = model.state_dict()
    assert all(torch.equal(loaded[n], (fresh if n.startswith("fc.") else source.state_dict())[n]) for n in loaded)


# --- adapted as timm does: timm's own way of loading is the reference ---


def by_timm(name: str, weights: dict[str, torch.Tensor], classes: int, **kwargs) -> nn.Module:
    import timm

    overlay = {"state_dict": weights, "num_classes": classes, "input_size": (3, 8, 8)}
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=classes, **kwargs)


def test_channels_and_positional_embeddings_are_adapted_as_timm_does(file):
    source = TimmModel("vit_tiny_patch16_224", kwargs=VIT).create((3, 8, 8), 4)
    nn.init.normal_(source.pos_embed)
    torch.save(source.state_dict(), file)
    larger = {**VIT, "img_size": 16}
    model = TimmModel("vit_tiny_patch16_224", kwargs=larger).create((1, 16, 16), 4)
    lines = load(model, file, shape=(1, 16, 16))
    assert lines[1:] == ["patch_embed.proj.weight: 3 input channels in the file, 1 in the data: adapted as timm does"]
    reference = by_timm("vit_tiny_patch16_224", source.state_dict(), 4, in_chans=1, **larger)
    assert same(model.state_dict(), reference.state_dict())
    assert model.pos_embed.shape != source.pos_embed.shape


def test_the_first_convolution_of_any_model_is_adapted(file):
    from timm.models import adapt_input_conv

    source, model = ResNet9(width=4).create((3, 8, 8), 4), ResNet9(width=4).create((1, 8, 8), 4)
    torch.save(source.state_dict(), file)
    assert "features.0.0.weight: 3 input channels in the file, 1 in the data" in load(model, file, shape=(1, 8, 8))[1]
    assert torch.equal(model.features[0][0].weight, adapt_input_conv(1, source.features[0][0].weight))
    wider = ResNet9(width=8).create((1, 8, 8), 4)
    assert "features.0.0.weight: 4×3×3×3 for 8×1×3×3" in refused(wider, file, shape=(1, 8, 8))


# --- in a run ---


def test_a_runs_directory_means_its_best_checkpoint_or_the_newest_valid_one(train):
    run_dir = train("saving=last", "saving.every_updates=1", "updates=4", "saving.keep=4").run_dir
    checkpoint = {int(p.name): safetensors.torch.load_file(p / "model.safetensors") for p in run_dir.glob("checkpoints/*")}
    result = json.loads((run_dir / "result.json").read_text())

    def loaded(best: int) -> int:
        result["metrics"]["test"]["best"]["update"] = best
        (run_dir / "result.json").write_text(json.dumps(result))
        model = Mlp().create((3, 8, 8), 4)
        load(model, run_dir)
        return next(update for update, weights in checkpoint.items() if same(weights, model.state_dict()))

    assert loaded(2) == 2
    assert loaded(1) == 1
    assert loaded(99) == 4  # not kept
    with (run_dir / "checkpoints" / "4" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert loaded(99) == 3
    model = Mlp().create((3, 8, 8), 4)
    assert "differs" in refused(model, run_dir / "checkpoints" / "4")
    load(model, run_dir / "checkpoints" / "2")
    assert same(model.state_dict(), checkpoint[2])


def test_a_sharded_run_and_its_export(train, tmp_path):
    from drivetrain.cli import main

    whole, parts = train("saving=last"), train("saving=last", "saving.sharded=true")
    assert main.main(["export", str(parts.run_dir), str(tmp_path / "exported.safetensors")]) == 0
    models = [Mlp().create((3, 8, 8), 4) for _ in range(3)]
    for model, place in zip(models, (whole.run_dir, parts.run_dir, tmp_path / "exported.safetensors"), strict=True):
        load(model, place)
    assert same(models[0].state_dict(), models[1].state_dict())
    assert same(models[0].state_dict(), models[2].state_dict())


def test_a_resumed_run_goes_on_from_its_checkpoint_and_needs_the_file_no_more(train, file):
    torch.save(Mlp().create((3, 8, 8), 4).state_dict(), file)
    first = train(f"model.weights={file}", "saving=last", "updates=2")
    straight = train(f"model.weights={file}", "saving=last", "updates=3")
    file.unlink()
    resumed = continued(first.run_dir, "updates=3")
    ends = [safetensors.torch.load_file(r.run_dir / "checkpoints" / "3" / "model.safetensors") for r in (straight, resumed)]
    assert same(*ends)
    with pytest.raises(UserError, match="no such file"):
        raise UserError(train(f"model.weights={file}").error)


def test_biases_that_surgery_removes_are_accounted_for(make, tmp_path):
    """The file's biases are subtracted from the norms' means, and the checkpoint of an edited model is the same function."""
    words = ["data.shape=[1,8,8]", "model=resnet9", "model.width=4", "model.bias=true"]
    edited = [*words, "surgery=[no_bias_before_norm]"]
    source = ResNet9(4, bias=True).create((1, 8, 8), 4)
    for module in source.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
    torch.save(source.state_dict(), tmp_path / "w.pt")
    x = torch.randn(3, 1, 8, 8)
    built = make(*edited, f"model.weights={tmp_path / 'w.pt'}").model
    assert built.features[0][0].bias is None
    torch.testing.assert_close(built.eval()(x), source.eval()(x))

    torch.save(built.state_dict(), tmp_path / "edited.pt")  # without biases
    for again in (
        make(*edited, f"model.weights={tmp_path / 'edited.pt'}"),
        make(*words, f"model.weights={tmp_path / 'edited.pt'}"),
    ):
        torch.testing.assert_close(again.model.eval()(x), source.eval()(x))


def test_master_weights_are_the_files_float32(make, tmp_path):
    source = Mlp().create((3, 8, 8), 4).state_dict()
    torch.save(source, tmp_path / "w.pt")
    trainer = make("precision=bf16_pure", f"model.weights={tmp_path / 'w.pt'}")
    assert trainer.model.head.weight.dtype == torch.bfloat16
    masters = {
        name: p for group in trainer.optimizer.param_groups for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    assert same({name: p.detach() for name, p in masters.items()}, source)


def test_the_random_numbers_of_a_run_do_not_depend_on_its_weights(make, tmp_path):
    torch.save(Mlp().create((3, 8, 8), 4).state_dict(), tmp_path / "w.pt")
    plain = make()
    first = torch.get_rng_state()
    assert not same(make(f"model.weights={tmp_path / 'w.pt'}").model.state_dict(), plain.model.state_dict())
    assert torch.equal(torch.get_rng_state(), first)


# --- settings ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.weights_skip=[head.*]"], "model.weights_skip leaves out names of model.weights, which is not set"),
        (["model=timm", "model.kwargs={checkpoint_path: w.pt}"], "model.kwargs.checkpoint_path names initial weights"),
        (["model=timm", "model.pretrained=true", "model.weights=w.pt"], "are two sets of initial weights: leave one out"),
    ],
)
def test_settings_that_exclude_each_other(problems, words, says):
    assert any(says in problem for problem in problems(*words))


@pytest.mark.parametrize(("group", "line"), [("mlp", "weights: theirs.pt"), ("timm", "pretrained: true")])
def test_a_recipe_does_not_choose_weights(tmp_path, group, line):
    """They are the operator's: a recipe neither names files nor downloads."""
    (tmp_path / "theirs.yaml").write_text(f"defaults:\n  - override /model: {group}\nmodel:\n  {line}\n")
    with pytest.raises(UserError, match=f"a recipe cannot set 'model.{line.partition(':')[0]}'"):
        prepare(f"recipe={tmp_path / 'theirs.yaml'}")


def prepare(*words: str):
    from drivetrain.launch.job import prepare

    return prepare(list(words))


def test_weights_make_another_run(train, tmp_path):
    """The hash tells runs from other weights apart, the run's recipe says what it lacks, and a resume does not swap them."""
    torch.save(Mlp().create((3, 8, 8), 4).state_dict(), tmp_path / "w.pt")
    words = [f"model.weights={tmp_path / 'w.pt'}"]
    assert prepare("model=mlp").config_hash != prepare("model=mlp", *words).config_hash
    run_dir = train(*words, "saving=last").run_dir
    assert f'# model.weights="{tmp_path / "w.pt"}" is not part of a recipe' in (run_dir / "recipe.yaml").read_text()
    with pytest.raises(UserError, match=r"model\.weights: .*w.pt → other.pt"):
        prepare(f"resume={run_dir}", "model.weights=other.pt")
    assert prepare(f"resume={run_dir}").run.model.weights == str(tmp_path / "w.pt")
