"""Tokenizers: text comes back, documents keep their length, and a missing end-of-document token is explained."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import write_tokenizer
from tokenizers import models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megazero.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_bring_any_text_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == text


def test_bytes_cut_in_the_middle_of_a_character_still_decode():
    assert ByteTokenizer().decode(ByteTokenizer().encode("aé")[:-1]) == "a�"


def test_a_repository_of_the_hub_is_a_tokenizer_and_one_that_cannot_be_fetched_is_said_so(tmp_path, monkeypatch):
    """The cache is as huggingface_hub leaves it after a download, and there is no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--org--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    folder = cached / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    path = write_tokenizer(folder / "tokenizer.json", {"a": 0, "b": 1, "c": 2})
    assert load_tokenizer("org/model").fingerprint == load_tokenizer(path).fingerprint
    with pytest.raises(
        FileNotFoundError, match=r"none could be fetched from the Hugging Face hub.*hf download org/none"
    ):
        load_tokenizer("org/none")


def test_a_tokenizer_file_encodes_whole_documents_without_padding(tmp_path):
    path = write_tokenizer(tmp_path / "t.json", {"a": 0, "b": 1, "c": 2}, truncate=2)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("c b a b").tolist() == [2, 1, 0, 1]
    assert tokenizer.encode("c").tolist() == [2]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode(np.array([2, 1, tokenizer.eod_id])) == "c b"
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (3, 4)


def test_the_vocabulary_reaches_to_the_largest_id_though_ids_have_holes(tmp_path):
    assert load_tokenizer(write_tokenizer(tmp_path / "t.json", {"a": 0, "<eos>": 40}, "<eos>")).vocab_size == 41


def test_the_fingerprint_changes_with_the_file_and_with_the_end_of_document(tmp_path):
    one = write_tokenizer(tmp_path / "1.json", {"a": 0, "b": 1, "</s>": 2})
    other = write_tokenizer(tmp_path / "2.json", {"b": 0, "a": 1, "</s>": 2})
    prints = [FileTokenizer(one), FileTokenizer(other), FileTokenizer(one, "b"), ByteTokenizer()]
    assert len({tokenizer.fingerprint for tokenizer in prints}) == 4
    assert FileTokenizer(one).fingerprint == FileTokenizer(one).fingerprint


@pytest.mark.parametrize(
    ("beside", "special", "end"),
    [
        ({}, "<eos>", "<eos>"),  # </s> is a word, as an HTML tag of Gemma's
        ({"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "</s>"}}}, "<eos>", "</s>"),
        ({"tokenizer_config": {"eos_token": "<stop>"}, "config": {"eos_token_id": 1}}, "<eos> </s>", "<stop>"),
        ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "</s>"}}, "<eos>", "</s>"),
        ({"generation_config": {"eos_token_id": [3, 2]}}, "<stop> <eos> </s>", "<eos>"),
        ({"config": {"eos_token_id": 1}}, "<eos>", "<eos>"),  # 1 is no special token
        ({}, "<eos> </s>", r"its usual name names \['</s>', '<eos>'\]; .*--eod-token"),
        ({}, "<stop>", r"nothing names \[\]; .*--eod-token .*special tokens \['<stop>'\]"),
        ({"tokenizer_config": {"eos_token": "<end>"}}, "<eos>", r"tokenizer_config.json names \['<end>'\]"),
    ],
)
def test_documents_end_as_files_beside_a_tokenizer_say_or_its_only_usual_special_token(tmp_path, beside, special, end):
    write_tokenizer(tmp_path / "tokenizer.json", "a </s> <eos> <stop>", special)
    for name, content in beside.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=end) if " " in end else nullcontext():
        assert f"documents end with {end!r}, id " in load_tokenizer(tmp_path).about
        if beside.get("tokenizer_config", {}).get("eos_token"):
            assert PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token == end


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece", "WordLevel"])
@pytest.mark.parametrize("cut", ["ByteLevel", "Metaspace", "WhitespaceSplit"])
def test_the_name_of_a_special_token_in_a_document_is_text(kind, cut):
    inner = tokenizers.Tokenizer(getattr(models, kind)())
    inner.pre_tokenizer = getattr(pre_tokenizers, cut)()
    trainer = getattr(trainers, f"{kind.replace('PE', 'pe')}Trainer")(special_tokens=["<unk>", "[UNK]", "</s>"])
    inner.train_from_iterator(["a </s> < / s b</s>c > b"] * 9, trainer)
    tokenizer = FileTokenizer("tokenizer.json", files={"tokenizer.json": inner.to_str().encode()})
    assert all(tokenizer.eod_id not in tokenizer.encode(text) for text in ("</s>", "a</s>b", "a </s> b"))
    assert tokenizer.encode("a b < c").tolist() == inner.encode("a b < c", add_special_tokens=False).ids
    if (kind, cut) == ("BPE", "ByteLevel"):
        theirs = PreTrainedTokenizerFast(tokenizer_object=inner, split_special_tokens=True)
        assert tokenizer.encode("a</s>b").tolist() == theirs("a</s>b")["input_ids"]


def test_names_that_are_no_tokenizer_are_explained(tmp_path):
    for name, content, what in (
        ("spiece.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "a SentencePiece model .*hf download ORG/MODEL"),
        ("tekken.json", b'{"config": {}, "vocab": [{"rank": 0}]}', "is not a tokenizer JSON file but .*tekken"),
        ("r50k.tiktoken", b"IQ== 0\nIg== 1\n", "tiktoken"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=what):
            load_tokenizer(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"hf download meta-llama/Llama-3-8B tokenizer\.json"):
        load_tokenizer("meta-llama/Llama-3-8B")
    with pytest.raises(FileNotFoundError, match='neither "byte" nor'):
        load_tokenizer("bytes")
    with pytest.raises(ValueError, match="leave out eod_token"):
        load_tokenizer("byte", "</s>")
