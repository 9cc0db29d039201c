# SPDX-License-Identifier: Apache-2.0
"""Settings as an operator wrote them, checked against the struct that describes them.

What cannot be taken is a ``ConfigError``: one sentence that names the setting, what is allowed and a value that works.
The allowed values are read from the field's own type and ``Meta``; the value that works is the first of its
``Meta(examples=...)``, else its default. ``whose`` names the owner in such a sentence: ``"the disk tier"``.
"""

import contextlib
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from vllm_overlay.config import IS_A_PATH, ConfigError, parse_bytes
from vllm_overlay.settings.foreign_names import OF_OTHERS, PLACES
from vllm_overlay.settings.paths import parse_path

_NEAR = 0.7
"""How alike two words are that are offered for one another: "cots" and "cost" are, "gpu" and "cpu" are not."""
Settings = TypeVar("Settings", bound=msgspec.Struct)


def checked(given: Mapping[str, Any], cls: type[Settings], whose: str) -> Settings:
    """``given`` as a ``cls``. Raises ConfigError for the first setting, in the order of ``cls``, that is wrong.

    Charts, environment variables and ``--set-string`` change how a value is written: a number or a word in quotes, a
    whole number with a point, ``off`` as false. What can be meant in one way only is taken.
    """
    fields = msgspec.structs.fields(cls)
    refuse_unknown(given, [field.encode_name for field in fields], whose)
    taken: dict[str, Any] = {}
    for field in fields:
        name = field.encode_name
        if _is_size(field) and (name in given or not field.required):
            taken[name] = parse_bytes(given.get(name, field.default), name)
        elif name in given:
            taken[name] = _taken(given[name], field, whose)
        elif field.required:
            raise ConfigError(f"{name} of {whose} is not set: set it to {allowed(field)}{_such_as(field)}")
    try:
        return msgspec.convert(taken, cls)
    except msgspec.ValidationError as error:  # of the struct's own __post_init__
        raise ConfigError(f"settings of {whose}: {error}") from error


def refuse_unknown(
    given: Iterable[str], known: Iterable[str], whose: str, belongs: Mapping[str, str] | None = None
) -> None:
    """Raises ConfigError that names all of ``given`` that are not ``known``.

    ``belongs``: where settings of another owner are to be written, before what is said of all in ``foreign_names.py``.
    """
    known, places = list(known), {**PLACES, **(belongs or {})}
    if unknown := sorted(set(map(str, given)) - set(known)):
        hints = [f"it takes {', '.join(known)}"]
        hints += [f"{name} belongs in {places[name]}" for name in unknown if name in places]
        near = {name: word for name in unknown if name not in places and (word := nearest(name, known))}
        meant = [word if len(unknown) == 1 else f"{word} for {name}" for name, word in near.items()]
        hints += [f"did you mean {', '.join(meant)}?"] if meant else []
        noun = "setting" if len(unknown) == 1 else "settings"
        raise ConfigError(f"unknown {noun} {', '.join(map(repr, unknown))} of {whose}: {'; '.join(hints)}")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """What ``word`` most likely means, of ``known``: what another product calls so, or what is written alike."""
    known = {_spelt(one): one for one in known}
    if (ours := OF_OTHERS.get(_spelt(word))) in known:
        return known[ours]
    near = difflib.get_close_matches(_spelt(word), known, n=1, cutoff=_NEAR)
    return known[near[0]] if near else None


def _spelt(word: str) -> str:
    """Without what only tells one spelling from another: capacityBytes, capacity-bytes, capacity_bytes."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[-. ]", "_", word).lower()


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a sentence about ``word``, which is none of ``known``: the nearest of them, or nothing."""
    near = nearest(word, known) if isinstance(word, str) else None
    return f"; did you mean {near}?" if near else ""


def _taken(value: Any, field: msgspec.structs.FieldInfo, whose: str) -> Any:
    kind = _type_of(field)
    written = value.strip() if _is_path(field) and isinstance(value, str) else value
    for reading in _readings(written, _words(kind)):
        try:
            taken = msgspec.convert(reading, field.type)
        except msgspec.ValidationError:
            continue
        return parse_path(taken, field.encode_name, example(field)) if _is_path(field) else taken
    wrong = f"{field.encode_name}={value!r} of {whose} must be {allowed(field)}{_such_as(field)}"
    raise ConfigError(wrong + did_you_mean(value, _words(kind)) + _why(value, field, kind))


def _readings(value: Any, words: Iterable[str]) -> Iterator[Any]:
    """What ``value`` may stand for, itself first."""
    yield value
    if isinstance(value, str):
        text = value.strip()
        yield text
        yield text.lower()
        with contextlib.suppress(ValueError):
            value = json.loads(text.lower())
            if isinstance(value, bool | int | float):
                yield value
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    if isinstance(value, bool):
        yield from {"on" if value else "off"} & set(words)


def _why(value: Any, field: msgspec.structs.FieldInfo, kind: inspect.Type) -> str:
    """The end of a refusal, for what a chart or a template has done."""
    if value is None and not field.required:
        return "; leave it out for the default"
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") and not isinstance(kind, inspect.StrType):
        return "; it is JSON inside a string: leave the outer quotes out"
    if isinstance(value, int | float) and not isinstance(value, bool) and isinstance(kind, inspect.StrType):
        return f'; put it into quotes: "{value}"'
    return ""


def _is_size(field: msgspec.structs.FieldInfo) -> bool:
    kind = _type_of(field)
    takes = {type(one) for one in kind.types} if isinstance(kind, inspect.UnionType) else set()
    return field.encode_name.endswith(("_bytes", "_bytes_per_s")) and takes == {inspect.IntType, inspect.StrType}


def _is_path(field: msgspec.structs.FieldInfo) -> bool:
    described = inspect.type_info(field.type)
    return isinstance(described, inspect.Metadata) and (described.extra or {}).items() >= IS_A_PATH.items()


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
