from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.engines import read_max_model_len


def test_the_length_of_the_first_model_is_read() -> None:
    assert read_max_model_len('{"data":[{"id":"m","max_model_len":512},{"id":"l"}]}') == 512


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no",
        "[]",
        "{}",
        '{"data":[]}',
        '{"data":[{}]}',
        '{"data":[{"max_model_len":true}]}',
        '{"data":[{"max_model_len":0}]}',
        '{"data":[{"max_model_len":"512"}]}',
        "[" * 100_000,
    ],
)
def test_where_it_is_not_told_it_is_not_known(text: str) -> None:
    assert read_max_model_len(text) is None


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    read_max_model_len(text)
