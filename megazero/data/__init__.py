"""Tokens: their files, and the order of the samples.  A training run imports only what reads; text is tokenized before it.

    text files --tokenize--> .bin/.idx --open_corpus--> Corpus.train.batch(global sample indices)

Needs numpy, not torch.  What is slow to import (tokenizers, filelock, process pools) is imported where it is used.
"""

from megazero.data.blend import Blend
from megazero.data.corpus import PYTHON_STDLIB, Corpus, open_corpus
from megazero.data.indexed import IndexedDataset
from megazero.data.permutation import Permutation
from megazero.data.sampler import SampleStream, ValidationStream, Windows, split
from megazero.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "PYTHON_STDLIB",
    "Blend",
    "ByteTokenizer",
    "Corpus",
    "FileTokenizer",
    "IndexedDataset",
    "Permutation",
    "SampleStream",
    "Tokenizer",
    "ValidationStream",
    "Windows",
    "load_tokenizer",
    "open_corpus",
    "split",
]
