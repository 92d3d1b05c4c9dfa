from __future__ import annotations

import pytest

from llmgw.errors import UsageError
from llmgw.pki.authority import Authority, issue_node, issue_server
from llmgw.pki.facts import CertificateFacts, read_facts
from llmgw.pki.revocation import Entry, Revoked, find_revocable, read_revoked, write_entry


@pytest.fixture(scope="module")
def issued(authority: Authority) -> dict[str, CertificateFacts]:
    now = 1_800_000_000.0
    return {
        "first": read_facts(issue_node(authority, "node01", now=now).certificate),
        "second": read_facts(issue_node(authority, "node01", now=now).certificate),
        "other": read_facts(issue_node(authority, "node02", now=now).certificate),
        "server": read_facts(issue_server(authority, "llmgw-ctl", ("localhost",), now=now).certificate),
    }


def test_a_node_stands_for_all_its_certificates(issued: dict[str, CertificateFacts]) -> None:
    assert find_revocable("node01", issued.values()) == (
        Entry(serial=issued["first"].serial, node="node01"),
        Entry(serial=issued["second"].serial, node="node01"),
    )


def test_a_serial_stands_for_one(issued: dict[str, CertificateFacts]) -> None:
    given = f"0x{issued['second'].serial.upper()}"
    assert find_revocable(given, issued.values()) == (Entry(serial=issued["second"].serial, node="node01"),)


def test_a_serial_need_not_be_on_record(issued: dict[str, CertificateFacts]) -> None:
    assert find_revocable("ab" * 20, issued.values()) == (Entry(serial="ab" * 20, node=""),)


def test_a_name_that_is_not_on_record_is_refused_with_the_ways_out(issued: dict[str, CertificateFacts]) -> None:
    with pytest.raises(UsageError, match=r"'node03' is on record here.*by its serial number.*a line of revoked\.txt"):
        find_revocable("node03", issued.values())


def test_a_server_is_not_revoked_for_nobody_would_read_it(issued: dict[str, CertificateFacts]) -> None:
    for given in ("llmgw-ctl", issued["server"].serial):
        with pytest.raises(UsageError, match="agents know no revoked ones"):
            find_revocable(given, issued.values())


def test_what_is_written_is_read(issued: dict[str, CertificateFacts]) -> None:
    entries = [*find_revocable("node01", issued.values()), *find_revocable("ab" * 20, issued.values())]
    lines = [write_entry(entry, 1_800_000_000.0) for entry in entries]
    assert lines[0] == f"{issued['first'].serial} # node01 2027-01-15"
    assert lines[-1] == f"{'ab' * 20} # not on record 2027-01-15"
    revoked = read_revoked("\n".join(lines))
    covered = {name: revoked.covers(facts) for name, facts in issued.items()}
    assert covered == {"first": True, "second": True, "other": False, "server": False}


def test_a_name_in_the_file_is_every_certificate_of_the_node(issued: dict[str, CertificateFacts]) -> None:
    revoked = read_revoked("# left us\n\n  Node01   # stolen\nllmgw-ctl\n")
    covered = {name: revoked.covers(facts) for name, facts in issued.items()}
    assert covered == {"first": True, "second": True, "other": False, "server": False}


def test_lines_that_refuse_nobody_are_told() -> None:
    assert read_revoked("node01 stolen\nab:cd\n").odd == ("node01 stolen", "ab:cd")
    assert read_revoked("") == Revoked()
