"""Manifests from text: what is accepted, and what each mistake is answered with."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import pytest
from dlo_api.errors import ApiError, ManifestInvalid, ManifestUnreadable, RuleViolated
from dlo_api.load import load_manifest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.api.manifests import TEXT, manifest


def _refused(text: str, kind: type[ApiError]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        load_manifest(text, "digits.yaml")
    assert type(caught.value) is kind, caught.value
    assert caught.value.code == kind.__name__
    return caught.value


def test_smallest_manifest() -> None:
    """The manifest of the first example."""
    loaded = load_manifest(TEXT, "digits.yaml")
    assert loaded.metadata.name == "digits"
    assert loaded.spec.model.source.directory is not None
    assert loaded.spec.model.source.directory.path == "digits"


def test_json_is_yaml() -> None:
    """A JSON manifest is taken too."""
    assert load_manifest(json.dumps(manifest()), "digits.json") == load_manifest(TEXT, "digits.yaml")


def test_exported_object_is_taken() -> None:
    """What the API server added is left aside; a null field is no field."""
    exported = manifest(
        {
            "metadata.uid": "7",
            "metadata.managedFields": [{}],
            "metadata.creationTimestamp": None,
            "status": {"phase": "Ready", "newField": 1},
            "spec.engine": None,
        }
    )
    assert load_manifest(json.dumps(exported), "x").spec == load_manifest(TEXT, "x").spec


def test_anchors_and_block_styles() -> None:
    """Plain YAML features work, and quoted words stay words."""
    text = (
        TEXT
        + "  engine:\n    kind: VllmOmni\n    extraArgs:\n    - &a --x\n    - *a\n    - '1'\n    - |-\n      on\n"
    )
    assert load_manifest(text, "x").spec.engine.extra_args == ("--x", "--x", "1", "on")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "  paralelism: {tensor: 2}\n",
            "digits.yaml:8: spec.paralelism: unknown field — did you mean parallelism?",
        ),
        ("  Replicas: 2\n", "digits.yaml:8: spec.Replicas: unknown field — did you mean replicas?"),
        (
            "  offload:\n    mode: None\n    resident_layers: 2\n",
            "digits.yaml:10: spec.offload.resident_layers: unknown field — did you mean residentLayers?",
        ),
        (
            "  engine: {imagePullSecrets: [{name: a, nam: b}]}\n",
            "digits.yaml:8: spec.engine.imagePullSecrets[0].nam: unknown field — did you mean name?",
        ),
        (
            "  cache: {prewarm: {zzz: 1}}\n",
            "digits.yaml:8: spec.cache.prewarm.zzz: unknown field — known here: scope, spareNodes, "
            "minReadyNodes, maxParallelNodes, progressDeadlineSeconds",
        ),
        ("  replicas: two\n", "digits.yaml:8: spec.replicas: a whole number is needed, found 'two'"),
        ("  replicas: 1.5\n", "digits.yaml:8: spec.replicas: a whole number is needed, found 1.5"),
        ("  replicas: [1]\n", "digits.yaml:8: spec.replicas: a whole number is needed, found a list"),
        ("  suspend: 'true'\n", "digits.yaml:8: spec.suspend: true or false is needed, found 'true'"),
        ("  cache: []\n", "digits.yaml:8: spec.cache: a map is needed, found a list"),
        (
            "  placement: {tolerations: {}}\n",
            "digits.yaml:8: spec.placement.tolerations: a list is needed, found a map",
        ),
        (
            "  placement:\n    nodeSelector: {a: 1}\n",
            "digits.yaml:9: spec.placement.nodeSelector.a: a string is needed, found 1",
        ),
        (
            "  engine: {device: cuda}\n",
            "digits.yaml:8: spec.engine.device: one of 'Cuda' or 'Cpu' is needed, found 'cuda' "
            "— did you mean Cuda?",
        ),
        (
            "  offload: {hostRegistration: {policy: Off}}\n",
            "digits.yaml:8: spec.offload.hostRegistration.policy: YAML reads Off as false, and a string is "
            'needed — quote it: "Off"',
        ),
        (
            "  offload: {residentLayers: auto}\n",
            "digits.yaml:8: spec.offload.residentLayers: a whole number or Auto is needed, found 'auto'",
        ),
        (
            "  offload: {deviceMemoryBudget: 20GB}\n",
            "digits.yaml:8: spec.offload.deviceMemoryBudget: '20GB' does not have the form "
            r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])?$ — write a size like 20Gi, as a string",
        ),
        (
            "  serving: {port: 99999}\n",
            "digits.yaml:8: spec.serving.port: input should be less than or equal to 65535, found 99999",
        ),
        (
            "  engine:\n    imagePullSecrets:\n    - {}\n",
            "digits.yaml:10: spec.engine.imagePullSecrets[0].name: is missing — add it",
        ),
        (
            "  parallelism: {tensor: 0}\n",
            "digits.yaml:8: spec.parallelism: a degree of parallelism is below 1 "
            "— set every degree to 1 or more",
        ),
    ],
)
def test_mistake_is_named_by_its_path_and_line(extra: str, message: str) -> None:
    """Where, what, and what to do."""
    with pytest.raises(ApiError) as caught:
        load_manifest(TEXT + extra, "digits.yaml")
    assert str(caught.value) == message


def test_typing_error_in_metadata() -> None:
    """Unknown metadata is refused although the server knows more of it than we read."""
    error = _refused(TEXT.replace("{name: digits}", "{name: digits, lables: {}}"), ManifestInvalid)
    assert str(error) == "digits.yaml:3: metadata.lables: unknown field — did you mean labels?"


def test_missing_parts_are_named() -> None:
    """A manifest without name or source."""
    error = _refused(
        "apiVersion: dlo.dev/v1alpha1\nkind: DiffusionDeployment\nspec: {model: {}}\n", ManifestInvalid
    )
    assert {problem.path for problem in error.problems} == {"metadata", "spec.model.source"}


def test_all_problems_are_listed_in_order() -> None:
    """One line each, under a line with their number."""
    error = _refused(TEXT + "  replicas: x\n  suspend: x\n  bogus: x\n", ManifestInvalid)
    first, *lines = str(error).splitlines()
    assert first == "digits.yaml: 3 problems"
    assert [line.split(":")[0] for line in lines] == ["  line 8", "  line 9", "  line 10"]
    assert [problem.path for problem in error.problems] == ["spec.replicas", "spec.suspend", "spec.bogus"]


def test_all_broken_rules_are_listed() -> None:
    """Rules are not stopped at the first."""
    error = _refused(
        TEXT + "  offload: {mode: None, transfer: AllGather}\n  engine: {kind: VllmOmni, device: Cpu}\n",
        RuleViolated,
    )
    assert [problem.rule for problem in error.problems] == [
        "VllmOmniNeedsGpu",
        "NoneExcludesAllGather",
        "AllGatherNeedsGroup",
    ]
    assert [problem.line for problem in error.problems] == [9, 8, 8]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "kind: DiffusionDeployment\napiVersion: dlo.dev/v1\n",
            ["apiVersion", "dlo.dev/v1alpha1", "'dlo.dev/v1'"],
        ),
        ("apiVersion: dlo.dev/v1alpha1\nkind: Deployment\n", ["kind", "DiffusionDeployment", "'Deployment'"]),
        ("a: b\n", ["apiVersion", "kind", "nothing"]),
        ("[1, 2]\n", ["a list", "map"]),
        ("word\n", ["'word'", "map"]),
        ("---\n", ["empty"]),
        ("null\n", ["empty"]),
    ],
)
def test_other_documents(text: str, names: list[str]) -> None:
    """Wrong kind, wrong version, no object at all."""
    error = str(_refused(text, ManifestInvalid))
    assert all(name in error for name in names), error


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["empty"]),
        ("# only a comment\n", ["empty"]),
        (TEXT + "---\nkind: Pod\n", [":8:", "second document"]),
        (TEXT + "  replicas: 1\n  replicas: 2\n", [":9:", "'replicas'", "twice"]),
        (TEXT + "  cache: {verify: Always, verify: OnPublish}\n", [":8:", "'verify'", "twice"]),
        (TEXT + "  x: [\n", [":9:", "not YAML"]),
        (TEXT + "\tx: 1\n", [":8:", "not YAML"]),
        (TEXT + "  x: \x00\n", [":8:", "NUL"]),
        (TEXT + '  x: "\\0"\n', [":8:", "NUL"]),
        (TEXT + "  x: \x07\n", [":8:", "not YAML", "0007"]),
        (TEXT + '  x: "\\UFFFFFFFF"\n', ["not YAML"]),
        (TEXT + '  x: "\\ud800"\n', [":8:", "half a character"]),
        (TEXT + "  x: !!python/object/apply:os.system [ls]\n", [":8:", "tag"]),
        (TEXT + "  x: !!binary aGk=\n", [":8:", "tag"]),
        (TEXT + "  x: !mine a\n", [":8:", "tag"]),
        (TEXT + "  ? [a, b]\n  : c\n", [":8:", "key"]),
        (TEXT + "  1: a\n", [":8:", "key", "quote"]),
        (TEXT + "  ~: a\n", [":8:", "key", "quote"]),
        (TEXT + "  <<: {a: b}\n", [":8:", "merge"]),
        (TEXT + "  x: *nowhere\n", [":8:", "*nowhere"]),
        (TEXT + "  x: &a [*a]\n", [":8:", "*a"]),
        (TEXT + "  replicas: 99999999999999999999\n", [":8:", "out of range"]),
        (TEXT + "  replicas: 1e999\n", [":8:", "out of range"]),
        ("[" + "1," * 70_000 + "1]", ["too much content"]),
        ("[" * 5000, ["levels deep"]),
        ("a: " * 3 + "b", ["not YAML"]),
        ("\n".join(" " * i + "a:" for i in range(600)), ["levels deep"]),
        ("- " * 3000, ["levels deep"]),
        ("x" * 300_000, ["larger than 256 KiB"]),
        ("é" * 200_000, ["larger than 256 KiB"]),
    ],
    ids=lambda value: value[-24:] if isinstance(value, str) else "",
)
def test_unreadable_text(text: str, names: list[str]) -> None:
    """No traceback, the line where there is one, and a hint."""
    error = _refused(text, ManifestUnreadable)
    assert all(name in str(error) for name in names), error
    assert error.hint


@pytest.mark.parametrize(
    "unit",
    ["[x, x, x, x, x, x, x, x, x]", "'" + "x" * 10_000 + "'"],
    ids=["values", "long string"],
)
def test_alias_bombs_cost_no_memory(unit: str) -> None:
    """Nine levels of nine aliases would be hundreds of millions of values."""
    lines = [f"a0: &a0 {unit}"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    tracemalloc.start()
    try:
        error = _refused("\n".join(lines), ManifestUnreadable)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "aliases" in str(error)
    assert peak < 16 * 2**20


def test_numbers_are_read_as_kubectl_reads_them() -> None:
    """Octal, hexadecimal and signed integers; a date stays a word."""
    text = TEXT + "  replicas: 0x10\n  rollout: {maxSurge: +1, maxUnavailable: 010}\n  model2: x\n"
    loaded = load_manifest(text.replace("  model2: x\n", ""), "x")
    assert (loaded.spec.replicas, loaded.spec.rollout.max_surge, loaded.spec.rollout.max_unavailable) == (
        16,
        1,
        8,
    )
    dated = TEXT.replace(
        "directory: {root: samples, path: digits}", "huggingFace: {repo: a, revision: 2026-11-29}"
    )
    source = load_manifest(dated, "x").spec.model.source.hugging_face
    assert source is not None
    assert source.revision == "2026-11-29"


_PIECES = st.sampled_from(
    [
        *("spec:", " ", "\n", "  ", "- ", "{", "}", "[", "]", "&a ", "*a", "!!str ", "? ", ": ", "|", ">"),
        *("'", '"', "#", "---\n", "...\n", "%YAML 1.1\n", "replicas", "1", "~", "Off", "\\u", "\t", "é"),
        *("\ud800", "\x85", "<<", "!", "@"),
    ]
)


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(st.lists(_PIECES, max_size=30).map("".join) | st.text(max_size=60))
@example("- - - {")
@example("%YAML 9.9\n---\na: b")
@example("%TAG ! x\n%TAG ! y\n---\n!a b")
def test_any_text_gives_an_object_or_our_error(text: str) -> None:
    """Whatever the text, nothing but ApiError comes out; appended to a manifest as well."""
    for whole in (text, TEXT + text, TEXT + "  engine:\n    extraArgs: " + text):
        with contextlib.suppress(ApiError):
            assert load_manifest(whole, "x").metadata.name == "digits"
