"""A run's data section: checked against the model, and fingerprinted by what decides the samples."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizer_files import write_tokenizer

from megazero.data import load_tokenizer, open_corpus
from megazero.data.corpus import build_python_stdlib
from megazero.data.indexed import IndexedDataset
from megazero.data.writer import IndexedWriter


def write_pair(prefix: Path, tokens: np.ndarray, lengths: list[int] | None = None, tokenizer: str = "") -> str:
    with IndexedWriter(prefix, np.int32, tokenizer) as writer:
        writer.add_documents(tokens.astype(np.int32), lengths or [len(tokens)])
    return str(prefix)


def open_with(sources, tmp_path, **changes):
    options = {"tokenizer": "byte", "seq_len": 8, "seed": 3, "validation_fraction": 0.25, "vocab_size": 300}
    return open_corpus(sources, cache_dir=tmp_path / "cache", **{**options, **changes})


def test_prefixes_are_blended_and_split(tmp_path):
    one = write_pair(tmp_path / "one", np.arange(161) % 100)
    two = write_pair(tmp_path / "two", np.arange(81) % 100 + 100)
    corpus = open_with([(one, 3.0), (two, 1.0)], tmp_path)
    assert (corpus.train.num_windows, len(corpus.validation)) == (15 + 8, 5 + 2)
    from_two = np.sum(corpus.train.batch(range(40))[:, 0] >= 100)
    assert from_two == 10
    assert open_with([(one, 1.0)], tmp_path, validation_fraction=0.0).validation is None


def test_the_standard_library_is_a_source_by_name(tmp_path):
    corpus = open_with([("python-stdlib", 1.0)], tmp_path, seq_len=128, vocab_size=257)
    assert corpus.train.num_windows * 128 > 5_000_000
    assert corpus.train.batch([0]).shape == (1, 129)
    again = open_with([("python-stdlib", 1.0)], tmp_path, seq_len=128, vocab_size=257)
    assert again.fingerprint == corpus.fingerprint


def test_the_fingerprint_follows_whatever_decides_the_samples(tmp_path):
    tokens = np.arange(400) % 100
    changed = tokens.copy()
    changed[200] += 1
    one = write_pair(tmp_path / "one", tokens, [100, 300])
    copy = write_pair(tmp_path / "copy", tokens, [100, 300])
    base = open_with([(one, 1.0)], tmp_path).fingerprint
    assert base == open_with([(copy, 2.0)], tmp_path, vocab_size=999).fingerprint  # the same samples
    others = [
        open_with([(one, 1.0)], tmp_path, seed=4),
        open_with([(one, 1.0)], tmp_path, seq_len=9),
        open_with([(one, 1.0)], tmp_path, validation_fraction=0.3),
        open_with([(one, 1.0), (copy, 1.0)], tmp_path),
        open_with([(one, 1.0), (copy, 2.0)], tmp_path),
        open_with([(write_pair(tmp_path / "other", changed, [100, 300]), 1.0)], tmp_path),
        open_with([(write_pair(tmp_path / "cut", tokens, [200, 200]), 1.0)], tmp_path),
        open_with([(write_pair(tmp_path / "short", tokens[:-1], [100, 299]), 1.0)], tmp_path),
    ]
    prints = {corpus.fingerprint for corpus in others} | {base}
    assert len(prints) == len(others) + 1


def test_every_token_of_a_large_source_is_in_its_fingerprint(tmp_path):
    tokens = np.arange(4_000_000) % 250
    base = open_with([(write_pair(tmp_path / "one", tokens), 1.0)], tmp_path).fingerprint
    for number, change in enumerate([slice(4_100, 62_000), slice(1_234_567, 1_234_568), slice(3_990_000, 3_990_001)]):
        changed = tokens.copy()
        changed[change] = 255
        other = open_with([(write_pair(tmp_path / f"{number}", changed), 1.0)], tmp_path)
        assert other.fingerprint != base


def test_the_tokenizer_is_part_of_the_identity(tmp_path):
    one, two = (write_tokenizer(tmp_path / f"{words[0]}.json", f"{words} </s>") for words in ("a b", "b a"))
    unknown = [(write_pair(tmp_path / "unknown", np.arange(400) % 3), 1.0)]
    choices = [{"tokenizer": str(one)}, {"tokenizer": str(two)}, {"tokenizer": str(one), "eod_token": "b"}, {}]
    assert len({open_with(unknown, tmp_path, **choice).fingerprint for choice in choices}) == 4
    mine = [(write_pair(tmp_path / "mine", np.arange(400) % 3, tokenizer=load_tokenizer(one).fingerprint), 1.0)]
    open_with(mine, tmp_path, **choices[0])
    for choice in choices[1:]:
        with pytest.raises(
            ValueError, match=r"mine was tokenized with a tokenizer of fingerprint .*name the tokenizer"
        ):
            open_with(mine, tmp_path, **choice)


def test_a_pair_goes_on_with_the_end_of_documents_that_it_was_written_with(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", "a <stop> </s>")
    pair = write_pair(tmp_path / "old", np.arange(400) % 3, tokenizer=load_tokenizer(path).fingerprint)  # with </s>
    before = open_with([(pair, 1.0)], tmp_path, tokenizer=str(path)).fingerprint
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    assert open_with([(pair, 1.0)], tmp_path, tokenizer=str(path)).fingerprint == before
    other = write_pair(tmp_path / "new", np.arange(400) % 3, tokenizer=load_tokenizer(path).fingerprint)  # with <stop>
    with pytest.raises(ValueError, match="new was tokenized with a tokenizer of fingerprint"):
        open_with([(other, 1.0)], tmp_path, tokenizer=str(path), ends_as=[pair])


@pytest.mark.parametrize("length", [1000, 600_000])
@pytest.mark.parametrize(("id_", "at"), [(300, 0), (-1, -1), (70_000, 500)])
def test_an_id_without_embedding_is_found_wherever_it_is(tmp_path, length, id_, at):
    tokens = np.zeros(length, np.int64)
    tokens[at] = id_
    prefix = write_pair(tmp_path / "bad", tokens)
    with pytest.raises(ValueError, match=rf"bad has ids from {min(id_, 0)} to {max(id_, 0):,}, .*vocab_size is 300"):
        open_with([(prefix, 1.0)], tmp_path)


def test_sources_that_cannot_serve_are_refused_by_name(tmp_path):
    short = write_pair(tmp_path / "short", np.zeros(8, np.int64))
    with pytest.raises(ValueError, match="'byte' has 257 ids; raise"):
        open_with([("python-stdlib", 1.0)], tmp_path, vocab_size=256)
    with pytest.raises(ValueError, match="short holds 8 tokens"):
        open_with([(short, 1.0)], tmp_path)
    with pytest.raises(FileNotFoundError, match="absent"):
        open_with([(str(tmp_path / "absent"), 1.0)], tmp_path)


def test_the_data_room_is_imported_without_torch_or_what_it_may_not_need():
    slow = {"torch", "tokenizers", "filelock", "multiprocessing.pool", "concurrent.futures.process"}
    slow |= {"megazero.data.writer"}
    code = f"import sys, megazero.data; print(sorted({slow!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_cache_that_cannot_be_made_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(OSError, match=r"cache cannot be written .*, where python-stdlib is kept; set data\.cache_dir"):
        build_python_stdlib(tmp_path / "cache", "byte")


def _llm_c(path: Path, ids: np.ndarray) -> None:
    """As llm.c's dev/data/data_common.py writes a data file."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.astype(np.uint16).tobytes())


def _datatrove(path: Path, ids: np.ndarray) -> None:
    ids.astype("<u2").tofile(path)
    np.array([300, 300, 1000], "<u8").tofile(f"{path}.index")


RAW = {
    "nanogpt.bin": lambda path, ids: ids.astype(np.uint16).tofile(path),
    "llm_c.bin": _llm_c,
    "olmo.npy": lambda path, ids: ids.astype(np.uint16).tofile(path),
    "numpy.npy": lambda path, ids: np.save(path, ids.astype(np.uint32), allow_pickle=False),
    "datatrove.ds": _datatrove,
}


@pytest.mark.parametrize("name", RAW)
def test_a_raw_token_file_is_a_source_whose_documents_end_as_it_says(name: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 1000)
    ids[[99, 499, 500]] = 256  # what ends a document in "byte"
    RAW[name](tmp_path / name, ids)
    fingerprints = {open_with([(str(tmp_path / name), 1.0)], tmp_path).fingerprint for _ in range(2)}
    assert len(fingerprints) == 1  # written, then found in the cache
    (index,) = (tmp_path / "cache").glob("*.idx")
    dataset = IndexedDataset(index.with_suffix(""))
    assert dataset.tokens.tolist() == ids.tolist()
    lengths = [300, 700] if name == "datatrove.ds" else [100, 400, 1, 499]
    assert dataset.borders.lengths(0, 1000) == lengths


def test_a_raw_token_file_that_is_cut_is_refused_and_a_pair_that_is_cut_is_written_again(tmp_path: Path) -> None:
    for end in ("bin", "idx"):
        RAW["nanogpt.bin"](tmp_path / "nanogpt.bin", np.arange(1000) % 256)
        open_with([(str(tmp_path / "nanogpt.bin"), 1.0)], tmp_path)
        next((tmp_path / "cache").glob(f"*.{end}")).unlink()
        open_with([(str(tmp_path / "nanogpt.bin"), 1.0)], tmp_path)
    RAW["datatrove.ds"](tmp_path / "empty.ds", np.arange(1000) % 256)
    (tmp_path / "empty.ds.index").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.ds\.index do not fit"):
        open_with([(str(tmp_path / "empty.ds"), 1.0)], tmp_path)
    for name in ("llm_c.bin", "datatrove.ds", "nanogpt.bin"):
        RAW[name](tmp_path / name, np.arange(1000) % 256)
        with (tmp_path / name).open("rb+") as file:
            file.truncate((tmp_path / name).stat().st_size - (1 if name == "nanogpt.bin" else 2))
        with pytest.raises(ValueError, match=name):
            open_with([(str(tmp_path / name), 1.0)], tmp_path)
