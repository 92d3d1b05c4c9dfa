"""Connections that push: over real sockets, through TLS, and in memory."""

from __future__ import annotations

import contextlib
import datetime
import gc
import ipaddress
import os
import socket
import ssl
import struct
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import (
    FLUSH_SECONDS,
    LINGER_BYTES,
    LINGER_SECONDS,
    READ_BYTES,
    Memory,
    Plain,
    Tls,
    Transport,
    memory_pair,
)

Sockets = Callable[..., tuple[socket.socket, socket.socket]]
BIG = os.urandom(3_000_000)


def settle(reactor: Reactor, *, until: Callable[[], object] = lambda: False) -> None:
    """Turn until ``until`` holds, or, without it, until the kernel has nothing more to say."""
    deadline = time.monotonic() + 10
    quiet = 0
    while not until() and quiet < 5:
        while reactor.turn():
            pass
        reactor._epoll.poll(0.002)
        quiet += until is settle.__kwdefaults__["until"]
        assert time.monotonic() < deadline


def let_pass(seconds: float, reactor: Reactor, clock: Any, *, until: Callable[[], object]) -> None:
    """Let time pass, so much at once, until ``until`` holds. More than once only when the kernel took some more bytes
    late, which is progress: then the time begins anew."""
    for _ in range(20):
        clock.now += seconds
        settle(reactor)
        if until():
            return


def read_all(sock: socket.socket, reactor: Reactor, size: int) -> bytes:
    """Read ``size`` bytes of the far end, the reactor turning in between."""
    got = bytearray()
    deadline = time.monotonic() + 10
    while len(got) < size:
        while reactor.turn():
            pass
        try:
            data = sock.recv(1_000_000)
        except BlockingIOError:
            data = None
        if data == b"":
            break
        got += data or b""
        assert time.monotonic() < deadline
    return bytes(got)


def events_of(reactor: Reactor, turns: int = 20) -> int:
    """How many polls in a row find something: a descriptor that nobody serves is reported for ever."""
    found = 0
    for _ in range(turns):
        found += bool(reactor._epoll.poll(0.001))
        while reactor.turn():
            pass
    return found


def fill(sock: socket.socket) -> int:
    """Send until the kernel takes no more."""
    sent = 0
    while True:
        try:
            sent += sock.send(BIG[:100_000])
        except BlockingIOError:
            return sent


class TestPlain:
    """A socket."""

    @pytest.fixture(params=[False, True], ids=["tcp", "unix"])
    def ends(self, request: pytest.FixtureRequest, sockets: Sockets) -> tuple[socket.socket, socket.socket]:
        return sockets(unix=request.param)

    @pytest.fixture
    def owner(self, reactor: Reactor, ends: tuple[socket.socket, socket.socket], ear: Any) -> Any:
        owner = ear()
        owner.transport = Plain(reactor, ends[0], owner)
        return owner

    @pytest.fixture
    def far(self, ends: tuple[socket.socket, socket.socket]) -> socket.socket:
        return ends[1]

    @pytest.fixture
    def watched(self, reactor: Reactor, ends: tuple[socket.socket, socket.socket], ear: Any) -> Any:
        """One that also notices a peer that closes while paused: a client's."""
        owner = ear()
        owner.transport = Plain(reactor, ends[0], owner, watch_hangup=True)
        return owner

    def test_bytes_pass_both_ways(self, reactor: Reactor, owner: Any, far: socket.socket) -> None:
        assert owner.transport.send(b"hello")
        assert read_all(far, reactor, 5) == b"hello"
        far.send(b"world")
        settle(reactor, until=lambda: owner.got)
        assert owner.got == b"world"
        assert owner.transport.pending == 0

    def test_a_huge_send_waits_for_the_peer_and_says_when_it_is_out(
        self, reactor: Reactor, owner: Any, far: socket.socket
    ) -> None:
        assert not owner.transport.send(BIG)
        assert not owner.transport.send(b"and more")
        assert owner.transport.pending > 0
        assert read_all(far, reactor, len(BIG) + 8) == BIG + b"and more"
        settle(reactor, until=lambda: owner.heard)
        assert owner.heard == ["drained"]
        assert owner.transport.pending == 0
        assert events_of(reactor) == 0

    def test_a_paused_owner_hears_nothing_and_the_peer_is_held_back(
        self, reactor: Reactor, owner: Any, far: socket.socket
    ) -> None:
        owner.transport.pause()
        sent = fill(far)
        settle(reactor)
        assert owner.got == b""
        assert events_of(reactor) == 0
        owner.transport.resume()
        settle(reactor, until=lambda: len(owner.got) == sent)

    def test_an_owner_may_pause_at_its_first_bytes(self, reactor: Reactor, owner: Any, far: socket.socket) -> None:
        owner.on["received"] = owner.transport.pause
        far.send(b"x" * (READ_BYTES + 10))
        settle(reactor, until=lambda: owner.got)
        settle(reactor)
        assert len(owner.got) <= READ_BYTES
        owner.on.clear()
        owner.transport.resume()
        settle(reactor, until=lambda: len(owner.got) == READ_BYTES + 10)

    def test_the_end_is_told_once(self, reactor: Reactor, owner: Any, far: socket.socket) -> None:
        far.send(b"last")
        far.close()
        settle(reactor, until=lambda: owner.heard)
        settle(reactor)
        assert (owner.got, owner.heard[0], owner.heard.count("ended")) == (b"last", "ended", 1)
        assert events_of(reactor) <= 1

    def test_after_the_end_the_answer_can_still_be_sent(self, reactor: Reactor, owner: Any, far: socket.socket) -> None:
        far.shutdown(socket.SHUT_WR)
        settle(reactor, until=lambda: owner.heard)
        assert owner.transport.send(b"answer")
        assert read_all(far, reactor, 6) == b"answer"
        assert events_of(reactor) == 0

    def test_a_paused_owner_gets_what_came_before_the_end_and_then_the_end(
        self, reactor: Reactor, owner: Any, far: socket.socket
    ) -> None:
        owner.transport.pause()
        far.send(b"last words")
        far.close()
        settle(reactor)
        assert events_of(reactor) <= 1
        owner.transport.resume()
        settle(reactor, until=lambda: owner.heard)
        assert (owner.got, owner.heard) == (b"last words", ["ended"])

    def test_a_client_that_closes_while_it_is_paused_is_noticed(
        self, reactor: Reactor, watched: Any, far: socket.socket
    ) -> None:
        watched.transport.pause()
        far.send(b"unread")
        far.shutdown(socket.SHUT_WR)
        settle(reactor, until=lambda: watched.heard)
        assert (watched.got, watched.heard) == (b"", ["ended"])
        assert events_of(reactor) == 0
        watched.transport.resume()
        settle(reactor, until=lambda: len(watched.heard) == 2)
        assert (watched.got, watched.heard) == (b"unread", ["ended", "ended"])

    def test_a_client_that_is_gone_both_ways_is_lost(self, reactor: Reactor, watched: Any, far: socket.socket) -> None:
        watched.transport.pause()
        watched.on["ended"] = lambda: None
        far.close()
        settle(reactor, until=lambda: watched.heard)
        watched.transport.send(b"x")
        settle(reactor, until=lambda: any(word.startswith("lost") for word in watched.heard))
        assert watched.transport.closed
        assert events_of(reactor) == 0

    def test_nothing_is_sent_after_a_close(self, reactor: Reactor, owner: Any, far: socket.socket) -> None:
        owner.transport.send(b"before")
        owner.transport.close()
        assert owner.transport.closed
        assert owner.transport.send(b"after")
        owner.transport.close()
        owner.transport.abort()
        assert read_all(far, reactor, 100) == b"before"
        assert owner.heard == []

    def test_a_close_sends_what_is_pending_first(self, reactor: Reactor, owner: Any, far: socket.socket) -> None:
        owner.transport.send(BIG)
        owner.transport.close()
        assert not owner.transport.closed
        assert owner.transport.send(b"ignored")
        assert read_all(far, reactor, len(BIG) + 1) == BIG
        settle(reactor, until=lambda: owner.transport.closed)
        assert owner.heard == []

    def test_a_peer_that_never_reads_does_not_hold_a_closing_connection(
        self, reactor: Reactor, clock: Any, owner: Any, far: socket.socket
    ) -> None:
        owner.transport.send(BIG)
        owner.transport.close()
        settle(reactor)
        assert not owner.transport.closed
        let_pass(FLUSH_SECONDS + 1, reactor, clock, until=lambda: owner.transport.closed)
        assert owner.transport.closed
        assert owner.heard == []

    def test_what_was_not_taken_in_time_does_not_look_whole(
        self, reactor: Reactor, clock: Any, sockets: Sockets, ear: Any
    ) -> None:
        near, far = sockets(unix=False)
        owner = ear()
        owner.transport = Plain(reactor, near, owner, flush_seconds=300)
        owner.transport.send(BIG)
        owner.transport.close(linger=True)
        settle(reactor)
        clock.now += 299
        settle(reactor)
        assert not owner.transport.closed
        let_pass(300, reactor, clock, until=lambda: owner.transport.closed)
        assert owner.transport.closed
        with pytest.raises(ConnectionResetError):
            read_all(far, reactor, len(BIG))

    @pytest.mark.parametrize("way", ["abort", "reset", "close", "linger", "broken", "crash", "flush"])
    def test_a_connection_that_has_ended_does_not_hold_its_owner(
        self, reactor: Reactor, clock: Any, sockets: Sockets, way: str
    ) -> None:
        """They would hold each other, and all that the owner holds, until the garbage collector comes by."""

        class Held:
            def __init__(self) -> None:
                self.transport: Plain

            def received(self, data: bytes) -> None: ...
            def ended(self) -> None: ...
            def lost(self, reason: str) -> None: ...
            def drained(self) -> None: ...
            def connected(self) -> None: ...
            def on_crash(self, error: Exception) -> None: ...

        near, far = sockets(unix=False)
        gc.collect()
        gc.disable()
        try:
            owner = Held()
            died = weakref.ref(owner)
            owner.transport = Plain(reactor, near, owner)
            transport = owner.transport
            if way == "flush":
                transport.send(BIG)
                transport.close()
                settle(reactor)
                let_pass(FLUSH_SECONDS + 1, reactor, clock, until=partial(getattr, transport, "closed"))
            elif way == "linger":
                transport.close(linger=True)
                settle(reactor)
                clock.now += LINGER_SECONDS + 1
            elif way == "broken":
                far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                far.close()
            elif way == "crash":
                transport.on_crash(ValueError("no"))
            else:
                getattr(transport, way)()
            settle(reactor)
            assert transport.closed
            del owner, transport
            assert died() is None
        finally:
            gc.enable()

    def test_one_that_could_not_connect_does_not_hold_its_owner_either(self, reactor: Reactor, ear: Any) -> None:
        owner = ear()
        owner.transport = Plain.connect(reactor, "/nowhere/at/all", owner, connected=lambda: None)
        settle(reactor, until=lambda: owner.heard)
        assert owner.heard[0].startswith("lost")
        assert owner.transport.owner is not owner

    def test_a_peer_that_reads_slowly_is_waited_for(
        self, reactor: Reactor, clock: Any, owner: Any, far: socket.socket
    ) -> None:
        owner.transport.send(BIG)
        owner.transport.close()
        got = b""
        while len(got) < len(BIG):
            clock.now += FLUSH_SECONDS * 0.9
            piece = read_all(far, reactor, min(400_000, len(BIG) - len(got)))
            assert piece
            got += piece
            settle(reactor)
        assert got == BIG

    def test_a_peer_that_leaves_ends_a_closing_connection(
        self, reactor: Reactor, owner: Any, far: socket.socket
    ) -> None:
        owner.transport.send(BIG)
        owner.transport.close()
        far.close()
        settle(reactor, until=lambda: owner.transport.closed)
        assert owner.heard == []

    def test_a_lingering_close_lets_the_peer_read_the_last_words(
        self, reactor: Reactor, clock: Any, owner: Any, far: socket.socket
    ) -> None:
        far.send(b"unread body")
        owner.transport.send(b"413")
        owner.transport.close(linger=True)
        far.send(b"more of it")
        assert read_all(far, reactor, 100) == b"413"
        assert not owner.transport.closed
        far.close()
        settle(reactor, until=lambda: owner.transport.closed)
        assert (owner.got, owner.heard) == (b"", [])

    def test_lingering_ends_by_time(self, reactor: Reactor, clock: Any, owner: Any, far: socket.socket) -> None:
        owner.transport.pause()
        owner.transport.close(linger=True)
        settle(reactor)
        assert not owner.transport.closed
        owner.transport.pause()
        owner.transport.resume()
        clock.now += LINGER_SECONDS + 1
        settle(reactor)
        assert owner.transport.closed

    def test_lingering_ends_by_size(self, reactor: Reactor, owner: Any, far: socket.socket) -> None:
        owner.transport.close(linger=True)
        sent = 0
        while not owner.transport.closed and sent < LINGER_BYTES * 100:
            try:
                sent += far.send(b"x" * 50_000)
            except BlockingIOError:
                pass
            except (BrokenPipeError, ConnectionResetError):
                break
            settle(reactor)
        settle(reactor, until=lambda: owner.transport.closed)

    def test_who_raises_loses_its_own_connection_only(
        self, reactor: Reactor, owner: Any, far: socket.socket, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> None:
            raise ValueError("no")

        owner.on["received"] = fail
        far.send(b"x")
        settle(reactor, until=lambda: owner.heard)
        assert owner.heard == ["crashed: no"]
        assert owner.transport.closed

    def test_an_owner_may_close_at_its_first_bytes(self, reactor: Reactor, owner: Any, far: socket.socket) -> None:
        owner.on["received"] = owner.transport.abort
        far.send(b"x")
        far.close()
        settle(reactor, until=lambda: owner.transport.closed)
        assert owner.heard == []


def reset(sock: socket.socket) -> None:
    """Close so that the peer sees a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class TestResets:
    """TCP alone knows them."""

    @pytest.fixture
    def ends(self, sockets: Sockets) -> tuple[socket.socket, socket.socket]:
        return sockets()

    def test_a_reset_is_a_loss(self, reactor: Reactor, ends: Any, ear: Any) -> None:
        owner = ear()
        owner.transport = Plain(reactor, ends[0], owner)
        reset(ends[1])
        settle(reactor, until=lambda: owner.heard)
        assert owner.heard == ["lost: Connection reset by peer"]

    def test_a_reset_while_paused_does_not_spin_and_is_still_a_loss(
        self, reactor: Reactor, ends: Any, ear: Any
    ) -> None:
        owner = ear()
        owner.transport = Plain(reactor, ends[0], owner)
        owner.transport.pause()
        ends[1].send(b"came before")
        reset(ends[1])
        settle(reactor)
        assert owner.heard == []
        assert events_of(reactor) == 0
        owner.transport.resume()
        settle(reactor, until=lambda: owner.heard)
        assert owner.heard == ["lost: Connection reset by peer"]

    def test_a_reset_of_a_paused_client_is_told_at_once(self, reactor: Reactor, ends: Any, ear: Any) -> None:
        owner = ear()
        owner.transport = Plain(reactor, ends[0], owner, watch_hangup=True)
        owner.transport.pause()
        reset(ends[1])
        settle(reactor, until=lambda: owner.heard)
        assert owner.heard[-1].startswith("lost")
        assert events_of(reactor) == 0

    def test_the_last_words_of_an_engine_that_takes_no_more_are_read(
        self, reactor: Reactor, ends: Any, ear: Any
    ) -> None:
        """It answers 413 and closes, with most of the body unread."""
        owner = ear()
        owner.transport = Plain(reactor, ends[0], owner)
        owner.transport.pause()
        owner.transport.send(BIG)
        ends[1].send(b"413")
        ends[1].close()
        settle(reactor)
        owner.transport.resume()
        settle(reactor, until=lambda: owner.heard)
        assert owner.got == b"413"
        assert owner.heard[-1].startswith("lost")

    def test_a_reset_of_ours_is_no_end_in_good_order(self, reactor: Reactor, ends: Any, ear: Any) -> None:
        owner = ear()
        owner.transport = Plain(reactor, ends[0], owner)
        owner.transport.send(b"half")
        assert read_all(ends[1], reactor, 4) == b"half"
        owner.transport.reset()
        owner.transport.reset()
        settle(reactor)
        with pytest.raises(ConnectionResetError):
            ends[1].recv(1)

    def test_sending_to_a_peer_that_is_gone_is_a_loss_and_not_an_exception(
        self, reactor: Reactor, ends: Any, ear: Any
    ) -> None:
        owner = ear()
        owner.transport = Plain(reactor, ends[0], owner, watch_hangup=True)
        reset(ends[1])
        for _ in range(3):
            assert not owner.transport.send(b"x")
        assert owner.heard == []
        settle(reactor, until=lambda: owner.transport.closed)
        assert next(word for word in owner.heard if word != "ended").startswith("lost")


class TestConnecting:
    """Plain.connect."""

    def test_what_is_sent_meanwhile_waits(self, reactor: Reactor, ear: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            owner, told = ear(), []
            owner.transport = Plain.connect(reactor, listener.getsockname(), owner, connected=lambda: told.append(True))
            assert not owner.transport.send(b"hello")
            far, _ = listener.accept()
            with far:
                far.setblocking(False)
                assert read_all(far, reactor, 5) == b"hello"
                assert told == [True]
                far.send(b"world")
                settle(reactor, until=lambda: owner.got == b"world")
                assert owner.transport.peer == f"127.0.0.1:{listener.getsockname()[1]}"

    def test_a_unix_socket_is_dialled_by_its_path(self, reactor: Reactor, ear: Any, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            owner = ear()
            owner.transport = Plain.connect(reactor, str(tmp_path / "s"), owner)
            owner.transport.send(b"hello")
            far, _ = listener.accept()
            with far:
                far.setblocking(False)
                assert read_all(far, reactor, 5) == b"hello"

    @pytest.mark.parametrize("where", ["tcp", "unix"])
    def test_a_refusal_is_a_loss_that_says_where(self, reactor: Reactor, ear: Any, tmp_path: Path, where: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname() if where == "tcp" else str(tmp_path / "nobody")
        owner = ear()
        owner.transport = Plain.connect(reactor, address, owner)
        owner.transport.send(b"hello")
        assert owner.heard == []
        settle(reactor, until=lambda: owner.heard)
        assert owner.heard[0].startswith("lost: connecting to ")
        assert ("ECONNREFUSED" if where == "tcp" else "ENOENT") in owner.heard[0]

    def test_a_connection_may_be_given_up_before_it_stands(self, reactor: Reactor, ear: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            owner = ear()
            owner.transport = Plain.connect(reactor, listener.getsockname(), owner)
            owner.transport.abort()
            settle(reactor)
            assert owner.heard == []

    def test_a_connection_closed_before_it_stands_sends_first(self, reactor: Reactor, ear: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            owner = ear()
            owner.transport = Plain.connect(reactor, listener.getsockname(), owner)
            owner.transport.send(b"bye")
            owner.transport.close(linger=True)
            far, _ = listener.accept()
            with far:
                far.send(b"unread")
                far.setblocking(False)
                assert read_all(far, reactor, 10) == b"bye"
            assert owner.heard == []

    def test_a_paused_connection_still_comes_to_stand(self, reactor: Reactor, ear: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            owner = ear()
            owner.transport = Plain.connect(reactor, listener.getsockname(), owner)
            owner.transport.pause()
            far, _ = listener.accept()
            with far:
                far.send(b"x")
                settle(reactor)
                assert owner.got == b""
                owner.transport.resume()
                settle(reactor, until=lambda: owner.got == b"x")


# -- TLS


class Contexts:
    """A certificate for localhost, made here, and who trusts it."""

    def __init__(self, folder: Path) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(key, hashes.SHA256())
        )
        pem = folder / "both.pem"
        pem.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.load_cert_chain(pem)
        self.client = ssl.create_default_context(cafile=str(pem))
        self.stranger = ssl.create_default_context()


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return Contexts(tmp_path_factory.mktemp("tls"))


class Pairing:
    """Two ends of a TLS connection, over memory or over sockets."""

    def __init__(self, reactor: Reactor, contexts: Contexts, ear: Any, below: Callable[..., Any], **given: Any) -> None:
        self.reactor = reactor
        self.ready: list[str] = []
        self.server, self.client = ear(), ear()
        trusting = contexts.stranger if given.get("stranger") else contexts.client
        self.tls_server = Tls(
            reactor, contexts.server, self.server, server_side=True, ready=lambda: self.ready.append("server")
        )
        self.tls_client = Tls(
            reactor,
            trusting,
            self.client,
            server_hostname=given.get("name", "localhost"),
            ready=lambda: self.ready.append("client"),
        )
        self.server.transport, self.client.transport = self.tls_server, self.tls_client
        self.low_server, self.low_client = below(self.tls_server, self.tls_client)

    def attach(self) -> Pairing:
        self.tls_server.attach(self.low_server)
        self.tls_client.attach(self.low_client)
        return self


@pytest.fixture(params=["memory", "sockets"])
def pairing(
    request: pytest.FixtureRequest, reactor: Reactor, contexts: Contexts, ear: Any, sockets: Sockets
) -> Callable[..., Pairing]:
    def over_memory(first: Any, second: Any) -> tuple[Transport, Transport]:
        return memory_pair(reactor, first, second)

    def over_sockets(first: Any, second: Any) -> tuple[Transport, Transport]:
        one, two = sockets()
        return Plain(reactor, one, first), Plain(reactor, two, second)

    below = over_memory if request.param == "memory" else over_sockets
    return lambda **given: Pairing(reactor, contexts, ear, below, **given)


class TestTls:
    """TLS over either."""

    def test_both_ends_shake_hands_and_speak(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing().attach()
        settle(reactor, until=lambda: len(pair.ready) == 2)
        pair.client.transport.send(b"ping")
        pair.server.transport.send(b"pong")
        settle(reactor, until=lambda: pair.server.got and pair.client.got)
        assert (pair.server.got, pair.client.got) == (b"ping", b"pong")
        assert pair.tls_client.object.version() == "TLSv1.3"
        assert pair.tls_client.peer == pair.low_client.peer

    def test_what_is_sent_before_the_handshake_waits_for_it(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing().attach()
        assert not pair.client.transport.send(b"early ")
        assert not pair.client.transport.send(b"bird")
        assert pair.client.transport.pending >= 10
        settle(reactor, until=lambda: pair.server.got == b"early bird")
        settle(reactor, until=lambda: "drained" in pair.client.heard)

    def test_a_certificate_of_an_unknown_authority_is_refused(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing(stranger=True).attach()
        settle(reactor, until=lambda: pair.client.heard and pair.server.heard)
        assert pair.client.heard == ["lost: TLS: CERTIFICATE_VERIFY_FAILED"]
        assert pair.server.heard[0].startswith("lost: ")
        assert pair.client.transport.closed
        assert pair.ready in ([], ["server"])

    def test_a_certificate_for_another_name_is_refused(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing(name="example.org").attach()
        settle(reactor, until=lambda: pair.client.heard)
        assert pair.client.heard == ["lost: TLS: CERTIFICATE_VERIFY_FAILED"]
        pair.client.transport.send(b"into the void")
        pair.client.transport.close()
        settle(reactor)
        assert pair.server.got == b""

    def test_a_big_send_arrives_whole_and_is_held_back_meanwhile(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing().attach()
        settle(reactor, until=lambda: len(pair.ready) == 2)
        pair.server.transport.pause()
        assert not pair.client.transport.send(BIG)
        settle(reactor)
        assert pair.client.transport.pending > 0
        assert pair.server.got == b""
        pair.server.transport.resume()
        settle(reactor, until=lambda: len(pair.server.got) == len(BIG))
        assert pair.server.got == BIG
        settle(reactor, until=lambda: pair.client.heard)
        assert pair.client.heard == ["drained"]

    def test_what_is_decrypted_already_comes_after_a_pause(self, reactor: Reactor, pairing: Any) -> None:
        """Several records come in one read; epoll says nothing of those that a pause left inside."""
        pair = pairing().attach()
        settle(reactor, until=lambda: len(pair.ready) == 2)
        pair.server.on["received"] = pair.server.transport.pause
        for _ in range(3):
            pair.client.transport.send(b"x" * 16_000)
        settle(reactor, until=lambda: pair.server.got)
        settle(reactor)
        assert len(pair.server.got) < 48_000
        for _ in range(3):
            pair.server.transport.resume()
            settle(reactor)
        assert len(pair.server.got) == 48_000

    def test_a_goodbye_is_an_end(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing().attach()
        settle(reactor, until=lambda: len(pair.ready) == 2)
        pair.client.transport.send(b"last")
        pair.client.transport.close()
        pair.client.transport.close()
        settle(reactor, until=lambda: pair.server.heard)
        assert (pair.server.got, pair.server.heard) == (b"last", ["ended"])
        assert pair.client.heard == []
        pair.server.transport.close()
        settle(reactor, until=lambda: pair.client.transport.closed)

    def test_an_end_without_a_goodbye_is_a_loss(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing().attach()
        settle(reactor, until=lambda: len(pair.ready) == 2)
        pair.client.transport.send(b"half of it")
        settle(reactor, until=lambda: pair.server.got)
        pair.client.transport.reset()
        settle(reactor, until=lambda: pair.server.heard)
        assert len(pair.server.heard) == 1
        assert pair.server.heard[0].startswith("lost: ")
        assert pair.server.transport.closed

    def test_the_end_comes_after_what_a_pause_held_back(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing().attach()
        settle(reactor, until=lambda: len(pair.ready) == 2)
        pair.server.transport.pause()
        pair.client.transport.send(b"last words")
        pair.client.transport.close()
        settle(reactor)
        assert pair.server.got == b""
        pair.server.transport.resume()
        settle(reactor, until=lambda: pair.server.got)
        settle(reactor)
        assert pair.server.got == b"last words"
        assert pair.server.heard[-1] == "ended"

    def test_a_close_before_the_handshake_waits_for_what_was_sent(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing().attach()
        pair.client.transport.send(b"hello and goodbye")
        pair.client.transport.close()
        assert pair.client.transport.send(b"ignored")
        settle(reactor, until=lambda: pair.server.heard)
        assert (pair.server.got, pair.server.heard) == (b"hello and goodbye", ["ended"])
        assert pair.client.heard == []
        assert "client" not in pair.ready

    def test_a_handshake_that_never_ends_does_not_hold_a_closing_connection(
        self, reactor: Reactor, clock: Any, pairing: Any
    ) -> None:
        pair = pairing()
        pair.low_server.pause()
        pair.tls_client.attach(pair.low_client)
        pair.client.transport.send(b"hello")
        pair.client.transport.close()
        settle(reactor)
        assert not pair.client.transport.closed
        clock.now += FLUSH_SECONDS + 1
        settle(reactor)
        assert pair.client.transport.closed
        assert pair.client.heard == []

    def test_a_close_during_an_idle_handshake_ends_it(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing().attach()
        pair.client.transport.close()
        settle(reactor, until=lambda: pair.server.heard)
        assert pair.server.heard[0].startswith("lost: ")
        assert pair.client.heard == []

    def test_garbage_instead_of_a_handshake_is_a_loss(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing()
        pair.low_client.send(b"GET / HTTP/1.1\r\n\r\n")
        pair.tls_server.attach(pair.low_server)
        settle(reactor, until=lambda: pair.server.heard)
        assert pair.server.heard[0].startswith("lost: TLS: ")
        assert len(pair.server.heard) == 1

    def test_who_raises_ends_its_own_connection(
        self, reactor: Reactor, pairing: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        pair = pairing().attach()
        settle(reactor, until=lambda: len(pair.ready) == 2)

        def fail() -> None:
            raise ValueError("no")

        pair.server.on["received"] = fail
        pair.client.transport.send(b"x")
        settle(reactor, until=lambda: pair.server.heard and pair.client.heard)
        assert pair.server.heard == ["crashed: no"]
        assert pair.server.transport.closed

    def test_the_tickets_of_the_protocol_are_no_bytes_of_ours(self, reactor: Reactor, pairing: Any) -> None:
        pair = pairing().attach()
        settle(reactor, until=lambda: len(pair.ready) == 2)
        settle(reactor)
        assert (pair.client.got, pair.client.heard) == (b"", [])
        assert not pair.client.transport.closed


def test_a_tls_end_has_nothing_below_before_it_is_attached(reactor: Reactor, contexts: Contexts, ear: Any) -> None:
    tls = Tls(reactor, contexts.client, ear(), server_hostname="localhost")
    with pytest.raises(RuntimeError, match="attach"):
        _ = tls.below
    tls.abort()


def shake_by_hand(contexts: Contexts) -> tuple[ssl.SSLObject, tuple[ssl.MemoryBIO, ssl.MemoryBIO], ssl.SSLObject, Any]:
    """Two ends whose handshake is done, each with its BIOs (in, out): the server's, then the client's."""
    server, client = (ssl.MemoryBIO(), ssl.MemoryBIO()), (ssl.MemoryBIO(), ssl.MemoryBIO())
    one = contexts.server.wrap_bio(*server, server_side=True)
    two = contexts.client.wrap_bio(*client, server_hostname="localhost")
    for _ in range(3):
        for end, there, here in ((two, client, server), (one, server, client)):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
            here[0].write(there[1].read())
    return one, server, two, client


def test_a_handshake_that_was_made_elsewhere_is_gone_on_with(
    reactor: Reactor, contexts: Contexts, ear: Any, sockets: Sockets
) -> None:
    spoken, bios, other, (other_in, other_out) = shake_by_hand(contexts)
    near, far = sockets()
    # one record is here already, and no descriptor will tell of it
    other.write(b"early ")
    bios[0].write(other_out.read())
    owner = ear()
    tls = owner.transport = Tls.adopt(reactor, near, spoken, bios, owner)
    assert owner.got == b""
    assert tls.peer == "{}:{}".format(*far.getsockname())
    settle(reactor, until=lambda: owner.got == b"early ")
    other.write(b"and late")
    far.send(other_out.read())
    settle(reactor, until=lambda: owner.got == b"early and late")
    assert tls.send(b"answer")
    settle(reactor, until=lambda: other_in.write(_take(far)) and _try_read(other) == b"answer")
    tls.close()
    settle(reactor, until=lambda: other_in.write(_take(far)) and _try_read(other) == b"")
    far.close()
    settle(reactor, until=lambda: tls.closed)


def test_one_that_is_paused_when_it_is_adopted_hears_nothing_yet(
    reactor: Reactor, contexts: Contexts, ear: Any, sockets: Sockets
) -> None:
    spoken, bios, other, (_, other_out) = shake_by_hand(contexts)
    near, _far = sockets()
    other.write(b"early")
    bios[0].write(other_out.read())
    owner = ear()
    tls = owner.transport = Tls.adopt(reactor, near, spoken, bios, owner)
    tls.pause()
    settle(reactor)
    assert owner.got == b""
    tls.resume()
    settle(reactor, until=lambda: owner.got == b"early")


def test_a_socket_that_has_lost_its_peer_can_be_adopted(
    reactor: Reactor, contexts: Contexts, ear: Any, sockets: Sockets
) -> None:
    spoken, bios, _other, _ = shake_by_hand(contexts)
    near, far = sockets()
    reset(far)
    settle(reactor, until=lambda: _is_reset(near))
    owner = ear()
    tls = owner.transport = Tls.adopt(reactor, near, spoken, bios, owner)
    assert tls.peer == ""
    settle(reactor, until=lambda: owner.heard)


def test_a_local_socket_has_no_address_to_name(
    reactor: Reactor, contexts: Contexts, ear: Any, sockets: Sockets
) -> None:
    spoken, bios, _other, _ = shake_by_hand(contexts)
    near, _far = sockets(unix=True)
    owner = ear()
    owner.transport = Tls.adopt(reactor, near, spoken, bios, owner)
    assert owner.transport.peer == ""


def _take(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except BlockingIOError:
        return b""


def _is_reset(sock: socket.socket) -> bool:
    try:
        _take(sock)
    except ConnectionResetError:
        return True
    return False


def _try_read(spoken: ssl.SSLObject) -> bytes | None:
    try:
        return spoken.read(65536)
    except ssl.SSLWantReadError:
        return None


def test_tls_speaks_with_the_standard_librarys(
    reactor: Reactor, contexts: Contexts, ear: Any, sockets: Sockets
) -> None:
    near, far = sockets()
    owner = ear()
    tls = owner.transport = Tls(reactor, contexts.server, owner, server_side=True)
    tls.attach(Plain(reactor, near, tls))
    other = contexts.client.wrap_socket(far, server_hostname="localhost", do_handshake_on_connect=False)
    with other:
        for step in (other.do_handshake, lambda: other.send(b"hello"), lambda: owner.got or (other.recv(0) and None)):
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    step()
                    break
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    settle(reactor)
        settle(reactor, until=lambda: owner.got == b"hello")
        tls.send(b"x" * 100_000)
        got = b""
        while len(got) < 100_000:
            try:
                got += other.recv(65536)
            except ssl.SSLWantReadError:
                settle(reactor)
        tls.close()
        settle(reactor)
        assert other.recv(1) == b""


# -- in memory


class TestMemory:
    """A pair without a socket."""

    @pytest.fixture
    def pair(self, reactor: Reactor, ear: Any) -> tuple[Any, Any]:
        one, two = ear(), ear()
        one.transport, two.transport = memory_pair(reactor, one, two, capacity=10)
        return one, two

    def test_bytes_come_in_a_later_turn(self, reactor: Reactor, pair: tuple[Any, Any]) -> None:
        one, two = pair
        assert one.transport.send(b"hello")
        assert two.got == b""
        reactor.turn()
        assert two.got == b"hello"

    def test_a_paused_end_holds_its_peer_back(self, reactor: Reactor, pair: tuple[Any, Any]) -> None:
        one, two = pair
        two.transport.pause()
        assert one.transport.send(b"0123456789")
        assert not one.transport.send(b"abc")
        reactor.turn()
        assert (one.transport.pending, two.got, one.heard) == (3, b"", [])
        two.transport.resume()
        reactor.turn()
        assert (two.got, one.heard, one.transport.pending) == (b"0123456789abc", ["drained"], 0)

    def test_a_close_comes_after_what_was_sent(self, reactor: Reactor, pair: tuple[Any, Any]) -> None:
        one, two = pair
        one.transport.send(b"last")
        one.transport.close()
        one.transport.send(b"ignored")
        reactor.turn()
        assert (two.got, two.heard) == (b"last", ["ended"])
        assert one.transport.closed
        assert not two.transport.closed

    def test_a_paused_end_is_told_and_gets_the_rest_later(self, reactor: Reactor, pair: tuple[Any, Any]) -> None:
        one, two = pair
        two.transport.pause()
        one.transport.send(b"last")
        one.transport.close()
        reactor.turn()
        assert (two.got, two.heard) == (b"", ["ended"])
        two.transport.resume()
        reactor.turn()
        assert (two.got, two.heard) == (b"last", ["ended", "ended"])

    def test_a_reset_is_a_loss(self, reactor: Reactor, pair: tuple[Any, Any]) -> None:
        one, two = pair
        one.transport.send(b"lost")
        one.transport.reset()
        one.transport.reset()
        reactor.turn()
        assert two.heard == ["lost: the peer reset the connection"]

    def test_who_raises_ends_its_own_end(
        self, reactor: Reactor, pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        one, two = pair

        def fail() -> None:
            raise ValueError("no")

        two.on["received"] = fail
        one.transport.send(b"x")
        reactor.turn()
        assert two.heard == ["crashed: no"]
        assert one.heard == ["ended"]
        assert cast("Memory", two.transport).closed
