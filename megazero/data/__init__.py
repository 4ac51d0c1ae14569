"""Tokens: how they are stored, made from text, and put in order.

    text files --tokenize_files--> .bin/.idx --open_corpus--> Corpus.train.batch(global sample indices)

Needs numpy, not torch. What is slow to import (tokenizers, filelock, process pools) is imported where it is used.
"""

from megazero.data.blend import Blend
from megazero.data.corpus import PYTHON_STDLIB, Corpus, open_corpus
from megazero.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megazero.data.permutation import Permutation
from megazero.data.sampler import SampleStream, ValidationStream, Windows, split
from megazero.data.stdlib import build_python_stdlib, stdlib_files
from megazero.data.tokenize import TokenizeSummary, tokenize_files
from megazero.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "PYTHON_STDLIB",
    "Blend",
    "ByteTokenizer",
    "Corpus",
    "FileTokenizer",
    "IndexedDataset",
    "IndexedWriter",
    "Permutation",
    "SampleStream",
    "TokenizeSummary",
    "Tokenizer",
    "ValidationStream",
    "Windows",
    "build_python_stdlib",
    "load_tokenizer",
    "open_corpus",
    "split",
    "stdlib_files",
    "token_dtype",
    "tokenize_files",
]
