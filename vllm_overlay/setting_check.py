# SPDX-License-Identifier: Apache-2.0
"""Settings as an operator wrote them, checked against the struct that describes them.

What cannot be taken is a ``ConfigError``: one sentence that names the setting, what is allowed and a value that works.
The allowed values are read from the field's own type and ``Meta``; the value that works is the first of its
``Meta(examples=...)``, else its default. ``whose`` names the owner in such a sentence: ``"the disk tier"``.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from vllm_overlay.config import ConfigError

_NEAR = 0.7
"""How alike two words are that are offered for one another: "cots" and "cost" are, "gpu" and "cpu" are not."""
Settings = TypeVar("Settings", bound=msgspec.Struct)


def checked(given: Mapping[str, Any], cls: type[Settings], whose: str) -> Settings:
    """``given`` as a ``cls``. Raises ConfigError for the first setting, in the order of ``cls``, that is wrong."""
    fields = msgspec.structs.fields(cls)
    refuse_unknown(given, [field.encode_name for field in fields], whose)
    for field in fields:
        _check_field(given, field, whose)
    try:
        return msgspec.convert(dict(given), cls)
    except msgspec.ValidationError as error:  # of the struct's own __post_init__
        raise ConfigError(f"settings of {whose}: {error}") from error


def refuse_unknown(
    given: Iterable[str], known: Iterable[str], whose: str, belongs: Mapping[str, str] | None = None
) -> None:
    """Raises ConfigError for the first of ``given`` that is not ``known``.

    ``belongs``: where settings of another owner are to be written.
    """
    known = list(known)
    if unknown := sorted(set(given) - set(known)):
        name = unknown[0]
        place = (belongs or {}).get(name)
        hint = f"; {name} belongs in {place}" if place else did_you_mean(name, known)
        raise ConfigError(f"unknown setting {name!r} of {whose}: it takes {', '.join(known)}{hint}")


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a sentence about ``word``, which is none of ``known``: the nearest of them, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=_NEAR) if isinstance(word, str) else []
    return f"; did you mean {near[0]}?" if near else ""


def _check_field(given: Mapping[str, Any], field: msgspec.structs.FieldInfo, whose: str) -> None:
    name = field.encode_name
    if name not in given:
        if field.required:
            raise ConfigError(f"{name} of {whose} is not set: set it to {allowed(field)}{_such_as(field)}")
        return
    try:
        msgspec.convert(given[name], field.type)
    except msgspec.ValidationError as error:
        wrong = f"{name}={given[name]!r} of {whose} must be {allowed(field)}{_such_as(field)}"
        raise ConfigError(wrong + did_you_mean(given[name], _words(_type_of(field)))) from error


def allowed(field: msgspec.structs.FieldInfo) -> str:
    """What a field takes, in words."""
    return _in_words(_type_of(field))


def example(field: msgspec.structs.FieldInfo) -> Any:
    """A value that the field takes; ``msgspec.NODEFAULT`` when it names none."""
    described = inspect.type_info(field.type)
    schema = described.extra_json_schema if isinstance(described, inspect.Metadata) else None
    return (schema or {}).get("examples", [field.default])[0]


def _such_as(field: msgspec.structs.FieldInfo) -> str:
    value = example(field)
    return "" if value is msgspec.NODEFAULT else f", such as {json.dumps(msgspec.to_builtins(value))}"


def _type_of(field: msgspec.structs.FieldInfo) -> inspect.Type:
    return _bare(inspect.type_info(field.type))


def _bare(kind: inspect.Type) -> inspect.Type:
    return _bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _in_words(kind: inspect.Type) -> str:
    kind = _bare(kind)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_in_words(one) for one in kind.types)
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(json.dumps(value) for value in kind.values)
    if isinstance(kind, inspect.EnumType):
        return " or ".join(json.dumps(one.value) for one in kind.cls)
    if isinstance(kind, inspect.CollectionType):
        return "a list of mappings" if isinstance(kind.item_type, inspect.DictType) else "a list"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        return noun + _range(kind)
    if isinstance(kind, inspect.StrType):
        return "a string that is not empty" if kind.min_length else "a string"
    words: dict[type[inspect.Type], str] = {
        inspect.BoolType: "true or false",
        inspect.NoneType: "null",
        inspect.DictType: "a mapping",
        inspect.TupleType: "a list",
    }
    return words.get(type(kind), "a value of another type")


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge:g} to {kind.le:g}"
    bounds = {"of at least": kind.ge, "above": kind.gt, "of at most": kind.le, "below": kind.lt}
    return " and".join(f" {words} {bound:g}" for words, bound in bounds.items() if bound is not None)


def _words(kind: inspect.Type) -> list[str]:
    """The words among the values that a type takes."""
    kind = _bare(kind)
    if isinstance(kind, inspect.UnionType):
        return [word for one in kind.types for word in _words(one)]
    return [str(value) for value in kind.values] if isinstance(kind, inspect.LiteralType) else []
