"""Messages: what goes in comes out, what is wrong is named, and nothing that comes in does any harm."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw import wire
from llmgw.core.effects import Desire
from llmgw.core.model import Lora, Model, ModelName, Prices, Profile, Scaling, Task
from llmgw.core.node import (
    Disk,
    EngineFound,
    FabricFound,
    FlagFound,
    ForeignUse,
    Gpu,
    MigInstance,
    Node,
    NodeId,
)
from llmgw.core.replica import Endpoint, Load, Measured, ReplicaId, ShardId, ShardReport, ShardSpec, ShardState
from llmgw.core.weights import Cached, Collect, Collected, Fetch, Member, NodeWeights, Phase, Pull, Swarm, WeightsOrder
from llmgw.wire import (
    PROTOCOL,
    Desired,
    DesiredDelta,
    Goaway,
    Hello,
    NodeWord,
    OrderWord,
    Refused,
    Register,
    Resync,
    ShardWord,
    WeightsWord,
    Welcome,
    WireError,
    decode_from_agent,
    decode_from_server,
    diff,
    encode,
    patch,
    refuse_protocol,
)

GPUS = (
    Gpu(
        uuid="GPU-11111111-aaaa",
        index=0,
        gpu_class="h100-80g",
        name="NVIDIA H100 80GB HBM3",
        memory_gb=85.5,
        memory_used_gb=72.5,
        pci="00000000:1b:00.0",
        temperature_c=-3.5,
        utilization_percent=100.0,
        ecc_errors=2,
        nvlink_peers=("GPU-22222222-bbbb",),
        foreign=(ForeignUse(memory_gb=70.5, pid=4242, name="python3"), ForeignUse(memory_gb=0.25)),
    ),
    Gpu(
        uuid="GPU-22222222-bbbb",
        index=1,
        gpu_class="h100-80g",
        name="NVIDIA H100 80GB HBM3",
        memory_gb=85.5,
        memory_used_gb=0.0,
        mig=(MigInstance(uuid="MIG-3333", shape="1g.10gb", memory_gb=10.5),),
        broken="it fell off the bus",
    ),
)
NODE = Node(
    id=NodeId("gpu-1"),
    cores=8,
    memory_foreign_gb=3.25,
    gpus=GPUS,
    gpu_driver="560.35.03",
    fabrics=(
        FabricFound(name="ib-a", interface="ib0", address="10.1.0.1", hcas=("mlx5_0", "mlx5_1")),
        FabricFound(name="ib-b", down="mlx5_7 has no active port"),
    ),
    labels={"rack": "a7", "empty": ""},
    warnings=("the processor has no AVX2",),
    clock=1_790_000_000.5,
    cpu_flags=frozenset({"avx2", "fma"}),
    memory_gb=64.0,
    memory_available_gb=60.5,
    disks=(Disk(path="/", free_gb=1.5, total_gb=2.0),),
    engines=(
        EngineFound(
            engine="mill",
            program=("/opt/mill", "-x"),
            version="b1",
            checked=True,
            problems=("--x is gone",),
            flags=(FlagFound(flag="--x", given_by="llmgw", state="removed", detail="take it out"),),
            flags_ok=11,
        ),
        EngineFound(engine="bad", program=("/b",), checked=True, broken="no libz", missing_libraries=("libz.so.1",)),
    ),
)


def a_spec(number: int = 1, *, epoch: int = 1, node: str = "gpu-1") -> ShardSpec:
    model = Model(
        name=ModelName("org/tiny"),
        source="/models/tiny",
        task=Task.EMBED,
        aliases=("small",),
        mmproj="/models/eyes",
        loras=(Lora(name=ModelName("sql"), source="/models/sql"),),
        context_length=4096,
        prices=Prices(prompt=0.5, completion=1.5, cached=0.125),
        scaling=Scaling(min=1, max=2),
        profiles=(
            Profile(
                name="cpu",
                engine="mill",
                tp=2,
                pp=3,
                nodes=2,
                gpu_class="any",
                gpu_memory_gb=40.5,
                labels={"rack": "a7"},
                tool_parser="hermes",
                reasoning_parser="r1",
                env={"MILL_WHEELS": "2", "EMPTY": ""},
                args=("--threads", "2"),
            ),
        ),
    )
    return ShardSpec(
        id=ShardId(f"shd-tiny-{number}-0"),
        replica=ReplicaId(f"rep-tiny-{number}"),
        epoch=epoch,
        node=NodeId(node),
        model=model,
        profile=model.profiles[0],
        rank=1,
        count=2,
        gpus=("GPU-11111111-aaaa", "GPU-22222222-bbbb"),
        fabric="ib-a",
        rendezvous="10.1.0.1:29500",
        go=False,
    )


def a_report(spec: ShardSpec) -> ShardReport:
    return ShardReport(
        shard=spec.id,
        replica=spec.replica,
        epoch=spec.epoch,
        state=ShardState.READY,
        endpoint=Endpoint(host="127.0.0.1", port=18000, served_name="org/tiny"),
        pid=4242,
        progress="läuft",
        remedy="give it more",
        lines=("one", "two"),
        load=Load(running=1, waiting=0, cache_used=0.25, prompt_tokens=40, cached_tokens=16, steps=7),
        measured=Measured(load_seconds=61.5, gpu_gb=70.25, memory_gb=3.5, version="0.9.1"),
    )


SPEC = a_spec()
WEIGHTS = NodeWeights(
    seed="10.1.0.1:7444",
    cached=(Cached(source="hf:org/tiny/t.gguf", commit="c0ffee", size_bytes=10**12, fetched_at=1.5, in_use=True),),
    fetches=(
        Fetch(
            source="hf:org/big/b.gguf",
            phase=Phase.FETCHING,
            commit="abc",
            done_bytes=5,
            total_bytes=2**40,
            rate=1.5,
            left_seconds=9.5,
            origin_bytes=3,
            peer_bytes=2,
            pull=7,
        ),
        Fetch(source="hf:org/no/n.gguf", phase=Phase.FAILED, cause="the disk is full", remedy="make room"),
        Fetch(source="hf:org/slow/s.gguf", phase=Phase.FETCHING, stalled_seconds=40.5),
    ),
    seen=("/mnt/models/x.gguf", "org/name"),
    shared=True,
    collected=Collected(number=3, freed_bytes=9, kept=("hf:org/a/a.gguf: in use",)),
    asks="b2f0",
)
ORDER = WeightsOrder(
    swarms=(
        Swarm(
            source="hf:org/big/b.gguf",
            commit="abc",
            members=(
                Member(node=NodeId("gpu-1"), seed="[fe80::1]:7444", fabrics=("ib-a",), whole=True),
                Member(node=NodeId("gpu-2")),
            ),
        ),
        Swarm(source="https://models.internal/x.gguf"),
    ),
    pulls=(Pull(number=7, source="hf:org/big/b.gguf"),),
    collect=Collect(number=3, items=(("hf:org/a/a.gguf", "c0ffee"),), asked="b2f0", seconds=54.5),
)
FROM_AGENT = [
    Hello(protocol=2, node="gpu-1", run="a1b2", dial=1, version="0.2.0"),
    Register(node=NODE, running=((SPEC, a_report(SPEC)),)),
    NodeWord(node=NODE, applied=3),
    ShardWord(report=replace(a_report(SPEC), fetch=WEIGHTS.fetches[0])),
    WeightsWord(weights=WEIGHTS),
    Resync(),
]
FROM_SERVER = [
    Welcome(protocol=2, session="t0k3n", lease_seconds=15.0),
    Refused(code="connected", reason="node gpu-1 is already connected from 10.0.0.7:4242"),
    Desired(revision=1, shards=(SPEC,)),
    DesiredDelta(revision=2, base=1, put=(SPEC,), drop=(ShardId("shd-tiny-9-0"),)),
    OrderWord(order=ORDER),
    Goaway(reason="the server stops"),
]

# As an agent of protocol 1 sent them, byte for byte, before there was a newer one.
RECORDED = (
    b'{"type":"hello","protocol":1,"node":"gpu-1","run":"5f3a9c0d1e2b4a68","dial":1,"version":"0.1.0"}',
    b'{"type":"register","node":{"id":"gpu-1","cores":4,"cpu_flags":["avx2","fma"],"memory_gb":16.7,'
    b'"memory_available_gb":12.1,"disks":[{"path":"/var/lib/llmgw-agent","free_gb":40.2,"total_gb":62.0}],'
    b'"engines":[{"engine":"mill","program":["/opt/mill/bin/mill"],"version":"b6"}]},"running":[[{"id":"shd-tiny-1-0",'
    b'"replica":"rep-tiny-1","epoch":3,"node":"gpu-1","model":{"name":"tiny","source":"/models/tiny.gguf","aliases":[],'
    b'"routing_profile":null,"context_length":2048,"max_output":null,"over_limit":"clamp","scaling":{"min":1,"max":1,'
    b'"idle_timeout_seconds":900.0},"profiles":[{"name":"cpu","engine":"mill","weight":1,"priority":0,'
    b'"gpu_class":null,"tp":1,"startup_timeout_seconds":600.0,"min_memory_gb":null,"min_disk_gb":null,"args":[]}]},'
    b'"profile":{"name":"cpu","engine":"mill","weight":1,"priority":0,"gpu_class":null,"tp":1,'
    b'"startup_timeout_seconds":600.0,"min_memory_gb":null,"min_disk_gb":null,"args":[]},"rank":0,"count":1},'
    b'{"shard":"shd-tiny-1-0","replica":"rep-tiny-1","epoch":3,"state":"ready","endpoint":{"host":"127.0.0.1",'
    b'"port":18000,"served_name":"tiny"},"pid":2211,"progress":null,"cause":null,"lines":[],"running":0,"waiting":0}]]}',
    b'{"type":"node","node":{"id":"gpu-1","cores":4,"cpu_flags":["avx2","fma"],"memory_gb":16.7,'
    b'"memory_available_gb":11.9,"disks":[],"engines":[]}}',
    b'{"type":"shard","report":{"shard":"shd-tiny-1-0","replica":"rep-tiny-1","epoch":3,"state":"ended","endpoint":null,'
    b'"pid":null,"progress":null,"cause":"it was stopped","lines":[],"running":null,"waiting":null}}',
    b'{"type":"resync"}',
)
# And one of protocol 2, as it was before models had tasks and adapters.
RECORDED_2 = (
    RECORDED[0].replace(b'"protocol":1', b'"protocol":2'),
    RECORDED[1].replace(b'"running":0,"waiting":0', b'"running":2,"waiting":1'),
    RECORDED[2].replace(b'"engines":[]}', b'"engines":[]},"applied":7'),
    RECORDED[3],
    RECORDED[4],
)
# And one of protocol 4, as it was before groups waited for one another and launches were measured.
RECORDED_4 = (
    RECORDED[0].replace(b'"protocol":1', b'"protocol":4'),
    b'{"type":"register","node":{"id":"gpu-1","cores":8,"cpu_flags":["avx2"],"memory_gb":64.0,'
    b'"memory_available_gb":60.5,"memory_foreign_gb":1.5,"disks":[],"engines":[],"gpus":[{"uuid":"GPU-1","index":0,'
    b'"gpu_class":"h100-80g","name":"NVIDIA H100","memory_gb":85.5,"memory_used_gb":72.5,"pci":"","temperature_c":null,'
    b'"utilization_percent":null,"ecc_errors":null,"nvlink_peers":null,"mig":null,"foreign":[],"broken":null}],'
    b'"gpu_driver":"560.35.03","fabrics":[{"name":"ib-a","interface":"ib0","address":"10.1.0.1","hcas":[],'
    b'"down":null}],"labels":{},"warnings":[],"clock":1790000000.5},"running":[[{"id":"shd-tiny-1-0",'
    b'"replica":"rep-tiny-1","epoch":3,"node":"gpu-1","model":{"name":"tiny","source":"/models/tiny"},"profile":'
    b'{"name":"wide","engine":"mill","nodes":2},"rank":0,"count":2,"gpus":["GPU-1"],"fabric":"ib-a","rendezvous":'
    b'"10.1.0.1:29500"},{"shard":"shd-tiny-1-0","replica":"rep-tiny-1","epoch":3,"state":"launching","endpoint":null,'
    b'"pid":null,"progress":"/opt/mill is being checked","context_length":null,"cause":null,"kind":null,"remedy":null,'
    b'"lines":[],"load":{"running":null,"waiting":null,"cache_used":null,"prompt_tokens":null,"cached_tokens":null,'
    b'"steps":null}}]]}',
    RECORDED_2[2],
    RECORDED[3],
    RECORDED[4],
)


@pytest.mark.parametrize("message", FROM_AGENT, ids=lambda message: type(message).__name__)
def test_what_an_agent_says_arrives_as_it_was_said(message: wire.AgentMessage) -> None:
    assert decode_from_agent(encode(message), PROTOCOL) == message


@pytest.mark.parametrize("message", FROM_SERVER, ids=lambda message: type(message).__name__)
def test_what_the_server_says_arrives_as_it_was_said(message: wire.ServerMessage) -> None:
    assert decode_from_server(encode(message)) == message


def test_a_recorded_agent_of_the_protocol_before_is_understood() -> None:
    hello, register, word, shard, resync = [decode_from_agent(data, 1) for data in RECORDED]
    assert hello == Hello(protocol=1, node="gpu-1", run="5f3a9c0d1e2b4a68", dial=1, version="0.1.0")
    assert isinstance(register, Register)
    [(spec, report)] = register.running
    assert (spec.id, spec.epoch, spec.model.context_length) == ("shd-tiny-1-0", 3, 2048)
    assert (report.state, report.endpoint) == (
        ShardState.READY,
        Endpoint(host="127.0.0.1", port=18000, served_name="tiny"),
    )
    assert isinstance(word, NodeWord)
    assert (word.node.memory_available_gb, word.applied) == (11.9, None)
    assert isinstance(shard, ShardWord)
    assert shard.report.cause == "it was stopped"
    assert resync == Resync()


def test_a_recorded_agent_of_protocol_2_is_understood() -> None:
    hello, register, word, shard, resync = [decode_from_agent(data, 2) for data in RECORDED_2]
    assert isinstance(hello, Hello)
    assert hello.protocol == 2
    assert isinstance(register, Register)
    [(spec, report)] = register.running
    model = Model(
        name=ModelName("tiny"),
        source="/models/tiny.gguf",
        context_length=2048,
        scaling=Scaling(min=1, max=1),
        profiles=(Profile(name="cpu", engine="mill"),),
    )
    # what its engine was started with is what a definition without the newer keys asks for: it is not started anew
    assert (spec.model, spec.profile) == (model, model.profiles[0])
    assert (report.state, report.load) == (ShardState.READY, Load())
    assert isinstance(word, NodeWord)
    assert word.applied == 7
    assert isinstance(shard, ShardWord)
    assert shard.report.state is ShardState.ENDED
    assert resync == Resync()


def test_a_recorded_agent_of_protocol_4_is_understood() -> None:
    hello, register, word, shard, resync = [decode_from_agent(data, 4) for data in RECORDED_4]
    assert isinstance(hello, Hello)
    assert hello.protocol == 4
    assert isinstance(register, Register)
    assert [gpu.uuid for gpu in register.node.gpus or ()] == ["GPU-1"]
    [(spec, report)] = register.running
    # what it runs waits for nobody any more
    assert (spec.count, spec.rendezvous, spec.go) == (2, "10.1.0.1:29500", True)
    assert (report.state, report.measured) == (ShardState.LAUNCHING, None)
    assert isinstance(word, NodeWord)
    assert word.applied == 7
    assert isinstance(shard, ShardWord)
    assert shard.report.state is ShardState.ENDED
    assert resync == Resync()


@dataclass(frozen=True, kw_only=True)
class OldProfile:
    """A profile as agents of protocol 2 have it."""

    name: str
    engine: str
    tp: int
    args: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OldModel:
    name: str
    source: str
    aliases: tuple[str, ...]
    profiles: tuple[OldProfile, ...]


@dataclass(frozen=True, kw_only=True)
class OldSpec:
    id: str
    epoch: int
    model: OldModel
    profile: OldProfile
    count: int


class OldDesired(msgspec.Struct, frozen=True, kw_only=True, tag="desired"):
    revision: int
    shards: tuple[OldSpec, ...]


def test_an_agent_of_protocol_2_passes_over_what_it_does_not_know() -> None:
    assert not SPEC.go
    told = msgspec.json.decode(encode(Desired(revision=1, shards=(SPEC,))), type=OldDesired)
    profile = OldProfile(name="cpu", engine="mill", tp=2, args=("--threads", "2"))
    model = OldModel(name="org/tiny", source="/models/tiny", aliases=("small",), profiles=(profile,))
    assert told.shards == (OldSpec(id=SPEC.id, epoch=1, model=model, profile=profile, count=2),)


def test_an_agent_that_tells_of_no_flags_is_understood() -> None:
    said = json.loads(encode(FROM_AGENT[2]))
    for engine in said["node"]["engines"]:
        del engine["flags"], engine["flags_ok"]
    word = decode_from_agent(json.dumps(said).encode(), PROTOCOL)
    assert isinstance(word, NodeWord)
    assert [(found.flags, found.flags_ok) for found in word.node.engines] == [((), 0), ((), 0)]


def test_the_first_message_reads_the_same_in_every_protocol() -> None:
    assert decode_from_agent(RECORDED[0], PROTOCOL) == decode_from_agent(RECORDED[0], 1)


def test_an_agent_of_protocol_1_that_sends_the_newer_field_is_not_believed_in_it() -> None:
    word = decode_from_agent(encode(NodeWord(node=NODE, applied=3)), 1)
    assert word == NodeWord(node=replace(BLIND, outdated=True), applied=None)


# As the agents before knew it: they have not looked for GPUs, and would not keep to those that they are given.
BLIND = replace(NODE, gpus=None, fabrics=(), fetches=False)


@pytest.mark.parametrize(("protocol", "outdated"), [(1, True), (2, True), (3, False)])
def test_an_older_agent_is_marked_wherever_it_speaks_of_itself_and_has_no_gpus(protocol: int, outdated: bool) -> None:
    for message in FROM_AGENT:
        if isinstance(message, WeightsWord):
            # (none of these says anything of them)
            continue
        found = decode_from_agent(encode(message), protocol)
        assert type(found) is type(message)
        if isinstance(found, Register | NodeWord):
            assert found.node == replace(BLIND, outdated=outdated)


@pytest.mark.parametrize("protocol", [4, 5])
def test_an_agent_that_fetches_no_weights_is_marked(protocol: int) -> None:
    word = decode_from_agent(encode(NodeWord(node=NODE, applied=3)), protocol)
    assert word == NodeWord(node=replace(NODE, fetches=False), applied=3)
    assert decode_from_agent(encode(NodeWord(node=NODE, applied=3)), PROTOCOL) == NodeWord(node=NODE, applied=3)


@pytest.mark.parametrize(("theirs", "whom"), [(0, "agent"), (-1, "agent"), (7, "server"), (10**9, "server")])
def test_another_protocol_is_refused_with_what_to_upgrade(theirs: int, whom: str) -> None:
    text = refuse_protocol(theirs)
    assert text is not None
    assert f"protocol {theirs}" in text
    assert text.endswith(f"upgrade the {whom}")


@pytest.mark.parametrize("theirs", [1, 2, 3, 4, 5, 6])
def test_the_present_protocol_and_those_before_are_spoken(theirs: int) -> None:
    assert refuse_protocol(theirs) is None


# -- what is wrong


def change(message: wire.AgentMessage, **fields: Any) -> bytes:
    return json.dumps({**json.loads(encode(message)), **fields}).encode()


def test_fields_that_are_not_known_are_passed_over() -> None:
    hello = FROM_AGENT[0]
    assert decode_from_agent(change(hello, colour="green", deep={"a": [1, {"b": None}]}), PROTOCOL) == hello


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[]", "got `array`"),
        (b"null", "got `null`"),
        (b"{}", "type"),
        (b'{"type":"welcome"}', "Invalid value 'welcome'"),
        (b'{"type":"node"}', "node"),
        (change(FROM_AGENT[0], protocol="2"), "$.protocol"),
        (change(FROM_AGENT[0], dial=0), "$.dial"),
        (change(FROM_AGENT[0], dial=10**30), "$.dial"),
        (change(FROM_AGENT[0], run="a b"), "$.run"),
        (change(FROM_AGENT[0], run="\n"), "$.run"),
        (change(FROM_AGENT[0], run="a1\n"), "$.run"),
        (change(FROM_AGENT[0], node=""), "$.node"),
        (change(FROM_AGENT[0], version="x" * 129), "$.version"),
        (change(FROM_AGENT[2], applied=-1), "$.applied"),
        (change(FROM_AGENT[1], running=[[1, 2]]), "$.running[0]"),
        (encode(FROM_AGENT[2]).replace(b"64.0", b"1e999"), "out of range"),
        (encode(FROM_AGENT[2]).replace(b"64.0", b"1.7e308"), "$.node.memory_gb"),
        (encode(FROM_AGENT[2]).replace(b'"cores":8', b'"cores":-5'), "$.node.cores"),
        (encode(FROM_AGENT[3]).replace(b'"epoch":1', b'"epoch":9007199254740992'), "$.report.epoch"),
        (encode(FROM_AGENT[3]).replace(b'"cause":null', b'"cause":"%s"' % (b"x" * 4001)), "$.report.cause"),
        (encode(FROM_AGENT[2]).replace(b"64.0", b"NaN"), "malformed"),
        (encode(FROM_AGENT[2]).replace(b"64.0", b"-Infinity"), "malformed"),
        (encode(FROM_AGENT[2]).replace(b"64.0", b'"64"'), "$.node.memory_gb"),
        (encode(FROM_AGENT[2]).replace(b'"cores":8', b'"cores":9007199254740993'), "$.node.cores"),
        (encode(FROM_AGENT[3]).replace(b'"ready"', b'"sleeping"'), "$.report.state"),
        (encode(FROM_AGENT[3]).replace(b'"shd-tiny-1-0"', b'""'), "$.report.shard"),
        (encode(FROM_AGENT[3]).replace(b'"shd-tiny-1-0"', b'"%s"' % (b"s" * 701)), "$.report.shard"),
        (encode(FROM_AGENT[3]).replace(b"0.25", b"1.5"), "Expected `float` <= 1.0 - at `$.report.load.cache_used`"),
        (encode(FROM_AGENT[3]).replace(b"0.25", b"-0.5"), "$.report.load.cache_used"),
        (encode(FROM_AGENT[3]).replace(b'"steps":7', b'"steps":"7"'), "$.report.load.steps"),
        (encode(FROM_AGENT[3]).replace(b"give it more", b"x" * 4001), "$.report.remedy"),
        (encode(FROM_AGENT[2]).replace(b"no libz", b"x" * 4001), "$.node.engines[1].broken"),
        (encode(FROM_AGENT[2]).replace(b"take it out", b"x" * 4001), "$.node.engines[0].flags[0].detail"),
        (encode(FROM_AGENT[2]).replace(b'"--x"', b'"%s"' % (b"x" * 4001)), "$.node.engines[0].flags[0].flag"),
        (encode(FROM_AGENT[2]).replace(b'"flags_ok":11', b'"flags_ok":-1'), "$.node.engines[0].flags_ok"),
        (encode(FROM_AGENT[1]).replace(b'"EMPTY":""', b'"EMPTY":1'), "$.running[0][0].model.profiles[0].env"),
        (encode(FROM_AGENT[1]).replace(b'"task":"embed"', b'"task":"cook"'), "$.running[0][0].model.task"),
        (encode(FROM_AGENT[1]).replace(b'"source":"/models/sql"', b'"x":1'), "$.running[0][0].model.loras[0]"),
        (b"[" * 100_000, "message"),
        (b'{"type":"resync","x":' + b"[" * 100_000, "message"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, words: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_from_agent(data, PROTOCOL)
    assert words in caught.value.message


def test_an_agent_of_this_protocol_says_what_it_has_applied() -> None:
    with pytest.raises(WireError, match="applied"):
        decode_from_agent(RECORDED[2], PROTOCOL)


def test_a_message_has_a_largest_size() -> None:
    with pytest.raises(WireError, match="it may have"):
        decode_from_server(b" " * (wire.MAX_MESSAGE_BYTES + 1))
    text = "x" * wire.TEXT_CHARS
    many = tuple(replace(SPEC, profile=replace(SPEC.profile, args=(text,))) for _ in range(17))
    with pytest.raises(WireError, match=r"^Desired: \d+ bytes"):
        encode(Desired(revision=1, shards=many))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            NodeWord(node=replace(NODE, memory_gb=float("nan")), applied=1),
            r"^NodeWord: Expected `float`, got `null` - at `\$\.node\.memory_gb`",
        ),
        (NodeWord(node=replace(NODE, memory_gb=float("inf")), applied=1), r"got `null` - at `\$\.node\.memory_gb`"),
        (NodeWord(node=replace(NODE, cores=2**53 + 1), applied=1), r"<= 100000 - at `\$\.node\.cores`"),
        (ShardWord(report=replace(a_report(SPEC), cause="\ud800")), "can't be written"),
        (
            ShardWord(report=replace(a_report(SPEC), lines=("a", "b" * (wire.TEXT_CHARS + 1)))),
            r"length <= 262144 - at `\$\.report\.lines\[1\]`",
        ),
        (
            ShardWord(report=replace(a_report(SPEC), lines=("",) * (wire.LIST_ITEMS + 1))),
            r"^ShardWord: Expected `array` of length <= 8192 - at `\$\.report\.lines`",
        ),
        (
            NodeWord(
                node=replace(NODE, engines=(replace(NODE.engines[0], flags=NODE.engines[0].flags * 101),)), applied=1
            ),
            r"^NodeWord: Expected `array` of length <= 100 - at `\$\.node\.engines\[0\]\.flags`",
        ),
    ],
)
def test_what_the_other_end_would_refuse_is_not_sent(message: wire.AgentMessage, words: str) -> None:
    with pytest.raises(WireError, match=words):
        encode(message)


def a_node(**of_gpu: Any) -> Node:
    return replace(NODE, gpus=(replace(GPUS[0], **of_gpu),))


MOST = 10**7
SHORT = "x" * wire.SHORT_CHARS


@pytest.mark.parametrize(
    ("most", "too_much", "field"),
    [
        (replace(NODE, gpus=GPUS[:1] * 64), replace(NODE, gpus=GPUS[:1] * 65), "gpus"),
        (a_node(uuid="x"), a_node(uuid=""), "gpus[0].uuid"),
        (a_node(uuid=SHORT), a_node(uuid=SHORT + "x"), "gpus[0].uuid"),
        (a_node(index=100_000), a_node(index=100_001), "gpus[0].index"),
        (a_node(index=0), a_node(index=-1), "gpus[0].index"),
        (a_node(gpu_class=SHORT), a_node(gpu_class=SHORT + "x"), "gpus[0].gpu_class"),
        (a_node(name=SHORT), a_node(name=SHORT + "x"), "gpus[0].name"),
        (a_node(memory_gb=MOST), a_node(memory_gb=MOST + 1), "gpus[0].memory_gb"),
        (a_node(memory_used_gb=0.0), a_node(memory_used_gb=-0.5), "gpus[0].memory_used_gb"),
        (a_node(pci=SHORT), a_node(pci=SHORT + "x"), "gpus[0].pci"),
        (a_node(temperature_c=-300.0), a_node(temperature_c=1e5), "gpus[0].temperature_c"),
        (a_node(utilization_percent=0.0), a_node(utilization_percent=-1.0), "gpus[0].utilization_percent"),
        (a_node(ecc_errors=2**53), a_node(ecc_errors=2**64 - 1), "gpus[0].ecc_errors"),
        (a_node(nvlink_peers=("x",) * 64), a_node(nvlink_peers=("x",) * 65), "gpus[0].nvlink_peers"),
        (a_node(nvlink_peers=(SHORT,)), a_node(nvlink_peers=(SHORT + "x",)), "gpus[0].nvlink_peers[0]"),
        (a_node(mig=GPUS[1].mig * 64), a_node(mig=GPUS[1].mig * 65), "gpus[0].mig"),
        (a_node(foreign=GPUS[0].foreign * 32), a_node(foreign=GPUS[0].foreign * 33), "gpus[0].foreign"),
        (
            a_node(foreign=(ForeignUse(memory_gb=0.0, name=SHORT),)),
            a_node(foreign=(ForeignUse(memory_gb=0.0, name=SHORT + "x"),)),
            "gpus[0].foreign[0].name",
        ),
        (
            a_node(foreign=(ForeignUse(memory_gb=0.0),)),
            a_node(foreign=(ForeignUse(memory_gb=-1.0),)),
            "gpus[0].foreign[0].memory_gb",
        ),
        (a_node(broken="x" * 4000), a_node(broken="x" * 4001), "gpus[0].broken"),
        (replace(NODE, gpu_driver=SHORT), replace(NODE, gpu_driver=SHORT + "x"), "gpu_driver"),
        (replace(NODE, memory_foreign_gb=0.0), replace(NODE, memory_foreign_gb=-0.5), "memory_foreign_gb"),
        (replace(NODE, fabrics=NODE.fabrics * 8), replace(NODE, fabrics=NODE.fabrics * 9), "fabrics"),
        (
            replace(NODE, fabrics=(FabricFound(name="a"),)),
            replace(NODE, fabrics=(FabricFound(name=""),)),
            "fabrics[0].name",
        ),
        (
            replace(NODE, fabrics=(FabricFound(name="a", address="fe80::1%ib0"),)),
            replace(NODE, fabrics=(FabricFound(name="a", address="--trust-remote-code"),)),
            "fabrics[0].address",
        ),
        (
            replace(NODE, fabrics=(FabricFound(name="a", hcas=("x",) * 64),)),
            replace(NODE, fabrics=(FabricFound(name="a", hcas=("x",) * 65),)),
            "fabrics[0].hcas",
        ),
        (
            replace(NODE, fabrics=(FabricFound(name="a", down="x" * 4000),)),
            replace(NODE, fabrics=(FabricFound(name="a", down="x" * 4001),)),
            "fabrics[0].down",
        ),
        (
            replace(NODE, labels=dict.fromkeys(map(str, range(64)), "")),
            replace(NODE, labels=dict.fromkeys(map(str, range(65)), "")),
            "labels",
        ),
        (replace(NODE, labels={"a": SHORT}), replace(NODE, labels={"a": SHORT + "x"}), "labels[...]"),
        (replace(NODE, warnings=("x" * 4000,) * 20), replace(NODE, warnings=("",) * 21), "warnings"),
        (replace(NODE, warnings=()), replace(NODE, warnings=("x" * 4001,)), "warnings[0]"),
        (replace(NODE, clock=0.0), replace(NODE, clock=-1.0), "clock"),
    ],
)
def test_what_a_node_says_of_its_devices_has_bounds(most: Node, too_much: Node, field: str) -> None:
    said = NodeWord(node=most, applied=1)
    assert decode_from_agent(encode(said), PROTOCOL) == said
    with pytest.raises(WireError) as caught:
        encode(NodeWord(node=too_much, applied=1))
    assert caught.value.message.endswith(f"at `$.node.{field}`")
    with pytest.raises(WireError) as caught:
        decode_from_agent(msgspec.json.encode(NodeWord(node=too_much, applied=1)), PROTOCOL)
    assert caught.value.message.endswith(f"at `$.node.{field}`")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (replace(SPEC, gpus=("x",) * 65), "gpus"),
        (replace(SPEC, gpus=("",)), "gpus[0]"),
        (replace(SPEC, fabric=""), "fabric"),
        (replace(SPEC, rendezvous="-x"), "rendezvous"),
        (replace(SPEC, rendezvous="a b:1"), "rendezvous"),
        (replace(SPEC, rendezvous="10.1.0.1:1\n"), "rendezvous"),
        (replace(SPEC, profile=replace(SPEC.profile, nodes=0)), "profile.nodes"),
        (replace(SPEC, profile=replace(SPEC.profile, gpu_memory_gb=-1.0)), "profile.gpu_memory_gb"),
        (replace(SPEC, profile=replace(SPEC.profile, labels={"a": SHORT + "x"})), "profile.labels[...]"),
        (replace(SPEC, model=replace(SPEC.model, prices=Prices(prompt=-1.0, completion=0.0))), "model.prices.prompt"),
    ],
)
def test_what_a_node_is_to_run_has_bounds(spec: ShardSpec, field: str) -> None:
    with pytest.raises(WireError) as caught:
        encode(Desired(revision=1, shards=(spec,)))
    assert caught.value.message.endswith(f"at `$.shards[0].{field}`")


@pytest.mark.parametrize(
    ("most", "too_much", "field"),
    [
        (Measured(load_seconds=MOST), Measured(load_seconds=MOST + 1), "load_seconds"),
        (Measured(load_seconds=0.0), Measured(load_seconds=-0.5), "load_seconds"),
        (Measured(gpu_gb=MOST), Measured(gpu_gb=MOST + 1), "gpu_gb"),
        (Measured(gpu_gb=0.0), Measured(gpu_gb=-0.5), "gpu_gb"),
        (Measured(memory_gb=MOST), Measured(memory_gb=MOST + 1), "memory_gb"),
        (Measured(memory_gb=0.0), Measured(memory_gb=-0.5), "memory_gb"),
        (Measured(version=SHORT), Measured(version=SHORT + "x"), "version"),
    ],
)
def test_what_a_launch_has_shown_has_bounds(most: Measured, too_much: Measured, field: str) -> None:
    said = ShardWord(report=replace(a_report(SPEC), measured=most))
    assert decode_from_agent(encode(said), PROTOCOL) == said
    with pytest.raises(WireError) as caught:
        encode(ShardWord(report=replace(a_report(SPEC), measured=too_much)))
    assert caught.value.message.endswith(f"at `$.report.measured.{field}`")


@pytest.mark.parametrize("state", ShardState)
def test_every_state_of_a_shard_can_be_told(state: ShardState) -> None:
    said = ShardWord(report=replace(a_report(SPEC), state=state))
    assert decode_from_agent(encode(said), PROTOCOL) == said


def test_only_the_word_to_go_is_sent_when_nothing_else_has_changed() -> None:
    before, after = (Desire(node=NODE.id, revision=at, shards=(replace(SPEC, go=at > 1),)) for at in (1, 2))
    change = decode_from_server(encode(diff(before, after)))
    assert change == DesiredDelta(revision=2, base=1, put=after.shards, drop=())
    assert isinstance(change, DesiredDelta)
    assert patch(before, change, node=NODE.id) == after


@pytest.mark.parametrize("gpus", [None, (), ("GPU-1",)])
def test_no_gpus_are_not_the_same_as_nobody_choosing(gpus: tuple[str, ...] | None) -> None:
    told = decode_from_server(encode(Desired(revision=1, shards=(replace(SPEC, gpus=gpus),))))
    assert isinstance(told, Desired)
    assert told.shards[0].gpus == gpus


@pytest.mark.parametrize("gpus", [None, ()])
def test_a_node_without_gpus_is_not_one_that_has_not_looked(gpus: tuple[Gpu, ...] | None) -> None:
    said = NodeWord(node=replace(NODE, gpus=gpus), applied=1)
    assert decode_from_agent(encode(said), PROTOCOL) == said


def test_a_figure_that_a_driver_makes_up_is_one_that_it_does_not_say() -> None:
    said = decode_from_agent(encode(NodeWord(node=a_node(temperature_c=float("nan")), applied=1)), PROTOCOL)
    assert isinstance(said, NodeWord)
    assert said.node == a_node(temperature_c=None)


@pytest.mark.parametrize("clock", [0.0, 946_684_800.0, 4_000_000_000.0, None])
def test_a_clock_that_is_wrong_by_years_is_understood(clock: float | None) -> None:
    said = NodeWord(node=replace(NODE, clock=clock), applied=1)
    assert decode_from_agent(encode(said), PROTOCOL) == said


def test_every_part_of_a_message_has_a_bound() -> None:
    """A field that is added is bounded by its kind: none is passed on unseen."""
    for message in (*FROM_AGENT, *FROM_SERVER):
        for path, text in texts(json.loads(encode(message))):
            tree = json.loads(encode(message))
            put(tree, path, text + "x" * (wire.TEXT_CHARS + 1))
            with pytest.raises(WireError):
                (decode_from_server if message in FROM_SERVER else read_newest)(json.dumps(tree).encode())


def read_newest(data: bytes) -> wire.AgentMessage:
    return decode_from_agent(data, PROTOCOL)


def texts(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Every text in it, and where."""
    if isinstance(tree, str):
        yield path, tree
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from texts(part, (*path, key))


def put(tree: Any, path: tuple[Any, ...], value: object) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"A": "s3cret" * wire.TEXT_CHARS}, r"length <= 262144 - at `\$\.shards\[0\]\.profile\.env\[\.\.\.\]`"),
        ({"A" * (wire.TEXT_CHARS + 1): ""}, r"length <= 262144 - at `key` in `\$\.shards\[0\]\.profile\.env`"),
        (
            dict.fromkeys(map(str, range(wire.LIST_ITEMS + 1)), ""),
            r"length <= 8192 - at `\$\.shards\[0\]\.profile\.env`",
        ),
        ({"A": "\udcff s3cret"}, "can't be written"),
        (MappingProxyType({"A": "s3cret"}), "can't be written"),
    ],
)
def test_an_environment_that_can_not_be_sent_is_named_and_not_shown(env: dict[str, str], words: str) -> None:
    spec = replace(SPEC, profile=replace(SPEC.profile, env=env))
    with pytest.raises(WireError, match=words) as caught:
        encode(Desired(revision=1, shards=(spec,)))
    assert "s3cret" not in caught.value.message


def test_the_words_of_an_error_are_safe_in_a_log() -> None:
    with pytest.raises(WireError) as caught:
        decode_from_agent(json.dumps({"type": "\x1b[2J\n" + "x" * 5000}).encode(), PROTOCOL)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 500


# -- garbage

VALID = [encode(message) for message in (*FROM_AGENT, *FROM_SERVER)] + [*RECORDED, *RECORDED_2, *RECORDED_4]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def read_all(data: bytes) -> None:
    for read in (decode_from_server, lambda data: decode_from_agent(data, 1), read_newest):
        with contextlib.suppress(WireError):
            read(data)


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    read_all(data)


@pytest.mark.slow
@given(st.sampled_from(VALID), st.data())
def test_no_mutation_of_a_message_raises_anything_else(valid: bytes, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(valid)))
    end = data.draw(st.integers(begin, min(len(valid), begin + 40)))
    read_all(valid[:begin] + data.draw(st.binary(max_size=40)) + valid[end:])


@pytest.mark.slow
@given(st.sampled_from(VALID), st.data())
def test_no_other_value_in_a_field_raises_anything_else(valid: bytes, data: st.DataObject) -> None:
    tree = json.loads(valid)
    at = tree
    while isinstance(at, (dict, list)) and at:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            at[key] = data.draw(JSON)
            break
        at = at[key]
    read_all(json.dumps(tree).encode())


# -- desired sets


def a_desire(revision: int, *specs: ShardSpec) -> Desire:
    return Desire(node=NodeId("gpu-1"), revision=revision, shards=specs)


SETS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), max_size=6).map(
    lambda pairs: tuple(a_spec(number, epoch=epoch) for number, epoch in pairs)
)


@pytest.mark.slow
@given(SETS, SETS, st.integers(0, 5), st.integers(0, 5))
def test_a_patch_makes_exactly_what_was_compared(
    old: tuple[ShardSpec, ...], new: tuple[ShardSpec, ...], first: int, second: int
) -> None:
    before, after = a_desire(first, *old), a_desire(second, *new)
    message = decode_from_server(encode(diff(before, after)))
    assert isinstance(message, Desired | DesiredDelta)
    assert patch(before, message, node=before.node) == after


def test_the_first_set_is_sent_whole() -> None:
    assert diff(None, a_desire(4, SPEC)) == Desired(revision=4, shards=(SPEC,))


def test_only_what_differs_is_sent() -> None:
    one, two, three = a_spec(1), a_spec(2), a_spec(3)
    again = a_spec(2, epoch=2)
    change = diff(a_desire(4, one, two), a_desire(7, again, three))
    assert change == DesiredDelta(revision=7, base=4, put=(again, three), drop=(one.id,))


def test_a_server_that_counts_from_anew_sends_the_whole() -> None:
    assert isinstance(diff(a_desire(9, SPEC), a_desire(1, SPEC)), Desired)


def test_the_whole_replaces_whatever_is_there() -> None:
    whole = Desired(revision=1, shards=())
    assert patch(a_desire(9, SPEC), whole, node=NodeId("gpu-1")) == a_desire(1)
    assert patch(None, whole, node=NodeId("gpu-1")) == a_desire(1)


@pytest.mark.parametrize("have", [None, a_desire(3, SPEC), a_desire(5, SPEC)])
def test_a_change_of_another_set_does_not_fit(have: Desire | None) -> None:
    assert patch(have, DesiredDelta(revision=6, base=4, put=(), drop=()), node=NodeId("gpu-1")) is None


def test_a_change_that_drops_what_is_not_there_does_not_fit() -> None:
    change = DesiredDelta(revision=6, base=4, put=(), drop=(ShardId("shd-other-1-0"),))
    assert patch(a_desire(4, SPEC), change, node=NodeId("gpu-1")) is None


def test_a_change_goes_forward_only() -> None:
    assert patch(a_desire(4, SPEC), DesiredDelta(revision=4, base=4, put=(), drop=()), node=NodeId("gpu-1")) is None
