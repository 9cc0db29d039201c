# SPDX-License-Identifier: Apache-2.0
"""Every setting of every struct: a refusal names it, says what is allowed, and gives a value that works."""

import datetime
import enum
import json
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from vllm_overlay.config import ConfigError, TierSettings
from vllm_overlay.multi_connector.settings import ChildSettings, MultiSettings
from vllm_overlay.settings.check import allowed, checked, example
from vllm_overlay.settings.foreign_names import OF_A_CHILD, OF_THE_MULTI_CONNECTOR
from vllm_overlay.tiers.cpu import CpuTierSettings
from vllm_overlay.tiers.disk.settings import DiskTierSettings

STRUCTS: tuple[type[msgspec.Struct], ...] = (MultiSettings, ChildSettings, CpuTierSettings, DiskTierSettings)
FIELDS = [
    pytest.param(cls, field, id=f"{cls.__name__}.{field.name}")
    for cls in STRUCTS
    for field in msgspec.structs.fields(cls)
]
WRONG: tuple[Any, ...] = (None, True, -1, 0, 65, 1.5, float("nan"), "", "wrong", [], ["wrong"], {"wrong": 1})


class Sample(msgspec.Struct, kw_only=True):
    """One field of each kind of type."""

    needed: Annotated[str, Meta(min_length=1, examples=["/var/x"])]
    optional: str = "text"
    flag: bool = True
    count: Annotated[int, Meta(ge=1, le=64)] = 4
    seconds: Annotated[float, Meta(gt=0)] = 30.0
    share: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    word: Literal["auto", "off"] = "auto"
    size: Annotated[int, Meta(gt=0)] | Literal["auto"] = "auto"
    parts: Annotated[list[dict[str, Any]], Meta(examples=[[{"a": 1}]])] = []


def refusal(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        checked({"needed": "x", **given}, Sample, "the sample")
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"needed": ""}, "needed='' of the sample must be a string that is not empty, such as \"/var/x\""),
        ({"optional": 5}, 'optional=5 of the sample must be a string, such as "text"'),
        ({"flag": 1}, "flag=1 of the sample must be true or false, such as true"),
        ({"count": 0}, "count=0 of the sample must be a whole number from 1 to 64, such as 4"),
        ({"count": "four"}, "count='four' of the sample must be a whole number from 1 to 64, such as 4"),
        ({"seconds": 0}, "seconds=0 of the sample must be a number above 0, such as 30.0"),
        ({"share": 1}, "share=1 of the sample must be a number of at least 0 and below 1, such as 0.5"),
        ({"word": "on"}, 'word=\'on\' of the sample must be "auto" or "off", such as "auto"'),
        ({"word": "offf"}, 'word=\'offf\' of the sample must be "auto" or "off", such as "auto"; did you mean off?'),
        ({"size": "atuo"}, 'must be a whole number above 0 or "auto", such as "auto"; did you mean auto?'),
        ({"parts": {}}, 'parts={} of the sample must be a list of mappings, such as [{"a": 1}]'),
        ({"counts": 5}, "unknown setting 'counts' of the sample: it takes needed, optional, flag, count, seconds, "),
        ({"counts": 5}, "; did you mean count?"),
    ],
)
def test_the_sentence_comes_from_the_fields_own_type(given: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**given)


def test_a_setting_of_the_multi_connector_or_of_a_child_has_its_place_wherever_it_is_written() -> None:
    assert set(MultiSettings.__struct_fields__) == {"connectors", *OF_THE_MULTI_CONNECTOR}
    assert set(ChildSettings.__struct_fields__) - set(TierSettings.__struct_fields__) == set(OF_A_CHILD)


def test_a_setting_that_is_missing_is_answered_with_one_that_works() -> None:
    with pytest.raises(ConfigError) as caught:
        checked({}, Sample, "the sample")
    assert str(caught.value) == (
        'needed of the sample is not set: set it to a string that is not empty, such as "/var/x"'
    )


def test_what_can_be_taken_is() -> None:
    taken = checked({"needed": "x", "size": 64, "seconds": 2}, Sample, "the sample")
    assert taken == Sample(needed="x", size=64, seconds=2.0)


@pytest.mark.parametrize(("cls", "field"), FIELDS)
def test_every_setting_says_what_it_takes_and_names_a_value_that_works(
    cls: type[msgspec.Struct], field: msgspec.structs.FieldInfo
) -> None:
    works = example(field)
    assert works not in (msgspec.NODEFAULT, "")
    msgspec.convert(works, field.type)
    others = {one.name: example(one) for one in msgspec.structs.fields(cls) if one.required}
    refused = 0
    for wrong in WRONG:
        try:
            msgspec.convert(wrong, field.type)
        except msgspec.ValidationError:
            with pytest.raises(ConfigError) as caught:
                checked({**others, field.name: wrong}, cls, "its owner")
            sentence = str(caught.value)
            start = f"{field.name}={wrong!r} of its owner must be {allowed(field)}, such as {json.dumps(works)}"
            if "_bytes" in field.name:
                start = f'{field.name}={wrong!r} is not a size: give bytes or a string such as "4 GiB"'
            assert sentence.startswith(start) and "\n" not in sentence
            refused += 1
    assert refused


class Mode(enum.Enum):
    ONE = "one"
    TWO = "two"


class OfOthers(msgspec.Struct):
    """What a tier of somebody else may have among its settings."""

    limit: int | None = None
    tags: tuple[str, ...] = ()
    pair: tuple[int, int] = (1, 2)
    hosts: set[str] = msgspec.field(default_factory=set)
    mode: Mode = Mode.ONE
    since: datetime.date | None = None
    port: int = 1

    def __post_init__(self) -> None:
        if self.port == 13:
            raise ValueError("an unlucky port")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"limit": "x"}, "limit='x' of theirs must be a whole number or null, such as null"),
        ({"tags": 3}, "tags=3 of theirs must be a list, such as []"),
        ({"pair": 3}, "pair=3 of theirs must be a list, such as [1, 2]"),
        ({"hosts": 1}, "hosts=1 of theirs must be a list"),
        ({"mode": "three"}, 'mode=\'three\' of theirs must be "one" or "two", such as "one"'),
        ({"since": "x"}, "since='x' of theirs must be a value of another type or null, such as null"),
        ({"port": 13}, "settings of theirs: an unlucky port"),
    ],
)
def test_settings_of_any_type_are_refused_with_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(given, OfOthers, "theirs")
    assert str(caught.value) == sentence
