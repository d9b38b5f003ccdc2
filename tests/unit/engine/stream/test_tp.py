"""Sharding driven by the layout: local shapes, and what linears compute, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dlo_cache.errors import NotDivisible, UnknownTensor
from dlo_cache.layout import BlockGroup, Layout, Role, Rule, Section
from dlo_cache.layouts import builtin_layout
from dlo_engine.assembly import build_model
from dlo_engine.errors import BadEntry, Unsupported
from dlo_engine.families import family_of
from dlo_engine.tp import GatheredLinear, RowLinear, TensorGroup, shard
from fakes.tiny_flux import HEADS, WIDTH, transformer_config
from torch import nn


class FakeGroup(TensorGroup):
    """A group whose collectives are given the other ranks' parts beforehand."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, rank, size)
        self.others: list[torch.Tensor] = []
        self.handed_in: list[torch.Tensor] = []

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adds the parts in rank order; notes this rank's."""
        self.handed_in.append(tensor)
        return torch.stack([tensor, *self.others]).sum(dim=0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part in its place."""
        parts = list(self.others)
        parts.insert(self.rank, tensor)
        return torch.stack(parts)


def layout_of(*rules: Rule) -> Layout:
    """A layout of one block list."""
    return Layout("test", "Test", (BlockGroup("blocks"),), rules)


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    """Without gradients."""
    return nn.Parameter(tensor, requires_grad=False)


def test_a_row_linear_adds_its_bias_once() -> None:
    """After the sum over ranks, not before."""
    weight, bias, x = torch.randn(3, 8), torch.randn(3), torch.randn(2, 8)
    group = FakeGroup(0, 2)
    group.others = [x[:, 4:] @ weight[:, 4:].T]
    row = RowLinear(parameter(weight[:, :4]), parameter(bias), group)
    expected = x @ weight.T + bias
    assert torch.allclose(row(x[:, :4]), expected, atol=1e-6)
    assert torch.equal(group.handed_in[0], x[:, :4] @ weight[:, :4].T), "every rank would add its bias"
    without = RowLinear(parameter(weight[:, :4]), None, group)
    assert torch.allclose(without(x[:, :4]), x @ weight.T, atol=1e-6)


@pytest.mark.parametrize(
    "kept",
    [(((0, 4),), ((4, 8),)), (((0, 2), (4, 6)), ((2, 4), (6, 8)))],
    ids=["one-range", "sections"],
)
def test_a_gathered_linear_restores_the_order_of_its_features(
    kept: tuple[tuple[tuple[int, int], ...], ...],
) -> None:
    """Whole ranges or sections cut each by itself: the output is that of the whole linear."""
    weight, bias, x = torch.randn(8, 5), torch.randn(8), torch.randn(2, 5)
    whole = x @ weight.T + bias
    for rank in range(2):
        rows = [torch.cat([torch.arange(a, b) for a, b in ranges]) for ranges in kept]
        group = FakeGroup(rank, 2)
        group.others = [whole[:, rows[1 - rank]]]
        linear = GatheredLinear(parameter(weight[rows[rank]]), parameter(bias[rows[rank]]), group, kept)
        assert torch.allclose(linear(x), whole, atol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_flux_is_cut_to_what_the_layout_cuts(size: int) -> None:
    """Every tensor of every rank has the shape that the builder gives it, and the heads divide."""
    family = family_of("FluxTransformer2DModel")
    config = {**transformer_config(), "_class_name": "FluxTransformer2DModel"}
    layout = builtin_layout("FluxTransformer2DModel")
    assert layout is not None
    full = {name: tuple(t.shape) for name, t in family.build(config).state_dict().items()}
    for rank in range(size):
        model = family.build(config)
        shard(model, layout, config, FakeGroup(rank, size))
        family.adapt(model, size)
        local = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        assert list(local) == list(full)
        for name, shape in full.items():
            assert local[name] == layout.cut(name, shape, size, rank, config).shape
        assert all(t.is_meta for t in model.parameters())
        attention = model.get_submodule("transformer_blocks.0.attn")
        assert attention.heads == HEADS // size
        assert attention.inner_dim == WIDTH // size
    assert local["transformer_blocks.0.norm1.linear.weight"] == (6 * WIDTH // size, WIDTH)
    assert local["single_transformer_blocks.1.proj_out.weight"] == (WIDTH, 5 * WIDTH // size)


def test_one_rank_is_left_alone() -> None:
    """No cut, no new modules."""
    model = nn.Module()
    model.add_module("blocks", nn.ModuleList([nn.Linear(4, 4)]))
    linear = model.get_submodule("blocks.0")
    shard(model, layout_of(Rule("**", Role.COLUMN)), {}, TensorGroup(None, 0, 1))
    assert model.get_submodule("blocks.0") is linear


def one_block(block: nn.Module) -> nn.Module:
    """A model of one block on meta."""
    model = nn.Module()
    model.add_module("blocks", nn.ModuleList([block]))
    return model.to("meta")


@pytest.mark.parametrize(
    ("block", "rules", "message"),
    [
        (nn.Linear(4, 4), [Rule("**", Role.VOCABULARY)], "role vocabulary"),
        (nn.Linear(4, 4), [Rule("**.bias", Role.COLUMN), Rule("**", Role.ROW)], "do not fit together"),
        (nn.Linear(4, 4), [Rule("**.bias", Role.REPLICATED), Rule("**", Role.COLUMN)], "do not fit"),
        (nn.LayerNorm(4), [Rule("**", Role.COLUMN)], "belongs to a LayerNorm"),
        (nn.Conv1d(4, 4, 1), [Rule("**", Role.COLUMN)], "belongs to a Conv1d"),
    ],
    ids=["vocabulary", "row-bias-cut", "column-bias-whole", "norm", "convolution"],
)
def test_what_cannot_be_run_is_refused_by_name(block: nn.Module, rules: list[Rule], message: str) -> None:
    """Never half-sharded in silence."""
    with pytest.raises(Unsupported, match=message) as caught:
        shard(one_block(block), layout_of(*rules), {}, FakeGroup(0, 2))
    assert "blocks.0" in str(caught.value)


def test_the_layouts_own_errors_come_through() -> None:
    """Unknown tensors and heads that do not divide are the layout's to refuse."""
    with pytest.raises(UnknownTensor):
        shard(one_block(nn.Linear(4, 4)), layout_of(Rule("other", Role.REPLICATED)), {}, FakeGroup(0, 2))
    heads = layout_of(Rule("**", Role.COLUMN, heads="n"))
    with pytest.raises(NotDivisible):
        shard(one_block(nn.Linear(4, 6)), heads, {"n": 3}, FakeGroup(0, 2))


def test_row_sections_follow_the_concatenated_input() -> None:
    """A row linear whose input joins two cut streams takes each stream's share of columns."""
    layout = layout_of(
        Rule("**.bias", Role.REPLICATED), Rule("**", Role.ROW, (Section(share=1), Section(share=4)))
    )
    weight, x = torch.randn(6, 20), torch.randn(3, 20)
    model = one_block(nn.Linear(20, 6))
    shard(model, layout, {}, FakeGroup(1, 2))
    row = model.get_submodule("blocks.0")
    assert isinstance(row, RowLinear)
    assert row.weight.shape == (6, 10)
    cuts = [layout.cut("blocks.0.weight", (6, 20), 2, rank, {}).ranges for rank in range(2)]
    assert cuts == [((0, 2), (4, 12)), ((2, 4), (12, 20))]
    columns = [torch.cat([torch.arange(a, b) for a, b in ranges]) for ranges in cuts]
    group = FakeGroup(0, 2)
    group.others = [x[:, columns[1]] @ weight[:, columns[1]].T]
    local = RowLinear(parameter(weight[:, columns[0]]), None, group)
    assert torch.allclose(local(x[:, columns[0]]), x @ weight.T, atol=1e-5)


def test_an_entry_that_another_layout_cut_is_refused() -> None:
    """Shards of other rules would load where shapes agree, and compute something else."""
    config = {**transformer_config(), "_class_name": "FluxTransformer2DModel"}
    layout = builtin_layout("FluxTransformer2DModel")
    assert layout is not None
    groups: Any = SimpleNamespace(tensor_size=2, replica=FakeGroup(0, 2))

    def opened(digest: str) -> Any:
        manifest = SimpleNamespace(preimage={"layout": {"id": layout.id, "digest": digest}})
        return SimpleNamespace(entry=SimpleNamespace(manifest=manifest), record=SimpleNamespace(dir="e"))

    build_model(config, opened(layout.digest), groups)
    with pytest.raises(BadEntry, match="Entry e was cut by another layout") as caught:
        build_model(config, opened("0" * 64), groups)
    assert caught.value.code == "LayoutMismatch"
