"""From pydantic to a structural schema: one test for each row of the table of traps."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from dlo_api.errors import SchemaUnsupported
from dlo_api.structural import normalise, structural_schema
from dlo_api.v1alpha1.types import PRESERVE_UNKNOWN, StringMap
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.alias_generators import to_camel


class Inner(BaseModel):
    """An object below."""

    value: int = Field(default=1, description="A value.")
    other: str | None = Field(default=None, description="Another.")


class Tree(BaseModel):
    """A recursive object."""

    children: list[Tree] = []


def field(annotation: Any, default: Any = ..., **words: Any) -> dict[str, Any]:
    """The structural schema of one field of this type."""
    model = create_model("Model", field=(annotation, Field(default, **words)))
    schema: dict[str, Any] = structural_schema(model)["properties"]["field"]
    return schema


def test_nested_model_is_inlined() -> None:
    """No `$ref`, no `$defs`; the field's own description wins."""
    schema = field(Inner, description="Mine.")
    assert schema == {
        "type": "object",
        "description": "Mine.",
        "properties": {
            "value": {"type": "integer", "default": 1, "description": "A value."},
            "other": {"type": "string", "description": "Another."},
        },
    }


def test_recursive_model_is_refused() -> None:
    """It cannot be inlined."""
    with pytest.raises(SchemaUnsupported, match="recursive model Tree"):
        structural_schema(create_model("Model", tree=(Tree, ...)))


def test_optional_is_hoisted_and_not_required() -> None:
    """No anyOf, no null type, no null default."""
    model = create_model("Model", field=(Annotated[int, Field(ge=0)] | None, None), needed=(int, ...))
    schema = structural_schema(model)
    assert schema["properties"]["field"] == {"type": "integer", "minimum": 0}
    assert schema["required"] == ["needed"]


def test_optional_model_is_hoisted() -> None:
    """The same through a reference."""
    assert field(Inner | None, None)["properties"]["value"]["type"] == "integer"


def test_one_literal_becomes_an_enum() -> None:
    """`const` is not known to the server."""
    assert field(Literal["x"]) == {"type": "string", "enum": ["x"]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"gt": 0}, {"type": "integer", "minimum": 1}),
        ({"lt": 5}, {"type": "integer", "maximum": 4}),
        ({"ge": 0, "le": 5}, {"type": "integer", "minimum": 0, "maximum": 5}),
    ],
)
def test_exclusive_bounds_of_integers(words: dict[str, int], expected: dict[str, Any]) -> None:
    """They become inclusive ones."""
    assert field(int, **words) == expected


def test_exclusive_bounds_of_numbers() -> None:
    """There `exclusiveMinimum` is a boolean beside the bound."""
    assert field(float, gt=0) == {"type": "number", "minimum": 0, "exclusiveMinimum": True}


def test_set_becomes_a_set_list() -> None:
    """`uniqueItems` is refused by the server."""
    assert field(set[str]) == {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"}


def test_set_of_objects_is_refused() -> None:
    """Sets hold plain values."""
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "object", "properties": {}}}
    with pytest.raises(SchemaUnsupported, match="plain values"):
        normalise(schema, {})


def test_constrained_keys_become_a_rule() -> None:
    """`patternProperties` is refused; a bounded map with a rule over its keys is not."""
    key = Annotated[str, Field(pattern="^[a-z]+$")]
    assert field(dict[key, int], max_length=4) == {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "maxProperties": 4,
        "x-kubernetes-validations": [
            {
                "rule": "self.all(key, key.matches(r'^[a-z]+$'))",
                "message": "a key does not have the form ^[a-z]+$: rename it",
            }
        ],
    }
    with pytest.raises(SchemaUnsupported, match="no bound"):
        field(dict[key, int])


def test_unions_are_refused() -> None:
    """Branches may only constrain, not define; a discriminator is unknown."""

    class A(BaseModel):
        kind: Literal["a"]

    class B(BaseModel):
        kind: Literal["b"]

    for union in (A | B, Annotated[A | B, Field(discriminator="kind")], int | bool, list[int] | int):
        with pytest.raises(SchemaUnsupported, match="union"):
            field(union)


def test_forbidden_extras_are_left_to_pruning() -> None:
    """No `additionalProperties: false` beside properties."""
    model = create_model("Model", __config__=ConfigDict(extra="forbid"), field=(int, 1))
    assert "additionalProperties" not in structural_schema(model)


@pytest.mark.parametrize("annotation", [dict[str, Any], dict, object])
def test_free_object_is_refused_unless_marked(annotation: Any) -> None:
    """One leaf may keep unknown fields; nothing else may be free."""
    with pytest.raises(SchemaUnsupported, match=r"free object|without a type"):
        field(annotation)


def test_marked_free_object_keeps_unknown_fields() -> None:
    """`additionalProperties: true` is not needed beside the mark."""
    assert field(Annotated[dict[str, Any], Field(json_schema_extra=PRESERVE_UNKNOWN)]) == {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
    }


def test_map_of_strings() -> None:
    """The ordinary map stays one."""
    assert field(StringMap, {}) == {
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": 4096},
        "maxProperties": 64,
        "default": {},
    }


def test_any_is_refused() -> None:
    """A value without a type is not structural."""
    with pytest.raises(SchemaUnsupported, match="without a type"):
        field(Any)


def test_tuple_of_several_types_is_refused() -> None:
    """`prefixItems` is unknown."""
    with pytest.raises(SchemaUnsupported, match="tuple"):
        field(tuple[int, str])


def test_tuple_of_one_type_is_a_list() -> None:
    """As our models write lists."""
    assert field(tuple[int, ...], ()) == {"type": "array", "items": {"type": "integer"}, "default": []}


@pytest.mark.parametrize("annotation", [int | str, int | Literal["Auto"], int | str | None])
def test_int_or_string(annotation: Any) -> None:
    """Only the exact int-or-string mark."""
    assert field(annotation, description="d") == {"x-kubernetes-int-or-string": True, "description": "d"}


def test_decimal_is_refused() -> None:
    """Sizes are strings with a pattern."""
    with pytest.raises(SchemaUnsupported, match="union"):
        field(Decimal)


def test_timedelta_is_refused() -> None:
    """Durations are whole numbers of seconds."""
    with pytest.raises(SchemaUnsupported, match="duration"):
        field(datetime.timedelta)


def test_bytes_are_base64() -> None:
    """Format `byte`, not `binary`."""
    assert field(bytes) == {"type": "string", "format": "byte"}


def test_refused_keywords_move_into_the_description() -> None:
    """`deprecated`, `readOnly` and `examples` are told in words; `title` goes."""
    schema = field(
        int, deprecated=True, title="T", examples=[3], json_schema_extra={"readOnly": True}, description="D."
    )
    assert schema == {"type": "integer", "description": "D. Deprecated. Read-only. For example 3."}


@pytest.mark.parametrize("pattern", ["^(?!a)b$", "(?<=a)b", r"(a)\1", "a++"])
def test_patterns_that_re2_does_not_take(pattern: str) -> None:
    """The server compiles patterns with RE2."""
    with pytest.raises(SchemaUnsupported, match="RE2"):
        normalise({"type": "string", "pattern": pattern}, {})


def test_snake_case_names_are_refused() -> None:
    """JSON is camelCase; an alias generator makes it so."""
    with pytest.raises(SchemaUnsupported, match=r"\.two_words: a name"):
        structural_schema(create_model("Model", two_words=(int, 1)))
    aliased = create_model("Model", __config__=ConfigDict(alias_generator=to_camel), two_words=(int, 1))
    assert list(structural_schema(aliased)["properties"]) == ["twoWords"]


def test_defaults_of_objects_are_written_out_without_nulls() -> None:
    """`default: {}` whose children have defaults makes rules fail at creation."""
    assert field(Inner, Inner())["default"] == {"value": 1}


def test_list_words_pass_through() -> None:
    """List-map keys come from the models."""
    words: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["value"]}
    schema = field(Annotated[tuple[Inner, ...], Field(json_schema_extra=words)])
    assert {name: schema[name] for name in words} == words


def test_long_descriptions_are_refused() -> None:
    """A CRD has to fit into one object and one annotation."""
    with pytest.raises(SchemaUnsupported, match="description"):
        field(int, description="x" * 600)


@pytest.mark.parametrize("word", ["oneOf", "not", "if", "contains", "allOf"])
def test_other_keywords_are_refused(word: str) -> None:
    """Nothing passes that nobody thought of."""
    value: Any = [{"type": "string"}, {"type": "string"}] if word.endswith("Of") else {"type": "string"}
    with pytest.raises(SchemaUnsupported):
        normalise({"type": "string", word: value}, {})


def test_single_allof_is_inlined() -> None:
    """Some pydantic versions wrap a reference so."""
    assert normalise({"allOf": [{"type": "string"}], "description": "d"}, {}) == {
        "type": "string",
        "description": "d",
    }
