"""The FLUX layout against the model itself and the tensor-parallel plan that diffusers publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from dlo_cache.errors import NotDivisible
from dlo_cache.layout import Layout, Role
from dlo_cache.layouts import builtin_architectures, builtin_layout
from unit.cache.format.joining import join, ranks

HEADS, HEAD_WIDTH = 4, 8
# Where diffusers' plan cuts nothing, ours does: the modulation, whose output is gathered to full width.
GATHERED = {
    "transformer_blocks.*.norm1.linear",
    "transformer_blocks.*.norm1_context.linear",
    "single_transformer_blocks.*.norm.linear",
}


@pytest.fixture(scope="module")
def layout() -> Layout:
    """The layout that ships."""
    found = builtin_layout("FluxTransformer2DModel")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model() -> FluxTransformer2DModel:
    """A small FLUX transformer without weights, of every kind of module."""
    with torch.device("meta"):
        return FluxTransformer2DModel(
            num_layers=2,
            num_single_layers=2,
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_WIDTH,
            joint_attention_dim=24,
            pooled_projection_dim=16,
            in_channels=8,
            axes_dims_rope=(2, 2, 4),
            guidance_embeds=True,
        )


def linears(model: FluxTransformer2DModel) -> Iterator[str]:
    """Every linear inside a block, with its block's number as a star."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "transformer_blocks." in name:
            group, _, rest = name.partition(".")
            yield f"{group}.*.{rest.partition('.')[2]}"


def test_every_tensor_has_a_rule_and_every_rule_a_tensor(
    layout: Layout, model: FluxTransformer2DModel
) -> None:
    """No parameter or buffer is unknown, and no rule is left over from another model."""
    used = {layout.rule(name).pattern for name in model.state_dict()}
    assert used == {rule.pattern for rule in layout.rules}


def test_blocks_are_those_of_the_model(layout: Layout, model: FluxTransformer2DModel) -> None:
    """Double blocks, then single blocks; all else is resident."""
    names = list(model.state_dict())
    assert layout.execution_order(names) == [
        "transformer_blocks.0",
        "transformer_blocks.1",
        "single_transformer_blocks.0",
        "single_transformer_blocks.1",
    ]
    assert {name.split(".")[0] for name in names if layout.block_of(name) is None} == {
        "time_text_embed", "context_embedder", "x_embedder", "norm_out", "proj_out"}  # fmt: skip


def test_roles_agree_with_the_plan_of_diffusers(layout: Layout, model: FluxTransformer2DModel) -> None:
    """Each linear of a block is cut as the published plan says, and only the modulation beyond it."""
    plan: dict[str, Any] = FluxTransformer2DModel._tp_plan
    words = {"colwise": Role.COLUMN, "rowwise": Role.ROW, "PackedRowwiseParallel": Role.ROW}
    seen = set()
    for pattern in linears(model):
        name = pattern.replace("*", "0")
        role = layout.rule(f"{name}.weight").role
        style = plan.get(pattern)
        word = style if isinstance(style, str) else type(style).__name__
        assert role is (words[word] if style is not None else Role.COLUMN_GATHERED), pattern
        bias = layout.rule(f"{name}.bias").role
        assert bias is (Role.REPLICATED if role is Role.ROW else role), pattern
        seen.add(pattern)
    assert seen == set(plan) | GATHERED


def test_the_packed_row_is_cut_by_sections(layout: Layout) -> None:
    """The single block's projection takes attention and MLP side by side: each is cut by itself."""
    cut = layout.cut(
        "single_transformer_blocks.0.proj_out.weight", (32, 160), 2, 1, {"num_attention_heads": HEADS}
    )
    assert cut == (1, ((16, 32), (96, 160)), (32, 80))


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_all_ranks_together_are_the_model(
    layout: Layout, model: FluxTransformer2DModel, tensor_size: int
) -> None:
    """For every tensor of a real state dict, joining the parts of all ranks gives it back bit for bit."""
    random = np.random.default_rng(0)
    config = dict(model.config)
    for name, tensor in model.state_dict().items():
        whole = random.integers(0, 2**16, tuple(tensor.shape), np.uint16)
        parts = ranks(layout, name, whole, tensor_size, config)
        assert np.array_equal(join(parts, whole.shape), whole), name
        assert all(tuple(cut.shape) == part.shape for cut, part in parts)


def test_each_rank_holds_its_share(layout: Layout, model: FluxTransformer2DModel) -> None:
    """At size 4 a rank has little more than a quarter of the blocks' bytes: the modulation is cut too."""
    config = dict(model.config)
    blocks = {name: tensor for name, tensor in model.state_dict().items() if layout.block_of(name)}
    whole = sum(tensor.numel() for tensor in blocks.values())
    mine = sum(
        int(np.prod(layout.cut(name, tuple(t.shape), 4, 2, config).shape)) for name, t in blocks.items()
    )
    assert 0.25 < mine / whole < 0.27


@pytest.mark.parametrize(
    ("tensor_size", "fits"), [(1, True), (2, True), (3, True), (4, True), (5, False), (16, False)]
)
def test_flux_dev_sizes(layout: Layout, tensor_size: int, fits: bool) -> None:
    """24 heads: 2, 3 and 4 divide them, 5 and 16 do not, and the head count is named."""
    config = {"num_attention_heads": 24}
    if fits:
        layout.check(config, tensor_size)
        return
    with pytest.raises(NotDivisible, match="num_attention_heads = 24"):
        layout.check(config, tensor_size)


def test_the_layout_is_named_and_reads_back(layout: Layout) -> None:
    """Its digest is in the key of every FLUX entry: a change of this value rebuilds every cache."""
    assert builtin_architectures() == ("FluxTransformer2DModel",)
    assert Layout.from_json(layout.to_json()) == layout
    assert layout.digest == "b383385a05a28fbe9a9d70cb852cfb7defa2b0b924e48604385aba937a43ae9f"
    assert json.loads(layout.to_json())["groups"] == ["transformer_blocks", "single_transformer_blocks"]


def test_there_is_no_layout_for_others() -> None:
    """An unknown class has none, nor has a name that is a path."""
    assert builtin_layout("WanTransformer3DModel") is None
    assert builtin_layout("../layout") is None
