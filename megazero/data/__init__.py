"""Tokens: their files, and the order of the samples.  A training run imports only what reads; text is tokenized before it.

    text files --tokenize--> .bin/.idx --open_corpus--> Corpus.train.batch(global sample indices)

Needs numpy, not torch.  What is slow to import is imported where it is used.
"""

from megazero.data.corpus import Corpus, open_corpus
from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Corpus", "IndexedDataset", "Tokenizer", "load_tokenizer", "open_corpus"]
