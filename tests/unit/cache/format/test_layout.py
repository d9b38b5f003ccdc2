"""Layouts: which rule counts, what each role cuts, and which head is never split."""

from __future__ import annotations

import numpy as np
import pytest
from dlo_cache.errors import Invalid, NotDivisible, UnknownTensor
from dlo_cache.layout import BlockGroup, Layout, Role, Rule, Section, replicated_layout
from dlo_cache.layout_rules import compile_pattern
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.cache.format.joining import join, ranks

CONFIG = {"heads": 8, "kv_heads": 2, "name": "x", "none": None}


def layout(*rules: Rule, groups: tuple[str, ...] = ("blocks",), keep_fp32: tuple[str, ...] = ()) -> Layout:
    """A layout of these rules."""
    return Layout("tiny", "TinyTransformer", tuple(map(BlockGroup, groups)), rules, keep_fp32)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b", "axb", False),
        ("a.*.b", "a.0.b", True),
        ("a.*.b", "a.b", False),
        ("a.*.b", "a.0.1.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("*.b", "a.b", True),
        ("a.**", "a", True),
        ("a.**", "a.b.c", True),
        ("a.**", "ab", False),
        ("**.b", "b", True),
        ("**.b", "a.x.b", True),
        ("**.b", "ab", False),
        ("a.**.b", "a.b", True),
        ("a.**.b", "a.x.y.b", True),
        ("**", "anything.at.all", True),
        ("a+.b", "aa.b", False),
        ("a+.b", "a+.b", True),
    ],
)
def test_patterns(pattern: str, name: str, matches: bool) -> None:
    """One star is exactly one segment, two are any number, all else is literal."""
    rules = layout(Rule(pattern, Role.REPLICATED))
    if matches:
        assert rules.rule(name).pattern == pattern
    else:
        with pytest.raises(UnknownTensor):
            rules.rule(name)


@given(
    st.lists(st.sampled_from(["a", "b", "*", "**"]), min_size=1, max_size=7),
    st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=8),
)
def test_patterns_match_as_by_trying_everything(pattern: list[str], name: list[str]) -> None:
    """Any mixture of stars and words agrees with a matcher that tries every length of every double star."""

    def matches(rest: list[str], names: list[str]) -> bool:
        if not rest:
            return not names
        if rest[0] == "**":
            return any(matches(rest[1:], names[at:]) for at in range(len(names) + 1))
        return bool(names) and rest[0] in ("*", names[0]) and matches(rest[1:], names[1:])

    found = compile_pattern(".".join(pattern)).fullmatch("." + ".".join(name))
    assert (found is not None) == matches(pattern, name)


def test_a_pattern_of_many_double_stars_takes_no_time() -> None:
    """Layouts and names may come from strangers: trying every division would take longer than we live."""
    pattern = compile_pattern(".".join(["**", "a"] * 12 + ["x"]))
    assert pattern.fullmatch(".a" * 500) is None
    assert pattern.fullmatch(".a" * 499 + ".x") is not None


def test_the_first_rule_that_matches_counts() -> None:
    """An exception stands in front of the rule it is from."""
    rules = layout(Rule("blocks.*.q.scale", Role.REPLICATED), Rule("blocks.*.q.*", Role.COLUMN))
    assert rules.rule("blocks.0.q.scale").role is Role.REPLICATED
    assert rules.rule("blocks.0.q.bias").role is Role.COLUMN


def test_unknown_tensors_are_named_and_never_replicated() -> None:
    """The error names the tensor, the layout, and rules that end alike."""
    with pytest.raises(
        UnknownTensor, match=r"tiny has no rule for tensor blocks\.0\.new\.weight.*blocks\.\*\.q\.weight"
    ) as caught:
        layout(Rule("blocks.*.q.weight", Role.COLUMN)).cut("blocks.0.new.weight", (4, 4), 1, 0, {})
    assert caught.value.code == "UnknownTensor"


def test_blocks_and_their_order() -> None:
    """Groups run in the layout's order and blocks by number, whatever the order of the names."""
    rules = layout(Rule("**", Role.REPLICATED), groups=("transformer_blocks", "token_refiner.blocks"))
    names = [f"transformer_blocks.{at}.w" for at in (10, 2, 0)] + [
        f"token_refiner.blocks.{at}.x.y" for at in (1, 0)
    ]
    assert rules.execution_order([*names, "proj.weight"]) == [
        "transformer_blocks.0",
        "transformer_blocks.2",
        "transformer_blocks.10",
        "token_refiner.blocks.0",
        "token_refiner.blocks.1",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "proj.weight",
        "transformer_blocks",
        "transformer_blocks.0",
        "transformer_blocks.x.w",
        "a.transformer_blocks.0.w",
        "single_transformer_blocks.0.w",
        "transformer_blocks.01.w",
    ],
)
def test_what_is_outside_the_blocks_is_resident(name: str) -> None:
    """A prefix that merely looks like a group's is none."""
    assert layout(Rule("**", Role.REPLICATED), groups=("transformer_blocks",)).block_of(name) is None


def test_no_groups_means_everything_is_resident() -> None:
    """A component without blocks is one resident file."""
    rules = layout(Rule("**", Role.REPLICATED), groups=())
    assert rules.block_of("blocks.0.w") is None
    assert rules.execution_order(["blocks.0.w"]) == []


def test_case_13_fused_qkv_each_section_is_cut_by_itself() -> None:
    """Rank r gets its heads of Q, of K and of V, never a run of the whole."""
    rows = np.arange(192)[:, None] * np.ones((1, 16))
    rules = layout(Rule("qkv", Role.COLUMN, tuple(Section(size=64, heads=8) for _ in range(3))))
    parts = [part[:, 0].tolist() for _, part in ranks(rules, "qkv", rows, 4, CONFIG)]
    assert parts[1] == [*range(16, 32), *range(80, 96), *range(144, 160)]
    assert parts[3] == [*range(48, 64), *range(112, 128), *range(176, 192)]


def test_case_13_fewer_kv_heads_than_ranks_are_refused() -> None:
    """Two key heads cannot be divided among four ranks; the error names tensor, size and heads."""
    sections = (
        Section(size=64, heads="heads"),
        Section(size=16, heads="kv_heads"),
        Section(size=16, heads="kv_heads"),
    )
    rules = layout(Rule("qkv", Role.COLUMN, sections))
    with pytest.raises(NotDivisible, match=r"qkv: 16 elements in 2 heads \(kv_heads\).*4 ranks") as caught:
        rules.cut("qkv", (96, 16), 4, 0, CONFIG)
    assert (caught.value.subject["tensor"], caught.value.subject["heads"]) == ("qkv", 2)
    cut = rules.cut("qkv", (96, 16), 2, 1, CONFIG)
    assert cut.ranges == ((32, 64), (72, 80), (88, 96))


def test_case_15_roles_decide_not_the_number_of_dimensions() -> None:
    """Column bias cut, row bias and 0-d constant whole."""
    rules = layout(
        Rule("*.groupsize", Role.REPLICATED),
        Rule("up.*", Role.COLUMN),
        Rule("down.weight", Role.ROW),
        Rule("down.bias", Role.REPLICATED),
    )
    assert rules.cut("up.weight", (48, 16), 4, 1, {}) == (0, ((12, 24),), (12, 16))
    assert rules.cut("up.bias", (48,), 4, 1, {}) == (0, ((12, 24),), (12,))
    assert rules.cut("down.weight", (16, 48), 4, 1, {}) == (1, ((12, 24),), (16, 12))
    assert rules.cut("down.bias", (16,), 4, 1, {}) == (None, (), (16,))
    assert rules.cut("up.groupsize", (), 4, 1, {}) == (None, (), ())


@pytest.mark.parametrize(("role", "shape"), [(Role.COLUMN, ()), (Role.ROW, (16,)), (Role.VOCABULARY, ())])
def test_a_cut_without_its_dimension_is_refused(role: Role, shape: tuple[int, ...]) -> None:
    """A scalar under a cutting rule is a mistake in the layout, at any tensor size."""
    for size in (1, 2):
        with pytest.raises(Invalid, match=r"x of shape .* no dimension"):
            layout(Rule("x", role)).cut("x", shape, size, 0, {})


def test_a_size_of_one_cuts_nothing_but_still_checks() -> None:
    """At size 1 everything is whole; sections that do not fit the tensor are still found."""
    rules = layout(Rule("x", Role.COLUMN, (Section(size=3), Section(size=4))))
    assert rules.cut("x", (7, 2), 1, 0, {}) == (None, (), (7, 2))
    with pytest.raises(NotDivisible, match="8 elements do not fall into the sections size 3, size 4"):
        rules.cut("x", (8, 2), 1, 0, {})


@pytest.mark.parametrize("shape", [(0,), (0, 16)])
def test_case_11_empty_tensors_are_cut_into_empty_tensors(shape: tuple[int, ...]) -> None:
    """Nothing divided among ranks is nothing."""
    assert layout(Rule("x", Role.COLUMN)).cut("x", shape, 2, 1, {}).shape == shape


def test_not_divisible_without_heads() -> None:
    """A plain dimension that does not divide is named with its size."""
    with pytest.raises(NotDivisible, match="x: 10 elements cannot be divided among 4 ranks"):
        layout(Rule("x", Role.COLUMN)).cut("x", (10, 4), 4, 0, {})


def test_a_head_is_never_split() -> None:
    """24 elements divide among 4 ranks, but not as 6 heads of 4."""
    with pytest.raises(NotDivisible, match="24 elements in 6 heads"):
        layout(Rule("x", Role.COLUMN, heads=6)).cut("x", (24, 4), 4, 0, {})


def test_heads_that_do_not_fit_the_size_are_refused() -> None:
    """Seven rows are not eight heads, which is the layout's or the config's mistake."""
    with pytest.raises(NotDivisible, match=r"12 elements do not fall into 8 heads \(heads\)"):
        layout(Rule("x", Role.COLUMN, heads="heads")).cut("x", (12, 4), 2, 0, CONFIG)


@pytest.mark.parametrize("key", ["absent", "name", "none"])
def test_a_head_count_must_be_a_number_in_the_config(key: str) -> None:
    """A missing or odd config key is named."""
    with pytest.raises(Invalid, match=key):
        layout(Rule("x", Role.COLUMN, heads=key)).cut("x", (8, 4), 2, 0, CONFIG)


def test_a_rank_must_be_below_the_size() -> None:
    """There is no rank 2 of 2."""
    with pytest.raises(Invalid, match="rank 2"):
        layout(Rule("x", Role.COLUMN)).cut("x", (8,), 2, 2, {})


def test_check_names_the_head_counts_and_what_would_fit() -> None:
    """The planner's answer before any tensor is looked at."""
    rules = layout(Rule("q", Role.COLUMN, heads="heads"), Rule("k", Role.COLUMN, heads="kv_heads"))
    rules.check(CONFIG, 2)
    with pytest.raises(NotDivisible, match="kv_heads = 2 are not divisible by tensor 4") as caught:
        rules.check(CONFIG, 4)
    assert caught.value.subject["heads"] == {"kv_heads": 2}
    with pytest.raises(NotDivisible, match=r"heads = 8, kv_heads = 2 .* tensor 3 x ulysses 2") as caught:
        rules.check(CONFIG, 3, ulysses=2)
    assert caught.value.hint.endswith("1, 2")
    assert rules.head_counts(CONFIG) == {"heads": 8, "kv_heads": 2}


def test_keep_fp32() -> None:
    """Names by the same patterns."""
    rules = layout(Rule("**", Role.REPLICATED), keep_fp32=("**.norm.*", "table"))
    assert rules.keeps_fp32("blocks.0.norm.weight")
    assert rules.keeps_fp32("table")
    assert not rules.keeps_fp32("blocks.0.q.weight")


def test_replicated_layout() -> None:
    """A text encoder streams its layers and is never divided."""
    rules = replicated_layout("T5EncoderModel", ["encoder.block"])
    assert rules.block_of("encoder.block.3.layer.0.weight") == "encoder.block.3"
    assert rules.cut("encoder.block.3.layer.0.weight", (4, 4), 2, 1, {}).dim is None
    assert rules == Layout.from_json(rules.to_json())


@pytest.mark.parametrize(
    ("rules", "groups", "words"),
    [
        ((), ("b",), "no rules"),
        ((Rule("a.x*", Role.COLUMN),), ("b",), "a star stands"),
        ((Rule("a..b", Role.COLUMN),), ("b",), "dotted segments"),
        ((Rule("", Role.COLUMN),), ("b",), "dotted segments"),
        ((Rule("a", Role.REPLICATED, heads=2),), ("b",), "replicated"),
        ((Rule("a", Role.COLUMN, (Section(share=1),), heads=2),), ("b",), "sections and heads"),
        ((Rule("a", Role.COLUMN, (Section(),)),), ("b",), "share or a size"),
        ((Rule("a", Role.COLUMN, (Section(share=1, size=1),)),), ("b",), "share or a size"),
        ((Rule("a", Role.COLUMN, (Section(share=0),)),), ("b",), "positive"),
        ((Rule("a", Role.COLUMN, heads=0),), ("b",), "heads is a positive number"),
        ((Rule("a", Role.COLUMN, heads=""),), ("b",), "heads is a positive number"),
        ((Rule("a", Role.COLUMN),), ("b", "b"), "twice"),
        ((Rule("a", Role.COLUMN),), ("b", "b.c"), "another group"),
        ((Rule("a", Role.COLUMN),), ("../b",), "module list"),
        ((Rule("a", Role.COLUMN),), ("b.*",), "module list"),
        ((Rule("a", Role.COLUMN),), ("b" * 101,), "module list"),
    ],
)
def test_layouts_that_mean_nothing_are_refused(
    rules: tuple[Rule, ...], groups: tuple[str, ...], words: str
) -> None:
    """Each mistake is said when the layout is made, not when a tensor meets it."""
    with pytest.raises(Invalid, match=words):
        layout(*rules, groups=groups)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([None, 4, 8, "heads"]), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([Role.COLUMN, Role.ROW, Role.COLUMN_GATHERED, Role.VOCABULARY]),
)
def test_all_ranks_together_are_the_tensor(
    amounts: list[tuple[int, int | str | None, bool]], tensor_size: int, role: Role
) -> None:
    """Whatever the sections, putting the parts back gives every element once, bit for bit."""
    unit = 8
    sections = tuple(
        Section(size=amount * unit, heads=heads) if sized else Section(share=amount, heads=heads)
        for amount, heads, sized in amounts
    )
    length = sum(amount * unit for amount, _, _ in amounts)
    shape = (3, length) if role is Role.ROW else (length, 3)
    whole = np.arange(length * 3).reshape(shape)
    rules = layout(Rule("x", role, sections))
    parts = ranks(rules, "x", whole, tensor_size, CONFIG)
    assert all(tuple(cut.shape) == part.shape for cut, part in parts)
    assert np.array_equal(join(parts, shape), whole)
