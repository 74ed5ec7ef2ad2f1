"""The file of a bundle: a zip archive of plain files, whose first member says what the others are.

`manifest.json` has the key of the bundle, and the size and SHA-256 of every other member. A
member is named "<place>/<path>". Nothing of an archive is believed before it was compared with
the manifest, and no name in it chooses a folder: it has as many parts as its place allows, none of
which leads out of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 64 << 20


class Refusal(Exception):
    """A bundle is not used; the message says why."""


class Member(NamedTuple):
    """One file of a bundle, as its manifest describes it."""

    bytes: int
    sha256: str


class Archive:
    """A bundle that is open for reading."""

    def __init__(self, file: zipfile.ZipFile, key: dict[str, str], members: dict[str, Member]):
        self._file = file
        self.key, self.members = key, members

    def read(self, name: str) -> bytes:
        """The content of a member.

        Raises:
            Refusal: it is not what the manifest says.
        """
        expected = self.members[name]
        with _damage(name), self._file.open(name) as source:
            content = source.read(expected.bytes + 1)
        if len(content) != expected.bytes or _sha256(content) != expected.sha256:
            raise Refusal(f"it is damaged: {name} is not what its manifest says")
        return content


def write(path: Path, key: Mapping[str, str], members: Mapping[str, bytes]) -> int:
    """Write a bundle, which appears whole or not at all, in place of an older one; returns its
    size in bytes.

    Raises:
        OSError: it cannot be written.
    """
    described = {name: Member(len(m), _sha256(m))._asdict() for name, m in members.items()}
    manifest = {"moe_ops_bundle": FORMAT, "key": dict(key), "members": described}
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    # not tempfile's, which only their owner may read
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(handle, "wb") as target:
            with zipfile.ZipFile(target, "w") as file:
                _put(file, MANIFEST, json.dumps(manifest, indent=1).encode())
                for name, content in members.items():
                    _put(file, name, content)
            target.flush()
            os.fsync(target.fileno())
            size = target.tell()
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    return size


@contextlib.contextmanager
def reading(path: Path, parts: Mapping[str, int]) -> Iterator[Archive]:
    """Open a bundle.

    Args:
        path: its file.
        parts: the places that it may have members of, and of how many parts a path there is.

    Raises:
        Refusal: it is absent, no bundle, truncated, or has members that it may not have.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            raise Refusal("it is not a file")
        source = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise Refusal(f"it cannot be read: {error.strerror}") from error
    with source:
        with _damage("the file"):
            file = zipfile.ZipFile(source)
        with file:
            yield Archive(file, *_manifest(file, parts))


def _manifest(
    file: zipfile.ZipFile, parts: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, Member]]:
    """The key and the members of a bundle, by its manifest."""
    entries = file.infolist()
    names = [entry.filename for entry in entries]
    if names[:1] != [MANIFEST] or entries[0].file_size > MOST_MANIFEST_BYTES:
        raise Refusal("it is not a bundle of moe_ops.save_warm")
    with _damage(MANIFEST):
        said = json.loads(file.read(MANIFEST))
        if said["moe_ops_bundle"] != FORMAT:
            raise Refusal(f"its format is {said['moe_ops_bundle']!r}, this version's {FORMAT}")
        key = {str(name): str(value) for name, value in said["key"].items()}
        members = {
            str(name): Member(int(one["bytes"]), str(one["sha256"]))
            for name, one in said["members"].items()
        }
    if sorted(names[1:]) != sorted(members):
        raise Refusal("it is damaged: its members are not those of its manifest")
    for entry in entries[1:]:
        if reason := _why_not_member(entry, members[entry.filename], parts):
            raise Refusal(f"its member {entry.filename!r} {reason}")
    return key, members


def _why_not_member(
    entry: zipfile.ZipInfo, expected: Member, parts: Mapping[str, int]
) -> str | None:
    """Why a member is not taken, else None."""
    place, *path = entry.filename.split("/")
    if len(path) != parts.get(place):
        return "lies outside of the folders for caches"
    if any(part in ("", ".", "..") or set(part) & set("\\:\0") for part in path):
        return "has a name that leads elsewhere"
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):  # a link, a folder, a device
        return "is not a plain file"
    if entry.file_size != expected.bytes:
        return f"has {entry.file_size} bytes, and {expected.bytes} by its manifest"
    return None


@contextlib.contextmanager
def _damage(what: str) -> Iterator[None]:
    """Turn what reading a damaged archive raises into a Refusal."""
    try:
        yield
    except Refusal:
        raise
    except (
        *(zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError),
        *(ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError),
        *(RecursionError, MemoryError),
    ) as error:
        raise Refusal(f"it is damaged or truncated: {what}: {_text(error)}") from error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _put(file: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name)  # its date is the same always: equal bundles are equal bytes
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    file.writestr(entry, content, zipfile.ZIP_DEFLATED)


def _sha256(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()
