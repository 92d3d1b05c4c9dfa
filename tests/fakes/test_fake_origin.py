"""The fake origin does what its tests of others rely on."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKES = str(Path(__file__).parent / "origin")
sys.path.insert(0, FAKES)
try:
    from fake_origin import FakeOrigin
finally:
    sys.path.remove(FAKES)

DATA = bytes(range(256)) * 400
KEY = "org/repo/x.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "org" / "repo").mkdir(parents=True)
    (tmp_path / KEY).write_bytes(DATA)
    (tmp_path / "org/repo/config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def origin(folder: Path) -> Iterator[FakeOrigin]:
    with FakeOrigin(folder) as found:
        yield found


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_a_file_and_a_part_of_it(origin: FakeOrigin) -> None:
    status, headers, body = get(origin.port, f"/{KEY}")
    assert (status, body) == (200, DATA)
    status, part, body = get(origin.port, f"/{KEY}", range="bytes=100-199")
    assert (status, body, part["content-range"]) == (206, DATA[100:200], f"bytes 100-199/{len(DATA)}")
    assert part["etag"] == headers["etag"]
    assert get(origin.port, f"/{KEY}", range=f"bytes={len(DATA)}-")[0] == 416
    assert origin.sent == {KEY: len(DATA) + 100}
    assert origin.requests[1].headers["range"] == "bytes=100-199"


def test_a_repository_as_the_hub_tells_it(origin: FakeOrigin) -> None:
    told = json.loads(get(origin.port, "/api/models/org/repo/revision/main?blobs=true")[2])
    assert [(each["rfilename"], each["size"], "lfs" in each) for each in told["siblings"]] == [
        ("config.json", 2, False),
        ("x.gguf", len(DATA), True),
    ]
    status, headers, _ = get(origin.port, f"/org/repo/resolve/{told['sha']}/x.gguf")
    assert (status, headers["x-repo-commit"], headers["x-linked-size"]) == (302, told["sha"], str(len(DATA)))
    assert get(origin.port, headers["location"].removeprefix(origin.url))[2] == DATA
    assert get(origin.port, "/org/repo/resolve/main/config.json")[2] == b"{}"


@pytest.mark.parametrize(
    ("path", "token", "status", "code"),
    [
        ("/api/models/org/none/revision/main", "", 401, "RepoNotFound"),
        ("/api/models/org/none/revision/main", "t", 404, "RepoNotFound"),
        ("/api/models/org/repo/revision/v1", "", 404, "RevisionNotFound"),
        ("/org/repo/resolve/main/none.gguf", "right", 404, "EntryNotFound"),
        ("/org/repo/resolve/main/x.gguf", "", 401, "GatedRepo"),
        ("/org/repo/resolve/main/x.gguf", "wrong", 403, "GatedRepo"),
    ],
)
def test_refusals_as_the_hub_tells_them(origin: FakeOrigin, path: str, token: str, status: int, code: str) -> None:
    origin.gated["org/repo"] = "right"
    told = get(origin.port, path, **({"authorization": f"Bearer {token}"} if token else {}))
    assert (told[0], told[1]["x-error-code"]) == (status, code)


@pytest.mark.parametrize("fault", [{"reset_after": 1000}, {"short_after": 1000}])
def test_a_body_that_ends_early_does_so_once(origin: FakeOrigin, fault: dict[str, int]) -> None:
    origin.fault(KEY, **fault, times=1)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        get(origin.port, f"/{KEY}")
    assert origin.sent == {KEY: 1000}
    assert get(origin.port, f"/{KEY}")[2] == DATA


def test_a_byte_is_another_one(origin: FakeOrigin) -> None:
    origin.fault(KEY, flip=5)
    body = get(origin.port, f"/{KEY}", range="bytes=3-9")[2]
    assert [at for at in range(7) if body[at] != DATA[3 + at]] == [2]


def test_what_went_quiet_goes_on_once_it_is_cleared(origin: FakeOrigin) -> None:
    origin.fault(KEY, stall_after=1000)
    threading.Timer(0.05, origin.clear).start()
    assert get(origin.port, f"/{KEY}")[2] == DATA


def test_what_is_quiet_ends_with_the_server(folder: Path) -> None:
    found: list[BaseException] = []

    def ask(port: int) -> None:
        try:
            get(port, f"/{KEY}")
        except (http.client.HTTPException, OSError) as error:
            found.append(error)

    with FakeOrigin(folder) as origin:
        origin.fault(KEY, stall_after=1000)
        asking = threading.Thread(target=ask, args=(origin.port,))
        asking.start()
        while origin.sent.get(KEY) != 1000:
            asking.join(0.01)
    asking.join(60)
    assert not asking.is_alive()


def test_as_a_program_it_is_told_what_to_do(folder: Path) -> None:
    command = [sys.executable, f"{FAKES}/fake_origin.py", "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            port = int(program.stdout.readline().rpartition(":")[2])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/fake/fault", body=json.dumps({"pattern": KEY, "no_ranges": True}))
            connection.getresponse().read()
            connection.close()
            assert get(port, f"/{KEY}", range="bytes=0-0")[0] == 200
            assert json.loads(get(port, "/fake/sent")[2]) == {KEY: len(DATA)}
            assert json.loads(get(port, "/fake/requests")[2])[0]["headers"]["range"] == "bytes=0-0"
        finally:
            program.kill()
