#!/usr/bin/env python3
"""A web server that weights come from, and that misbehaves on request. Standard library only.

It serves the files of a folder at their paths, and the same files as the Hugging Face hub does: ``ORG/REPO/FILE`` below
the folder is FILE of the repository ORG/REPO.

    GET /PATH
        the file, with ETag, Last-Modified and ranges
    GET /api/models/ORG/REPO[/revision/REV][?blobs=true]
        the commit and the files, with sizes and SHA-256 of large ones
    GET /ORG/REPO/resolve/REV/FILE
        the file; a large one by a redirect to /cdn/…, on this port or, with ``cdn="other"``, on another one

A repository's commit follows from what its files hold; REV is ``main``, that commit, or a key of ``tags``. ``gated``
maps a repository to the token that it wants; one that isn't there is told as the hub tells it (401 without a token, 404
with one).

In a test::

    with FakeOrigin(folder) as origin:
        origin.fault("org/repo/x.gguf", reset_after=1000, times=1)
        ...
        assert origin.sent["org/repo/x.gguf"] < 2000       # bytes of bodies, by the file's path below the folder
        assert "authorization" not in origin.requests[-1].headers

As a program: ``python fake_origin.py --folder F [--host H] [--port N] [--cdn same|other|none]`` writes its address as
the first line, and is spoken to by POST /fake/fault {"pattern": "...", ...}, POST /fake/clear, GET /fake/sent and
GET /fake/requests.

A fault is for all requests whose path, or whose file's path below the folder, matches its pattern (fnmatch). What
spoils a body waits for an answer that has the file's bytes. Its fields:

    times, skip      it happens so many times (None: always), after it was passed over so many times
    bytes_per_s      so fast, no faster
    stall_after      goes quiet after so many bytes of a body, until the fault is cleared
    reset_after      resets the connection after so many bytes of a body
    short_after      closes the connection in order after so many bytes of a body, promising all
    flip             the byte at this offset of the file is another one
    no_ranges        a range is ignored: 200 and all of it
    no_length        the body is chunked, and nobody says how long it is
    etag             says this ETag ("": none, and no Last-Modified either)
    status           this answer and no other, with ``headers``, ``body``, and ``error_code`` as the hub says it
    redirect         to this address, with ``status`` (302)
    headers          more headers, or others; null takes one away
    api              what GET /api/models/… says instead, as JSON
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import select
import socket
import ssl
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE = (".gguf", ".safetensors", ".bin")
CHUNK = 64 * 1024


@dataclass
class Fault:
    pattern: str = "*"
    times: int | None = None
    skip: int = 0
    bytes_per_s: int | None = None
    stall_after: int | None = None
    reset_after: int | None = None
    short_after: int | None = None
    flip: int | None = None
    no_ranges: bool = False
    no_length: bool = False
    etag: str | None = None
    status: int | None = None
    error_code: str | None = None
    body: str = ""
    redirect: str | None = None
    headers: dict[str, str | None] = field(default_factory=dict)
    api: Any = None
    cleared: threading.Event = field(default_factory=threading.Event, repr=False)

    def is_for(self, *, body: bool) -> bool:
        """What spoils a file's bytes is kept for an answer that has them, past the redirect that leads there."""
        return body or any((self.status, self.redirect, self.headers, self.api is not None))


@dataclass
class Seen:
    """A request as it came; names of headers are in lower case. ``cdn``: it came to the other port."""

    method: str
    path: str
    headers: dict[str, str]
    cdn: bool = False


class FakeOrigin:
    """All of it, by threads of its own, so that it may be used from any kind of test."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        cdn: str = "same",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.sent: dict[str, int] = {}
        self.requests: list[Seen] = []
        self.connections = 0
        self.gated: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self._faults: list[Fault] = []
        self._hashes: dict[tuple[str, int, int], str] = {}
        self._has_cdn = cdn != "none"
        self._main = _Server(self, (host, port), tls)
        self._other = _Server(self, (host, 0), tls, cdn=True) if cdn == "other" else None
        self.url = self._main.url
        self.cdn_url = (self._other or self._main).url

    @property
    def port(self) -> int:
        return int(self._main.server_address[1])

    def __enter__(self) -> FakeOrigin:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        for server in self._servers():
            server.begin()

    def stop(self) -> None:
        """Every connection ends, also those that are quiet."""
        self.stopping.set()
        self.clear()
        for server in self._servers():
            server.end()

    def _servers(self) -> list[_Server]:
        return [server for server in (self._main, self._other) if server is not None]

    def fault(self, pattern: str = "*", **fields: Any) -> Fault:
        """From now on. The first one that matches a request is what happens."""
        fault = Fault(pattern=pattern, **fields)
        with self.lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """No fault any more; what is quiet goes on."""
        with self.lock:
            for fault in self._faults:
                fault.cleared.set()
            self._faults.clear()

    def forget(self) -> None:
        """Count and record anew."""
        with self.lock:
            self.sent.clear()
            self.requests.clear()

    def find_fault(self, path: str, key: str, *, body: bool) -> Fault:
        with self.lock:
            for fault in self._faults:
                if not fault.is_for(body=body):
                    continue
                if not any(fnmatch.fnmatchcase(name, fault.pattern) for name in (path, path[1:], key)):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    if fault.times == 0:
                        continue
                    fault.times -= 1
                return fault
        return Fault()

    def count(self, key: str, amount: int) -> None:
        with self.lock:
            self.sent[key] = self.sent.get(key, 0) + amount

    def path_of(self, key: str) -> Path | None:
        path = self.folder / key
        return path if path.is_file() and path.resolve().is_relative_to(self.folder.resolve()) else None

    def sha256_of(self, path: Path) -> str:
        stat = path.stat()
        mark = (str(path), stat.st_mtime_ns, stat.st_size)
        if mark not in self._hashes:
            with path.open("rb") as file:
                self._hashes[mark] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._hashes[mark]

    def files_of(self, repo: str) -> dict[str, Path]:
        folder = self.folder / repo
        found = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path for path in sorted(found)}

    def commit_of(self, repo: str) -> str:
        told = json.dumps({name: self.sha256_of(path) for name, path in self.files_of(repo).items()})
        return hashlib.sha1(told.encode()).hexdigest()

    def knows(self, repo: str, revision: str) -> bool:
        commit = self.commit_of(repo)
        return revision in ("main", commit) or self.tags.get(revision) == commit

    def describe(self, repo: str, *, blobs: bool) -> dict[str, Any]:
        """What the hub's API says of a repository."""
        siblings = []
        for name, path in self.files_of(repo).items():
            each: dict[str, Any] = {"rfilename": name}
            if blobs:
                size = path.stat().st_size
                each |= {"blobId": hashlib.sha1(self.sha256_of(path).encode()).hexdigest(), "size": size}
                if name.endswith(LARGE):
                    each["lfs"] = {"sha256": self.sha256_of(path), "size": size, "pointerSize": 135}
            siblings.append(each)
        gated = "manual" if repo in self.gated else False
        return {"id": repo, "modelId": repo, "sha": self.commit_of(repo), "gated": gated, "siblings": siblings}

    def cdn_place(self, key: str) -> str | None:
        if not self._has_cdn or not key.endswith(LARGE):
            return None
        return f"{self.cdn_url}/cdn/{quote(key)}?Signature=very-secret"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, origin: FakeOrigin, place: tuple[str, int], tls: ssl.SSLContext | None, *, cdn: bool = False
    ) -> None:
        self.origin = origin
        self.cdn = cdn
        self.tls = tls
        self.open: set[socket.socket] = set()
        super().__init__(place, _Exchange)
        host = f"[{place[0]}]" if ":" in place[0] else place[0]
        self.url = f"{'https' if tls else 'http'}://{host}:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        with self.origin.lock:
            for connection in self.open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()
        # Those that serve a connection are let end: they write what is counted.
        deadline = time.monotonic() + 10
        while self.open and time.monotonic() < deadline:
            time.sleep(0.005)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self.origin.lock:
            self.open.add(request)
            self.origin.connections += 1
        connection = request
        try:
            if self.tls is not None:
                connection = self.tls.wrap_socket(request, server_side=True)
                with self.origin.lock:
                    self.open.add(connection)
            self.finish_request(connection, client_address)
        except (OSError, ValueError):
            pass
        finally:
            with self.origin.lock:
                self.open -= {request, connection}
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            connection.close()
            request.close()


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    # A head and the first bytes behind it go as two writes, and neither waits for the other's acknowledgement.
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        origin = self.server.origin
        split = urlsplit(self.path)
        path = unquote(split.path)
        if path.startswith("/fake/"):
            self._control(path)
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        with origin.lock:
            origin.requests.append(Seen(self.command, self.path, headers, self.server.cdn))
        repo, revision, key = _read_path(split.path)
        leads_on = repo is not None and (key == repo or origin.cdn_place(key) is not None)
        fault = origin.find_fault(path, key, body=not leads_on)
        if fault.redirect is not None:
            self._answer(fault.status or 302, b"", {"location": fault.redirect}, fault)
        elif fault.status is not None:
            code = {"x-error-code": fault.error_code} if fault.error_code else {}
            self._answer(fault.status, fault.body.encode(), code, fault)
        elif repo is None:
            self._serve(key, {}, fault)
        elif self._may_see(repo, revision, is_api=key == repo, fault=fault):
            if key == repo:
                blobs = parse_qs(split.query).get("blobs") == ["true"]
                told = origin.describe(repo, blobs=blobs) if fault.api is None else fault.api
                self._answer(200, json.dumps(told).encode(), {"content-type": "application/json"}, fault)
            else:
                self._resolve(repo, key, fault)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if self.path == "/fake/fault":
            self.server.origin.fault(**body)
        elif self.path == "/fake/clear":
            self.server.origin.clear()
        self._answer(200, b"{}", {}, Fault())

    def _control(self, path: str) -> None:
        origin = self.server.origin
        with origin.lock:
            told: Any = origin.sent if path == "/fake/sent" else [asdict(seen) for seen in origin.requests]
            body = json.dumps(told).encode()
        self._answer(200, body, {"content-type": "application/json"}, Fault())

    def _may_see(self, repo: str, revision: str, *, is_api: bool, fault: Fault) -> bool:
        """As the hub has it: what is gated is listed for all, and given to those who may."""
        origin = self.server.origin
        told = self.headers.get("authorization", "").removeprefix("Bearer ")
        if not (origin.folder / repo).is_dir():
            self._refuse(404 if told else 401, "RepoNotFound", "Repository not found", fault)
        elif not origin.knows(repo, revision):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}", fault)
        elif not is_api and repo in origin.gated and told != origin.gated[repo]:
            self._refuse(403 if told else 401, "GatedRepo", f"Access to model {repo} is restricted", fault)
        else:
            return True
        return False

    def _refuse(self, status: int, code: str, message: str, fault: Fault) -> None:
        headers = {"x-error-code": code, "x-error-message": message, "content-type": "application/json"}
        self._answer(status, json.dumps({"error": message}).encode(), headers, fault)

    def _resolve(self, repo: str, key: str, fault: Fault) -> None:
        origin = self.server.origin
        path = origin.path_of(key)
        headers = {"x-repo-commit": origin.commit_of(repo)}
        if path is None:
            self._refuse(404, "EntryNotFound", "Entry not found", fault)
            return
        place = origin.cdn_place(key)
        if key.endswith(LARGE):
            linked = {"x-linked-size": str(path.stat().st_size), "x-linked-etag": f'"{origin.sha256_of(path)}"'}
            headers |= linked
        if place is None:
            self._serve(key, headers, fault)
        else:
            self._answer(302, b"", {**headers, "location": place}, fault)

    def _serve(self, key: str, headers: dict[str, str], fault: Fault) -> None:
        path = self.server.origin.path_of(key)
        if path is None:
            self._answer(404, b"not here", {}, fault)
            return
        stat = path.stat()
        size = stat.st_size
        etag = f'"{stat.st_mtime_ns:x}-{size:x}"' if fault.etag is None else fault.etag
        marks = {"etag": etag, "last-modified": formatdate(stat.st_mtime, usegmt=True)} if etag else {}
        headers = {**marks, "content-type": "application/octet-stream", **headers}
        asked = None if fault.no_ranges else self.headers.get("range")
        if not fault.no_ranges:
            headers["accept-ranges"] = "bytes"
        start, stop, status = 0, size, 200
        if asked is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(0, size - int(last))
            stop = min(size, int(last) + 1) if first and last else size
            if start >= size or start >= stop:
                self._answer(416, b"", {"content-range": f"bytes */{size}"}, fault)
                return
            headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
            status = 206
        length = None if fault.no_length else stop - start
        self._head(status, length, headers, fault)
        if self.command != "HEAD":
            self._send_file(path, key, (start, stop), fault)

    def _head(self, status: int, length: int | None, headers: dict[str, str], fault: Fault) -> None:
        told: dict[str, str | None] = {**headers}
        if length is None:
            told["transfer-encoding"] = "chunked"
        else:
            told["content-length"] = str(length)
        self.send_response(status)
        for name, value in {**told, **fault.headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()

    def _answer(self, status: int, body: bytes, headers: dict[str, str], fault: Fault) -> None:
        self._head(status, len(body), headers, fault)
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def _send_file(self, path: Path, key: str, part: tuple[int, int], fault: Fault) -> None:
        origin = self.server.origin
        start, stop = part
        end = {start + after for after in (fault.reset_after, fault.short_after) if after is not None}
        end_at = min(end, default=stop)
        plain = not fault.no_length and fault.flip is None and self.server.tls is None
        step = CHUNK if fault.bytes_per_s is None else max(1024, min(CHUNK, fault.bytes_per_s // 20))
        stall_at = None if fault.stall_after is None else start + fault.stall_after
        with path.open("rb") as file:
            at = start
            while at < min(end_at, stop):
                if stall_at is not None and at >= stall_at:
                    self._stall(fault)
                    stall_at = None
                upto = min(stop, end_at, stall_at if stall_at is not None else stop)
                upto = min(upto, at + (4 * CHUNK if plain and fault.bytes_per_s is None else step))
                # Before it goes out: who has read all of it finds it counted.
                origin.count(key, upto - at)
                sent = 0
                try:
                    if plain and fault.bytes_per_s is None:
                        file.seek(at)
                        try:
                            self.connection.sendfile(file, at, upto - at)
                        finally:
                            sent = file.tell() - at
                    else:
                        sent = self._send_some(file, (at, upto), fault)
                finally:
                    origin.count(key, sent - (upto - at))
                if not sent:
                    break
                at += sent
        if fault.reset_after is not None and end_at < stop:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        if end_at < stop or at < stop:
            self.close_connection = True
        elif fault.no_length:
            self.connection.sendall(b"0\r\n\r\n")

    def _send_some(self, file: Any, part: tuple[int, int], fault: Fault) -> int:
        start, stop = part
        file.seek(start)
        data = bytearray(file.read(stop - start))
        if fault.flip is not None and start <= fault.flip < start + len(data):
            data[fault.flip - start] ^= 1
        framed = b"%x\r\n%b\r\n" % (len(data), data) if fault.no_length else data
        self.connection.sendall(framed)
        if fault.bytes_per_s is not None and not fault.cleared.is_set():
            fault.cleared.wait(len(data) / fault.bytes_per_s)
        return len(data)

    def _stall(self, fault: Fault) -> None:
        """Until it is cleared, or nobody is there any more."""
        while not fault.cleared.wait(0.02):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, 0 if self.server.tls else socket.MSG_PEEK):
                raise ConnectionResetError


def _read_path(path: str) -> tuple[str | None, str, str]:
    """The repository and revision that a path is about (None: neither), and the file below the folder."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[:2] == ["api", "models"] and len(parts) in (4, 6):
        repo = "/".join(parts[2:4])
        return repo, parts[5] if len(parts) == 6 else "main", repo
    if len(parts) > 4 and parts[2] == "resolve":
        repo = "/".join(parts[:2])
        return repo, parts[3], "/".join([repo, *parts[4:]])
    return None, "", "/".join(parts[1:] if parts[0] == "cdn" else parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--cdn", choices=("same", "other", "none"), default="same")
    options = parser.parse_args()
    with FakeOrigin(options.folder, host=options.host, port=options.port, cdn=options.cdn) as origin:
        sys.stdout.write(f"{origin.url}\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
