from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from llmgw.config.definition import load_definitions
from llmgw.config.load_node import find_node_file, load_node
from llmgw.config.node import EngineConfig, NodeConfig, NodeLimits, Timeouts, WeightsConfig
from llmgw.core.model import Lora, Model, Prices, Profile, Scaling
from llmgw.errors import ConfigError

ROOT = Path(__file__).parents[3]
ENGINES = {"llamacpp", "vllm"}
NOWHERE = Path("/nowhere/node.yaml")
SHAPES: dict[str, type] = {
    "": NodeConfig,
    "timeouts": Timeouts,
    "limits": NodeLimits,
    "weights": WeightsConfig,
    "engines.<name>": EngineConfig,
    "models": Model,
    "models.loras": Lora,
    "models.prices": Prices,
    "models.scaling": Scaling,
    "models.profiles": Profile,
}


def load(path: Path | None, *, port: int | None = None, **environ: str) -> NodeConfig:
    return load_node(path, environ=environ, engines=ENGINES, port=port, system_file=NOWHERE).config


def written(folder: Path, text: str) -> Path:
    path = folder / "node.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(written(folder, text))
    return [str(problem).replace(str(folder), "") for problem in caught.value.problems]


def keys_of_the_trees() -> set[str]:
    """Every key that can be written, as the dataclasses have it; a nested dataclass is the keys in it."""
    found = set()
    for prefix, shape in SHAPES.items():
        for field in fields(shape):
            key = field.name.removesuffix("_seconds")
            path = f"{prefix}.{key}" if prefix else key
            if path not in {"timeouts", "limits", "weights", "engines"} | SHAPES.keys():
                found.add(path)
    return found


def test_without_a_file_all_is_default(tmp_path: Path) -> None:
    assert load(None, HOME=str(tmp_path)) == NodeConfig()


def test_what_is_written_is_what_is_loaded(tmp_path: Path) -> None:
    config = load(
        written(
            tmp_path,
            "host: localhost\nport: 8000\ncors_origins: ['https://a.example']\nengine_ports: 20000-20010\n"
            "on_demand_wait: 0\nstate: /s\ncache: /c\ntimeouts: {generation: 0, idle: 3m}\n"
            "limits: {max_body: 1MiB, download_rate: 20MB}\nweights: {allow_hosts: [Hub.example], hub_token: hf_x}\n"
            "engines: {llamacpp: {bin: /opt/llama-server}}\n"
            "models: [{name: m, source: /m.gguf, profiles: [{name: cpu, engine: llamacpp}]}]\n",
        )
    )
    assert config == NodeConfig(
        host="localhost",
        port=8000,
        cors_origins=("https://a.example",),
        engine_ports=(20000, 20010),
        on_demand_wait=0.0,
        state="/s",
        cache="/c",
        timeouts=Timeouts(generation=0.0, idle=180.0),
        limits=NodeLimits(max_body=1024 * 1024, download_rate=20_000_000),
        weights=WeightsConfig(allow_hosts=("hub.example",), hub_token="hf_x"),
        engines={"llamacpp": EngineConfig(bin="/opt/llama-server")},
        models=config.models,
    )
    assert [model.name for model in config.models] == ["m"]
    # The manual's rule: a model without a scaling stanza is configured and does not run.
    assert config.models[0].scaling == Scaling(min=0, max=0)


def test_a_path_in_the_home_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load(written(tmp_path, "state: ~/llmgw\n")).state == "/home/me/llmgw"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "/node.yaml:1:1 prot: unknown key (port?)"),
        ("port: 70000", "/node.yaml:1:1 port: must be from 0 to 65535, not 70000"),
        ("host: 0.0.0.0", "/node.yaml:1:1 host: 0.0.0.0 can be reached from other machines"),
        ("host: '::'", "/node.yaml:1:1 host: :: can be reached from other machines"),
        ("host: node-7", "/node.yaml:1:1 host: 'node-7' is not an address; write 127.0.0.1 or ::1"),
        ("cors_origins: ['*']", "/node.yaml:1:1 cors_origins: '*' is not an origin"),
        (
            "cors_origins: ['https://a.example/x']",
            "/node.yaml:1:1 cors_origins: 'https://a.example/x' is not an origin",
        ),
        ("engine_ports: 18000", "/node.yaml:1:1 engine_ports: '18000' is not a range of ports"),
        ("engine_ports: 19000-18000", "/node.yaml:1:1 engine_ports: '19000-18000' is not a range of ports"),
        ("engine_ports: 80-90", "/node.yaml:1:1 engine_ports: '80-90' is not a range of ports"),
        ("port: 18001", "/node.yaml:1:1 engine_ports: holds 18001, which is the port that clients use"),
        ("state: here", "/node.yaml:1:1 state: 'here' must be a whole path, from / or ~/"),
        ("timeouts: {idle: 0}", "/node.yaml:1:12 timeouts.idle: must be more than 0"),
        ("timeouts: {idel: 3s}", "/node.yaml:1:12 timeouts.idel: unknown key (idle?)"),
        ("limits: {max_head: 3}", "/node.yaml:1:10 limits.max_head: must be at least 1024 bytes"),
        ("limits: {max_body: 1GiB}", "/node.yaml:1:10 limits.max_body: is more than bodies_total"),
        ("limits: {max_connections: 0}", "/node.yaml:1:10 limits.max_connections: must be from 1"),
        ("limits: {download_rate: 1kB}", "/node.yaml:1:10 limits.download_rate: must be at least 65536 bytes"),
        ("weights: {cache: /c}", "/node.yaml:1:11 weights.cache: is a key of its own in this file: write cache beside"),
        ("weights: {hub_tokn: x}", "/node.yaml:1:11 weights.hub_tokn: unknown key (hub_token?)"),
        ("weights: {allow_hosts: [hub/x]}", "/node.yaml:1:11 weights.allow_hosts: 'hub/x' is an address; write its"),
        ("models: [{name: m, source: w.gguf}]", "/node.yaml:1:20 models[0].source: 'w.gguf': a source is a whole path"),
        ("engines: {llamacp: {}}", "/node.yaml:1:11 engines.llamacp: no engine 'llamacp' is installed (llamacpp?)"),
        ("engines: {llamacpp: {bin: x}}", "/node.yaml:1:22 engines.llamacpp.bin: 'x' must be a whole path"),
        ("engines: {llamacpp: {bni: /x}}", "/node.yaml:1:22 engines.llamacpp.bni: unknown key (bin?)"),
        ("models: [{name: m}]", "/node.yaml:1:10 models[0].source: is missing"),
    ],
)
def test_a_wrong_line_is_placed_and_explained(tmp_path: Path, text: str, said: str) -> None:
    found = problems(tmp_path, f"{text}\n")
    assert any(problem.startswith(said) for problem in found), found


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "prot: 1\nhost: 0.0.0.0\ntimeouts: {idel: x, idle: x}\nmodels: [{}]\n")) == 7


def test_the_environment_wins_over_the_file_and_the_command_line_over_both(tmp_path: Path) -> None:
    path = written(tmp_path, "host: 127.0.0.1\nport: 8000\ncache: /c\n")
    config = load(path, port=9000, LLMGW_HOST="::1", LLMGW_MODELS="/big/weights")
    assert (config.host, config.port, config.cache) == ("::1", 9000, "/big/weights/.cache")


def test_an_open_host_in_the_environment_is_refused_with_the_ways_out() -> None:
    with pytest.raises(ConfigError, match=r"^LLMGW_HOST: 0\.0\.0\.0 can be reached.*tunnel.*reverse proxy"):
        load(None, LLMGW_HOST="0.0.0.0", HOME="/nowhere")


def test_a_port_among_the_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--port: 18500 is one of the ports kept for engines \(18000-18999\)"):
        load(None, port=18500, HOME="/nowhere")


def test_an_empty_variable_says_nothing() -> None:
    assert load(None, LLMGW_HOST="", LLMGW_MODELS="", LLMGW_CONFIG="", HOME="/nowhere") == NodeConfig()


def test_the_file_is_the_named_one_else_the_machines_else_the_users(tmp_path: Path) -> None:
    system, own = tmp_path / "etc.yaml", tmp_path / ".config" / "llmgw" / "node.yaml"
    own.parent.mkdir(parents=True)
    environ = {"HOME": str(tmp_path)}

    def found(path: Path | None = None, **more: str) -> Path | None:
        return find_node_file(path, environ=environ | more, system_file=system)

    assert found() is None
    own.write_text("port: 1")
    assert found() == own
    system.write_text("port: 2")
    assert found() == system
    assert found(LLMGW_CONFIG="/env.yaml") == Path("/env.yaml")
    assert found(Path("/flag.yaml"), LLMGW_CONFIG="/env.yaml") == Path("/flag.yaml")


def test_xdg_config_home_moves_the_users_file_unless_it_is_relative(tmp_path: Path) -> None:
    own = tmp_path / "llmgw" / "node.yaml"
    own.parent.mkdir()
    own.write_text("port: 1")
    assert find_node_file(None, environ={"XDG_CONFIG_HOME": str(tmp_path)}, system_file=NOWHERE) == own
    environ = {"XDG_CONFIG_HOME": "here", "HOME": "/nowhere"}
    assert find_node_file(None, environ=environ, system_file=NOWHERE) is None


def test_a_named_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^/nowhere/x\.yaml can't be read: No such file"):
        load(None, LLMGW_CONFIG="/nowhere/x.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("node*.yaml")), ids=lambda path: path.name)
def test_the_examples_load(path: Path) -> None:
    assert load(path).models


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "models").glob("*.yaml")), ids=lambda path: path.name)
def test_the_example_models_load(path: Path) -> None:
    assert load_definitions(path, ENGINES)


def test_the_full_example_names_every_key() -> None:
    text = (ROOT / "examples" / "node-full.yaml").read_text()
    names = set(re.findall(r"([a-z_]+):", text))
    assert {path.rsplit(".", 1)[-1] for path in keys_of_the_trees()} <= names


def test_the_full_example_shows_the_defaults() -> None:
    config = load(ROOT / "examples" / "node-full.yaml")
    assert config.timeouts == Timeouts()
    # (written for its unit: there is no limit by default)
    assert config.limits == NodeLimits(download_rate=config.limits.download_rate)
    assert (config.host, config.port, config.engine_ports) == ("127.0.0.1", 17434, (18000, 18999))
    assert config.on_demand_wait == NodeConfig().on_demand_wait


def test_the_manual_describes_every_key_and_no_other() -> None:
    manual = (ROOT / "docs" / "configuration.md").read_text()
    sections = re.split(r"^## ", manual, flags=re.MULTILINE)
    ours = ("node.yaml\n", "timeouts\n", "limits\n", "engines\n", "models\n", "A model's definition\n")
    text = "".join(section for section in sections if section.startswith(ours))
    described = set(re.findall(r"^\| `([a-z_.<>]+)` \|", text, re.MULTILINE))
    assert described == keys_of_the_trees()


def test_every_shape_is_one_of_ours() -> None:
    assert all(is_dataclass(shape) for shape in SHAPES.values())
