from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from llmgw import cli
from llmgw.cli.ctl.cert import AUTHORITY_DAYS, DAYS, command
from llmgw.pki import authority


class Shell:
    """Runs ``llmgw ctl cert`` in a folder and keeps what it said."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.out = self.err = ""

    def run(self, line: str) -> int | str | None:
        with pytest.raises(SystemExit) as caught:
            cli.main(shlex.split(line), program=command)
        self.out, self.err = self._capfd.readouterr()
        return caught.value.code

    def facts(self, line: str) -> Any:
        assert self.run(f"{line} --json") == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capfd)


@pytest.fixture
def issued(shell: Shell) -> Shell:
    """An authority in D, a server's files in S, those of two nodes in N1 and N2."""
    for line in (
        "init-ca --dir D",
        "issue-server llmgw-ctl --host 10.0.0.140 --host llmgw.internal --dir D --out S",
        "issue-node node01 --dir D --out N1",
        "issue-node node02 --host 10.0.0.142 --days 20 --dir D --out N2",
    ):
        assert shell.run(line) == 0, shell.err
    return shell


def test_the_days_are_those_of_the_authority() -> None:
    assert (AUTHORITY_DAYS, DAYS) == (authority.AUTHORITY_DAYS, authority.DAYS)


def test_help_says_what_each_command_does(shell: Shell) -> None:
    assert shell.run("--help") == 0
    assert "..." not in shell.out.partition("Commands:")[2]
    assert isinstance(command, click.Group)
    for name in command.commands:
        assert shell.run(f"{name} --help") == 0
        assert name in shell.out


def test_an_authority_is_made_and_said_where(shell: Shell) -> None:
    assert shell.run("init-ca --dir D") == 0
    assert "D/ca.pem  goes to every machine" in shell.out
    assert "D/ca-key.pem  stays here" in shell.out
    assert Path("D/ca-key.pem").stat().st_mode & 0o777 == 0o600


def test_a_second_authority_in_its_place_is_refused(issued: Shell) -> None:
    before = Path("D/ca-key.pem").read_bytes()
    assert issued.run("init-ca --dir D") == 2
    assert "never overwritten" in issued.err
    assert Path("D/ca-key.pem").read_bytes() == before


def test_each_machine_gets_its_three_files(issued: Shell) -> None:
    assert sorted(os.listdir("S")) == ["ca.pem", "server-key.pem", "server.pem"]
    assert sorted(os.listdir("N1")) == ["ca.pem", "node-key.pem", "node.pem"]


def test_a_server_without_a_host_is_told_what_to_give(issued: Shell) -> None:
    assert issued.run("issue-server llmgw-ctl --dir D --out T") == 2
    assert "needs --host" in issued.err
    assert not Path("T").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("issue-node Node03 --dir D --out T", "write 'node03'"),
        ("issue-node node03 --host http://x --dir D --out T", "without a scheme"),
        ("issue-node node03 --dir E --out T", "E is no folder"),
        ("issue-node node03 --dir S --out T", "ca-key.pem is missing"),
        ("issue-node node03 --out T", "--dir"),
        ("issue-node node03 --dir D", "--out"),
        ("issue-node node03 --dir D --out T --days 0", "--days"),
        ("issue-node node03 --dir D --out N1", "for node node01: --force"),
        ("issue-server x --host y --dir D --out D/ca.pem", "is a file, not a folder"),
        ("show", "Give a FILE"),
        ("show S/server.pem --dir D", "Give a FILE"),
        ("show S/server-key.pem", "is a private key"),
        ("show S", "is a folder"),
        ("list --dir N3", "N3 is no folder"),
        ("revoke node03 --dir D", "no certificate of 'node03'"),
        ("revoke llmgw-ctl --dir D", "a server's certificate"),
    ],
)
def test_a_wrong_command_says_what_to_do_and_writes_nothing(line: str, said: str, issued: Shell) -> None:
    before = sorted(Path().rglob("*"))
    assert issued.run(line) == 2
    assert said in issued.err
    assert sorted(Path().rglob("*")) == before


def test_force_renews_in_place(issued: Shell) -> None:
    old = issued.facts("show N1/node.pem")
    assert issued.run("issue-node node01 --dir D --out N1 --force") == 0
    (new,) = issued.facts("show N1/node.pem")
    assert new["name"] == "node01"
    assert new["serial"] != old[0]["serial"]
    listed = {row["serial"] for row in issued.facts("list --dir D") if row["name"] == "node01"}
    assert listed == {old[0]["serial"], new["serial"]}


def test_a_certificate_ends_with_its_authority_and_says_so(shell: Shell) -> None:
    assert shell.run("init-ca --dir D --days 10") == 0
    assert shell.run("issue-node node01 --dir D --out N") == 0
    assert "(as its authority)" in shell.out


def test_show_tells_the_facts(issued: Shell) -> None:
    assert issued.run("show S/server.pem") == 0
    for said in ("server llmgw-ctl", "valid", "llmgw.internal, 10.0.0.140", "serverAuth", "issued by llmgw authority"):
        assert said in issued.out
    (facts,) = issued.facts("show --dir D")
    assert facts["kind"] == "authority"
    assert facts["standing"] == "valid"
    assert facts["serial"] in issued.facts("show D/ca.pem")[0]["serial"]


def test_list_has_a_line_for_each_and_its_standing(issued: Shell) -> None:
    assert issued.run("list --dir D") == 0
    head, *lines = issued.out.splitlines()
    assert head.split() == ["NAME", "KIND", "STANDING", "EXPIRES", "SERIAL", "HOSTS"]
    assert [line.split()[0] for line in lines] == ["llmgw", "llmgw-ctl", "node01", "node02"]
    assert "node02,10.0.0.142" in lines[3]
    assert [row["standing"] for row in issued.facts("list --dir D")] == ["valid"] * 4


def test_a_node_is_revoked_once_and_listed_so(issued: Shell) -> None:
    assert issued.run("revoke node01 --dir D") == 0
    serial = next(row["serial"] for row in issued.facts("list --dir D") if row["name"] == "node01")
    line = Path("D/revoked.txt").read_text()
    assert line.startswith(f"{serial} # node01 20")
    assert [row["standing"] for row in issued.facts("list --dir D")] == ["valid", "valid", "revoked", "valid"]
    assert issued.run("revoke node01 --dir D") == 0
    assert "node01 is revoked already" in issued.out
    assert Path("D/revoked.txt").read_text() == line


def test_a_renewed_node_that_was_revoked_is_believed_again(issued: Shell) -> None:
    assert issued.run("revoke node01 --dir D") == 0
    assert issued.run("issue-node node01 --dir D --out N1 --force") == 0
    assert {row["standing"] for row in issued.facts("list --dir D") if row["name"] == "node01"} == {"revoked", "valid"}
    assert issued.facts("revoke node01 --dir D")["already"] == 1
    assert [row["standing"] for row in issued.facts("list --dir D") if row["name"] == "node01"] == ["revoked"] * 2


def test_a_node_that_is_revoked_by_name_is_told_when_it_gets_a_new_one(issued: Shell) -> None:
    Path("D/revoked.txt").write_text("node01\n")
    assert issued.run("issue-node node01 --dir D --out N1 --force") == 0
    assert "revokes node01 by name: this certificate is refused too" in issued.err


def test_a_serial_from_elsewhere_can_be_revoked(issued: Shell) -> None:
    answer = issued.facts(f"revoke {'AB' * 20} --dir D")
    assert answer == {"file": "D/revoked.txt", "revoked": [{"serial": "ab" * 20}], "already": 0}


def test_what_can_not_be_read_is_told_and_the_rest_shown(issued: Shell) -> None:
    Path("D/issued/broken.pem").write_text("junk")
    Path("D/revoked.txt").write_text("node02 and others")
    assert issued.run("list --dir D") == 0
    assert "left out: D/issued/broken.pem is not a certificate" in issued.err
    assert "'node02 and others' is neither a node's name nor a serial number" in issued.err
    assert len(issued.out.splitlines()) == 5
    assert issued.run("revoke node02 --dir D") == 0
    assert Path("D/revoked.txt").read_text().splitlines()[0] == "node02 and others"


def test_no_secret_is_ever_shown(issued: Shell) -> None:
    for line in ("list --dir D", "show N1/node.pem", "show --dir D --json", "issue-node n3 --dir D --out N3 --json"):
        assert issued.run(line) == 0
        assert "PRIVATE" not in issued.out + issued.err
