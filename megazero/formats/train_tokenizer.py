"""Trains a byte-level BPE tokenizer on the text that `data tokenize` reads, with the library `tokenizers`."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from megazero.data.tokenizer import END_OF_DOCUMENT_TOKENS
from megazero.formats.documents import SkippedText, cut_files, documents_of, find_files
from megazero.settings import write_text

_RANGE_BYTES: Final = 1 << 24
_LEAST: Final = 257  # a token for each byte, and the end of a document


def train_tokenizer(inputs: Sequence[str], out: Path, vocab_size: int, jsonl_key: str = "text") -> int:
    """Train a tokenizer and write it as a `tokenizer.json`; documents end with <|endoftext|>.

    Args:
        inputs, jsonl_key: the text; see `tokenize_files`.
        out: the file to write.
        vocab_size: largest number of tokens.

    Returns: the number of tokens.

    Raises:
        FileNotFoundError: an input does not exist.
        FileExistsError: `out` exists.
        ValueError: an input cannot be read, or the vocabulary is too small.
    """
    if vocab_size < _LEAST:
        raise ValueError(f"--vocab-size {vocab_size} must be at least {_LEAST}: the bytes, and the end of a document")
    if out.exists():
        raise FileExistsError(f"{out} exists: data that it has tokenized needs it; name another file")
    from tokenizers import ByteLevelBPETokenizer

    files, unread, _ = find_files(inputs)
    ranges, uncut = cut_files(files, _RANGE_BYTES)

    def texts() -> Iterator[str]:
        for problem in (*unread, *uncut):
            raise ValueError(problem)
        for each in ranges:
            for position, text in documents_of(each, jsonl_key):
                if isinstance(text, Exception):
                    raise ValueError(SkippedText(each.path, position, str(text)))
                yield text

    tokenizer, special = ByteLevelBPETokenizer(), [END_OF_DOCUMENT_TOKENS[0]]
    tokenizer.train_from_iterator(texts(), vocab_size, special_tokens=special, show_progress=sys.stderr.isatty())
    write_text(out, tokenizer.to_str(pretty=True))
    return int(tokenizer.get_vocab_size())
