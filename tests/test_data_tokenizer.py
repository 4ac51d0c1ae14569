"""Tokenizers: text comes back, documents keep their length, and a missing end-of-document token is explained."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megazero.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer


def write_tokenizer(path: Path, vocab: dict[str, int], special: list[str] = (), truncate: int | None = None) -> Path:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(special))
    if truncate:
        inner.enable_truncation(truncate)
        inner.enable_padding(length=truncate)
    inner.save(str(path))
    return path


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_bring_any_text_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == text


def test_bytes_cut_in_the_middle_of_a_character_still_decode():
    assert ByteTokenizer().decode(ByteTokenizer().encode("aé")[:-1]) == "a�"


def test_a_tokenizer_file_encodes_whole_documents_without_padding(tmp_path):
    path = write_tokenizer(tmp_path / "t.json", {"a": 0, "b": 1, "c": 2}, ["</s>"], truncate=2)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("c b a b").tolist() == [2, 1, 0, 1]
    assert tokenizer.encode("c").tolist() == [2]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode(np.array([2, 1, tokenizer.eod_id])) == "c b"
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (3, 4)


def test_the_vocabulary_reaches_to_the_largest_id_though_ids_have_holes(tmp_path):
    assert load_tokenizer(write_tokenizer(tmp_path / "t.json", {"a": 0, "<eos>": 40}, ["<eos>"])).vocab_size == 41


def test_a_directory_stands_for_its_tokenizer_json(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json", {"a": 0}, ["<|endoftext|>"])
    assert load_tokenizer(tmp_path).eod_id == 1


def test_a_file_without_end_of_document_says_what_it_has_and_takes_a_name(tmp_path):
    path = write_tokenizer(tmp_path / "t.json", {"a": 0, "<stop>": 1, "</s>": 2}, ["<pad>"])
    with pytest.raises(ValueError, match=r"nothing names \[\]; .*--eod-token .*special tokens \['<pad>'\]"):
        load_tokenizer(path)
    with pytest.raises(ValueError, match=r"eod_token names \['<halt>'\]"):
        load_tokenizer(path, "<halt>")
    assert load_tokenizer(path, "<stop>").eod_id == 1


def test_the_fingerprint_changes_with_the_file_and_with_the_end_of_document(tmp_path):
    one = write_tokenizer(tmp_path / "1.json", {"a": 0, "b": 1, "</s>": 2}, ["</s>"])
    other = write_tokenizer(tmp_path / "2.json", {"b": 0, "a": 1, "</s>": 2}, ["</s>"])
    prints = [FileTokenizer(one), FileTokenizer(other), FileTokenizer(one, "b"), ByteTokenizer()]
    assert len({tokenizer.fingerprint for tokenizer in prints}) == 4
    assert FileTokenizer(one).fingerprint == FileTokenizer(one).fingerprint


def test_names_that_are_no_tokenizer_are_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match='neither "byte" nor'):
        load_tokenizer("bytes")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer JSON file"):
        load_tokenizer(tmp_path / "t.json")
    with pytest.raises(ValueError, match="leave out eod_token"):
        load_tokenizer("byte", "</s>")
