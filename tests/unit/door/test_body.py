"""Edits of a request body: it decodes to what was meant, and every other byte is as it came."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmgw.dialects.refusal import Refusal
from llmgw.door.body import MAX_KEYS, Asked, TooManyKeys, ask_for_usage, encode_fields, read_body, set_fields

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(text | st.sampled_from(["messages", "n", "models", "stream_option"]), values, max_size=6)


def written(value: object, *, indent: int | None, ascii_only: bool) -> bytes:
    return json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()


def rename_model(body: bytes, name: str) -> bytes:
    return set_fields(body, encode_fields({"model": name}))


def asked(body: bytes, *, chat: bool = False) -> Asked:
    found = read_body(body, chat=chat)
    assert isinstance(found, Asked)
    return found


def refused(body: bytes, *, chat: bool = False) -> Refusal:
    found = read_body(body, chat=chat)
    assert isinstance(found, Refusal)
    assert found.status == 400
    return found


@given(objects, text, st.sampled_from([None, 0, 2]), st.booleans(), st.integers(0, 6))
def test_renaming_changes_the_models_name_and_no_other_byte(
    fields: dict[str, object], name: str, indent: int | None, ascii_only: bool, place: int
) -> None:
    pairs = [pair for pair in fields.items() if pair[0] != "model"]
    before, after = dict(pairs[:place]), dict(pairs[place:])
    body = written({**before, "model": "mine", **after}, indent=indent, ascii_only=ascii_only)
    edited = rename_model(body, name)
    assert json.loads(edited) == {**before, "model": name, **after}
    assume(body.count(b'"mine"') == 1)
    start, end = body.split(b'"mine"')
    assert edited.startswith(start)
    assert edited.endswith(end)


@given(
    objects,
    st.dictionaries(text | st.sampled_from(["messages", "n", "models"]), values, min_size=1, max_size=4),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_setting_fields_replaces_those_that_are_there_and_adds_the_others(
    fields: dict[str, object], wanted: dict[str, object], indent: int | None, ascii_only: bool
) -> None:
    body = written(fields, indent=indent, ascii_only=ascii_only)
    edited = set_fields(
        body, tuple((key, written(value, indent=None, ascii_only=True)) for key, value in wanted.items())
    )
    assert json.loads(edited) == {**fields, **wanted}
    # what was there keeps its order, and what is new comes first
    assert list(json.loads(edited)) == [*(key for key in wanted if key not in fields), *fields]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"a"}', b'{"lora":[{"id":0,"scale":1.0}],"model":"b"}'),
        (b'{ "lora" : null , "model" : "a" }', b'{ "lora" : [{"id":0,"scale":1.0}] , "model" : "b" }'),
        (b'{"model":"a","x":{"lora":1},"lora":[]}', b'{"model":"b","x":{"lora":1},"lora":[{"id":0,"scale":1.0}]}'),
        (
            b'{"n":123456789012345678901234567890,"model":"a","lora":2,"lora":3}',
            b'{"n":123456789012345678901234567890,"model":"b","lora":2,"lora":[{"id":0,"scale":1.0}]}',
        ),
    ],
)
def test_an_adapter_is_chosen_by_its_fields_and_no_other_byte_changes(body: bytes, expected: bytes) -> None:
    assert set_fields(body, encode_fields({"model": "b", "lora": [{"id": 0, "scale": 1.0}]})) == expected


def test_nothing_to_set_changes_nothing() -> None:
    assert set_fields(b' {"model": 1}', ()) == b' {"model": 1}'


@pytest.mark.parametrize("value", [object(), "\ud800", {1j: 2}])
def test_what_is_no_json_can_not_be_set(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode_fields({"model": value})


@given(objects, st.sampled_from([None, 1]), st.booleans())
def test_asking_for_usage_adds_one_field_and_changes_no_other_byte(
    fields: dict[str, object], indent: int | None, ascii_only: bool
) -> None:
    fields.pop("stream_options", None)
    body = written(fields, indent=indent, ascii_only=ascii_only)
    edited = ask_for_usage(body, names_stream_options=False)
    assert json.loads(edited) == {**fields, "stream_options": {"include_usage": True}}
    assert edited.startswith(b"{")
    assert edited.endswith(body[1:])


@given(
    objects,
    st.none() | st.dictionaries(text | st.just("include_usage"), st.none() | st.booleans(), max_size=3),
    st.sampled_from([None, 2]),
)
def test_asking_for_usage_leaves_the_other_stream_options(
    fields: dict[str, object], options: dict[str, object] | None, indent: int | None
) -> None:
    given_fields = {**fields, "stream_options": options, "last": [1, {"stream_options": 5}]}
    edited = ask_for_usage(written(given_fields, indent=indent, ascii_only=True), names_stream_options=True)
    assert json.loads(edited) == {**given_fields, "stream_options": {**(options or {}), "include_usage": True}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"mod\\u0065l": "a"}', b'{"mod\\u0065l": "b"}'),
        (b'{"model":"x","model" :\n"a" }', b'{"model":"x","model" :\n"b" }'),
        (b'{"n":{"model":"a"},"model":"a"}', b'{"n":{"model":"a"},"model":"b"}'),
        (b'{"n":"\\"model\\":\\"a\\"","model":"a"}', b'{"n":"\\"model\\":\\"a\\"","model":"b"}'),
        (b'{"n":["{","]","\\\\"],"model":"a"}', b'{"n":["{","]","\\\\"],"model":"b"}'),
        (b' \n{ "model" : "a" , "n" : -1.5e-7 }\r\n', b' \n{ "model" : "b" , "n" : -1.5e-7 }\r\n'),
        (b'{"\xff\xfe":1,"\\u00e9":2,"model":"a"}', b'{"\xff\xfe":1,"\\u00e9":2,"model":"b"}'),
        (b'{"n":123456789012345678901234567890,"model":"a"}', b'{"n":123456789012345678901234567890,"model":"b"}'),
    ],
)
def test_odd_but_valid_bodies_are_renamed_in_place(body: bytes, expected: bytes) -> None:
    asked(body)
    assert rename_model(body, "b") == expected


def test_a_name_with_quotes_is_written_as_json() -> None:
    edited = rename_model(b'{"model":"a"}', 'it is "b"\\')
    assert json.loads(edited) == {"model": 'it is "b"\\'}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"stream_options":{"include_usage":true}}'),
        (b"{ \n}", b'{"stream_options":{"include_usage":true} \n}'),
        (b' {"a":1}', b' {"stream_options":{"include_usage":true},"a":1}'),
        (b'{"stream_options":null}', b'{"stream_options":{"include_usage":true}}'),
        (b'{"stream_options": {} }', b'{"stream_options": {"include_usage":true} }'),
        (b'{"stream_options":{"include_usage":false}}', b'{"stream_options":{"include_usage":true}}'),
        (b'{"stream_options":{ "x":1}}', b'{"stream_options":{"include_usage":true, "x":1}}'),
        (
            b'{"stream_options":{"include_usage":true},"stream_options":{"include_usage":null}}',
            b'{"stream_options":{"include_usage":true},"stream_options":{"include_usage":true}}',
        ),
    ],
)
def test_usage_is_asked_for_where_it_belongs(body: bytes, expected: bytes) -> None:
    assert ask_for_usage(body, names_stream_options=b"stream_options" in body) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (b'{"continuous_usage_stats":true}', b'{"include_usage":true,"continuous_usage_stats":false}'),
        (
            b'{"include_usage":false, "continuous_usage_stats": true }',
            b'{"include_usage":true, "continuous_usage_stats": false }',
        ),
        (
            b'{"continuous_usage_stats":true,"include_usage":null}',
            b'{"continuous_usage_stats":false,"include_usage":true}',
        ),
        (b'{"continuous_usage_stats":false}', b'{"include_usage":true,"continuous_usage_stats":false}'),
    ],
)
def test_usage_in_every_event_is_not_asked_for_on_our_own_account(options: bytes, expected: bytes) -> None:
    """What takes the usage out again knows the one event at the end."""
    before, after = b'{"n":[{"continuous_usage_stats":true}],"stream_options":', b',"model":"a"}'
    edited = ask_for_usage(before + options + after, names_stream_options=True)
    assert edited == before + expected + after


KEYS = {
    "different": b",".join(b'"k%d":0' % number for number in range(MAX_KEYS)),
    "one": b",".join([b'"k":0'] * MAX_KEYS),
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_an_object_of_too_many_keys_is_not_searched(keys: bytes) -> None:
    with pytest.raises(TooManyKeys, match=str(MAX_KEYS)):
        rename_model(b"{" + keys + b',"model":"a"}', "b")
    with pytest.raises(TooManyKeys):
        ask_for_usage(b'{"stream_options":{' + keys + b',"x":0}}', names_stream_options=True)
    # others' objects are stepped over whole
    deeper = b'{"n":{' + keys + b',"x":0},"model":"%b"}'
    assert rename_model(deeper % b"a", "b") == deeper % b"b"


@pytest.mark.slow
def test_a_huge_body_is_edited() -> None:
    image = 'a\\\\b"' * 2_000_000
    body = (
        b'{"messages":["' + image.replace('"', "").encode() + b'"],"prompt":[' + b"1," * 2_000_000 + b'1],"model":"a"}'
    )
    assert rename_model(body, "b") == body.replace(b'"model":"a"', b'"model":"b"')


def test_what_a_body_is_made_of_does_not_matter_to_who_edits_it() -> None:
    """A step for each bracket would take a second for each few megabytes, of a thread that others wait for."""
    steps = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal steps
        steps += 1

    for piece in (b"[],", b'{"a":[]},', b'"\\n",', b"1,"):
        body = b'{"model":"a","x":[' + piece * 100_000 + b'0],"stream_options":{"x":[' + piece * 100_000 + b"0]}}"
        sys.setprofile(count)
        renamed, asking = rename_model(body, "b"), ask_for_usage(body, names_stream_options=True)
        sys.setprofile(None)
        assert renamed == body.replace(b'"model":"a"', b'"model":"b"')
        assert asking == body.replace(b'"stream_options":{', b'"stream_options":{"include_usage":true,')
    assert steps < 1000


def test_deep_nesting_is_edited_or_refused_and_never_raises() -> None:
    deep = b'{"x":' + b"[" * 900 + b"]" * 900 + b',"model":"a"}'
    assert rename_model(deep, "b").endswith(b'"model":"b"}')
    bottomless = b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b',"model":"a"}'
    assert isinstance(read_body(bottomless, chat=False), Refusal)


# -- reading


def test_a_body_says_what_it_asks_for() -> None:
    body = b'{"model":"a","stream":true,"stream_options":{"include_usage":true},"messages":[1]}'
    assert asked(body, chat=True) == Asked("a", stream=True, wants_usage=True, names_stream_options=True)


def test_null_and_absent_are_the_same() -> None:
    assert asked(b'{"model":"a"}') == Asked("a", stream=False, wants_usage=False, names_stream_options=False)
    both = asked(b'{"model":"a","stream":null,"stream_options":null}')
    assert both == Asked("a", stream=False, wants_usage=False, names_stream_options=True)


def test_usage_is_wanted_of_streams_only() -> None:
    assert not asked(b'{"model":"a","stream_options":{"include_usage":true}}').wants_usage


def test_where_nothing_streams_the_wish_for_a_stream_means_nothing() -> None:
    body = b'{"model":"a","stream":true,"stream_options":{"include_usage":true}}'
    found = read_body(body, chat=False, streams=False)
    assert found == Asked("a", stream=False, wants_usage=False, names_stream_options=True)


def test_of_a_key_that_came_twice_the_last_counts() -> None:
    assert asked(b'{"model":"a","model":"b"}').model == "b"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"model"',
        b"{",
        b'{"model":"a"} x',
        b'{"model":"a",}',
        b"{'model':'a'}",
        b'{"model":1}',
        b'{"model":"a","stream":"yes"}',
        b'{"model":"a","stream_options":[]}',
        b'\xef\xbb\xbf{"model":"a"}',
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
        b"\x1f\x8b\x08\x00",
    ],
)
def test_what_is_no_json_object_of_the_right_kind_is_refused(body: bytes) -> None:
    assert refused(body).code == "invalid_request"


@pytest.mark.parametrize("body", [b"{}", b'{"model":null}', b'{"model":""}'])
def test_a_body_without_a_model_is_refused(body: bytes) -> None:
    assert refused(body).param == "model"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"model":1}', "model"),
        (b'{"model":"a","stream":"true"}', "stream"),
        (b'{"model":"a","stream_options":[]}', "stream_options"),
        (b'{"model":"a","stream_options":{"include_usage":1}}', "stream_options.include_usage"),
        (b"[]", None),
    ],
)
def test_a_field_of_the_wrong_type_is_named(body: bytes, field: str | None) -> None:
    assert refused(body).param == field


@pytest.mark.parametrize("value", [b"[ ]", b"[\n]", b"{}", b'""', b"0", b'"[1]"', b'{"a":[1]}', b" [\t] "])
def test_messages_are_a_list_of_at_least_one(value: bytes) -> None:
    assert refused(b'{"model":"a","messages":' + value + b"}", chat=True).param == "messages"


@pytest.mark.parametrize("value", [b"[1]", b' [ {"role":"user"} ] ', b"\n[\n[]]"])
def test_what_the_messages_are_is_the_engines_business(value: bytes) -> None:
    assert isinstance(read_body(b'{"model":"a","messages":' + value + b"}", chat=True), Asked)


@pytest.mark.parametrize("messages", [b"", b',"messages":null', b',"messages": [] '])
def test_a_chat_without_messages_is_refused(messages: bytes) -> None:
    body = b'{"model":"a"' + messages + b"}"
    assert refused(body, chat=True).param == "messages"
    assert asked(body).model == "a"
