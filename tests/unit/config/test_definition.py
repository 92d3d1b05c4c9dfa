from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from llmgw.config.definition import find_rejections, load_definitions, parse_definitions, wrong_name
from llmgw.core.model import Lora, Model, ModelName, Prices, Profile, Scaling, Task
from llmgw.errors import ConfigError, Problem

ENGINES = {"llamacpp", "vllm"}

SEED = """\
name: qwen2.5-coder-3b-instruct
aliases: [coder]
source: /var/lib/llmgw-models/qwen2.5-coder-3b-instruct-q4_k_m.gguf
routing_profile: chat
context_length: 32768
max_output: 4096
scaling: { min: 1, max: 1 }
profiles:
  - name: cpu
    engine: llamacpp
    weight: 1
    priority: 100
    startup_timeout: 5m
    min_memory_gb: 8
    args: ["--ctx-size", "65536"]
"""

SMALL = "name: m\nsource: /m.gguf\nprofiles: [{name: cpu, engine: llamacpp}]\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "m.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_definitions(written(folder, text), ENGINES)
    return [str(problem).replace(str(folder), "") for problem in caught.value.problems]


def test_a_definition_as_in_the_manual_becomes_a_model(tmp_path: Path) -> None:
    (definition,) = load_definitions(written(tmp_path, SEED), ENGINES)
    assert definition.model == Model(
        name="qwen2.5-coder-3b-instruct",  # type: ignore[arg-type]
        source="/var/lib/llmgw-models/qwen2.5-coder-3b-instruct-q4_k_m.gguf",
        aliases=("coder",),
        routing_profile="chat",
        context_length=32768,
        max_output=4096,
        scaling=Scaling(min=1, max=1),
        profiles=(
            Profile(
                name="cpu",
                engine="llamacpp",
                priority=100,
                startup_timeout_seconds=300.0,
                min_memory_gb=8.0,
                args=("--ctx-size", "65536"),
            ),
        ),
    )
    assert definition.scaled
    assert definition.not_in_effect == ("routing_profile", "max_output")


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    (definition,) = load_definitions(written(tmp_path, SMALL), ENGINES)
    assert definition.model.scaling == Scaling()
    assert definition.model.profiles == (Profile(name="cpu", engine="llamacpp"),)
    assert not definition.scaled
    assert definition.not_in_effect == ()


def test_a_file_may_hold_several_models(tmp_path: Path) -> None:
    text = "models:\n" + "".join(
        f"- {{name: {name}, source: /{name}.gguf, profiles: [{{name: cpu, engine: llamacpp}}]}}\n" for name in "ab"
    )
    assert [definition.model.name for definition in load_definitions(written(tmp_path, text), ENGINES)] == ["a", "b"]


def test_keys_without_effect_are_named_once(tmp_path: Path) -> None:
    text = (
        "name: m\nsource: /m.gguf\nover_limit: clamp\nprices: {prompt: 1, completion: 2}\n"
        "scaling: {min: 0, max: 1, idle_timeout: 15m}\nprofiles:\n"
        "- {name: a, engine: vllm, weight: 2, gpu_class: h100-80g, tp: 2}\n- {name: b, engine: vllm, tp: 4, pp: 2}\n"
    )
    (definition,) = load_definitions(written(tmp_path, text), ENGINES)
    assert definition.not_in_effect == (
        "profiles.weight",
        "over_limit",
        "prices",
    )


def test_scaling_is_read_whole_and_what_is_left_out_is_usual(tmp_path: Path) -> None:
    def read(scaling: str) -> Scaling:
        (definition,) = load_definitions(written(tmp_path, f"{SMALL}scaling: {scaling}\n"), ENGINES)
        assert definition.not_in_effect == ()
        return definition.model.scaling

    assert read("{min: 1, max: 4, idle_timeout: 90s, target: 2}") == Scaling(
        min=1, max=4, idle_timeout_seconds=90.0, target=2
    )
    assert read("{max: 1}") == Scaling(min=0, max=1, idle_timeout_seconds=900.0, target=8)


@pytest.mark.parametrize(
    ("written_as", "read_as"),
    [
        ("./m.gguf", "{folder}/m.gguf"),
        ("../m.gguf", "{parent}/m.gguf"),
        ("org/repo", "org/repo"),
        ("hf:org/repo/m.gguf", "hf:org/repo/m.gguf"),
        ("https://models.internal/m.gguf", "https://models.internal/m.gguf"),
    ],
)
def test_a_source_that_begins_with_a_dot_lies_beside_the_definition(
    tmp_path: Path, written_as: str, read_as: str
) -> None:
    (definition,) = load_definitions(written(tmp_path, SMALL.replace("/m.gguf", written_as)), ENGINES)
    assert definition.model.source == read_as.format(folder=tmp_path, parent=tmp_path.parent)


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("m.gguf", "'m.gguf': a source is a whole path (/…), hf:org/repo/file, https://…, or a repository org/repo"),
        ("oci://host/m", "'oci://host/m': oci: is no scheme that is fetched: write hf:org/repo/file, https://… or a"),
        ("hf:org/repo", "'hf:org/repo': names no file of org/repo: write hf:org/repo/FILE, or org/repo alone for the"),
        ("hf:org/repo/../m", "'hf:org/repo/../m': ../m is no file of a repository: no part of it may be empty, . or"),
        ("https://host/", "'https://host/': is no address of a file: write https://host/path/file"),
        ("https://me:word@host/m.gguf", "'https://…': holds a name or password: give the file away without one"),
    ],
)
@pytest.mark.parametrize("key", ["source", "mmproj", "loras[0].source"])
def test_what_is_no_source_is_told_at_its_place(tmp_path: Path, key: str, source: str, said: str, folder: bool) -> None:
    lines = {
        "source": SMALL.replace("/m.gguf", source),
        "mmproj": f"{SMALL}mmproj: {source}\n",
        "loras[0].source": f"{SMALL}loras:\n- name: l\n  source: {source}\n",
    }
    path = written(tmp_path, lines[key])
    with pytest.raises(ConfigError) as caught:
        load_definitions(path, ENGINES) if folder else parse_definitions(path.read_text(), "m.yaml", ENGINES)
    (problem,) = caught.value.problems
    place = {"source": "2:1", "mmproj": "4:1", "loras[0].source": "6:3"}[key]
    assert (problem.key, problem.where.rpartition("m.yaml:")[2]) == (key, place)
    assert problem.message.startswith(said)
    assert "word" not in problem.message.replace("password", "")


def test_a_source_in_the_home_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (definition,) = load_definitions(written(tmp_path, SMALL.replace("/m.gguf", "~/m.gguf")), ENGINES)
    assert definition.model.source == "/home/me/m.gguf"


def test_everything_that_is_missing_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path, "aliases: [a]\nprofiles: [{}]\n") == [
        "/m.yaml:1:1 name: is missing",
        "/m.yaml:1:1 source: is missing",
        "/m.yaml:2:12 profiles[0].name: is missing",
        "/m.yaml:2:12 profiles[0].engine: is missing",
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nmae: x", "/m.yaml:4:1 nmae: unknown key (name?)"),
        ("over_limit: cut", "/m.yaml:4:1 over_limit: 'cut' is not one of clamp, refuse"),
        ("scaling: {min: 1}", "/m.yaml:4:11 scaling.min: 1 is more than max, which is 0; write both"),
        ("scaling: {min: 1, mx: 1, max: 1}", "/m.yaml:4:19 scaling.mx: unknown key (max?)"),
        ("scaling: {max: 1, idle_timeout: 0}", "/m.yaml:4:19 scaling.idle_timeout: must be more than 0"),
        ("scaling: {max: 1, target: 0}", "/m.yaml:4:19 scaling.target: must be from 1 to 100000, not 0"),
        ("context_length: 0", "/m.yaml:4:1 context_length: must be from 1 to 100000000, not 0"),
        ("{context_length: 8, max_output: 9}", ""),
        ("aliases: [m]", "/m.yaml:4:1 aliases: 'm' is taken already by the name, alias or adapter at /m.yaml:1:1"),
        ("aliases: [a, a]", "/m.yaml:4:1 aliases: 'a' is taken already by the name, alias or adapter at /m.yaml:4:1"),
        ("aliases: ['a b']", "/m.yaml:4:1 aliases: 'a b' may hold letters"),
        ("models: []", "/m.yaml:4:1 models: has no model in it"),
        ("task: translate", "/m.yaml:4:1 task: 'translate' is not one of chat, embed, rerank"),
        ("tsak: chat", "/m.yaml:4:1 tsak: unknown key (task?)"),
        ("mmproj:", "/m.yaml:4:1 mmproj: has no value, and needs one"),
        ("routing_profile:", "/m.yaml:4:1 routing_profile: has no value; leave the key out to have its default"),
        ("loras: [{name: , source: /s}]", "/m.yaml:4:10 loras[0].name: has no value, and needs one"),
        ("prices: 3", "/m.yaml:4:1 prices: must be a mapping (key: value), not a single value"),
        ("prices: {prompt: 1}", "/m.yaml:4:9 prices.completion: is missing"),
        ("prices: {prompt: , completion: 1}", "/m.yaml:4:10 prices.prompt: has no value, and needs one"),
        ("prices: {prompt: 1, completion: 2, cached: }", "/m.yaml:4:36 prices.cached: has no value; leave the key out"),
        ("prices: {prompt: -1}", "/m.yaml:4:10 prices.prompt: must be a number of 0 or more, as 8 or 7.5, not '-1'"),
        ("prices: {prompt: '1'}", "/m.yaml:4:10 prices.prompt: must be a number of 0 or more, as 8 or 7.5, not '1'"),
        ("prices: {prompt: .inf}", "/m.yaml:4:10 prices.prompt: must be a number of 0 or more"),
        ("prices: {prompt: 1000001}", "/m.yaml:4:10 prices.prompt: must be 1000000 at most, not 1000001"),
        ("prices: {promt: 1}", "/m.yaml:4:10 prices.promt: unknown key (prompt?)"),
        ("mmproj: [x]", "/m.yaml:4:1 mmproj: must be a single value, not a list"),
        ("loras: sql", "/m.yaml:4:1 loras: must be a list, not a single value"),
        ("loras: [sql]", "/m.yaml:4:9 loras[0]: must be a mapping (key: value), not a single value"),
        ("loras: [{name: sql}]", "/m.yaml:4:9 loras[0].source: is missing"),
        ("loras: [{source: /s}]", "/m.yaml:4:9 loras[0].name: is missing"),
        ("loras: [{name: a b, source: /s}]", "/m.yaml:4:10 loras[0].name: 'a b' may hold letters"),
        ("loras: [{name: s, source: /s, scale: 2}]", "/m.yaml:4:31 loras[0].scale: unknown key"),
        (
            "loras: [{name: m, source: /s}]",
            "/m.yaml:4:10 loras[0].name: 'm' is taken already by the name, alias or adapter at /m.yaml:1:1",
        ),
        (
            "loras: [{name: s, source: /s}, {name: s, source: /t}]",
            "/m.yaml:4:33 loras[1].name: 's' is taken already by the name, alias or adapter at /m.yaml:4:10",
        ),
    ],
)
def test_a_wrong_line_is_placed_and_explained(tmp_path: Path, line: str, said: str) -> None:
    if line.startswith("{"):
        line = line.strip("{}").replace(", ", "\n")
        said = "/m.yaml:5:1 max_output: is more than context_length (8)"
    found = problems(tmp_path, f"{SMALL}{line}\n")
    assert any(problem.startswith(said) for problem in found), found


FULL = """\
name: m
source: ./m.gguf
task: rerank
mmproj: ../eyes.gguf
prices: {prompt: 0.15, completion: 0.6, cached: 0}
loras:
- {name: org/sql, source: ~/sql.gguf}
- name: poem
  source: org/poem
profiles:
- name: gpu
  engine: vllm
  gpu_class: any
  gpu_memory_gb: 70.5
  tp: 2
  pp: 3
  nodes: 3
  labels: {zone: a, rack: 7}
  tool_parser: hermes
  reasoning_parser: r1
  env: {VLLM_USE_V1: 1, B: 010, C: true, D: no, E: 1.50, F: "", G: 2026-01-02, _h: "x=y $Z", I: 'two words'}
"""


def test_all_that_engines_are_told_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (definition,) = load_definitions(written(tmp_path, FULL), ENGINES)
    # numbers and truths of the environment are the words that were written
    environment = {
        "VLLM_USE_V1": "1",
        "B": "010",
        "C": "true",
        "D": "no",
        "E": "1.50",
        "F": "",
        "G": "2026-01-02",
        "_h": "x=y $Z",
        "I": "two words",
    }
    assert definition.model == Model(
        name=ModelName("m"),
        source=f"{tmp_path}/m.gguf",
        task=Task.RERANK,
        mmproj=f"{tmp_path.parent}/eyes.gguf",
        loras=(
            Lora(name=ModelName("org/sql"), source="/home/me/sql.gguf"),
            Lora(name=ModelName("poem"), source="org/poem"),
        ),
        profiles=(
            Profile(
                name="gpu",
                engine="vllm",
                gpu_class="any",
                gpu_memory_gb=70.5,
                tp=2,
                pp=3,
                nodes=3,
                labels={"zone": "a", "rack": "7"},
                tool_parser="hermes",
                reasoning_parser="r1",
                env=environment,
            ),
        ),
        prices=Prices(prompt=0.15, completion=0.6, cached=0.0),
    )
    assert definition.not_in_effect == ("prices",)
    assert list(definition.claims()) == [("name", "m"), ("loras[0].name", "org/sql"), ("loras[1].name", "poem")]
    assert [key for key, _ in definition.sources()] == ["source", "mmproj", "loras[0].source", "loras[1].source"]
    assert {key for key, _ in (*definition.claims(), *definition.sources())} <= definition.places.keys()


def test_what_was_read_is_stored_and_shown_as_it_is(tmp_path: Path) -> None:
    (definition,) = load_definitions(written(tmp_path, FULL), ENGINES)
    model = definition.model
    assert msgspec.json.decode(msgspec.json.encode(model), type=Model) == model


def test_two_models_can_not_share_a_name(tmp_path: Path) -> None:
    model = "{name: m, source: /m.gguf, profiles: [{name: cpu, engine: llamacpp}]}"
    assert problems(tmp_path, f"models:\n- {model}\n- {model}\n") == [
        "/m.yaml:3:4 models[1].name: 'm' is taken already by the name, alias or adapter at /m.yaml:2:4"
    ]


def test_a_list_of_models_stands_alone_in_its_file(tmp_path: Path) -> None:
    text = "models:\n- {name: m, source: /m.gguf, profiles: [{name: cpu, engine: llamacpp}]}\nport: 3\n"
    assert problems(tmp_path, text) == ["/m.yaml:3:1 port: unknown key"]


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "llama3:8b", "m", "a.b_c-d+e"])
def test_names_that_clients_use_are_taken(name: str) -> None:
    assert wrong_name(name) is None


@pytest.mark.parametrize("name", ["", "/m", "m/", "a//b", "../m", "a b", "ü", "a?b", "x" * 201, "m\n"])
def test_names_that_a_url_would_trip_over_are_refused(name: str) -> None:
    assert wrong_name(name)


@pytest.mark.parametrize(
    ("key", "path", "line"),
    [
        ("args", "m: profiles[1].args", "m.yaml:6:"),
        ("source", "m: source", "m.yaml:2:"),
        ("weight", "m: profiles[1]", "m.yaml:6:"),
        ("tp", "m: profiles[1].tp", "m.yaml:7:"),
        ("pp", "m: profiles[1].pp", "m.yaml:7:"),
        ("tool_parser", "m: profiles[1].tool_parser", "m.yaml:8:"),
        ("reasoning_parser", "m: profiles[1]", "m.yaml:6:"),
        ("env", "m: profiles[1].env", "m.yaml:9:"),
        ("env.A", "m: profiles[1].env.A", "m.yaml:10:"),
        ("env.B", "m: profiles[1].env", "m.yaml:9:"),
        ("task", "m: task", "m.yaml:11:"),
        ("mmproj", "m: mmproj", "m.yaml:12:"),
        ("loras", "m: loras", "m.yaml:13:"),
        ("loras[1]", "m: loras[1]", "m.yaml:15:"),
        ("loras[1].source", "m: loras[1].source", "m.yaml:15:"),
        ("loras[2].source", "m: loras", "m.yaml:13:"),
    ],
)
def test_what_an_engine_finds_wrong_is_placed_in_the_file(tmp_path: Path, key: str, path: str, line: str) -> None:
    text = (
        "name: m\nsource: /m\nprofiles:\n- name: a\n  engine: vllm\n- {name: b, engine: vllm, args: [x],\n"
        "   tp: 2, pp: 2,\n   tool_parser: t,\n   env:\n    {A: 1}}\n"
        "task: embed\nmmproj: /e\nloras:\n- {name: s, source: /s}\n- {name: t, source: /t}\n"
    )
    (definition,) = load_definitions(written(tmp_path, text), ENGINES)
    problem = definition.locate(1, Problem(key=key, message="is wrong"))
    assert problem.key == path
    assert line in problem.where


@pytest.mark.parametrize("source", ["./m.gguf", "../m.gguf", "~/m.gguf"])
def test_no_path_of_this_machine_means_anything_to_others(source: str) -> None:
    text = f"{SMALL}mmproj: {source}\nloras: [{{name: s, source: {source}}}]\n"
    with pytest.raises(ConfigError) as caught:
        parse_definitions(text, "m.yaml", ENGINES)
    assert [f"{problem.where} {problem.key}" for problem in caught.value.problems] == [
        "m.yaml:4:1 mmproj",
        "m.yaml:5:19 loras[0].source",
    ]


@pytest.mark.parametrize("source", ["./m.gguf", "../m.gguf", "~/m.gguf"])
def test_a_path_of_this_machine_means_nothing_to_others(source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_definitions(SMALL.replace("/m.gguf", source), "m.yaml", ENGINES)
    assert caught.value.message == (
        f"m.yaml:2:1 source: {source!r} is a path on this machine; write the whole one that the nodes have"
    )


def test_a_text_for_other_machines_may_hold_several_models() -> None:
    text = "models:\n" + "".join(
        f"  - {{name: {name}, source: org/{name}, profiles: [{{name: c, engine: vllm}}]}}\n" for name in "ab"
    )
    found = parse_definitions(text, "m.yaml", ENGINES)
    assert [(definition.model.name, definition.model.source) for definition in found] == [
        ("a", "org/a"),
        ("b", "org/b"),
    ]


def test_what_the_engines_find_wrong_comes_with_its_places_and_once() -> None:
    class Strict:
        def validate(self, model: Model, profile: Profile) -> list[Problem]:
            return [Problem(key="source", message="is not mine"), Problem(key="args", message=f"{profile.name}: no")]

        def check_gpus(self, profile: Profile) -> list[Problem]:
            return [Problem(key="gpu_class", message="needs one")] if profile.name == "b" else []

    text = SMALL.replace("engine: llamacpp}", "engine: llamacpp, args: [-x]}, {name: b, engine: llamacpp, args: [-x]}")
    found = find_rejections(parse_definitions(text, "m.yaml", ENGINES), {"llamacpp": Strict()})
    assert [str(problem) for problem in found] == [
        "m.yaml:2:1 m: source: is not mine",
        "m.yaml:3:42 m: profiles[0].args: cpu: no",
        "m.yaml:3:83 m: profiles[1].args: b: no",
        "m.yaml:3:55 m: profiles[1]: needs one",
    ]
    assert find_rejections(parse_definitions(text, "m.yaml", ENGINES), {"llamacpp": Strict()}, gpus=False) == found[:3]
    assert find_rejections(parse_definitions(text, "m.yaml", ENGINES), {}) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("source: --port=80\n", "/m.yaml:2:1 source: '--port=80' begins with -"),
        ("source: /m.gguf\nmmproj: -x\n", "/m.yaml:3:1 mmproj: '-x' begins with -"),
        (
            "source: /m.gguf\nloras: [{name: l, source: --port=80}]\n",
            "/m.yaml:3:19 loras[0].source: '--port=80' begins",
        ),
        ("source: /" + "x" * 5000 + "\n", "/m.yaml:2:1 source: is longer than any path: 4095 bytes at most"),
    ],
)
def test_a_source_that_an_engine_would_read_as_a_flag_is_refused(tmp_path: Path, text: str, where: str) -> None:
    (found,) = problems(tmp_path, f"name: m\n{text}profiles: [{{name: p, engine: vllm}}]\n")
    assert found.startswith(where)
    assert len(found) < 200
