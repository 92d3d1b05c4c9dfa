"""The conformance kit over the SGLang plugin, against the flags of ten releases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import llmgw_sglang
from llmgw.engines import Launch, Profile
from llmgw.engines.testing import EngineContract
from llmgw_sglang import flags
from llmgw_sglang.flags import OWNED, OWNED_ENV
from llmgw_sglang.history import CHANGES

HERE = Path(__file__).parent


def names(table: Path) -> frozenset[str]:
    rows = [row for row in table.read_text(encoding="utf-8").splitlines() if not row.startswith("#")]
    return frozenset(name for row in rows for name in row.split("\t")[0].split())


RECORDED = {table.stem: names(table) for table in sorted((HERE / "flags").glob("*.txt"))}
# `sglang serve` takes it out of the words before the parser has them.
OF_THE_COMMAND_ITSELF = {"--model-type"}


class TestSglang(EngineContract):
    plugin = llmgw_sglang
    flag_tables = RECORDED
    launch: Launch = replace(EngineContract.launch, source="/var/lib/models/some model")
    owned = tuple(OWNED)
    inherited = ("SGLANG_GRPC_PORT", "SGLANG_USE_MODELSCOPE", "SGL_PORT")
    log = tuple(
        line for log in sorted((HERE / "logs").glob("*.log")) for line in log.read_text(encoding="utf-8").splitlines()
    )
    metrics = tuple(text.read_text(encoding="utf-8") for text in sorted((HERE / "metrics").glob("*.txt")))
    contexts = (
        '{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"sglang","root":"tiny","max_model_len":512}]}',
    )
    launches = (
        replace(launch, gpus=(0, 3), tp=2, cache="/var/cache/llmgw"),
        replace(launch, args=("--context-length", "64k", "--enable-metrics", "--log-level-http", "info")),
        replace(launch, args=("--enable-cache-report",)),
    )


def test_ten_releases_are_recorded() -> None:
    assert len(RECORDED) == 10
    assert all(len(known) > 180 for known in RECORDED.values())


def test_every_owned_flag_is_one_that_sglang_has() -> None:
    """A misspelling here would let the real one through."""
    assert set(OWNED) - set().union(*RECORDED.values()) == OF_THE_COMMAND_ITSELF


def test_no_flag_of_a_release_is_taken_for_one_of_llmgws_that_is_longer() -> None:
    free = set().union(*RECORDED.values()) - set(OWNED)
    assert {flag for flag in free if flags.check_args((flag,))} == set()


def test_what_is_said_to_be_gone_is_in_no_later_release_and_what_is_there_instead_is() -> None:
    order = sorted(RECORDED, key=lambda number: tuple(map(int, number.split("."))))
    for change in CHANGES:
        since = tuple(map(int, change.gone_in.split(".")))
        for number in order:
            if tuple(map(int, number.split("."))) >= since:
                assert change.flag not in RECORDED[number], (change, number)
        assert change.instead is None or change.instead in RECORDED["0.5.23"], change


def test_every_flag_that_went_between_two_releases_is_known_to_be_gone() -> None:
    order = sorted(RECORDED, key=lambda number: tuple(map(int, number.split("."))))
    went = set().union(*RECORDED.values()) - RECORDED[order[-1]]
    assert went - {change.flag for change in CHANGES} == set()


def test_variables_of_llmgws_are_refused_by_name() -> None:
    profile = Profile(name="p", engine="sglang", env=dict.fromkeys([*OWNED_ENV, "NCCL_DEBUG", "SGL_HOST_IP"], "1"))
    problems = flags.check_env(profile.env)
    assert {problem.key for problem in problems} == {"env"}
    assert {problem.message.split()[0] for problem in problems} == {*OWNED_ENV, "SGL_HOST_IP"}
