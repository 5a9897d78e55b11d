"""model=timm: any network of timm."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import Entries, Text, one_of
from drivetrain.core.options.option import Momentum, RunSpec, needs_extra
from drivetrain.model import hub
from drivetrain.model.base import NO_START, Model

# A network's keys for recipes: the numbers of timm's architectures, not the ones that create_model reads itself (paths,
# addresses, caches, pretrained_cfg). A network without such an argument raises an error when it is built.
NUMBERS = """
    act_first always_partition attn_drop_rate attn_mlp_ratio attn_pool_mlp_ratio attn_pool_num_heads attn_ratio avg_down
    base_width bias block_reduce_first bottle_ratio cardinality channels class_token conv_bias conv_mlp conv_ratio depth
    depths dim_mul dims distillation down_kernel_size down_patch_size down_stride downsamples drop_block_rate drop_path_rate
    drop_rate dropout dynamic_img_pad dynamic_img_size embed_dim embed_dims expand_groups expand_ratio fc_norm final_norm
    fix_init fix_stem fused_conv growth_rate head_bias head_dim head_hidden_size head_init_scale head_mul head_norm
    head_norm_first head_widths heads hidden_size img_size in_chans init_values input_3x3 intermediate_size kernel_size
    kernel_sizes key_dim layer_scale_init_value layers legacy ls_init_value mask_unit_size merge_size mlp_bias mlp_ratio
    mlp_ratios no_embed_class norm_eps num_classes num_features num_heads num_init_features num_kv_heads num_reg_tokens
    out_features output_stride patch_drop_rate patch_kernel patch_norm patch_padding patch_size patch_stride pool_size
    pos_drop_rate pre_norm preact proj_bias proj_drop_rate q_pool q_stride qk_norm qkv_bias reg_tokens replace_stem_pool
    rope_temperature scale_mlp se_from_exp sr_ratios stages stem_bias stem_chs stem_expand_ratio stem_kernel_size stem_norm
    stem_size stem_width strict_img_size swiglu_mlp use_abs_pos_emb use_fc_norm use_lab use_pos_embed use_post_norm
    use_rot_pos_emb width width_factor widths window_ratio window_size zero_init_last
"""
NORM_LAYERS = """
    batchnorm batchnorm2d groupnorm groupnorm1 layernorm layernorm2d rmsnorm rmsnorm2d simplenorm simplenorm2d
"""
ACTIVATIONS = """
    celu elu gelu gelu_tanh hard_mish hard_sigmoid hard_swish leaky_relu mish quick_gelu relu relu6 selu sigmoid silu swish
    tanh
"""
NAMES = {  # argument → its allowed texts
    "act_layer": one_of(*ACTIVATIONS.split()),
    "norm_layer": one_of(*NORM_LAYERS.split()),
    "global_pool": one_of("", "avg", "max", "avgmax", "catavgmax", "fast", "map", "token"),
    "pad_type": one_of("", "same"),
    "weight_init": one_of("", "jax", "jax_nlhb", "moco", "skip"),
}
ARGUMENTS = Entries(
    Text("|".join([*NUMBERS.split(), *NAMES]), "an argument of timm's architectures that a recipe may set"),
    tuple((one_of(name), texts) for name, texts in NAMES.items()),
)


@dataclass(eq=False)
class TimmModel(Model):
    """Any network of timm by name. `kwargs` are further arguments of timm.create_model.

    The numbers of input channels and of classes come from the data, unless `kwargs` sets them. `drop_path` is the rate of
    stochastic depth (Huang et al. 2016) by which timm drops the last residual branch of a sample; null is the network's own.
    """

    name: Annotated[str, Text(r"\w+(\.\w+)?", "a name of timm.list_models(), not one of a hub or a folder")] = "resnet18"
    pretrained: bool = False
    kwargs: Annotated[dict[str, Any], ARGUMENTS] = field(default_factory=dict)
    drop_path: Momentum | None = None

    machine_local_keys = identifying_keys = (*Model.machine_local_keys, "pretrained")
    may_be_transformer = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        for key, instead in {"pretrained": "model.pretrained=true", "checkpoint_path": "model.weights=PATH"}.items():
            if key in self.kwargs:
                yield f"model.kwargs.{key} names initial weights, and a run has its own key for them: set {instead}"
        if self.drop_path is not None and "drop_path_rate" in self.kwargs:
            yield (
                f"model.drop_path={self.drop_path} and model.kwargs.drop_path_rate={self.kwargs['drop_path_rate']} set the same "
                "rate: leave the second one out"
            )
        if self.pretrained and self.weights is not None:
            yield f"model.pretrained=true and model.weights={self.weights} are two sets of initial weights: leave one out"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if missing := list(needs_extra("timm", "timm", "model=timm")):
            yield from missing
            return
        import timm

        base = self.name.split(".")[0]
        if not self.name.startswith("hf-hub:") and not timm.is_model(self.name):
            near = difflib.get_close_matches(base, timm.list_models(), n=5, cutoff=0.5)
            yield (f"model.name={self.name} is no model of timm {timm.__version__}: did you mean {', '.join(near) or 'another'}?")

    @property
    def given_weights(self) -> bool:
        return self.pretrained or super().given_weights

    def untrained(self) -> TimmModel:
        return replace(self, **NO_START, pretrained=False)

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        import timm

        if len(shape) != 3:
            raise UserError(f"model=timm wants images, but the data gives {list(shape)}: set model=mlp")
        if self.pretrained:
            self._reach_weights()
        kwargs = {"in_chans": shape[0], "num_classes": classes, "drop_path_rate": self.drop_path, **self.kwargs}
        try:  # timm leaves out arguments that are None
            model = timm.create_model(self.name, pretrained=self.pretrained, **kwargs)
        except TypeError as error:  # not an argument of this network
            if self.drop_path is not None and "drop_path_rate" in str(error):
                raise self._no_drop_path() from None
            raise UserError(f"model.name={self.name} does not take these model.kwargs {self.kwargs}: {error}") from None
        if self.drop_path and not _drops_paths(model):
            raise self._no_drop_path()  # it takes the argument but ignores it
        if (size := _only_size(model)) is not None and size != tuple(shape[1:]):
            raise UserError(
                f"model.name={self.name} takes images of {size[0]}×{size[1]}, and the data gives {shape[1]}×{shape[2]}: set "
                f"model.kwargs={{img_size: {_shown(tuple(shape[1:]))}}}, or the data's size to {_shown(size)}"
            )
        return model

    def _reach_weights(self) -> None:
        """Raise UserError if the weights are neither in the cache nor on the hub: timm would try for more than a minute."""
        import timm

        found = timm.get_pretrained_cfg(self.name)
        if found is not None and found.hf_hub_id:
            setting = f"model.pretrained=true: {found.hf_hub_id}, which has the weights of model.name={self.name},"
            instead = "set model.weights=/path/to/a/file of them, or model.pretrained=false"
            hub.only_cached(found.hf_hub_id, found.hf_hub_filename or "model.safetensors", setting, instead)

    def _no_drop_path(self) -> UserError:
        """The refusal of a network without stochastic depth."""
        return UserError(
            f"model.drop_path={self.drop_path}: model.name={self.name} drops no residual branches (timm's drop_path_rate): set "
            "model.drop_path=null, or a network that does, such as model.name=resnet18"
        )


def _only_size(model: torch.nn.Module) -> tuple[int, int] | None:
    """The height and width of a timm transformer's images; None if it takes several sizes."""
    embed: Any = getattr(model, "patch_embed", None)
    size = getattr(embed, "img_size", None)
    return tuple(size) if size is not None and getattr(embed, "strict_img_size", False) else None


def _shown(size: tuple[int, ...]) -> str:
    return str(size[0]) if size[0] == size[1] else str(list(size))


def _drops_paths(model: torch.nn.Module) -> bool:
    """Return whether a block of a timm model may drop its residual branch. EfficientNet's blocks without one declare it."""
    from timm.layers import DropPath

    blocks = (block for block in model.modules() if getattr(block, "has_skip", True))
    return any(isinstance(child, DropPath) and child.drop_prob > 0 for block in blocks for child in block.children())
