"""Who we are by the files of a certificate: what is made of them, and made again when one of them changes."""

from __future__ import annotations

import logging
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from llmgw.config.ordinary import read_with_stat
from llmgw.errors import UsageError

log = logging.getLogger(__name__)

T = TypeVar("T")


class TlsFiles(Protocol):
    """Where the authority, the own certificate and its key are (config has two of these)."""

    @property
    def ca(self) -> Path: ...
    @property
    def cert(self) -> Path: ...
    @property
    def key(self) -> Path: ...


class Context(ssl.SSLContext):
    """Keeps the memory BIOs with the object that speaks over them: who moves a connection elsewhere, or has a last word
    to send, needs both."""

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **named: Any) -> ssl.SSLObject:
        spoken = super().wrap_bio(incoming, outgoing, *args, **named)
        vars(spoken)["bios"] = (incoming, outgoing)
        return spoken


def load_files(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    """The context, for TLS 1.3 alone, with this certificate, and the authority believed. UsageError names the file that
    can't be used."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for file in (files.ca, files.cert, files.key):
        try:
            mode = read_with_stat(file, 1)[1].st_mode
        except OSError as error:
            raise UsageError(f"{file}: can't be read: {error.strerror}") from error
    if mode & stat.S_IROTH:
        raise UsageError(f"{files.key}: the key is readable by everybody; run: chmod o-rwx {files.key}")
    # What OpenSSL raises is an OSError too, and so is a file that went just now.
    try:
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise UsageError(f"{files.ca}: holds no certificate of an authority in PEM") from error
    try:
        # With a password at hand OpenSSL does not ask the terminal for one.
        context.load_cert_chain(files.cert, files.key, password="")
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(f"{files.key}: is not the key of the certificate {files.cert}") from error
        raise UsageError(f"{files.cert}, {files.key}: no certificate and its key, unencrypted, in PEM") from error
    return context


class Credentials(Generic[T]):
    """What is made of certificate files, and made again when one of them changes; open connections keep what they have.

    ``build`` makes it, by ``load_files``. A change that can't be used is logged once, and what worked
    goes on working: files are renewed one after the other, and between two of them they do not fit.
    """

    def __init__(self, files: TlsFiles, build: Callable[[TlsFiles], T]) -> None:
        """Raises UsageError when the files can't be used."""
        self._files = files
        self._build = build
        self._stamp = self._read_stamp()
        self._current = build(files)

    @property
    def current(self) -> T:
        """For the next connection."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current = self._build(self._files)
            except UsageError as error:
                log.warning("the changed certificate files are not used, the former ones stay: %s", error)
            else:
                log.info("%s: the changed certificate is used from now on", self._files.cert)
        return self._current

    def _read_stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, (self._files.ca, self._files.cert, self._files.key)))


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        seen = file.stat()
    except OSError:  # while a file is replaced it may be missing; the next look tells
        return None
    # Of the inode, not of the content: a chmod that makes a key usable is a change as well.
    return seen.st_ctime_ns, seen.st_size, seen.st_ino
