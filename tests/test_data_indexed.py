"""The `.bin`/`.idx` pair: the bytes are Megatron's, and a pair under its final name is whole."""

import os
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from harness import killed
from hypothesis import given
from hypothesis import strategies as st

from megazero.data import IndexedDataset
from megazero.data.writer import IndexedWriter, token_dtype

DOCUMENTS = [[5, 6, 7], [], [65535], [1, 2]]


def idx_bytes(code: int, itemsize: int, sizes: list[int], documents: list[int]) -> bytes:
    """The index as Megatron's `_IndexWriter` packs it."""
    pointers = [itemsize * sum(sizes[:i]) for i in range(len(sizes))]
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(sizes))
        + struct.pack("<Q", len(documents))
        + struct.pack(f"<{len(sizes)}i", *sizes)
        + struct.pack(f"<{len(sizes)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


def write_by_hand(prefix: Path, code: int = 8, letter: str = "H", sequences=DOCUMENTS, documents=None) -> None:
    flat = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(flat)}{letter}", *flat))
    documents = list(range(len(sequences) + 1)) if documents is None else documents
    sizes = [len(sequence) for sequence in sequences]
    Path(f"{prefix}.idx").write_bytes(idx_bytes(code, struct.calcsize(letter), sizes, documents))


def test_pointers_that_wrapped_at_2_31_are_read_from_the_lengths(tmp_path):
    whole = idx_bytes(8, 2, sizes := [2**30 - 5, 2**30, 3, 9], [0, 1, 2, 3, 4])
    wrapped = np.frombuffer(whole, "<i8", 4, 34 + 16).astype("<i4").astype("<i8").tobytes()  # of int32 lengths
    (tmp_path / "w.idx").write_bytes(whole[:50] + wrapped + whole[82:])
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(2 * sum(sizes))
    (dataset := IndexedDataset(tmp_path / "w")).check_layout()
    assert dataset.borders.lengths(0, len(dataset.tokens)) == sizes


@pytest.mark.parametrize(("code", "letter", "dtype"), [(8, "H", "uint16"), (4, "i", "int32"), (5, "q", "int64")])
def test_a_pair_packed_by_hand_is_read(tmp_path, code, letter, dtype):
    write_by_hand(tmp_path / "hand", code, letter)
    dataset = IndexedDataset(tmp_path / "hand")
    assert len(dataset) == 4
    assert dataset.dtype == np.dtype(dtype)
    assert dataset.sizes.tolist() == [3, 0, 1, 2]
    assert [dataset[i].tolist() for i in range(4)] == DOCUMENTS
    assert dataset[-1].tolist() == [1, 2]
    assert dataset.tokens.tolist() == [5, 6, 7, 65535, 1, 2]
    with pytest.raises(IndexError, match="sequence 4"):
        dataset[4]


def test_documents_of_several_sequences_and_mode_bytes_are_read(tmp_path):
    write_by_hand(tmp_path / "many", sequences=[[1], [2], [3]], documents=[0, 2, 3])
    with Path(tmp_path / "many.idx").open("ab") as file:
        file.write(b"\x00\x01\x00")
    dataset = IndexedDataset(tmp_path / "many")
    assert dataset.document_indices.tolist() == [0, 2, 3]
    assert [sequence.tolist() for sequence in dataset] == [[1], [2], [3]]


@pytest.mark.parametrize(("dtype", "code", "letter"), [("uint16", 8, "H"), ("int32", 4, "i")])
def test_the_writer_writes_megatrons_bytes(tmp_path, dtype, code, letter):
    with IndexedWriter(tmp_path / "deep" / "out", dtype) as writer:
        for document in DOCUMENTS:
            writer.add_documents(np.array(document, dtype), [len(document)])
    assert (tmp_path / "deep" / "out.bin").read_bytes() == struct.pack(f"<6{letter}", 5, 6, 7, 65535, 1, 2)
    expected = idx_bytes(code, struct.calcsize(letter), [3, 0, 1, 2], [0, 1, 2, 3, 4])
    assert (tmp_path / "deep" / "out.idx").read_bytes() == expected
    assert sorted(os.listdir(tmp_path / "deep")) == ["out.bin", "out.identity.json", "out.idx"]


@given(documents=st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=6))
def test_what_is_written_is_read(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("round") / "trip"
    with IndexedWriter(prefix, token_dtype(65536)) as writer:
        for document in documents:
            writer.add_documents(np.array(document, writer.dtype), [len(document)])
    assert [sequence.tolist() for sequence in IndexedDataset(prefix)] == documents


def test_ids_take_two_bytes_while_all_of_them_fit():
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.int32


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path, suffix):
    write_by_hand(tmp_path / "x")
    (tmp_path / f"x{suffix}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"x\{suffix}: a token source is a pair"):
        IndexedDataset(tmp_path / "x")


def test_a_file_named_instead_of_its_prefix_is_explained(tmp_path):
    write_by_hand(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=r"name it by its prefix, .*x$"):
        IndexedDataset(tmp_path / "x.bin")


@pytest.mark.parametrize(("change", "fault"), [(-1, "truncated"), (1, "longer than its index says")])
def test_a_bin_of_another_size_is_refused_with_both_sizes(tmp_path, change, fault):
    write_by_hand(tmp_path / "x")
    content = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes((content + b"\x00")[: len(content) + change])
    with pytest.raises(ValueError, match=rf"{fault}: expected 12 bytes .* found {12 + change};"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize(
    ("at", "byte", "message"),
    [
        (0, b"X", "expected it to start with b'MMIDIDX"),
        (9, b"\x02", "index version 2"),
        (17, b"\x07", "dtype code 7; token ids have one of .*8 \\(uint16\\)"),
        (18, b"\x05", "5 sequences and 5 document indices take 134 bytes, found 122"),
        (-8, b"\x03", "documents end at sequence 3, its sequences end at 4"),
    ],
)
def test_a_damaged_index_is_refused_with_what_was_found(tmp_path, at, byte, message):
    write_by_hand(tmp_path / "x")
    content = bytearray((tmp_path / "x.idx").read_bytes())
    at %= len(content)
    content[at : at + 1] = byte
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(tmp_path / "x")


def test_an_index_without_documents_is_refused(tmp_path):
    write_by_hand(tmp_path / "x", documents=[])
    with pytest.raises(ValueError, match="its documents have no borders, its sequences end at 4"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("kept", [0, 33, 50])
def test_a_truncated_index_is_refused(tmp_path, kept):
    write_by_hand(tmp_path / "x")
    (tmp_path / "x.idx").write_bytes((tmp_path / "x.idx").read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"found {kept}$"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("ids", [[65536], [-1], [1.5]])
def test_an_id_that_would_wrap_is_refused(tmp_path, ids):
    with pytest.raises(ValueError, match=r"ids|integer"), IndexedWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_documents(np.array(ids), [1])
    assert os.listdir(tmp_path) == []


def _write_and_be_interrupted(prefix: Path) -> None:
    with IndexedWriter(prefix, np.int32) as writer:
        writer.add_documents(np.arange(10, dtype=np.int32), [10])
        raise KeyboardInterrupt


def test_a_failed_writer_leaves_the_old_pair_and_nothing_else(tmp_path):
    write_by_hand(tmp_path / "x")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    with pytest.raises(KeyboardInterrupt):
        _write_and_be_interrupted(tmp_path / "x")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def _write_and_die(prefix: Path) -> None:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_documents(np.arange(60_000, dtype=np.uint16), [60_000])
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_writer_leaves_nothing_under_the_final_name_and_the_next_one_succeeds(tmp_path):
    killed(lambda: _write_and_die(tmp_path / "x"))
    assert not [path.name for path in tmp_path.iterdir() if path.suffix in (".bin", ".idx")]
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_documents(np.array([3], np.uint16), [1])
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.identity.json", "x.idx"]
    assert IndexedDataset(tmp_path / "x").tokens.tolist() == [3]


def test_of_two_writers_of_a_pair_the_second_is_refused_and_waits_for_nothing(tmp_path):
    with IndexedWriter(tmp_path / "x", np.uint16) as first:
        first.add_documents(np.array([3], np.uint16), [1])
        with pytest.raises(FileExistsError, match=r"another process is writing .*x\.idx"):
            IndexedWriter(tmp_path / "x", np.uint16).__enter__()
    assert IndexedDataset(tmp_path / "x").tokens.tolist() == [3]
