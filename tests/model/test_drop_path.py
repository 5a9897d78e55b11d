"""model.drop_path: stochastic depth of timm's networks and of gpt."""

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.model import Gpt, Timm
from drivetrain.model.gpt import DropPath

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


def outputs_of_paths(model: torch.nn.Module, x: torch.Tensor) -> list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]]:
    """(layer, its input, its output) for each call of a stochastic depth layer that may drop."""
    seen: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]] = []
    for layer in model.modules():
        if isinstance(layer, timm.layers.DropPath) and layer.drop_prob:
            layer.register_forward_hook(lambda layer, inputs, output: seen.append((layer, inputs[0].clone(), output.clone())))
    model(x)
    return seen


@pytest.mark.parametrize("name", SMALL)
def test_branches_are_dropped_in_training_and_none_in_evaluation(name):
    torch.manual_seed(0)
    model = Timm(name, kwargs=SMALL[name], drop_path=0.5).create(SHAPE, 4)
    x = torch.randn(16, *SHAPE)
    seen = outputs_of_paths(model.train(), x)
    assert max(layer.drop_prob for layer, _, _ in seen) >= 0.25  # efficientnet's last block is below the rate
    dropped = kept = 0
    for layer, branch, out in seen:
        for sample, result in zip(branch, out, strict=True):
            if not result.any():
                dropped += 1
            else:
                kept += 1
                torch.testing.assert_close(result, sample / (1 - layer.drop_prob))
    assert dropped > 0
    assert kept > 0
    assert all(torch.equal(branch, out) for _, branch, out in outputs_of_paths(model.eval(), x))


@pytest.mark.parametrize("name", SMALL)
def test_it_is_timms_own_with_the_same_seed(name):
    x, outputs = torch.randn(4, *SHAPE), []
    theirs = dict(in_chans=3, num_classes=4, drop_path_rate=0.3, **SMALL[name])
    for make in (
        lambda: Timm(name, kwargs=SMALL[name], drop_path=0.3).create(SHAPE, 4),
        lambda: timm.create_model(name, **theirs),
    ):
        torch.manual_seed(1)
        outputs.append(make().train()(x))
    assert torch.equal(*outputs)


def test_null_is_the_networks_own_rate_and_zero_is_none():
    def rates(drop_path):
        model = Timm("fasternet_t1", drop_path=drop_path).create((3, 32, 32), 4)
        return max((m.drop_prob for m in model.modules() if isinstance(m, timm.layers.DropPath)), default=0.0)

    assert rates(None) > 0.0
    assert rates(0.0) == 0.0


@pytest.mark.parametrize("name", ["vgg11", "densenet121"])
def test_a_network_without_it_is_refused(name):
    with pytest.raises(
        UserError, match=rf"^model\.drop_path=0\.1: model\.name={name} drops no .*: set model\.drop_path=null, or"
    ):
        Timm(name, drop_path=0.1).create((3, 32, 32), 4)


def test_what_makes_nothing_of_the_rate_is_refused():
    for name, kwargs in (
        ("test_vit", {"img_size": 32, "depth": 1}),
        ("test_efficientnet", {}),
    ):  # one block; blocks without a skip
        with pytest.raises(UserError, match=rf"model\.name={name} drops no residual branches"):
            Timm(name, drop_path=0.1, kwargs=kwargs).create(SHAPE, 4)


def test_bad_settings_are_refused(problems):
    of_timm = ["model=timm", "model.name=resnet10t", "data.shape=[3,32,32]"]
    for rate in ("-0.1", "1", "often"):
        assert any(p.startswith(f"model.drop_path={rate}") for p in problems(*of_timm, f"model.drop_path={rate}"))
    (problem,) = problems(*of_timm, "model.drop_path=0.1", "model.kwargs.drop_path_rate=0.2")
    assert problem == "model.drop_path=0.1 and model.kwargs.drop_path_rate=0.2 set the same rate: leave the second one out"
    text = ["data=stdlib", "data.max_files=10", "loss=next_token", "model=gpt", "model.width=16", "model.heads=2"]
    assert any("has no effect with model.depth=1" in p for p in problems(*text, "model.drop_path=0.1", "model.depth=1"))


def test_a_recipe_may_set_it(tmp_path, tiny):
    from drivetrain.launch.job import prepare

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
