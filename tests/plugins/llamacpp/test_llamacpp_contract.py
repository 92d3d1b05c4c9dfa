"""The conformance kit over the llama.cpp plugin, against the flags of four versions and of the embedded program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import llmgw_llamacpp
from llmgw.engines import Launch, Lora, ModelName
from llmgw.engines.testing import EngineContract, read_flags
from llmgw_llamacpp.flags import CHANGES, OWNED
from llmgw_llamacpp.options import OPTIONS

HERE = Path(__file__).parent
EMBEDDED = frozenset(name for option in OPTIONS for name in (*option.names, *option.off))
RECORDED = {table.stem: read_flags(table.read_text()) for table in sorted((HERE / "flags").glob("*.txt"))}
LORAS = tuple(Lora(name=ModelName(name), source=f"/var/lib/loras/{name}.gguf") for name in ("a", "b"))


class TestLlamacpp(EngineContract):
    plugin = llmgw_llamacpp
    flag_tables = RECORDED | {"embedded": EMBEDDED}
    owned = tuple(OWNED)
    inherited = ("LLAMA_ARG_CTX_SIZE", "LLAMA_API_KEY", "LLAMA_SERVER_ROUTER_PORT", "AIP_MODE")
    log = tuple(
        line for log in sorted((HERE / "logs").glob("*.log")) for line in log.read_text(encoding="utf-8").splitlines()
    )
    metrics = tuple(text.read_text(encoding="utf-8") for text in sorted((HERE / "metrics").glob("*.txt")))
    contexts = tuple(text.read_text(encoding="utf-8") for text in sorted((HERE / "props").glob("*.json")))
    launches = (
        replace(EngineContract.launch, gpus=(0, 3)),
        replace(EngineContract.launch, args=("--ctx-size", "65536")),
        replace(EngineContract.launch, args=("-np", "4", "--threads", "2")),
        replace(EngineContract.launch, args=("--metrics", "--no-webui", "-n", "7", "--device", "CUDA0"), gpus=()),
    )

    def _launches(self) -> Iterator[tuple[str, Launch]]:
        # Its own kinds of files, and a word that it knows.
        for what, launch in super()._launches():
            mmproj = launch.mmproj and "/var/lib/models/some mmproj.gguf"
            parser = launch.reasoning_parser and "deepseek"
            loras = LORAS if launch.loras else ()
            yield what, replace(launch, mmproj=mmproj, loras=loras, reasoning_parser=parser)

    def test_its_command_carries_the_shape_of_a_replica(self) -> None:
        """Nothing counts its cards: it takes all that it sees, and shares the layers out."""
        command = self._command(replace(self.launch, tp=2, gpus=(1, 3)))
        assert command.env["CUDA_VISIBLE_DEVICES"] == "1,3"
        assert command.argv[command.argv.index("--split-mode") + 1] == "layer"
        problems = self._validate(replace(self.launch, tp=2, args=("--split-mode", "none")))
        assert [problem.message.partition(":")[0] for problem in problems] == [
            "--split-mode none uses one card, and tp is 2"
        ]


def test_the_embedded_program_has_no_flag_of_its_own() -> None:
    """A definition that works with it works with a llama-server of the same llama.cpp."""
    assert len(RECORDED) == 4
    assert not EMBEDDED - RECORDED["llama-server-b11549"]


def test_every_owned_flag_is_one_that_llama_server_has() -> None:
    """A misspelling here would let the real one through."""
    assert set(OWNED) <= set().union(*RECORDED.values())


def test_the_history_of_the_flags_agrees_with_the_tables() -> None:
    numbers = {name.removeprefix("llama-server-"): flags for name, flags in RECORDED.items()}
    known = set().union(*numbers.values())
    for change in CHANGES:
        # What went before the first table can't be seen in one.
        assert change.flag in known or change.gone_in == "b8672"
        later = {number for number in numbers if int(number[1:]) >= int(change.gone_in[1:])}
        assert not [number for number in later if change.flag in numbers[number]]
        assert change.instead is None or change.instead in numbers["b11549"]
