from __future__ import annotations

import pytest

from llmgw.config.document import parse_document
from llmgw.config.labels import read_labels, wrong_label


def read(text: str) -> tuple[dict[str, str], list[str]]:
    section, findings = parse_document(text, "f")
    labels = read_labels(section, "labels")
    section.close()
    return labels, [str(problem) for problem in findings.problems()]


def test_labels_that_are_not_written_are_none() -> None:
    assert read("labels:\n") == ({}, [])


def test_numbers_and_truths_are_the_text_that_is_written() -> None:
    assert read("labels: {zone: a, rack: 07, ssd: yes, t/w: 1.50}\n") == (
        {"zone": "a", "rack": "07", "ssd": "yes", "t/w": "1.50"},
        [],
    )


def test_each_wrong_label_is_told_once_with_its_place() -> None:
    text = 'labels:\n  -a: 1\n  b c: 2\n  d=e:\n  f:\n  g: {}\n  h: "x\\ny"\n  ok: 1\n'
    assert read(text)[1] == [
        "f:2:3 labels.-a: may hold letters, digits and . _ / - only, and starts with a letter or digit",
        "f:3:3 labels.b c: may hold letters, digits and . _ / - only, and starts with a letter or digit",
        "f:4:3 labels.d=e: is one word with a = in it: write NAME: value",
        'f:5:3 labels.f: has no value; write "" for an empty one',
        "f:6:3 labels.g: must be a single value, not a mapping",
        "f:7:3 labels.h: has a value that is not one printable line",
    ]


@pytest.mark.parametrize(("name", "value"), [("x" * 201, ""), ("x", "y" * 201)])
def test_a_label_has_an_end(name: str, value: str) -> None:
    assert wrong_label(name, value) == "is longer than 200 characters"
    assert wrong_label(name[:200], value[:200]) is None
