"""What of an engine's output is hidden, and what is left."""

from __future__ import annotations

import pytest

from llmgw.agent.masking import MASK, Mask


def test_the_values_of_a_profile_are_hidden_whatever_their_names_are():
    mask = Mask({"MODE": "sekret-1", "OTHER": "sekret-12"}, {})
    assert mask.hide("bad token sekret-1, sekret-12!") == f"bad token {MASK}, {MASK}!"
    assert mask.hide_all(["a", "xsekret-1x"]) == ("a", f"x{MASK}x")


def test_a_short_value_hides_nothing():
    assert Mask({"A": "1", "B": "false", "C": ""}, {}).hide("1 of 3 is false") == "1 of 3 is false"
    assert Mask({}, {"HF_TOKEN": "abc"}).hide("abc") == "abc"


def test_a_path_and_a_number_are_no_secrets_unless_they_are_called_so():
    plain = {"HF_HOME": "/srv/models", "SEED": "1234567", "DB_PASSWORD": "7654321", "API_KEY": "/key/of/it"}
    assert Mask(plain, {}).hide("/srv/models/x.gguf 1234567 7654321 /key/of/it") == (
        f"/srv/models/x.gguf 1234567 {MASK} {MASK}"
    )
    assert Mask({"A": "/x+Yz9/Q=="}, {}).hide("it is /x+Yz9/Q==") == f"it is {MASK}"


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "apikey", "CLIENT_SECRET_2", "PGPASSWORD", "TOKENS"),
        *("SSHPASS", "DB_PASSWD", "KEY_PASSPHRASE", "GOOGLE_APPLICATION_CREDENTIALS"),
    ],
)
def test_what_is_inherited_is_hidden_where_its_name_says_so(name):
    assert Mask({}, {name: "sekret"}).hide("it is sekret") == f"it is {MASK}"


@pytest.mark.parametrize("name", ["PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PASSES", "HOME"])
def test_what_is_inherited_under_another_name_is_left(name):
    assert Mask({}, {name: "value-1"}).hide("it is value-1") == "it is value-1"


def test_a_value_is_hidden_as_a_log_shows_it():
    mask = Mask({"KEY": "-- BEGIN --\nfirst  line\n\x1b[1mbold-line\x1b[0m\nend"}, {})
    text = "-- BEGIN -- | first line | first  line | bold-line | end"
    assert mask.hide(text) == f"{MASK} | {MASK} | {MASK} | {MASK} | end"


def test_the_environment_is_read_as_it_is_now(monkeypatch):
    monkeypatch.setenv("MASKED_BY_A_TEST_TOKEN", "sekret-now")
    assert Mask({}).hide("sekret-now") == MASK
