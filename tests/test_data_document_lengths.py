"""Documents of a sample: their lengths follow from the index alone, whatever the tokens are."""

import random
import struct
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_data_indexed import idx_bytes, write_by_hand

from megazero.data import Corpus, IndexedDataset, indexed, open_corpus
from megazero.data.corpus import ValidationStream
from megazero.data.identity import verified_identity
from megazero.data.sampler import Stream, Windows

Documents = list[list[int]]  # the lengths of the sequences of each


def write_documents(prefix: Path, documents: Documents, first_id: int = 0) -> IndexedDataset:
    """A pair as Megatron writes it, whose n-th token has the id `first_id` + n."""
    sizes = [size for document in documents for size in document]
    ids = iter(range(first_id, first_id + sum(sizes)))
    indices = [sum(map(len, documents[:number])) for number in range(len(documents) + 1)]
    write_by_hand(prefix, 4, "i", [[next(ids) for _ in range(size)] for size in sizes], indices)
    return IndexedDataset(prefix)


def owners(documents: Documents) -> list[int]:
    """The document of each token."""
    return [number for number, document in enumerate(documents) for _ in range(sum(document))]


def runs(values: list[int]) -> list[int]:
    """Lengths of the runs of equal values."""
    return [len(list(run)) for _, run in groupby(values)]


@given(
    documents=st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=9),
    seq_len=st.integers(1, 8),
    first=st.integers(0, 2),
)
@example([[4], [4], [8]], 4, 0)  # borders on the edges of windows, and a window inside a document
@example([[1]] * 9, 4, 0)
@example([[], [0], [2, 0, 3], [0, 0], [], [1], [6], [0], []], 3, 0)
@example([[20]], 3, 1)
def test_the_lengths_are_the_runs_of_tokens_of_one_document(tmp_path_factory, documents, seq_len, first):
    dataset = write_documents(tmp_path_factory.mktemp("x") / "x", documents)
    dataset.check_layout()
    owner = owners(documents)
    starts = [sum(map(sum, documents[:number])) for number in range(len(documents))]
    assert [dataset.borders.start(number) for number in range(len(dataset.borders))] == starts
    count = (len(owner) - 1) // seq_len - first
    windows = Windows(dataset.tokens, seq_len, first, max(count, 0), borders=dataset.borders)
    for position in range(windows.count):
        start = (first + position) * seq_len
        goes_on = owner[start + seq_len - 1] == owner[start + seq_len]
        assert windows.documents(position) == (runs(owner[start : start + seq_len]), goes_on)


# ---- Streams


def random_documents(random_: random.Random, tokens: int) -> Documents:
    """Empty ones, short ones and long ones, of up to three sequences, with so many tokens or a few more."""
    documents: Documents = []
    while sum(map(sum, documents)) < tokens:
        most = random_.choice([0, 1, 3, 40])
        documents.append([random_.randint(0, most) for _ in range(random_.randint(0, 3))])
    return documents


def test_a_stream_tells_the_lengths_of_the_samples_that_it_reads(tmp_path):
    """The ids of all sources are different, so the ids of a sample tell the documents that its tokens are of."""
    random_, owner = random.Random(5), [-1] * 4000
    sources = []
    for number, (weight, tokens) in enumerate([(3.0, 900), (1.0, 401), (0.7, 150)]):
        documents = random_documents(random_, tokens)
        write_documents(tmp_path / f"{number}", documents, 1000 * number)
        for place, document in enumerate(owners(documents)):
            owner[1000 * number + place] = 1000 * number + document
        sources.append((str(tmp_path / f"{number}"), weight))

    def check(stream: Stream, indices: list[int]) -> list[bool]:
        found = stream.documents(indices)
        for (lengths, last), sample in zip(found, stream.batch(indices).tolist(), strict=True):
            read = [owner[id_] for id_ in sample]
            assert lengths == runs(read[:-1])
            assert last == (read[-1] == read[-2])
        assert len({len(lengths) for lengths, _ in found}) > 2
        return [last for _, last in found]

    corpus = _open(sources, tmp_path)
    assert corpus.validation is not None
    assert {*check(corpus.train, random_.sample(range(10_000), 300))} == {True, False}  # many epochs
    check(corpus.validation, [*range(len(corpus.validation))])
    check(ValidationStream(corpus.train.sources), [*range(corpus.train.num_windows)])
    content = corpus.contents[sources[0][0]]
    later = ValidationStream(corpus.train.sources).behind({content: 400})
    assert later is not None
    assert len(later) < corpus.train.num_windows
    check(later, [*range(len(later))])
    assert corpus.train.documents([]) == []
    with pytest.raises(IndexError, match="-1 is negative"):
        corpus.train.documents([-1])
    with pytest.raises(IndexError, match="validation sample"):
        corpus.validation.documents([len(corpus.validation)])


def _open(sources: list[tuple[str, float]], tmp_path: Path) -> Corpus:
    return open_corpus(
        sources,
        tokenizer="byte",
        seq_len=16,
        seed=3,
        validation_fraction=0.2,
        cache_dir=tmp_path / "cache",
        vocab_size=4000,
    )


# ---- Indices whose lookups would be wrong


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_an_index_whose_sequences_have_gaps_or_whose_documents_are_in_disorder_is_refused(
    tmp_path, monkeypatch, at_once
):
    monkeypatch.setattr(indexed, "_CHECKED_AT_ONCE", at_once)
    sizes, documents = [3, 0, 1, 2, 4], [0, 2, 2, 3, 5]
    write_by_hand(tmp_path / "x", sequences=[[7] * size for size in sizes], documents=documents)
    IndexedDataset(tmp_path / "x").check_layout()
    whole = idx_bytes(8, 2, sizes, documents)
    assert (tmp_path / "x.idx").read_bytes() == whole
    pointers, indices = 34 + 4 * 5, 34 + 12 * 5

    def refusal(at: int, form: str, value: int) -> str:
        (tmp_path / "x.idx").write_bytes(whole[:at] + struct.pack(form, value) + whole[at + struct.calcsize(form) :])
        with pytest.raises(ValueError, match=r"x\.idx is damaged") as error:
            verified_identity(IndexedDataset(tmp_path / "x"), tmp_path / "cache")
        return str(error.value)

    for number in range(1, 4):
        assert "do not lie end to end; tokenize again" in refusal(pointers + 8 * number, "<q", 5)
        assert "do not lie end to end" in refusal(34 + 4 * number, "<i", -1)
        disorder = refusal(indices + 8 * number, "<q", 6 if number > 1 else 3)
        assert "are not in the order of their sequences" in disorder
    assert "sequences start at byte 2 instead of 0" in refusal(pointers, "<q", 2)
    assert "documents start at sequence 1 instead of 0" in refusal(indices, "<q", 1)
