"""Files of tokenizers that know a handful of words."""

from pathlib import Path

import tokenizers


def write_tokenizer(path: Path, words: str | dict[str, int], special: str = "</s>", truncate: int = 0) -> Path:
    """Write a tokenizer of whole words, the first of which is "a" for what it does not know.  Lists are cut at spaces."""
    vocab = words if isinstance(words, dict) else {word: id_ for id_, word in enumerate(words.split())}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(special.split())
    if truncate:
        inner.enable_truncation(truncate)
        inner.enable_padding(length=truncate)
    inner.save(str(path))
    return path
