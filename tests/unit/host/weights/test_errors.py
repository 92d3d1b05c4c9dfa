"""What is told of an address, and what a try that broke too often has become."""

from __future__ import annotations

import pytest

from llmgw.host.weights.errors import Broken, Kind, show_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a/b.gguf", "https://host/a/b.gguf"),
        ("https://host:81/b.gguf?X-Signature=secret", "https://host:81/b.gguf"),
        ("https://host/b.gguf#secret?x", "https://host/b.gguf"),
        ("https://me:secret@host/b.gguf", "https://host/b.gguf"),
        ("https://host/a@b.gguf?token=secret@x", "https://host/a@b.gguf"),
        ("https://host?secret", "https://host"),
        ("s3://key:secret@bucket/x.gguf?y", "s3://bucket/x.gguf"),
        ("https://host/a.gguf?x\ntoken=secret", "https://host/a.gguf"),
        ("https://host/a\n.gguf", "https://host/a\\n.gguf"),
        ("hf:org/repo/x.gguf@v1", "hf:org/repo/x.gguf@v1"),
        # (what these have is no query)
        ("hf:org/repo/x-?.gguf", "hf:org/repo/x-?.gguf"),
        ("hf:org/repo/x#1.gguf", "hf:org/repo/x#1.gguf"),
        ("/models/what?/x#1.gguf", "/models/what?/x#1.gguf"),
        ("hf:org/repo/a\x1b[2Jb.gguf", "hf:org/repo/a\\x1b[2Jb.gguf"),
    ],
)
def test_an_address_is_told_without_what_opens_it(url: str, shown: str) -> None:
    assert show_url(url) == shown


def test_what_broke_too_often_has_failed() -> None:
    failed = Broken("no such luck", 3.0, kind=Kind.DNS, remedy="look it up").give_up()
    assert (failed.message, failed.kind, failed.remedy) == ("no such luck", Kind.DNS, "look it up")
