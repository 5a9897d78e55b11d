"""The networks: shapes, settings, and clear words for those that cannot be built."""

import sys

import pytest
import torch

from drivetrain.config import validate
from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from drivetrain.model.gpt import DropPath
from drivetrain.model.own import OwnModel
from drivetrain.model.shipped import Gpt, Mlp, ResNet9
from drivetrain.model.timm import TimmModel
from drivetrain.parallel import tensor

OWN = '''
"""A network from outside."""
import torch

class Net(torch.nn.Module):
    def __init__(self, shape, classes, width=3):
        super().__init__()
        self.inner = torch.nn.Linear(shape[0] * shape[1] * shape[2], width)
        self.outer = torch.nn.Linear(width, classes)

    def forward(self, x):
        return self.outer(self.inner(x.flatten(1)))

def net(num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, num_classes))

class Fixed(torch.nn.Linear):
    def __init__(self, inputs):
        super().__init__(inputs, 4)
'''


@pytest.fixture
def own(own_module):
    own_module("theirs", OWN)
    return ["model=own", "trust=[theirs]"]


@pytest.mark.parametrize("shape", [(5,), (3, 8, 8), (2, 3, 4, 5)])
def test_mlp_takes_any_shape(shape):
    model = Mlp(hidden=[6, 7], dropout=0.1).create(shape, 4)
    assert model(torch.randn(2, *shape)).shape == (2, 4)
    assert [layer.linear.out_features for layer in model.layers] == [6, 7]
    assert {layer.dropout.p for layer in model.layers} == {0.1}


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (4, 11, 9)])
def test_resnet9_takes_images_of_any_size_and_channels(shape):
    model = ResNet9(width=4).create(shape, 5)
    assert model(torch.randn(2, *shape)).shape == (2, 5)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 8
    assert all(m.bias is None for m in convolutions)
    assert convolutions[-1].out_channels == 32
    assert all(m.bias is not None for m in ResNet9(4, bias=True).create(shape, 5).modules() if isinstance(m, torch.nn.Conv2d))


def test_timm_by_name_with_channels_classes_and_its_own_arguments():
    model = TimmModel("resnet10t", kwargs={"drop_rate": 0.25}).create((1, 32, 32), 7)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    assert model.drop_rate == 0.25


def test_timms_arguments_come_through_from_the_command_line(make):
    words = ["model=timm", "model.name=resnet10t", "data.shape=[3,32,32]", "model.kwargs.drop_rate=0.5"]
    assert make(*words).model.drop_rate == 0.5


def test_an_argument_that_the_network_does_not_take_is_refused():
    with pytest.raises(UserError, match=r"model\.name=resnet10t does not take these model\.kwargs.*wings"):
        TimmModel("resnet10t", kwargs={"wings": 2}).create((3, 32, 32), 4)


@pytest.mark.parametrize("target", ["theirs.Net", "theirs.net"])
def test_an_own_class_or_function_trains(train, own, target):
    train(*own, f"model.target={target}", *(["+model.kwargs.width=5"] if target.endswith("Net") else []), updates=2)


def test_an_own_class_is_told_shape_and_classes_if_it_takes_them(own):
    model = OwnModel("theirs.Net", {"width": 9}).create((3, 8, 8), 4)
    assert (model.inner.in_features, model.inner.out_features, model.outer.out_features) == (192, 9, 4)
    assert OwnModel("theirs.Fixed", {"inputs": 6}).create((3, 8, 8), 4).in_features == 6


def test_own_code_needs_a_target_and_trust(problems, own):
    assert any("model=own needs model.target" in p for p in problems("model=own"))
    assert any("set trust=[theirs] on the command line" in p for p in problems("model=own", "model.target=theirs.Net"))
    assert any("set trust=[theirs_too]" in p for p in problems(*own, "model.target=theirs_too.Net"))


@pytest.mark.parametrize(
    ("target", "kwargs", "says"),
    [
        ("theirs.Nothing", {}, "cannot be imported"),
        ("not_there.Net", {}, "cannot be imported"),
        ("Net", {}, "cannot be imported"),
        ("theirs.Fixed", {}, "cannot be built with"),
        ("theirs.Net", {"height": 1}, "cannot be built with"),
    ],
)
def test_own_code_that_cannot_be_built_is_one_line(own, target, kwargs, says):
    with pytest.raises(UserError, match=says) as refused:
        OwnModel(target, kwargs).create((3, 8, 8), 4)
    assert f"model.target={target}" in str(refused.value)
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize("beside", [(), ("loss=focal",), ("loss=[cross_entropy,focal]",)])
def test_fewer_outputs_than_classes_are_refused_before_training(make, own, beside):
    words = (*own, "model.target=theirs.Net", "+model.kwargs.classes=3", *beside)
    with pytest.raises(
        UserError, match=r"^model=own has 3 outputs for the 4 classes of data=synthetic: give its last layer more"
    ):
        make(*words)
    make(*words[:3], "model.kwargs.classes=5", *beside)  # more than needed are a model's own affair


def test_a_transformer_of_timm_for_images_of_another_size_is_refused_with_what_to_set(make):
    vit = ["data.shape=[3,16,16]", "model=timm", "model.name=vit_tiny_patch16_224"]
    with pytest.raises(UserError, match=r"takes images of 224×224, and the data gives 16×16: set model.kwargs=\{img_size: 16\}"):
        make(*vit)
    make(*vit, "model.kwargs={dynamic_img_size: true, depth: 1}")
    make(*vit, "model.kwargs={img_size: 16, patch_size: 8, depth: 1}")


# --- own models, and drivetrain's, train where timm and torchvision are not installed; what needs them says what to install ---


@pytest.fixture
def without_timm(monkeypatch):
    """As if neither were installed, also for modules of them that were loaded already."""
    for name in {*sys.modules, "timm", "torchvision"}:
        if name.partition(".")[0] in ("timm", "torchvision"):
            monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("words", [["model=timm", "model.name=resnet18"], ["optimizer=timm"]])
def test_what_needs_timm_says_so(words, tiny, without_timm):
    with pytest.raises(
        UserError, match=rf"{words[0]} needs the package 'timm', which is not installed: pip install 'drivetrain\[timm\]'"
    ):
        validate.validate_device(prepare(tiny(*words)).run)


def test_a_run_needs_neither(train, without_timm):
    train("updates=1", "saving=none")
    assert tensor.plan_for(object()) is None


def test_weights_of_timm_that_cannot_be_reached_are_told_at_once(make, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    says = r"timm/resnet18.a1_in1k, which has .* is neither a folder nor reachable: set model\.weights=/path/to/a/file"
    with pytest.raises(UserError, match=says):
        make("model=timm", "model.name=resnet18", "model.pretrained=true")


# --- model.drop_path: stochastic depth of timm's networks and of gpt ---

timm = pytest.importorskip("timm")

SMALL = {  # one of each family
    "test_vit": {"img_size": 32, "depth": 3},
    "resnet10t": {"zero_init_last": False},
    "test_convnext": {},
    "mnasnet_small": {},  # of EfficientNet's class
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "window_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2],
    },
}  # fmt: skip
SHAPE = (3, 32, 32)


@pytest.mark.parametrize("name", SMALL)
def test_it_is_timms_own_with_the_same_seed(name):
    x, outputs = torch.randn(4, *SHAPE), []
    theirs = dict(in_chans=3, num_classes=4, drop_path_rate=0.3, **SMALL[name])
    for make in (
        lambda: TimmModel(name, kwargs=SMALL[name], drop_path=0.3).create(SHAPE, 4),
        lambda: timm.create_model(name, **theirs),
    ):
        torch.manual_seed(1)
        outputs.append(make().train()(x))
    assert torch.equal(*outputs)


def test_null_is_the_networks_own_rate_and_zero_is_none():
    def rates(drop_path):
        model = TimmModel("fasternet_t1", drop_path=drop_path).create((3, 32, 32), 4)
        return max((m.drop_prob for m in model.modules() if isinstance(m, timm.layers.DropPath)), default=0.0)

    assert rates(None) > 0.0
    assert rates(0.0) == 0.0


@pytest.mark.parametrize("name", ["vgg11", "densenet121"])
def test_a_network_without_it_is_refused(name):
    with pytest.raises(
        UserError, match=rf"^model\.drop_path=0\.1: model\.name={name} drops no .*: set model\.drop_path=null, or"
    ):
        TimmModel(name, drop_path=0.1).create((3, 32, 32), 4)


def test_what_makes_nothing_of_the_rate_is_refused():
    for name, kwargs in (
        ("test_vit", {"img_size": 32, "depth": 1}),
        ("test_efficientnet", {}),
    ):  # one block; blocks without a skip
        with pytest.raises(UserError, match=rf"model\.name={name} drops no residual branches"):
            TimmModel(name, drop_path=0.1, kwargs=kwargs).create(SHAPE, 4)


OF_TIMM = ["model=timm", "model.name=resnet10t", "data.shape=[3,32,32]"]
OF_GPT = ["data=stdlib", "data.max_files=10", "loss=next_token", "model=gpt", "model.width=16", "model.heads=2"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *(
            ([f"model.{word}"], f"model.{word.partition('=')[0]}")
            for word in ("hidden=[0]", "hidden=3", "dropout=1.0", "dropout=-0.1")
        ),
        *(([*OF_TIMM, f"model.drop_path={rate}"], f"model.drop_path={rate}") for rate in ("-0.1", "1", "often")),
        (
            [*OF_TIMM, "model.drop_path=0.1", "model.kwargs.drop_path_rate=0.2"],
            "model.drop_path=0.1 and model.kwargs.drop_path_rate=0.2 set the same rate: leave the second one out",
        ),
        ([*OF_GPT, "model.drop_path=0.1", "model.depth=1"], "model.drop_path=0.1 has no effect with model.depth=1"),
        (["model=timm", "model.name=resnet9000"], "model.name=resnet9000 is no model of timm"),
        *((["model=resnet9", f"data.shape={s}"], "model=resnet9 wants images of at least 8×8") for s in ("[3,4,4]", "[12]")),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_bad_settings_are_refused(problems, words, says):
    assert any(p.startswith(says) for p in problems(*words))


def test_a_recipe_may_set_it(tmp_path, tiny):
    recipe = tmp_path / "deep.yaml"
    recipe.write_text("model:\n  drop_path: 0.2\ndefaults:\n- override /model: timm\n")
    assert prepare([f"recipe={recipe}"]).run.model.drop_path == 0.2


def test_our_layer_is_timms():
    for shape in ((5, 3, 4), (5, 2, 3, 4)):
        x, outputs = torch.randn(shape), []
        for layer in (DropPath(0.4), timm.layers.DropPath(0.4)):
            torch.manual_seed(2)
            outputs.append(layer.train()(x))
        assert torch.equal(*outputs)
    assert torch.equal(DropPath(0.4).eval()(x), x)


def test_gpt_drops_whole_branches_of_texts_more_often_in_late_blocks():
    model = Gpt(width=16, depth=3, heads=2, drop_path=0.5).create((12,), 30).train()
    assert [getattr(block.drop_path, "rate", 0.0) for block in model.blocks] == [0.0, 0.25, 0.5]
    for block in model.blocks:  # which start as the identity
        torch.nn.init.normal_(block.attention.out.weight)
        torch.nn.init.normal_(block.feed_forward.down.weight)
    x, block = torch.randn(64, 12, 16), model.blocks[-1]
    torch.manual_seed(3)
    moved = (block(x, model.rotary) != x).flatten(1).any(1).float().mean().item()
    assert 0.6 < moved < 0.9  # one of two branches, each with a chance of a half: 0.75
    plain = Gpt(width=16, depth=3, heads=2).create((12,), 30)
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(30, (4, 12))
    assert torch.equal(model.eval()(tokens), plain.eval()(tokens))
