"""The driver's library: the real pynvml over a library that is built here and says what a file says.

A process keeps the first library that it loads, so each test asks in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmgw.host.nvml import FELL_OFF, NOT_RUNNING, UPDATED, Nvml, load_nvml

SOURCE = Path(__file__).parents[2] / "fakes" / "fake_nvml.c"

# Looks once for each line that comes, and says what it saw; the line holds the pids of our engines.
ASKED = """
import json, sys
import msgspec
from llmgw.host.gpus import GpuReader
from llmgw.host.nvml import Nvml
nvml = Nvml(count_present=lambda: int(sys.argv[1]))
reader = GpuReader((nvml,), classes={})
assert "pynvml" not in sys.modules
for line in sys.stdin:
    ours = json.loads(line)
    found = nvml.survey() if ours is None else reader.read(ours)
    print(json.dumps(msgspec.to_builtins(found)), flush=True)
"""

TWO = """
driver 550.54.15
card GPU-a 00000000:3B:00.0 NVIDIA A100-SXM4-40GB
memory 40960 500 30000
temperature 41
utilization 7
ecc 0
card GPU-b 00000000:86:00.0 NVIDIA A100-SXM4-40GB
memory 40960 500 40460
"""

slow_with_compiler = [pytest.mark.slow, pytest.mark.needs("cc", "gcc")]


def build(folder: Path, *flags: str) -> Path:
    library = folder / "libnvidia-ml.so.1"
    command = ("cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", *flags, "-o", str(library), str(SOURCE))
    subprocess.run(command, check=True, timeout=120)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("old-nvml"), "-DOLD")


class Driver:
    """A driver, and a process that looks at it."""

    def __init__(self, process: subprocess.Popen[str], says: Path) -> None:
        self.process = process
        self.says = says

    def say(self, text: str) -> None:
        # (in one step: the other process may be reading)
        fresh = self.says.with_suffix(".fresh")
        fresh.write_text(text)
        fresh.replace(self.says)

    def send(self, ours: list[int] | None) -> None:
        self.process.stdin.write(json.dumps(ours) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict:
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def survey(self) -> dict:
        self.send(None)
        return self.receive()

    def read(self, *ours: int) -> dict:
        self.send(list(ours))
        return self.receive()

    def opened(self) -> list[str]:
        return self.says.with_name(self.says.name + ".log").read_text().split()


@pytest.fixture
def start_driver(tmp_path):
    """Start a process that looks at what a library says."""
    started = []

    def start(library, text, present=1):
        says = tmp_path / "says"
        environ = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML": str(says)}
        process = subprocess.Popen(
            (sys.executable, "-W", "error", "-c", ASKED, str(present)),
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        driver = Driver(process, says)
        driver.say(text)
        return driver

    yield start
    for process in started:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


class TestWithALibrary:
    """What a library that is really loaded tells."""

    pytestmark = slow_with_compiler

    def test_each_card_is_told_by_its_uuid_with_what_the_driver_measures(self, library, start_driver):
        found = start_driver(library, TWO).survey()
        first, second = found["cards"]
        assert (found["driver"], found["problem"], found["lost"]) == ("550.54.15", None, [])
        assert (first["uuid"], first["index"], first["pci"]) == ("GPU-a", 0, "0000:3b:00.0")
        assert first["name"] == "NVIDIA A100-SXM4-40GB"
        assert first["memory_bytes"] == 40960 * 2**20
        assert first["used_bytes"] == (40960 - 500 - 30000) * 2**20
        assert first["reserve_apart"]
        assert (first["temperature_c"], first["utilization_percent"], first["ecc_errors"]) == (41, 7, 0)
        assert (second["temperature_c"], second["utilization_percent"], second["ecc_errors"]) == (None, None, None)
        assert (second["mig"], second["nvlink_peers"], second["holders"]) == (None, [], [])

    def test_the_library_is_opened_once_and_kept(self, library, start_driver):
        driver = start_driver(library, TWO)
        driver.survey()
        driver.survey()
        assert driver.opened() == ["open"]

    def test_an_old_library_tells_what_it_can(self, old_library, start_driver):
        text = f"{TWO}link 0 gpu 00000000:3B:00.0\nprocess 4711 300 compute\n"
        second = start_driver(old_library, text).survey()["cards"][1]
        assert not second["reserve_apart"]
        assert second["used_bytes"] == 500 * 2**20
        assert second["holders"] == [{"pid": 4711, "memory_bytes": 300 * 2**20, "name": None}]
        # It does not say what is at the other end, but one of our cards is there.
        assert second["nvlink_peers"] == ["GPU-a"]

    def test_an_old_library_does_not_say_whether_a_strange_address_is_a_switch(self, old_library, start_driver):
        text = TWO + "link 0 gpu 00000000:AA:00.0\n"
        assert start_driver(old_library, text).survey()["cards"][1]["nvlink_peers"] is None

    def test_a_bridge_joins_its_two_cards_and_no_others(self, library, start_driver):
        pairs = {"a": "B", "b": "A", "c": "D", "d": "C"}
        text = "".join(
            f"card GPU-{name} 00000000:{name.upper()}0:00.0 NVIDIA RTX A6000\nmemory 49140 500 48640\n"
            f"link 0 gpu 00000000:{other}0:00.0\nlink 1 down\nlink 2 gpu 00000000:{other}0:00.0\n"
            for name, other in pairs.items()
        )
        cards = start_driver(library, text).survey()["cards"]
        assert [card["nvlink_peers"] for card in cards] == [["GPU-b"], ["GPU-a"], ["GPU-d"], ["GPU-c"]]

    def test_a_switch_joins_all_that_reach_it(self, library, start_driver):
        card = "card GPU-{0} 00000000:0{0}:00.0 NVIDIA H100 80GB HBM3\nmemory 81559 500 81059\n"
        text = "".join(
            (card + "link 0 switch 00000000:F0:00.0\nlink 1 switch 00000000:F1:00.0\n").format(n) for n in "123"
        )
        cards = start_driver(library, text + card.format(4)).survey()["cards"]
        peers = [card["nvlink_peers"] for card in cards]
        assert peers == [["GPU-2", "GPU-3"], ["GPU-1", "GPU-3"], ["GPU-1", "GPU-2"], []]

    def test_a_link_that_leads_nobody_knows_where_leaves_the_peers_unknown(self, library, start_driver):
        text = TWO + "link 0 unknown 00000000:F0:00.0\n"
        assert start_driver(library, text).survey()["cards"][1]["nvlink_peers"] is None

    def test_who_holds_memory_is_told_once_though_it_is_in_two_lists(self, library, start_driver):
        text = TWO + "process 1 100 compute\nprocess 1 100 graphics\nprocess 2 -1 graphics\nprocess 3 5 mps\n"
        holders = start_driver(library, text).survey()["cards"][1]["holders"]
        sizes = {holder["pid"]: holder["memory_bytes"] for holder in holders}
        assert sizes == {1: 100 * 2**20, 2: None, 3: 5 * 2**20}

    def test_the_parts_of_a_cut_card_are_told(self, library, start_driver):
        text = f"""{TWO}mig 1
instance MIG-a 4864 1 NVIDIA A100-SXM4-40GB MIG 1g.5gb
instance MIG-b 19968 3 a name that says nothing
"""
        first, second = start_driver(library, text).survey()["cards"]
        assert first["mig"] is None
        assert second["mig"] == [
            {"uuid": "MIG-a", "shape": "1g.5gb", "memory_gb": 5.1},
            {"uuid": "MIG-b", "shape": "3g.20gb", "memory_gb": 20.938},
        ]

    def test_a_card_that_could_be_cut_and_is_not_takes_engines(self, library, start_driver):
        assert start_driver(library, TWO + "mig 0\n").survey()["cards"][1]["mig"] is None

    def test_a_card_without_memory_of_its_own_is_not_broken(self, library, start_driver):
        (card,) = start_driver(library, "card GPU-s 0000000F:01:00.0 NVIDIA GB10\n").survey()["cards"]
        assert (card["memory_bytes"], card["broken"], card["pci"]) == (None, None, "000f:01:00.0")

    @pytest.mark.parametrize(
        ("function", "code", "said"),
        [
            ("nvmlDeviceGetTemperature", 15, FELL_OFF),
            ("nvmlDeviceGetNvLinkState", 15, FELL_OFF),
            ("nvmlDeviceGetMemoryInfo_v2", 16, "it needs a reset (`nvidia-smi --gpu-reset`), or a reboot"),
            ("nvmlDeviceGetMemoryInfo", 999, "the NVIDIA driver says: Unknown Error"),
        ],
    )
    def test_a_lost_card_does_not_hide_the_others(self, library, start_driver, function, code, said):
        both = "fail nvmlDeviceGetMemoryInfo_v2 999\n" if code == 999 else ""
        found = start_driver(library, f"{TWO}{both}fail {function} {code}\n").survey()
        assert [card["broken"] for card in found["cards"]] == [None, said]
        assert found["problem"] is None

    def test_a_figure_that_fails_for_itself_breaks_no_card(self, library, start_driver):
        text = (
            TWO + "temperature 50\nfail nvmlDeviceGetTemperature 999\nfail nvmlDeviceGetComputeRunningProcesses_v3 4\n"
        )
        card = start_driver(library, text).survey()["cards"][1]
        assert (card["broken"], card["temperature_c"], card["holders"]) == (None, None, [])

    def test_a_card_that_was_lost_is_back_when_it_is_back(self, library, start_driver):
        driver = start_driver(library, TWO)
        driver.read()
        driver.say(TWO + "fail nvmlDeviceGetHandleByIndex_v2 15\n")
        gone = driver.read()
        assert [(gpu["uuid"], gpu["broken"]) for gpu in gone["gpus"]] == [("GPU-a", None), ("GPU-b", FELL_OFF)]
        assert gone["gpus"][1]["memory_gb"] == 42.95
        driver.say(TWO)
        assert [gpu["broken"] for gpu in driver.read()["gpus"]] == [None, None]
        # It was opened anew for that: a library does not see by itself that a card was reset.
        assert driver.opened() == ["open", "close", "open"]

    def test_a_card_that_was_never_seen_is_told_as_a_problem(self, library, start_driver):
        found = start_driver(library, TWO + "fail nvmlDeviceGetHandleByIndex_v2 15\n").read()
        assert [gpu["uuid"] for gpu in found["gpus"]] == ["GPU-a"]
        assert found["problem"] == f"GPU 1: {FELL_OFF}"

    def test_a_driver_that_was_updated_under_us_is_told_and_tried_again(self, library, start_driver):
        driver = start_driver(library, TWO)
        driver.read()
        driver.say("fail nvmlDeviceGetCount_v2 18\n")
        found = driver.read()
        assert found["problem"] == UPDATED
        assert [gpu["broken"] for gpu in found["gpus"]] == [UPDATED, UPDATED]
        driver.say(TWO)
        found = driver.read()
        assert (found["problem"], [gpu["broken"] for gpu in found["gpus"]]) == (None, [None, None])

    def test_a_driver_that_goes_between_two_cards_is_gone_for_all(self, library, start_driver):
        found = start_driver(library, TWO + "fail nvmlDeviceGetUUID 9\n").survey()
        assert (found["cards"], found["problem"]) == ([], NOT_RUNNING)

    def test_a_driver_that_does_not_run_is_no_problem_where_there_is_no_card_for_it(self, library, start_driver):
        assert start_driver(library, "fail nvmlInitWithFlags 9\n", present=0).survey()["problem"] is None

    def test_a_driver_that_does_not_run_is_a_problem_where_there_is_a_card(self, library, start_driver):
        assert start_driver(library, "fail nvmlInitWithFlags 9\n", present=1).survey()["problem"] == NOT_RUNNING

    def test_a_driver_that_hangs_in_its_library_keeps_nobody_else_waiting(self, library, tmp_path):
        says = tmp_path / "says"
        says.write_text(f"hang nvmlDeviceGetCount_v2\n{TWO}")
        code = f"""
import threading
from pathlib import Path
from llmgw.host.gpus import NO_ANSWER, GpuReader
from llmgw.host.nvml import Nvml
now = [0.0]
reader = GpuReader((Nvml(),), classes={{}}, clock=lambda: now[0])
first = threading.Thread(target=reader.read)
first.start()
while reader.recall().problem is None:
    now[0] += 60.0
assert reader.read().problem == NO_ANSWER
Path({str(says)!r} + ".go").touch()
first.join()
assert [gpu.uuid for gpu in reader.read().gpus] == ["GPU-a", "GPU-b"]
"""
        environ = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML": str(says)}
        subprocess.run((sys.executable, "-W", "error", "-c", code), env=environ, check=True, timeout=100)

    def test_a_library_where_no_loader_looks_is_found(self, library, tmp_path):
        says = tmp_path / "says"
        says.write_text(TWO)
        code = f"""
from llmgw.host.nvml import Nvml, load_nvml
places = ("libnvidia-no.so.1", {str(library)!r})
assert len(Nvml(lambda: load_nvml(places)).survey().cards) == 2
"""
        environ = {**os.environ, "FAKE_NVML": str(says)}
        subprocess.run((sys.executable, "-c", code), env=environ, check=True, timeout=100)


# Without one


def test_a_machine_without_a_driver_is_left_in_peace():
    assert load_nvml(("libnvidia-no.so.1", "/nowhere/libnvidia-ml.so.1")) is None
    assert Nvml(lambda: None).survey() is None


def test_a_library_that_is_none_is_told(tmp_path):
    # What containers leave behind that were made where there was a driver.
    empty = tmp_path / "libnvidia-ml.so.1"
    empty.touch()
    found = Nvml(lambda: load_nvml((str(empty),))).survey()
    assert found.problem == f"the NVIDIA driver's library can't be loaded: {empty}: file too short"


class NvmlError(Exception):
    def __init__(self, value):
        super().__init__(f"number {value}")
        self.value = value


class Library:
    """What of pynvml a test needs; everything else is not supported."""

    NVMLError = NvmlError

    def __init__(self, **functions):
        self.functions = functions

    def __getattr__(self, name):
        if name.startswith(("NVML_", "nvmlMemory")):
            return 1

        def fail(*arguments):
            raise NvmlError(3)

        return self.functions.get(name, fail)


def give(value):
    return lambda *arguments: value


def fail_with(error):
    def fail(*arguments):
        raise error

    return fail


ONE_CARD = {
    "nvmlInit": give(None),
    "nvmlDeviceGetCount": give(1),
    "nvmlDeviceGetHandleByIndex": give("handle"),
    "nvmlDeviceGetUUID": give("GPU-x"),
}


def look(**functions):
    return Nvml(give(Library(**ONE_CARD | functions))).survey()


def test_a_card_of_which_only_the_uuid_is_told_is_one_still():
    (card,) = look().cards
    assert (card.uuid, card.name, card.pci, card.broken) == ("GPU-x", "NVIDIA GPU", None, None)
    assert (card.holders, card.memory_bytes, card.nvlink_peers) == (None, None, ())


def test_an_answer_that_is_no_text_is_told():
    found = look(nvmlDeviceGetUUID=fail_with(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")))
    assert "answers nonsense" in found.lost[0].reason


def test_a_user_who_may_not_ask_is_told_what_to_do():
    found = look(nvmlInit=fail_with(NvmlError(4)))
    assert found.problem == "the driver gives no permission for it: let the agent's user open /dev/nvidia*"


def test_an_unknown_trouble_is_told_in_the_drivers_words():
    assert look(nvmlInit=fail_with(NvmlError(77))).problem == "the NVIDIA driver says: number 77"


def test_a_driver_that_can_not_even_be_closed_is_closed():
    opened = []
    gone = {"nvmlDeviceGetCount": fail_with(NvmlError(1)), "nvmlShutdown": fail_with(NvmlError(1))}
    nvml = Nvml(give(Library(**ONE_CARD | gone | {"nvmlInit": lambda: opened.append("open")})))
    nvml.survey()
    nvml.survey()
    assert opened == ["open", "open"]


def test_a_driver_that_knows_of_no_links_at_all_leaves_the_peers_unknown():
    (card,) = look(nvmlDeviceGetNvLinkState=fail_with(NvmlError(13))).cards
    assert card.nvlink_peers is None


def test_a_link_without_an_address_leaves_the_peers_unknown():
    found = look(
        nvmlDeviceGetNvLinkState=give(1),
        nvmlDeviceGetNvLinkRemoteDeviceType=give(0),
        nvmlDeviceGetNvLinkRemotePciInfo=give(SimpleNamespace(busId="")),
    )
    assert found.cards[0].nvlink_peers is None


def test_a_cut_card_whose_parts_are_not_told_takes_no_engine_all_the_same():
    (card,) = look(nvmlDeviceGetMigMode=give([1, 1])).cards
    assert card.mig == ()
