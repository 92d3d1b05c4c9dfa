from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmgw.config.document import (
    MAX_FILE_BYTES,
    MAX_VALUES,
    MESSAGE_CHARS,
    VALUE_CHARS,
    Section,
    near,
    parse_document,
    read_document,
    tidy,
)
from llmgw.errors import ConfigError


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        read_document(written(folder, text))
    return caught.value.message.replace(str(folder), "")


def problems(folder: Path, text: str, read: object) -> list[str]:
    section, findings = read_document(written(folder, text))
    read(section)  # type: ignore[operator]
    section.close()
    return [str(problem).replace(str(folder), "") for problem in findings.problems()]


def test_values_are_read_as_what_they_are_asked_for(tmp_path: Path) -> None:
    section, findings = read_document(
        written(
            tmp_path,
            "word: yes please\nport: 80\nwait: 1m\nplain: 90\nsize: 2KiB\nlist: [a, 'b']\ngb: 7.5\n"
            "price: 0.15\nnested: {x: 1}\nmany: [{x: 1}, {x: 2}]\n",
        )
    )
    assert section.text("word", None) == "yes please"
    assert section.count("port", 0, low=0, high=100) == 80
    assert section.duration("wait", 1.0) == 60.0
    assert section.duration("plain", 1.0) == 90.0
    assert section.size("size", 1, low=1) == 2048
    assert section.texts("list") == ("a", "b")
    assert section.gigabytes("gb", None, high=8) == 7.5
    assert section.amount("price", None, high=1) == 0.15
    assert section.section("nested").count("x", 0, low=0, high=9) == 1
    assert [item.count("x", 0, low=0, high=9) for item in section.sections("many")] == [1, 2]
    section.close()
    assert findings.problems() == []


def test_absent_keys_give_their_defaults(tmp_path: Path) -> None:
    section, findings = read_document(written(tmp_path, "a: 1\n"))
    assert section.text("b", None) is None
    assert section.count("b", 7, low=0, high=9) == 7
    assert section.texts("b") == ()
    assert section.sections("b") == ()
    assert section.section("b").names() == ()
    assert not section.has("b")
    assert findings.problems() == []


def test_a_section_or_list_with_all_its_lines_commented_out_is_an_empty_one(tmp_path: Path) -> None:
    def read(section: Section) -> None:
        section.section("timeouts").close()
        section.texts("list")

    assert problems(tmp_path, "timeouts:\n  # idle: 3s\nlist:\n", read) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("k: [a]\n", "must be a single value, not a list"),
        ("k: {a: 1}\n", "must be a single value, not a mapping"),
        ("k:\n", "has no value; leave the key out to have its default"),
        ("k: 3\n", "must be text, not '3'; write \"3\" if that is what you mean"),
        ("k: yes\n", "must be text, not 'yes'"),
        ('k: " "\n', "must not be empty"),
    ],
)
def test_text_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    found = problems(tmp_path, text, lambda section: section.text("k", None))
    assert len(found) == 1
    assert found[0].startswith(f"/a.yaml:1:1 k: {said}")


def test_a_key_that_is_required_is_not_said_to_have_a_default(tmp_path: Path) -> None:
    def read(section: Section) -> None:
        section.required_text("a")
        section.require("b")
        section.amount("b", 0.0, high=9)
        section.require("c")

    assert problems(tmp_path, "a:\nb:\n", read) == [
        "/a.yaml:1:1 a: has no value, and needs one",
        "/a.yaml:1:1 c: is missing",
        "/a.yaml:2:1 b: has no value, and needs one",
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("-1", "must be a number of 0 or more, as 8 or 7.5, not '-1'"),
        ("1e3", "must be a number of 0 or more"),
        ("'1'", "must be a number of 0 or more"),
        ("1_0", "must be a number of 0 or more"),
        ("9.5", "must be 9 at most, not 9.5"),
        ("0.0", "must be more than 0"),
    ],
)
def test_an_amount_that_is_none_is_refused(tmp_path: Path, value: str, said: str) -> None:
    (found,) = problems(tmp_path, f"k: {value}\n", lambda section: section.amount("k", None, high=9, zero=False))
    assert found.startswith(f"/a.yaml:1:1 k: {said}")


@pytest.mark.parametrize("value", ["010", "0x1F", "1:30", "1_000", "1.0", "many", "9" * 40])
def test_only_plain_decimals_are_whole_numbers(tmp_path: Path, value: str) -> None:
    found = problems(tmp_path, f"k: {value}\n", lambda section: section.count("k", 0, low=0, high=10**20))
    assert len(found) == 1
    assert "must be a whole number, not" in found[0]


def test_a_quoted_number_is_told_to_drop_its_quotes(tmp_path: Path) -> None:
    found = problems(tmp_path, "k: '80'\n", lambda section: section.count("k", 0, low=0, high=100))
    assert found == ["/a.yaml:1:1 k: must be a whole number without quotes"]


def test_a_number_out_of_range_is_told_the_range(tmp_path: Path) -> None:
    found = problems(tmp_path, "k: -1\n", lambda section: section.count("k", 0, low=0, high=9))
    assert found == ["/a.yaml:1:1 k: must be from 0 to 9, not -1"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("soon", "is not a duration"),
        ("0", "must be more than 0"),
        ("0s", "must be more than 0"),
        ("-3", "is not a duration"),
        ("true", "must be a number with a unit"),
        ("31d", "is longer than 30 days"),
        ("9" * 400, "is longer than 30 days"),
    ],
)
def test_a_duration_that_would_not_work_is_refused(tmp_path: Path, value: str, said: str) -> None:
    found = problems(tmp_path, f"k: {value}\n", lambda section: section.duration("k", 1.0))
    assert len(found) == 1
    assert said in found[0]


def test_zero_is_a_duration_where_it_means_off(tmp_path: Path) -> None:
    assert problems(tmp_path, "k: 0\n", lambda section: section.duration("k", 1.0, zero=True)) == []


@pytest.mark.parametrize(("value", "said"), [("big", "is not a size"), ("5", "must be at least 10 bytes")])
def test_a_size_that_would_not_work_is_refused(tmp_path: Path, value: str, said: str) -> None:
    found = problems(tmp_path, f"k: {value}\n", lambda section: section.size("k", 100, low=10))
    assert len(found) == 1
    assert said in found[0]


def test_an_entry_of_a_list_is_named_with_its_number(tmp_path: Path) -> None:
    found = problems(tmp_path, "k: [a, 1, [b]]\n", lambda section: section.texts("k"))
    assert found == [
        "/a.yaml:1:8 k[1]: must be text, not '1'; write \"1\" if that is what you mean",
        "/a.yaml:1:11 k[2]: must be text, not a list",
    ]


def test_words_for_a_command_line_may_be_numbers(tmp_path: Path) -> None:
    section, _ = read_document(written(tmp_path, "k: [--ctx-size, 065536, 0.50]\n"))
    assert section.texts("k", numbers=True) == ("--ctx-size", "065536", "0.50")


def test_a_mapping_where_a_list_belongs_is_refused_and_the_other_way_round(tmp_path: Path) -> None:
    def read(section: Section) -> None:
        section.texts("list")
        section.section("map")
        section.sections("maps")

    assert problems(tmp_path, "list: {}\nmap: []\nmaps: [a]\n", read) == [
        "/a.yaml:1:1 list: must be a list, not a mapping",
        "/a.yaml:2:1 map: must be a mapping (key: value), not a list",
        "/a.yaml:3:8 maps[0]: must be a mapping (key: value), not a single value",
    ]


def test_all_problems_come_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    def read(section: Section) -> None:
        section.count("port", 0, low=0, high=9)
        timeouts = section.section("timeouts")
        timeouts.duration("idle", 1.0)
        timeouts.close()

    assert problems(tmp_path, "prot: 1\nport: x\ntimeouts:\n  idel: 3s\n", read) == [
        "/a.yaml:1:1 prot: unknown key (port?)",
        "/a.yaml:2:1 port: must be a whole number, not 'x'",
        "/a.yaml:4:3 timeouts.idel: unknown key (idle?)",
    ]


def test_a_key_written_twice_is_named_with_its_first_line(tmp_path: Path) -> None:
    found = problems(tmp_path, "k: a\nj: b\nk: c\n", lambda section: (section.text("k", ""), section.text("j", "")))
    assert found == ["/a.yaml:3:1 k: written twice (first on line 1)"]


def test_a_missing_key_is_placed_at_its_section(tmp_path: Path) -> None:
    def read(section: Section) -> None:
        (item,) = section.sections("items")
        item.required_text("name")
        item.text("x", None)

    assert problems(tmp_path, "items:\n  - x: a\n", read) == ["/a.yaml:2:5 items[0].name: is missing"]


def test_a_key_that_is_no_word_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, "? [a, b]\n: c\n", lambda section: None) == ["/a.yaml:1:3 a key must be a word"]


def test_an_unlike_key_gets_no_suggestion() -> None:
    assert near("zzzz", {"port", "host"}) == ""


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a comment\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_said_to_be_empty(tmp_path: Path, text: str | bytes) -> None:
    assert refusal(tmp_path, text) == "/a.yaml is empty; write at least one key, or leave the file out"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    section, _ = read_document(written(tmp_path, b"\xef\xbb\xbfport: 1\n"))
    assert section.names() == ("port",)


@pytest.mark.parametrize("text", ["- a\n", "just words\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "must be a mapping (key: value) at the top" in refusal(tmp_path, text)


def test_broken_yaml_is_placed(tmp_path: Path) -> None:
    assert refusal(tmp_path, "a: 1\nb: [1, 2\nc: 3\n").startswith("/a.yaml:3:2 is not YAML: ")


def test_two_documents_in_a_file_are_refused(tmp_path: Path) -> None:
    assert "is not YAML" in refusal(tmp_path, "a: 1\n---\nb: 2\n")


def test_a_control_character_is_refused(tmp_path: Path) -> None:
    assert "is not YAML" in refusal(tmp_path, "a: \x00\n")


def test_a_python_tag_makes_no_object(tmp_path: Path) -> None:
    found = problems(tmp_path, "k: !!python/object/apply:os.getcwd []\n", lambda section: section.text("k", None))
    assert found == ["/a.yaml:1:1 k: must be a single value, not a list"]


def test_bytes_that_are_not_utf8_are_placed(tmp_path: Path) -> None:
    assert refusal(tmp_path, b"a: 1\nb: \xff\n") == "/a.yaml is not UTF-8 (line 2)"


def test_a_file_that_is_not_there_or_a_folder_is_said_to_be_unreadable(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="can't be read: "):
            read_document(path)


def test_a_huge_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    assert "is larger than 1024 KiB" in refusal(tmp_path, "#" * (MAX_FILE_BYTES + 1))


def test_a_yaml_bomb_is_refused_without_being_unfolded(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    assert f"stands for more than {MAX_VALUES} values" in refusal(tmp_path, "\n".join(lines))


def test_a_long_text_is_not_repeated_without_end_either(tmp_path: Path) -> None:
    times = MAX_VALUES * VALUE_CHARS // 100_000 + 1
    lines = [f"a: &a {'x' * 100_000}", *(f"b{n}: *a" for n in range(times))]
    assert f"stands for more than {MAX_VALUES} values" in refusal(tmp_path, "\n".join(lines))


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "pipe"])
def test_what_is_no_ordinary_file_is_neither_waited_for_nor_read(tmp_path: Path, device: str) -> None:
    path = tmp_path / device
    if device == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=rf"{path} can't be read: it is no ordinary file"):
        read_document(path)


def test_a_section_is_told_as_it_was_written() -> None:
    text = (
        "# of the file\nmodels:\n  - name: a  # first\n    args: |\n      x\n\n        y\n    # of a\n\n"
        "  # of b\n  - {name: b,\n     args: c}  # behind\n  -   name: c\n      args: d"
    )
    top, _ = parse_document(text, "f")
    assert [section.written() for section in top.sections("models")] == [
        "name: a  # first\nargs: |\n  x\n\n    y\n# of a\n",
        "{name: b,\n args: c}\n",
        "name: c\nargs: d\n",
    ]


def test_an_alias_of_itself_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "a: 1\nb: &b\n  - *b\n") == "/a.yaml line 2 holds an alias of itself"


def test_a_harmless_alias_is_taken(tmp_path: Path) -> None:
    section, findings = read_document(written(tmp_path, "a: &x [one]\nb: *x\n"))
    assert section.texts("a") == section.texts("b") == ("one",)
    assert findings.problems() == []


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "a: " + "[" * 20_000) == "/a.yaml is nested too deep"


@pytest.mark.parametrize(("value", "read"), [("true", True), ("false", False), ("False", False)])
def test_a_truth_is_true_or_false(tmp_path: Path, value: str, read: bool) -> None:
    section, findings = read_document(written(tmp_path, f"a: {value}\n"))
    assert section.truth("a", default=not read) is read
    assert section.truth("b", default=not read) is not read
    assert findings.problems() == []


@pytest.mark.parametrize("value", ["yes", "off", "'false'", "0", "maybe"])
def test_other_words_for_it_are_refused(tmp_path: Path, value: str) -> None:
    (said,) = problems(tmp_path, f"a: {value}\n", lambda section: section.truth("a", default=True))
    assert said == f"/a.yaml:1:1 a: must be true or false, not {value.strip(chr(39))!r}"


def test_a_refused_key_is_told_why_once_and_is_no_suggestion(tmp_path: Path) -> None:
    found = problems(
        tmp_path, "later: 1\nlaterr: 2\n", lambda section: section.refuse({"later", "never"}, "is not in this version")
    )
    assert found == ["/a.yaml:1:1 later: is not in this version", "/a.yaml:2:1 laterr: unknown key"]


def test_a_text_is_placed_in_the_file_that_it_is_said_to_be_from() -> None:
    with pytest.raises(ConfigError, match=r"^m\.yaml:1:5 is not YAML: "):
        parse_document("a: [", "m.yaml")
    section, _ = parse_document("a: 1", "m.yaml")
    assert section.where("a") == "m.yaml:1:1"


def test_a_message_is_one_line_of_a_length_that_can_be_read() -> None:
    assert tidy("a \x1b[31m\nb") == "a \\x1b[31m\\nb"
    assert tidy("/" + "x" * 5000 + ": is not there; do so") == "/" + "x" * 199 + "… is not there; do so"
    assert len(tidy("word " * 1000)) == MESSAGE_CHARS + 1
