"""The file of a bundle: what is read is what was written, or it is refused with the reason."""

import json
import os
import random
import stat
import threading
import zipfile

import pytest

from moe_ops.bundle import archive
from moe_ops.bundle.archive import MANIFEST, Refusal

PARTS = {"triton": 2, "torch": 1}
KEY = {"GPU": "none", "torch": "2"}
MEMBERS = {
    "torch/artifacts": bytes(range(256)) * 40,
    "triton/KEY/__grp__f.json": b'{"child_paths": {}}',
    "triton/KEY/f.cubin": random.Random(0).randbytes(5000),
}


def read(path):
    with archive.reading(path, PARTS) as found:
        return found.key, {name: found.read(name) for name in found.members}


@pytest.fixture
def bundle(tmp_path):
    path = tmp_path / "model.warm"
    assert archive.write(path, KEY, MEMBERS) == path.stat().st_size
    return path


def test_what_was_written_is_read(bundle):
    assert read(bundle) == (KEY, MEMBERS)
    assert os.listdir(bundle.parent) == [bundle.name]


def test_equal_bundles_are_equal_bytes(bundle, tmp_path):
    archive.write(tmp_path / "other", KEY, MEMBERS)
    assert (tmp_path / "other").read_bytes() == bundle.read_bytes()


def test_others_may_read_it(bundle):
    previous = os.umask(0o022)
    os.umask(previous)
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o666 & ~previous


def test_truncated_bundles_are_refused(bundle, tmp_path):
    content = bundle.read_bytes()
    for length in (0, 1, 30, len(content) // 3, len(content) // 2, len(content) - 1):
        cut = tmp_path / "cut"
        cut.write_bytes(content[:length])
        with pytest.raises(Refusal, match="damaged or truncated"):
            read(cut)


def test_damage_is_refused_or_of_no_effect(bundle, tmp_path):
    """Wherever bits change: dates and the like are in no use."""
    content, choose, refused = bundle.read_bytes(), random.Random(1), 0
    for _ in range(400):
        damaged = bytearray(content)
        damaged[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        try:
            key, members = read(path)
        except Refusal:
            refused += 1
        else:
            assert (key, members) == (KEY, MEMBERS)
    assert refused > 300


def forged(path, entries, said=None):
    """A zip archive of these (ZipInfo or name, content), whose manifest lists what `said` has."""
    listed = entries if said is None else said
    members = {
        getattr(name, "filename", name): {"bytes": len(c), "sha256": archive._sha256(c)}
        for name, c in listed
    }
    manifest = {"moe_ops_bundle": archive.FORMAT, "key": KEY, "members": members}
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(MANIFEST, json.dumps(manifest))
        for name, content in entries:
            file.writestr(name, content)
    return path


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "triton/../../evil", "triton/KEY/..", "triton/KEY/.", "triton//evil"),
        *("/etc/evil", "triton/KEY/sub/evil", "triton/evil", "other/evil", "evil", "triton/"),
        *("triton/KEY/a\\..\\evil", "triton/C:/evil", "torch/a/b"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(Refusal, match="lies outside|leads elsewhere"):
        read(forged(tmp_path / "forged", [(name, b"evil")]))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_are_refused(tmp_path, kind):
    entry = zipfile.ZipInfo("triton/KEY/f.cubin")
    entry.external_attr = (kind | 0o777) << 16
    with pytest.raises(Refusal, match="is not a plain file"):
        read(forged(tmp_path / "forged", [(entry, b"/etc/passwd")]))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "entries, said",
    [
        ([("torch/a", b"1"), ("torch/b", b"2")], [("torch/a", b"1")]),
        ([("torch/a", b"1")], [("torch/a", b"1"), ("torch/b", b"2")]),
        ([("torch/a", b"1"), ("torch/a", b"1")], [("torch/a", b"1")]),
        ([("torch/a", b"1")], [("torch/a", b"2")]),
        ([("torch/a", b"1")], [("torch/a", b"11")]),
    ],
)
def test_members_are_those_of_the_manifest(tmp_path, entries, said):
    with pytest.raises(Refusal, match="manifest"):
        read(forged(tmp_path / "forged", entries, said))


@pytest.mark.parametrize(
    "manifest",
    [b"", b"[]", b"{}", b"\xff", b'{"moe_ops_bundle": 1}', b"[" * 100_000],
    ids=["empty", "list", "no fields", "no text", "no members", "deep"],
)
def test_manifests_are_read_with_care(tmp_path, manifest):
    with zipfile.ZipFile(tmp_path / "forged", "w") as file:
        file.writestr(MANIFEST, manifest)
    with pytest.raises(Refusal, match="damaged or truncated: manifest.json"):
        read(tmp_path / "forged")


def test_other_files_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "other", "w") as file:
        file.writestr("data.pkl", b"")
    with pytest.raises(Refusal, match="not a bundle of moe_ops.save_warm"):
        read(tmp_path / "other")
    newer = {"moe_ops_bundle": 99, "key": {}, "members": {}}
    with zipfile.ZipFile(tmp_path / "newer", "w") as file:
        file.writestr(MANIFEST, json.dumps(newer))
    with pytest.raises(Refusal, match="its format is 99, this version's 1"):
        read(tmp_path / "newer")
    with pytest.raises(Refusal, match="cannot be read: No such file"):
        read(tmp_path / "absent")
    with pytest.raises(Refusal, match="is not a file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refusal, match="is not a file"):  # and nobody waits for its writer
        read(tmp_path / "pipe")


def test_writers_at_once_leave_one_whole_bundle(tmp_path):
    path = tmp_path / "model.warm"
    contents = [{"torch/artifacts": bytes([i]) * 300_000} for i in range(8)]
    threads = [threading.Thread(target=archive.write, args=(path, KEY, c)) for c in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(path)[1] in contents
    assert os.listdir(tmp_path) == [path.name]


def test_a_write_that_fails_leaves_what_was_there(bundle, monkeypatch):
    before = bundle.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        archive.write(bundle, KEY, {"torch/artifacts": b"new"})
    assert bundle.read_bytes() == before
    assert os.listdir(bundle.parent) == [bundle.name]
