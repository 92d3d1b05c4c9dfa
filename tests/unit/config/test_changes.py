from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from llmgw.config.changes import WHILE_RUNNING, changed, take_changes
from llmgw.config.node import Limits, Timeouts
from llmgw.config.server import AgentTls, Auth, FleetConfig, Listen, ServerConfig
from llmgw.core.model import Model, ModelName, Profile

OLD = ServerConfig(agent_tls=AgentTls(ca=Path("/ca"), cert=Path("/cert"), key=Path("/key")))
NEW = ServerConfig(
    agent_tls=AgentTls(ca=Path("/ca"), cert=Path("/cert2"), key=Path("/key2"), revoked=Path("/r")),
    listen=Listen(host="127.0.0.1", port=1),
    admin_listen=Listen(host="127.0.0.1", port=2),
    agent_listen=Listen(host="127.0.0.1", port=3),
    auth=Auth(enabled=False, store="/other.db"),
    fleet=FleetConfig(lease=30.0, replace_after=90.0, brake=0.0),
    cors_origins=("https://a.example",),
    timeouts=Timeouts(idle=1.0, drain=2.0),
    limits=Limits(max_head=2048),
    models=(Model(name=ModelName("m"), source="/m"),),
)


def test_what_stays_the_same_is_not_named() -> None:
    assert changed(OLD, OLD) == ((), ())


def test_what_can_change_is_told_from_what_needs_a_restart() -> None:
    applied, restart = changed(OLD, NEW)
    assert applied == (
        "fleet.lease",
        "fleet.replace_after",
        "fleet.brake",
        "cors_origins",
        "timeouts.idle",
        "timeouts.drain",
        "limits.max_head",
        "models",
    )
    assert restart == (
        "agent_tls.cert",
        "agent_tls.key",
        "agent_tls.revoked",
        "listen",
        "admin_listen",
        "agent_listen",
        "auth.enabled",
        "auth.store",
    )


def test_another_environment_is_a_change_whose_values_are_not_told() -> None:
    def with_token(token: str) -> ServerConfig:
        profile = Profile(name="p", engine="e", env={"HF_TOKEN": token})
        return replace(OLD, models=(Model(name=ModelName("m"), source="/m", profiles=(profile,)),))

    assert changed(with_token("a"), with_token("b")) == (("models",), ())
    assert changed(with_token("a"), with_token("a")) == ((), ())


def test_a_running_server_takes_what_can_change_and_keeps_naming_the_rest() -> None:
    taken = take_changes(OLD, NEW)
    assert changed(OLD, taken) == (changed(OLD, NEW)[0], ())
    assert changed(taken, NEW) == ((), changed(OLD, NEW)[1])


def test_every_key_that_can_change_is_one() -> None:
    assert set(WHILE_RUNNING) < {field.name for field in fields(ServerConfig)}
    assert replace(OLD, models=NEW.models) == take_changes(OLD, replace(OLD, models=NEW.models))
