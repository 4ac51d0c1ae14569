"""What a pair holds is known to the byte, read once, and part of the identity of a run."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from harness import run_world

from megazero.data import IndexedDataset, identity
from megazero.data.identity import Identity, changes_between, fingerprint_of, identity_path, verified_identity
from megazero.data.writer import IndexedWriter


def write_pair(prefix: Path, ids: np.ndarray, tokenizer: str = "") -> Path:
    with IndexedWriter(prefix, ids.dtype, tokenizer) as writer:
        writer.add_documents(ids, [len(document) for document in np.array_split(ids, 3)])
    return prefix


def verify(prefix: Path, cache: Path) -> Identity:
    return verified_identity(IndexedDataset(prefix), cache)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Pairs that were read as a whole, in order."""
    done = []
    inner = identity.read_identity
    monkeypatch.setattr(identity, "read_identity", lambda path, *rest: done.append(path) or inner(path, *rest))
    return done


@pytest.mark.parametrize("block", [16, 64, 1 << 24])
def test_the_content_is_a_hash_of_the_hashes_of_all_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(identity, "_BLOCK_BYTES", block)
    ids = np.arange(100, dtype="<i4")[::-1] * 7 - 5
    prefix = write_pair(tmp_path / "x", ids, "mine")
    files = [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    digests = [xxhash.xxh3_128(c[i : i + block]).digest() for c in files for i in range(0, len(c), block)]
    content = xxhash.xxh3_128(repr([len(c) for c in files]).encode() + b"".join(digests)).hexdigest()
    stored = {"format": 1, "content": content, "smallest_id": -5, "largest_id": 99 * 7 - 5, "tokenizer": "mine"}
    assert json.loads(identity_path(prefix).read_bytes()) == stored
    assert verify(prefix, tmp_path / "cache") == Identity(content, -5, 688, "mine")


def test_any_bit_that_flips_in_either_file_is_found(tmp_path):
    prefix = write_pair(tmp_path / "x", np.arange(20, dtype="<u2"))
    for suffix in (".bin", ".idx"):
        path = Path(f"{prefix}{suffix}")
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with pytest.raises(
                ValueError, match=r"is not what was written|damaged|is truncated|longer than|index|dtype"
            ):
                verify(prefix, tmp_path / f"cache{suffix}{at}")
        path.write_bytes(whole)
    verify(prefix, tmp_path / "cache")


def test_a_pair_is_read_once_and_again_when_its_files_change(tmp_path, reads):
    prefix, cache = write_pair(tmp_path / "x", np.arange(20, dtype="<u2")), tmp_path / "cache"
    reads.clear()
    first = verify(prefix, cache)
    assert [verify(prefix, cache) for _ in range(3)] == [first] * 3
    assert len(reads) == 1
    verify(prefix, tmp_path / "other machine")
    assert len(reads) == 2
    content = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(content[:4] + b"\1\1" + content[6:])  # as long as before, at the same inode
    os.utime(f"{prefix}.bin", ns=(0, 1))
    with pytest.raises(ValueError, match=r"x\.bin or \.idx is not what was written: .* copy all three files again"):
        verify(prefix, cache)
    Path(tmp_path / "copy").write_bytes(content)
    os.replace(tmp_path / "copy", f"{prefix}.bin")
    assert verify(prefix, cache) == first
    assert len(reads) == 4


def test_the_identity_is_that_of_the_files_that_are_mapped(tmp_path):
    old = write_pair(tmp_path / "x", np.arange(20, dtype="<u2"))
    new = write_pair(tmp_path / "new", np.arange(20, 40, dtype="<u2"))
    cache, dataset = tmp_path / "cache", IndexedDataset(old)
    first = verified_identity(dataset, tmp_path / "other machine")
    for path in (".bin", ".idx", ".identity.json"):
        os.replace(f"{new}{path}", f"{old}{path}")
    assert dataset.tokens[0] == 0
    with pytest.raises(ValueError, match="x changed while it was read"):
        verified_identity(dataset, cache)
    assert verify(old, cache).smallest_id == 20
    assert first.smallest_id == 0


def test_a_bit_that_flips_in_what_a_machine_remembers_makes_it_read_again(tmp_path):
    prefix, cache = write_pair(tmp_path / "x", np.arange(20, dtype="<u2")), tmp_path / "cache"
    first = verify(prefix, cache)
    (memory,) = (cache / "identities").glob("*.json")
    whole = memory.read_bytes()
    for at in range(len(whole)):
        memory.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        assert verify(prefix, cache) == first


def test_what_was_verified_when_less_was_checked_is_verified_again(tmp_path, monkeypatch, reads):
    prefix, cache = write_pair(tmp_path / "x", np.arange(20, dtype="<u2")), tmp_path / "cache"
    reads.clear()
    with monkeypatch.context() as earlier:
        earlier.setattr(identity, "_CHECKS", identity._CHECKS - 1)
        first = verify(prefix, cache)
    monkeypatch.setattr(IndexedDataset, "check_layout", lambda _: reads.append("layout"))
    assert [verify(prefix, cache) for _ in range(3)] == [first] * 3
    assert reads[1:] == ["layout", reads[0]]


def test_a_pair_without_identity_gets_one_at_its_first_use_where_it_can_be_written(tmp_path, monkeypatch, reads):
    prefix = write_pair(tmp_path / "x", np.arange(20, dtype="<u2"), "mine")
    identity_path(prefix).unlink()  # as Megatron's tools leave it
    first = verify(prefix, tmp_path / "cache")
    assert (first.largest_id, first.tokenizer) == (19, "")
    assert json.loads(identity_path(prefix).read_bytes())["content"] == first.content
    identity_path(prefix).unlink()

    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(identity, "write_identity", refuse)
    reads.clear()
    assert verify(prefix, tmp_path / "second") == verify(prefix, tmp_path / "second") == first
    assert len(reads) == 1
    assert not identity_path(prefix).exists()


def test_machines_that_share_files_read_them_once_and_each_of_many_copies_is_read_once(tmp_path, monkeypatch, reads):
    prefix, cache = write_pair(tmp_path / "x", np.arange(20, dtype="<u2")), tmp_path / "cache"
    reads.clear()
    for machine in range(5):
        monkeypatch.setattr("platform.node", lambda machine=machine: f"pod-{machine}")
        verify(prefix, cache)
    assert len(reads) == 1
    files = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    for machine in range(100):  # each has its own files under this path, as a new inode shows
        local = tmp_path / f"machine-{machine}"
        local.mkdir()
        for file in files:
            (local / file.name).write_bytes(file.read_bytes())
    held = tmp_path / "held"
    for _ in range(2):
        for machine in range(100):
            (tmp_path / f"machine-{machine}").rename(held)
            verify(held / "x", cache)
            held.rename(tmp_path / f"machine-{machine}")
    assert len(reads) == 101


def test_what_stands_in_the_way_is_named(tmp_path, monkeypatch):
    prefix = write_pair(tmp_path / "x", np.arange(20, dtype="<u2"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/identities cannot be written .* set data\.cache_dir"):
        verify(prefix, tmp_path / "file")
    inner = identity.read_identity
    monkeypatch.setattr(
        identity, "read_identity", lambda path, *rest: (inner(path, *rest), os.utime(path, ns=(0, 1)))[0]
    )
    with pytest.raises(ValueError, match="x changed while it was read"):
        verify(prefix, tmp_path / "cache")
    monkeypatch.undo()
    for damaged in ("{", "[]", '{"format": 2}', '{"format": 1, "content": "x"}'):
        identity_path(prefix).write_text(damaged)
        with pytest.raises(ValueError, match=r"x\.identity\.json is damaged .* remove it"):
            verify(prefix, tmp_path / "cache")


def _verify(_: int, prefix: Path, cache: Path) -> tuple[Identity, int]:
    reads = []
    inner = identity.read_identity
    identity.read_identity = lambda *args: reads.append(1) or inner(*args)
    return verify(prefix, cache), len(reads)


def test_of_many_processes_one_reads(tmp_path):
    prefix = write_pair(tmp_path / "x", np.arange(500_000, dtype="<i4"))
    answers = run_world(5, _verify, prefix, tmp_path / "cache")
    assert len({answer for answer, _ in answers}) == 1
    assert sum(reads for _, reads in answers) == 1


def test_what_differs_between_two_fingerprints_is_named():
    base = fingerprint_of((8, 3), "byte", ["a", "b"])
    assert changes_between(base, base) == []
    assert changes_between("", base) == []
    assert changes_between("0" * 32, base) == []  # of an earlier release, which read a sample of the tokens
    (order,) = changes_between(fingerprint_of((9, 3), "byte", ["a", "b"]), base)
    assert order.startswith("the order of the samples (weights of data.sources, ")
    (tokenizer,) = changes_between(fingerprint_of((8, 3), "c0ffee", ["a", "b"]), base)
    assert tokenizer == "the tokenizer (data.tokenizer, data.eod_token)"
    (tokens,) = changes_between(fingerprint_of((8, 3), "byte", ["b", "a"]), base)
    assert tokens.startswith("the tokens (data.sources)")
    assert changes_between("mine", "yours") == ["the data (fingerprint mine, now yours)"]
    assert changes_between("mine", base) == [f"the data (fingerprint mine, now {base})"]
