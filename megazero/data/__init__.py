"""Token files and the order of samples.  A training run imports only the code that reads; text is tokenized beforehand.

    text files --tokenize--> .bin/.idx --open_corpus--> Corpus.train.batch(global sample indices)

Needs numpy, not torch.  Modules that are slow to import are imported where they are used.
"""

from megazero.data.corpus import Corpus, open_corpus
from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Corpus", "IndexedDataset", "Tokenizer", "load_tokenizer", "open_corpus"]
