from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from llmgw.config.load_server import LATER, LATER_AUTH, LoadedServer, find_server_file, load_server
from llmgw.config.node import Limits, Timeouts
from llmgw.config.server import AgentTls, Auth, FleetConfig, Listen, Seeding, ServerConfig
from llmgw.core.model import Model, Profile
from llmgw.errors import ConfigError, Problem

ROOT = Path(__file__).parents[3]
MANUAL = (ROOT / "docs" / "configuration.md").read_text()
MODEL = "{name: m, source: /m.gguf, profiles: [{name: cpu, engine: toy}]}"


class Toy:
    """An engine that refuses the argument --bad."""

    def validate(self, model: Model, profile: Profile) -> list[Problem]:
        return [Problem(key="args", message="--bad is not a flag")] if "--bad" in profile.args else []

    def check_gpus(self, profile: Profile) -> list[Problem]:
        return []


ENGINES = {"toy": Toy(), "llamacpp": Toy(), "vllm": Toy()}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with what an agents' port proves itself with."""
    for name in ("ca.pem", "server.pem", "server-key.pem"):
        (tmp_path / name).write_text("pem\n")
    (tmp_path / "server-key.pem").chmod(0o640)
    return tmp_path


def written(folder: Path, text: str, *, tls: bool = True, auth: bool = True) -> Path:
    """What is needed stands last, so that the given text begins on the first line."""
    path = folder / "server.yaml"
    if tls:
        text += f"\nagent_tls: {{ca: {folder}/ca.pem, cert: {folder}/server.pem, key: {folder}/server-key.pem}}\n"
    path.write_text(text + ("auth: {enabled: false}\n" if auth else ""))
    return path


def load(folder: Path, text: str, *, tls: bool = True, auth: bool = True) -> ServerConfig:
    return load_server(written(folder, text, tls=tls, auth=auth), engines=ENGINES).config


def problems(folder: Path, text: str, *, tls: bool = True, auth: bool = True) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, tls=tls, auth=auth)
    return [str(problem).replace(str(folder), "") for problem in caught.value.problems]


def example(name: str, folder: Path) -> LoadedServer:
    """An example, with its files where the test has them."""
    path = folder / "example.yaml"
    path.write_text((ROOT / "examples" / name).read_text().replace("/etc/llmgw/", f"{folder}/"))
    return load_server(path, engines=ENGINES)


def keys() -> set[str]:
    nested = {"agent_tls": AgentTls, "auth": Auth, "fleet": FleetConfig}
    below = {f"{key}.{field.name}" for key, shape in nested.items() for field in fields(shape)}
    parts = {*nested, "timeouts", "limits", "models"}
    return below | {field.name for field in fields(ServerConfig) if field.name not in parts}


def test_with_its_certificate_and_the_word_that_it_is_open_all_is_default(files: Path) -> None:
    tls = AgentTls(ca=files / "ca.pem", cert=files / "server.pem", key=files / "server-key.pem")
    assert load(files, "") == ServerConfig(agent_tls=tls, auth=Auth(enabled=False))


def test_what_is_written_is_what_is_loaded(files: Path) -> None:
    text = (
        "listen: '[::1]:8000'\nadmin_listen: localhost:9000\nagent_listen: 10.0.0.1:7000\n"
        "cors_origins: ['https://a.example']\nfleet: {lease: 20s, replace_after: 30s, brake: 0, on_demand_wait: 0}\n"
        f"timeouts: {{idle: 3m}}\nlimits: {{max_body: 1MiB}}\nmodels: [{MODEL}]\n"
        f"agent_tls: {{ca: {files}/ca.pem, cert: {files}/server.pem, key: {files}/server-key.pem, revoked: /no/more}}\n"
        "auth: {enabled: false, store: /data/llmgw.db}\n"
    )
    loaded = load_server(written(files, text, tls=False, auth=False), engines=ENGINES)
    assert loaded.config == ServerConfig(
        agent_tls=AgentTls(
            ca=files / "ca.pem", cert=files / "server.pem", key=files / "server-key.pem", revoked=Path("/no/more")
        ),
        listen=Listen(host="::1", port=8000),
        admin_listen=Listen(host="127.0.0.1", port=9000),
        agent_listen=Listen(host="10.0.0.1", port=7000),
        auth=Auth(enabled=False, store="/data/llmgw.db"),
        fleet=FleetConfig(lease=20.0, replace_after=30.0, brake=0.0, on_demand_wait=0.0),
        cors_origins=("https://a.example",),
        timeouts=Timeouts(idle=180.0),
        limits=Limits(max_body=1024 * 1024),
        models=tuple(definition.model for definition in loaded.definitions),
    )
    assert [definition.model.name for definition in loaded.definitions] == ["m"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lisen: ':8080'", "1:1 lisen: unknown key (listen?)"),
        ("listen: ':8080'", "1:1 listen: :8080 can be reached from other machines, and this version has no keys"),
        ("listen: 0.0.0.0:8080", "1:1 listen: 0.0.0.0:8080 can be reached from other machines"),
        ("listen: 8080", "1:1 listen: must be text, not '8080'"),
        ("listen: node-7:8080", "1:1 listen: 'node-7' is not an IP address; write it as 127.0.0.1:8080"),
        ("admin_listen: ':9090'", "1:1 admin_listen: :9090 can be reached from other machines, and whoever"),
        ("admin_listen: '127.0.0.1:8080'", "1:1 admin_listen: 127.0.0.1:8080 is taken by listen"),
        ("agent_listen: ':8080'", "1:1 agent_listen: :8080 is taken by listen (127.0.0.1:8080)"),
        ("agent_listen: host:7443", "1:1 agent_listen: 'host' is not an IP address; write it as :7443"),
        ("cors_origins: ['*']", "1:1 cors_origins: '*' is not an origin"),
        ("fleet: {lease: 3s}", "1:9 fleet.lease: must be at least 10s, for agents are heard every 5s"),
        ("fleet: {laese: 3s}", "1:9 fleet.laese: unknown key (lease?)"),
        ("fleet: {replace_after: 0}", "1:9 fleet.replace_after: must be more than 0"),
        (
            "fleet: {replace_after: 14s}",
            "1:9 fleet.replace_after: must be at least the lease, which is 15s: what is down",
        ),
        ("fleet: {lease: 2m, replace_after: 90s}", "1:20 fleet.replace_after: must be at least the lease, which is 2m"),
        ("fleet: {brake: 5s}", "1:9 fleet.brake: must be at least the lease, which is 15s, or 0 for none"),
        ("fleet: {brake: 31d}", "1:9 fleet.brake: is longer than 30 days"),
        ("fleet: {brake: }", "1:9 fleet.brake: has no value; leave the key out to have its default"),
        ("agent_listen: ", "1:1 agent_listen: has no value; leave the key out to have its default"),
        ("timeouts: {idle: 0}", "1:12 timeouts.idle: must be more than 0"),
        ("limits: {max_head: 3}", "1:10 limits.max_head: must be at least 1024 bytes"),
        ("seeding: on", "1:1 seeding: must be text, not 'on'"),
        ("seeding: peers", "1:1 seeding: 'peers' is not one of direct, off, relay"),
        ("relay_rate: 5MB", "1:1 relay_rate: is for seeding: relay, and seeding is direct; leave it out"),
        ("seeding: relay\nrelay_rate: 999kB", "2:1 relay_rate: must be at least 1000000 bytes"),
        ("seeding: relay\nrelay_rate: fast", "2:1 relay_rate: "),
        ("models: [{name: m}]", "1:10 models[0].source: is missing"),
        (
            f"models: [{MODEL.replace('/m', './m')}]",
            "1:20 models[0].source: './m.gguf' is a path on this machine; write the whole one that the nodes have",
        ),
        (f"models: [{MODEL.replace('toy', 'toi')}]", "1:60 models[0].profiles[0].engine: no engine 'toi' is installed"),
        (
            f"models: [{MODEL.replace('toy', 'toy, args: [--bad]')}]",
            "1:73 m: profiles[0].args: --bad is not a flag",
        ),
    ],
)
def test_a_wrong_line_is_placed_and_explained(files: Path, text: str, said: str) -> None:
    found = problems(files, text)
    assert [problem for problem in found if problem.startswith(f"/server.yaml:{said}")], found


@pytest.mark.parametrize("word", ["off", "'off'"])
def test_nodes_may_be_told_to_take_nothing_from_each_other(files: Path, word: str) -> None:
    assert load(files, f"seeding: {word}").seeding is Seeding.OFF
    assert load(files, "seeding: direct").seeding is load(files, "").seeding is Seeding.DIRECT


def test_weights_may_go_through_the_server_at_a_rate(files: Path) -> None:
    config = load(files, "seeding: relay")
    assert (config.seeding, config.relay_rate) == (Seeding.RELAY, 100_000_000)
    assert load(files, "seeding: relay\nrelay_rate: 20MB").relay_rate == 20_000_000


def test_a_long_lease_alone_takes_the_others_along(files: Path) -> None:
    fleet = load(files, "fleet: {lease: 20m}").fleet
    assert fleet == FleetConfig(lease=1200.0, replace_after=1200.0, brake=1200.0)
    assert load(files, "fleet: {lease: 30s}").fleet == FleetConfig(lease=30.0)


def test_a_lease_that_is_wrong_is_the_only_thing_that_is_told(files: Path) -> None:
    (said,) = problems(files, "fleet: {lease: 3s, replace_after: 15s}")
    assert "fleet.lease" in said


def test_a_certificate_that_is_not_named_is_not_said_to_have_a_default(files: Path) -> None:
    text = f"agent_tls: {{ca: , cert: {files}/server.pem, key: {files}/server-key.pem}}\n"
    assert problems(files, text, tls=False) == ["/server.yaml:1:13 agent_tls.ca: has no value, and needs one"]


@pytest.mark.parametrize("port", [8080, 80])
def test_clients_from_other_machines_are_refused_with_the_ways_out(files: Path, port: int) -> None:
    (said,) = problems(files, f"listen: ':{port}'")
    assert f"Write 127.0.0.1:{port} and come in by a tunnel (ssh -L {port}:127.0.0.1:{port} HOST)" in said
    assert said.endswith("or put a reverse proxy that asks for a password before it")


def test_operators_from_other_machines_are_refused_with_the_ways_out(files: Path) -> None:
    (said,) = problems(files, "admin_listen: '[::]:9090'")
    assert "[::]:9090 can be reached" in said
    assert "Write 127.0.0.1:9090 and come in by a tunnel (ssh -L 9090:127.0.0.1:9090 HOST)" in said
    assert "(metrics_listen, /admin) is not in this version" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "",
            "/server.yaml:2:1 auth.enabled: is not written, which means true, and this version has no accounts",
        ),
        ("auth: {enabled: true}", "/server.yaml:1:8 auth.enabled: is true, and this version has no accounts and keys"),
        ("auth: {enabled: no}", "/server.yaml:1:8 auth.enabled: must be true or false, not 'no'"),
        ("auth: {enabled: 'false'}", "/server.yaml:1:8 auth.enabled: must be true or false, not 'false'"),
    ],
)
def test_that_nobody_is_asked_for_a_key_must_be_written(files: Path, text: str, said: str) -> None:
    assert problems(files, text, auth=False)[0].startswith(said)


@pytest.mark.parametrize(
    ("prefix", "key"),
    [
        *(("", key) for key in sorted(LATER)),
        *(("auth.", key) for key in sorted(LATER_AUTH)),
    ],
)
def test_a_key_of_a_later_version_is_refused_by_name(files: Path, prefix: str, key: str) -> None:
    stanza = prefix.rstrip(".")
    enabled = "enabled: false, " if stanza == "auth" else ""
    text = f"{stanza}: {{{enabled}{key}: 1}}" if stanza else f"{key}: 1"
    (said,) = problems(files, text, auth=stanza != "auth")
    assert re.search(rf" {re.escape(prefix + key)}: is not in this version.*; leave it out$", said)
    assert f"`{prefix}{key}`" in MANUAL


def test_a_wrong_key_is_never_told_to_be_one_of_a_later_version(files: Path) -> None:
    (said,) = problems(files, "metric_listen: 1")
    assert ": unknown key" in said
    assert "metrics_listen" not in said


def test_all_problems_come_at_once(files: Path) -> None:
    text = f"lisen: 1\nlisten: ':1'\nlanding: {{}}\nmodels: [{MODEL.replace('toy', 'toy, args: [--bad]')}, {{}}]\n"
    found = problems(files, text, tls=False, auth=False)
    wanted = (
        "lisen",
        "listen",
        "landing",
        "agent_tls.ca",
        "agent_tls.cert",
        "agent_tls.key",
        "auth.enabled",
        "m: prof",
    )
    for key in (*wanted, "models[1].name", "models[1].source", "models[1].profiles"):
        assert len([line for line in found if line.split(" ", 1)[1].startswith(key)]) == 1, key


def test_a_store_may_be_named_by_a_secret_file(files: Path) -> None:
    secret = files / "store"
    secret.write_text("/data/other.db\n")
    secret.chmod(0o640)
    text = f"auth: {{enabled: false, store: '@{secret}'}}"
    assert load(files, text, auth=False).auth.store == "/data/other.db"
    secret.chmod(0o644)
    assert problems(files, text, auth=False)[0].endswith(
        f"auth.store: /store can be read by everybody on this machine: chmod o-rwx {secret}".replace(str(files), "")
    )


@pytest.mark.parametrize("address", ["postgres://u:hunter2@db/llmgw", "postgresql://u:hunter2@db/llmgw"])
def test_a_store_in_postgresql_is_refused_and_its_password_kept(files: Path, address: str) -> None:
    secret = files / "dsn"
    secret.write_text(address)
    secret.chmod(0o600)
    for store in (address, f"@{secret}"):
        (said,) = problems(files, f"auth: {{enabled: false, store: '{store}'}}", auth=False)
        assert "auth.store: is a PostgreSQL address" in said
        assert "hunter2" not in said


@pytest.mark.parametrize("store", ["here.db", ":memory:", "sqlite:///x"])
def test_a_store_that_is_no_whole_path_is_refused(files: Path, store: str) -> None:
    (said,) = problems(files, f"auth: {{enabled: false, store: '{store}'}}", auth=False)
    assert said.endswith("auth.store: must be the whole path of a file, as /var/lib/llmgw/llmgw.db")


def test_the_certificates_files_have_to_be_there(files: Path) -> None:
    (files / "ca.pem").unlink()
    (files / "server-key.pem").chmod(0o644)
    ca, key = problems(files, "")
    assert ca.endswith("agent_tls.ca: /ca.pem can't be read: No such file or directory")
    assert "agent_tls.key: /server-key.pem can be read by everybody on this machine: chmod o-rwx" in key


def test_the_file_is_the_named_one_else_the_machines(tmp_path: Path) -> None:
    system = tmp_path / "server.yaml"
    with pytest.raises(ConfigError, match=r"server\.yaml is not there: write it \(examples/server\.yaml is a start\)"):
        find_server_file(None, environ={}, system_file=system)
    system.write_text("")
    assert find_server_file(None, environ={}, system_file=system) == system
    assert find_server_file(None, environ={"LLMGW_CONFIG": "/e"}, system_file=system) == Path("/e")
    assert find_server_file(Path("/f"), environ={"LLMGW_CONFIG": "/e"}, system_file=system) == Path("/f")


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("server*.yaml")))
def test_the_examples_load(files: Path, name: str) -> None:
    assert example(name, files).config.models


def test_the_full_example_names_every_key() -> None:
    names = set(re.findall(r"([a-z_]+):", (ROOT / "examples" / "server-full.yaml").read_text()))
    shared = {field.name for shape in (Timeouts, Limits) for field in fields(shape)}
    assert {key.rpartition(".")[2] for key in keys()} | shared <= names


def test_the_full_example_shows_the_defaults(files: Path) -> None:
    config = example("server-full.yaml", files).config
    default = ServerConfig(agent_tls=config.agent_tls, auth=Auth(enabled=False))
    for key in ("listen", "admin_listen", "agent_listen", "auth", "fleet", "timeouts", "limits"):
        assert getattr(config, key) == getattr(default, key)
    assert config.agent_tls.revoked == files / "revoked.txt" == config.agent_tls.ca.with_name("revoked.txt")


def test_the_manual_describes_every_key_and_no_other() -> None:
    (section,) = (part for part in re.split(r"^## ", MANUAL, flags=re.MULTILINE) if part.startswith("server.yaml\n"))
    assert set(re.findall(r"^\| `([a-z_.<>]+)` \|", section, re.MULTILINE)) == keys()
