from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from llmgw.config.agent import (
    AgentConfig,
    AgentLimits,
    AgentWeights,
    Discovery,
    FabricConfig,
    NodeTls,
    ServerAddress,
)
from llmgw.config.load_agent import LATER_LIMITS, find_agent_file, load_agent
from llmgw.config.node import EngineConfig
from llmgw.config.server import Listen
from llmgw.errors import ConfigError

ROOT = Path(__file__).parents[3]
MANUAL = (ROOT / "docs" / "configuration.md").read_text()
ENGINES = {"llamacpp"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with what a node proves itself with."""
    for name in ("ca.pem", "node.pem", "node-key.pem"):
        (tmp_path / name).write_text("pem\n")
    (tmp_path / "node-key.pem").chmod(0o600)
    return tmp_path


def written(folder: Path, text: str, *, server: bool = True, tls: bool = True) -> Path:
    """What is needed stands last, so that the given text begins on the first line."""
    path = folder / "agent.yaml"
    if server:
        text += "\nserver: https://ctl:7443"
    if tls:
        text += f"\ntls: {{ca: {folder}/ca.pem, cert: {folder}/node.pem, key: {folder}/node-key.pem}}"
    path.write_text(text + "\n")
    return path


def load(folder: Path, text: str, *, server: bool = True, tls: bool = True, host_name: str = "host-1") -> AgentConfig:
    return load_agent(written(folder, text, server=server, tls=tls), engines=ENGINES, host_name=host_name)


def problems(folder: Path, text: str, *, server: bool = True, tls: bool = True, host_name: str = "host-1") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, server=server, tls=tls, host_name=host_name)
    return [str(problem).replace(str(folder), "") for problem in caught.value.problems]


def example(name: str, folder: Path) -> AgentConfig:
    """An example, with its files where the test has them."""
    path = folder / "example.yaml"
    path.write_text((ROOT / "examples" / name).read_text().replace("/etc/llmgw/", f"{folder}/"))
    return load_agent(path, engines=ENGINES, host_name="another")


def keys() -> set[str]:
    inner = {
        "tls.": NodeTls,
        "fabrics.<name>.": FabricConfig,
        "discovery.": Discovery,
        "weights.": AgentWeights,
        "limits.": AgentLimits,
    }
    found = {f"{prefix}{field.name}" for prefix, tree in inner.items() for field in fields(tree)}
    trees = {prefix.partition(".")[0] for prefix in inner}
    return found | {field.name for field in fields(AgentConfig)} - trees - {"engines"}


def test_with_a_server_and_a_certificate_all_is_default(files: Path) -> None:
    tls = NodeTls(ca=files / "ca.pem", cert=files / "node.pem", key=files / "node-key.pem")
    server = ServerAddress(host="ctl", port=7443)
    assert load(files, "") == AgentConfig(node="host-1", server=server, tls=tls)


def test_what_is_written_is_what_is_loaded(files: Path) -> None:
    text = (
        "node: n1.rack-2\nserver: https://10.0.0.1:7000\nstate: /s\nengine_ports: 20000-20010\ntrunks: 8\n"
        "engines: {llamacpp: {bin: /opt/llama-server}}\nlabels: {rack: r7, row: 3, spot: true}\n"
        "fabrics: {ib-a: {hcas: [mlx5_0, mlx5_1]}, eth: {interface: bond0.7}}\n"
        "discovery: {nvidia_smi: /opt/smi, classes: {NVIDIA H100 80GB HBM3: h100-80g, GPU-1: odd}}\n"
        "weights: {cache: /c, allow_hosts: [Huggingface.co, 10.0.0.9, huggingface.co], hub_token: hf_x}\n"
        "model_dirs: [/m, /n/o]\nseed_listen: '[fd00::1]:7444'\nlimits: {download_rate: 500MB}\n"
    )
    loaded = load(files, text, server=False)
    assert loaded == AgentConfig(
        node="n1.rack-2",
        server=ServerAddress(host="10.0.0.1", port=7000),
        tls=loaded.tls,
        state=Path("/s"),
        engine_ports=(20000, 20010),
        trunks=8,
        engines={"llamacpp": EngineConfig(bin="/opt/llama-server")},
        labels={"rack": "r7", "row": "3", "spot": "true"},
        fabrics={"ib-a": FabricConfig(hcas=("mlx5_0", "mlx5_1")), "eth": FabricConfig(interface="bond0.7")},
        discovery=Discovery(nvidia_smi=Path("/opt/smi"), classes={"NVIDIA H100 80GB HBM3": "h100-80g", "GPU-1": "odd"}),
        weights=AgentWeights(cache=Path("/c"), allow_hosts=("huggingface.co", "10.0.0.9"), hub_token="hf_x"),
        model_dirs=(Path("/m"), Path("/n/o")),
        seed_listen=Listen(host="fd00::1", port=7444),
        limits=AgentLimits(download_rate=500_000_000),
    )


def test_a_node_is_called_as_its_machine_is(files: Path) -> None:
    assert load(files, "", host_name="GPU-1.example").node == "gpu-1.example"


def test_a_machine_whose_name_is_no_nodes_is_to_be_given_one(files: Path) -> None:
    (said,) = problems(files, "", host_name="my_host")
    assert "node: is not written, and this machine's name won't do: 'my_host' is not a DNS name" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nod: n1", "1:1 nod: unknown key (node?)"),
        ("node: N1", "1:1 node: 'N1' is not a DNS name in lower case"),
        ("node: 10.0.0.1", "1:1 node: '10.0.0.1' is an address; give the node a name"),
        ("trunks: 0", "1:1 trunks: must be from 1 to 8, not 0"),
        ("trunks: 9", "1:1 trunks: must be from 1 to 8, not 9"),
        ("engine_ports: 18000", "1:1 engine_ports: '18000' is not a range of ports"),
        ("state: here", "1:1 state: 'here' must be a whole path, from / or ~/"),
        ("engines: {llamacp: {}}", "1:11 engines.llamacp: no engine 'llamacp' is installed (llamacpp?)"),
        ("engines: {llamacpp: {bni: /x}}", "1:22 engines.llamacpp.bni: unknown key (bin?)"),
        ("label: {a: b}", "1:1 label: unknown key (labels?)"),
        ("labels: {a b: c}", "1:10 labels.a b: may hold letters, digits and . _ / - only"),
        ("labels: [a=b]", "1:1 labels: must be a mapping (key: value), not a list"),
        ("fabrics: {ib a: {hcas: [mlx5_0]}}", "1:11 fabrics.ib a: 'ib a' may hold letters, digits and . _ - only"),
        ("fabrics: {ib-a: {}}", "1:11 fabrics.ib-a: names no adapter and no interface: write hcas: [mlx5_0], "),
        ("fabrics: {ib-a: }", "1:11 fabrics.ib-a: names no adapter and no interface"),
        ("fabrics: {ib-a: {hca: [mlx5_0]}}", "1:18 fabrics.ib-a.hca: unknown key (hcas?)"),
        ("fabrics: {ib-a: {hcas: []}}", "1:18 fabrics.ib-a.hcas: has no adapter in it: write one (mlx5_0)"),
        ("fabrics: {ib-a: {hcas: ['mlx5_0:1']}}", "1:18 fabrics.ib-a.hcas: 'mlx5_0:1' has a port in it; write the "),
        ("fabrics: {ib-a: {hcas: [../x]}}", "1:18 fabrics.ib-a.hcas: '../x' is no adapter's name: write it as `ls "),
        ("fabrics: {ib-a: {hcas: [m0, m0]}}", "1:18 fabrics.ib-a.hcas: m0 is written twice"),
        (
            "fabrics: {a: {hcas: [m0]}, b: {hcas: [m0]}}",
            "1:32 fabrics.b.hcas: m0 is on a already: it is on one network",
        ),
        ("fabrics: {ib-a: {interface: ..}}", "1:18 fabrics.ib-a.interface: '..' is no interface's name: write it as "),
        ("fabrics: {ib-a: {interface: interface-much-too-long}}", "1:18 fabrics.ib-a.interface: 'interface-much-too"),
        ("discovery: {nvidia-smi: /x}", "1:13 discovery.nvidia-smi: unknown key (nvidia_smi?)"),
        ("discovery: {nvidia_smi: smi}", "1:13 discovery.nvidia_smi: 'smi' must be a whole path"),
        ("discovery: {classes: {A: any}}", "1:23 discovery.classes.A: any stands for every class, so no class can be"),
        ("discovery: {classes: {A: a b}}", "1:23 discovery.classes.A: 'a b' may hold letters, digits and . _ - only"),
        ("discovery: {classes: {A: }}", "1:23 discovery.classes.A: has no value, and needs one"),
        ("discovery: {fake: /f, nvidia_smi: /x}", "1:23 discovery.nvidia_smi: has no effect beside fake, whose file "),
        ("weights: {cash: /x}", "1:11 weights.cash: unknown key (cache?)"),
        ("weights: {cache: x}", "1:11 weights.cache: 'x' must be a whole path, from / or ~/"),
        (
            "weights: {allow_hosts: []}",
            "1:11 weights.allow_hosts: has no host in it, and nothing could be fetched; leave",
        ),
        (
            "weights: {allow_hosts: }",
            "1:11 weights.allow_hosts: has no host in it, and nothing could be fetched; leave",
        ),
        ("weights: {allow_hosts: hub.co}", "1:11 weights.allow_hosts: must be a list, not a single value"),
        ("weights: {allow_hosts: [[]]}", "1:25 weights.allow_hosts[0]: must be text, not a list"),
        (
            "weights: {allow_hosts: ['https://hub/']}",
            "1:11 weights.allow_hosts: 'https://hub/' is an address; write its host alone: huggingface.co",
        ),
        (
            "weights: {allow_hosts: ['*.hf.co']}",
            "1:11 weights.allow_hosts: has '*.hf.co' for a host, which is neither a",
        ),
        (
            "weights: {hub_token: a b}",
            "1:11 weights.hub_token: holds what no token does: letters, digits and signs, no",
        ),
        ("weights: {hub_token: '@x'}", "1:11 weights.hub_token: '@x' must be @ and a whole path"),
        ("model_dirs: /m", "1:1 model_dirs: must be a list, not a single value"),
        ("model_dirs: [m]", "1:1 model_dirs: 'm' must be a whole path, from / or ~/"),
        ("model_dirs: [/m, /m/]", "1:1 model_dirs: /m is written twice"),
        ("seed_listen: 7444", "1:1 seed_listen: must be text, not '7444'"),
        (
            "seed_listen: ':7444'",
            "1:1 seed_listen: :7444 is all addresses of this machine, and others are told one that",
        ),
        ("seed_listen: '0.0.0.0:7444'", "1:1 seed_listen: 0.0.0.0:7444 is all addresses of this machine"),
        ("seed_listen: '[::]:7444'", "1:1 seed_listen: [::]:7444 is all addresses of this machine"),
        (
            "seed_listen: '224.0.0.1:7444'",
            "1:1 seed_listen: 224.0.0.1:7444 is a group's address; write it as 10.0.0.141:",
        ),
        ("seed_listen: '[fe80::1%eth0]:7444'", "1:1 seed_listen: [fe80::1%eth0]:7444 means something on its own link"),
        ("seed_listen: node-1:7444", "1:1 seed_listen: 'node-1' is not an IP address; write it as 10.0.0.141:7444"),
        ("seed_listen: '10.0.0.1:18001'", "1:1 seed_listen: 18001 is one of engine_ports (18000-18999); take another"),
        ("limits: {download_rate: 500}", "1:10 limits.download_rate: must be at least 65536 bytes"),
        ("limits: {download: 5MB}", "1:10 limits.download: unknown key (download_rate?)"),
        ("discovery: {fake: /f, classes: {A: a}}", "1:23 discovery.classes: has no effect beside fake, whose file "),
    ],
)
def test_a_wrong_line_is_placed_and_explained(files: Path, text: str, said: str) -> None:
    found = problems(files, text)
    assert [problem for problem in found if problem.startswith(f"/agent.yaml:{said}")], found


@pytest.mark.parametrize("key", sorted(LATER_LIMITS))
def test_a_key_of_a_later_version_is_refused_by_name(files: Path, key: str) -> None:
    said = f"/agent.yaml:1:10 limits.{key}: is not in this version; leave it out"
    assert problems(files, f"limits: {{{key}: 1}}") == [said]
    assert f"`limits.{key}`" in MANUAL


def test_the_hubs_token_may_be_in_a_file_of_its_own_and_is_shown_nowhere(files: Path) -> None:
    secret = files / "token"
    secret.write_text("hf_secret\n")
    secret.chmod(0o640)
    text = f"weights: {{hub_token: '@{secret}'}}"
    loaded = load(files, text)
    assert loaded.weights.hub_token == "hf_secret"
    assert "hf_secret" not in repr(loaded)
    secret.chmod(0o644)
    (said,) = problems(files, text)
    assert said.endswith("weights.hub_token: /token can be read by everybody on this machine: chmod o-rwx /token")
    path = written(files, text)
    assert load_agent(path, engines=ENGINES, host_name="n1", check_files=False).weights.hub_token is None


@pytest.mark.parametrize("token", ["hf_a b", "hf_ä", "hf_" + "x" * 1000])
def test_a_token_that_is_none_is_not_told(files: Path, token: str) -> None:
    (said,) = problems(files, f"weights: {{hub_token: {token}}}")
    assert "hf_" not in said


def test_all_problems_come_at_once(files: Path) -> None:
    found = problems(files, "node: N\nlimits: 1\ntls: {kye: 1}\n", server=False, tls=False)
    wanted = ("node", "limits", "server", "tls.ca", "tls.cert", "tls.key", "tls.kye")
    assert sorted(line.split()[1].rstrip(":") for line in found) == sorted(wanted)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"labels: {{{', '.join(f'l{number}: x' for number in range(65))}}}", "labels: are 65; a node has 64 at most"),
        (
            f"fabrics: {{{', '.join(f'f{number}: {{interface: i{number}}}' for number in range(17))}}}",
            "fabrics: are 17; a node has 16 at most",
        ),
        (
            f"fabrics: {{f: {{hcas: [{', '.join(f'm{number}' for number in range(65))}]}}}}",
            "fabrics.f.hcas: are 65; a fabric has 64 adapters of a node at most",
        ),
        (
            f"model_dirs: [{', '.join(f'/m{number}' for number in range(33))}]",
            "model_dirs: are 33; a node has 32 at most",
        ),
        (
            f"weights: {{allow_hosts: [{', '.join(f'h{number}' for number in range(101))}]}}",
            "weights.allow_hosts: are 101; 100 at most",
        ),
        (f"discovery: {{classes: {{A: {'x' * 101}}}}}", "discovery.classes.A: is longer than 100 characters"),
    ],
)
def test_no_more_is_taken_than_can_be_told_to_the_server(files: Path, text: str, said: str) -> None:
    assert [problem.partition(" ")[2] for problem in problems(files, text)] == [said]


def test_a_fake_inventory_is_a_path_that_nobody_reads_yet(files: Path) -> None:
    assert load(files, "discovery: {fake: /f}").discovery == Discovery(fake=Path("/f"))


def test_the_certificates_files_have_to_be_there_unless_nobody_needs_them(files: Path) -> None:
    (files / "node.pem").unlink()
    (files / "node-key.pem").chmod(0o604)
    cert, key = problems(files, "")
    assert cert.endswith("tls.cert: /node.pem can't be read: No such file or directory")
    assert "tls.key: /node-key.pem can be read by everybody on this machine: chmod o-rwx" in key
    assert load_agent(files / "agent.yaml", engines=ENGINES, host_name="n1", check_files=False).node == "n1"


def test_the_file_is_the_named_one_else_the_machines(tmp_path: Path) -> None:
    system = tmp_path / "agent.yaml"
    with pytest.raises(ConfigError, match=r"agent\.yaml is not there: write it \(examples/agent\.yaml is a start\)"):
        find_agent_file(None, environ={"LLMGW_CONFIG": ""}, system_file=system)
    system.write_text("")
    assert find_agent_file(None, environ={}, system_file=system) == system
    assert find_agent_file(None, environ={"LLMGW_CONFIG": "/e"}, system_file=system) == Path("/e")
    assert find_agent_file(Path("/f"), environ={"LLMGW_CONFIG": "/e"}, system_file=system) == Path("/f")


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("agent*.yaml")))
def test_the_examples_load(files: Path, name: str) -> None:
    loaded = example(name, files)
    assert (loaded.node, loaded.server) == ("node-1", ServerAddress(host="llmgw-ctl", port=7443))


def test_the_full_example_names_every_key() -> None:
    names = set(re.findall(r"([a-z_]+):", (ROOT / "examples" / "agent-full.yaml").read_text()))
    assert {key.rpartition(".")[2] for key in keys()} | {"engines", "bin"} <= names


def test_the_full_example_shows_the_defaults(files: Path) -> None:
    loaded = example("agent-full.yaml", files)
    default = AgentConfig(node=loaded.node, server=loaded.server, tls=loaded.tls)
    for key in ("state", "engine_ports", "trunks"):
        assert getattr(loaded, key) == getattr(default, key)
    assert loaded.weights.cache == default.weights.cache


def test_the_manual_describes_every_key_and_no_other() -> None:
    (section,) = (part for part in re.split(r"^## ", MANUAL, flags=re.MULTILINE) if part.startswith("agent.yaml\n"))
    assert set(re.findall(r"^\| `([a-z_.<>]+)` \|", section, re.MULTILINE)) == keys()
