"""``llmgw ctl cert``: the authority of a cluster and what it issues; works on files, and asks no server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmgw.errors import UsageError

if TYPE_CHECKING:
    from llmgw.pki.authority import Authority, Issued
    from llmgw.pki.facts import CertificateFacts, Standing
    from llmgw.pki.files import AuthorityFolder
    from llmgw.pki.revocation import Entry, Revoked

Command = TypeVar("Command", bound=Callable[..., Any])
Clock = Callable[[], float]

# Ten years for what every machine holds a copy of, one for what is issued by it. (The rooms of pki load cryptography,
# which help and completion shall not wait for: a test compares these with theirs.)
AUTHORITY_DAYS, DAYS = 3650, 365
_MAX_DAYS = 36500


def _folder_option(command: Command) -> Command:
    kind = click.Path(path_type=Path, file_okay=True)
    return click.option("--dir", "folder", type=kind, required=True, metavar="D", help="The authority's folder.")(
        command
    )


def _json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")(command)


def _days_option(default: int) -> Callable[[Command], Command]:
    return click.option(
        "--days", type=click.IntRange(1, _MAX_DAYS), default=default, show_default=True, help="How long it is valid."
    )


def _issue_options(command: Command) -> Command:
    for decorate in (
        _json_option,
        click.option("--force", is_flag=True, help="Replace the certificate and key that are in OUT already."),
        _days_option(DAYS),
        click.option("--out", type=click.Path(path_type=Path), required=True, metavar="OUT", help="Where to write it."),
        _folder_option,
    ):
        command = decorate(command)
    return command


@click.group("cert")
def command() -> None:
    """Make and look at the certificates that a server and its nodes prove themselves with.

    \b
    llmgw ctl cert init-ca --dir /etc/llmgw/pki
    llmgw ctl cert issue-server llmgw-ctl --host 10.0.0.140 --dir /etc/llmgw/pki --out /etc/llmgw
    llmgw ctl cert issue-node node01 --dir /etc/llmgw/pki --out ./node01
    """


@command.command("init-ca", short_help="Make an authority in a folder.")
@_folder_option
@_days_option(AUTHORITY_DAYS)
@_json_option
def init_ca(*, folder: Path, days: int, as_json: bool) -> None:
    """Make an authority: ca.pem, which every machine gets, and ca-key.pem, which stays in D."""
    from llmgw.pki.authority import make_authority
    from llmgw.pki.facts import read_facts
    from llmgw.pki.files import AuthorityFolder

    place = AuthorityFolder(folder)
    authority = make_authority(now=time.time(), days=days)
    place.create(authority)
    facts = read_facts(authority.certificate)
    if as_json:
        _print_json({**_json_facts(facts, None), "files": [str(place.certificate), str(place.key)]})
        return
    click.echo(f"{facts.name}, valid to {_day(facts.not_after)}")
    click.echo(f"  {place.certificate}  goes to every machine")
    click.echo(f"  {place.key}  stays here: whoever has it can be any node")


@command.command("issue-server", short_help="Issue the server's certificate.")
@click.argument("name")
@click.option("--host", "hosts", multiple=True, metavar="H", help="A name or address that agents will dial; repeat it.")
@_issue_options
def issue_server_command(*, name: str, hosts: tuple[str, ...], **options: Any) -> None:
    """Issue the server's certificate for the agents' port: server.pem and server-key.pem in OUT, with ca.pem.

    NAME is for people; agents go by --host alone.
    """
    from llmgw.pki.authority import issue_server

    _issue(
        lambda authority, now, days: issue_server(authority, name, hosts, now=now, days=days),
        stem="server",
        whose="the server",
        **options,
    )


@command.command("issue-node", short_help="Issue a node's certificate.")
@click.argument("node")
@click.option("--host", "hosts", multiple=True, metavar="H", help="A further name or address of the node; repeat it.")
@_issue_options
def issue_node_command(*, node: str, hosts: tuple[str, ...], **options: Any) -> None:
    """Issue a node's certificate: node.pem and node-key.pem in OUT, with ca.pem.

    NODE is the node's id; the agent's configuration has to name the same.
    """
    from llmgw.pki.authority import issue_node

    _issue(
        lambda authority, now, days: issue_node(authority, node, hosts, now=now, days=days),
        stem="node",
        whose=node,
        **options,
    )


def _issue(
    issue: Callable[[Authority, float, int], Issued],
    *,
    stem: str,
    whose: str,
    folder: Path,
    out: Path,
    days: int,
    force: bool,
    as_json: bool,
) -> None:
    from llmgw.pki.facts import read_facts
    from llmgw.pki.files import AuthorityFolder, deliver

    now = time.time()
    place = AuthorityFolder(folder)
    issued = issue(place.load(now=now), now, days)
    certificate, key, ca = deliver(place, issued, out, stem, force=force)
    facts = read_facts(issued.certificate)
    if place.read_revoked().covers(facts):
        line = f"{place.revoked} revokes {facts.name} by name: this certificate is refused too while that line is there"
        click.echo(f"llmgw: {line}", err=True)
    if as_json:
        _print_json({**_json_facts(facts, None), "files": [str(path) for path in (certificate, key, ca)]})
        return
    shorter = now + (days - 1) * 86400 > facts.not_after
    click.echo(f"{facts.kind} {facts.name}, valid to {_day(facts.not_after)}{' (as its authority)' if shorter else ''}")
    click.echo(f"  {certificate}")
    click.echo(f"  {key}  is a secret of {whose}")
    click.echo(f"  {ca}")


@command.command("revoke", short_help="Revoke the certificates of a node, or one.")
@click.argument("given", metavar="NODE|SERIAL")
@_folder_option
@_json_option
def revoke_command(*, given: str, folder: Path, as_json: bool) -> None:
    """Revoke all certificates of a node so far, or one by its serial number: adds to D/revoked.txt.

    A server that reads this file (agent_tls.revoked) cuts the node off within two seconds. A copy elsewhere has to be
    copied again.
    """
    from llmgw.pki.files import AuthorityFolder
    from llmgw.pki.names import read_serial
    from llmgw.pki.revocation import find_revocable, write_entry

    place = AuthorityFolder(folder)
    place.read_certificate()
    issued, damaged = place.read_issued()
    before = place.read_revoked()
    _warn(place, damaged, before)
    entries = find_revocable(given, issued)
    fresh = [entry for entry in entries if read_serial(entry.serial) not in before.serials]
    if fresh:
        now = time.time()
        place.revoke([write_entry(entry, now) for entry in fresh])
    if as_json:
        _print_json({"file": str(place.revoked), "revoked": _json_entries(fresh), "already": len(entries) - len(fresh)})
        return
    for entry in fresh:
        click.echo(f"revoked {entry.serial} {entry.node or '(not on record here)'}")
    if not fresh:
        click.echo(f"{given} is revoked already")
    click.echo(f"The server has to read {place.revoked} (agent_tls.revoked), or a copy of it.")


@command.command("show", short_help="Show what a certificate says.")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), metavar="D", help="Show the authority in this folder."
)
@_json_option
def show_command(*, file: Path | None, folder: Path | None, as_json: bool) -> None:
    """Show what a certificate says: that of FILE, or the authority's in D."""
    from llmgw.pki.facts import find_standing, read_facts
    from llmgw.pki.files import AuthorityFolder, read_certificates

    if (file is None) == (folder is None):
        raise UsageError("show which certificate? Give a FILE, or an authority's folder with --dir")
    if folder is not None:
        found = [AuthorityFolder(folder).read_certificate()]
    elif file is not None:
        found = read_certificates(file)
    now = time.time()
    known = [(facts, find_standing(facts, now)) for facts in map(read_facts, found)]
    if as_json:
        _print_json([_json_facts(facts, standing) for facts, standing in known])
        return
    click.echo("\n\n".join(render_facts(facts, standing) for facts, standing in known))


@command.command("list", short_help="List what was issued, and what expires.")
@_folder_option
@_json_option
def list_command(*, folder: Path, as_json: bool) -> None:
    """List what the authority in D has issued, and which of it expires soon."""
    from llmgw.pki.facts import find_standing, read_facts
    from llmgw.pki.files import AuthorityFolder

    place = AuthorityFolder(folder)
    authority = read_facts(place.read_certificate())
    issued, damaged = place.read_issued()
    revoked = place.read_revoked()
    _warn(place, damaged, revoked)
    now = time.time()
    rows = [(authority, find_standing(authority, now))]
    rows += [(facts, find_standing(facts, now, revoked=revoked.covers(facts))) for facts in issued]
    if as_json:
        _print_json([_json_facts(facts, standing) for facts, standing in rows])
    else:
        click.echo(render_list(rows))


def _warn(place: AuthorityFolder, damaged: Sequence[str], revoked: Revoked) -> None:
    for line in damaged:
        click.echo(f"llmgw: left out: {line}", err=True)
    for line in revoked.odd:
        click.echo(f"llmgw: {place.revoked}: {line!r} is neither a node's name nor a serial number", err=True)


def render_facts(facts: CertificateFacts, standing: Standing) -> str:
    """One certificate, a fact in a line."""
    lines = [
        ("", f"{facts.kind} {facts.name}"),
        ("standing", str(standing)),
        ("valid", f"{_moment(facts.not_before)} to {_moment(facts.not_after)}"),
        ("hosts", ", ".join(facts.hosts)),
        ("may be", ", ".join(facts.usages)),
        ("issued by", facts.issuer),
        ("serial", facts.serial),
        ("sha256", facts.fingerprint),
    ]
    return "\n".join(f"{f'  {name:<10}' if name else ''}{value}" for name, value in lines if value)


def render_list(rows: Sequence[tuple[CertificateFacts, Standing]]) -> str:
    """A table, a certificate in a line."""
    table = [("NAME", "KIND", "STANDING", "EXPIRES", "SERIAL", "HOSTS")]
    table += [
        (facts.name, facts.kind, standing, _day(facts.not_after), facts.serial, ",".join(facts.hosts) or "-")
        for facts, standing in rows
    ]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def _json_facts(facts: CertificateFacts, standing: Standing | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": facts.name,
        "kind": str(facts.kind),
        "serial": facts.serial,
        "issuer": facts.issuer,
        "hosts": facts.hosts,
        "usages": facts.usages,
        "not_before": _moment(facts.not_before),
        "not_after": _moment(facts.not_after),
        "sha256": facts.fingerprint,
    }
    return found if standing is None else {**found, "standing": str(standing)}


def _json_entries(entries: Sequence[Entry]) -> list[dict[str, str]]:
    return [{"serial": entry.serial, **({"node": entry.node} if entry.node else {})} for entry in entries]


def _print_json(facts: Any) -> None:
    click.echo(json.dumps(facts, indent=2))


def _day(moment: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(moment))


def _moment(moment: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
