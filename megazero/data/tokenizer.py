"""Converting text to ids and back: one protocol, two tokenizers.

    "byte"                  ByteTokenizer   UTF-8 bytes 0..255 and an end-of-document id 256; needs no file
    path/to/tokenizer.json  FileTokenizer   any fast Hugging Face tokenizer

A tokenizer is passed by its name: each process calls `load_tokenizer` for itself.
"""

from pathlib import Path
from typing import Final, Protocol

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from megazero.registry import closest, did_you_mean

END_OF_DOCUMENT_TOKENS: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<EOS>",
    "<eod>",
    "<｜end▁of▁sentence｜>",
)


class Tokenizer(Protocol):
    """What data and training need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eod_id(self) -> int:
        """The id that ends every document."""

    @property
    def fingerprint(self) -> str:
        """A file name for the meaning of the ids: data of one tokenizer is never taken for that of another."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """The ids of `text`, int32 [length], with no special token added at either end."""

    def decode(self, ids: ArrayLike) -> str:
        """The text of integer ids [length]; special tokens are left out."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, end of document 256."""

    vocab_size: Final = 257
    eod_id: Final = 256
    fingerprint: Final = "byte"

    def encode(self, text: str) -> NDArray[np.int32]:
        """As the protocol.  Raises: UnicodeEncodeError for half of a surrogate pair."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: ArrayLike) -> str:
        """As the protocol; bytes that are not UTF-8 become U+FFFD."""
        array = np.asarray(ids, np.int64)
        return array[(array >= 0) & (array < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizers` JSON file; arguments as for `load_tokenizer`.

    The file's truncation and padding are switched off: a document keeps its length.  As in that library, the text of a
    special token inside a document becomes the special token.

    Source: https://huggingface.co/docs/tokenizers
    """

    def __init__(self, path: str | Path, eod_token: str | None = None) -> None:
        import tokenizers  # slow to import, and byte runs do not need it

        content = Path(path).read_bytes()
        try:
            self._inner = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception or ValueError
            raise ValueError(f"{path} is not a tokenizer JSON file: {error}") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        tried = END_OF_DOCUMENT_TOKENS if eod_token is None else (eod_token,)
        found = [(token, id_) for token in tried if (id_ := self._inner.token_to_id(token)) is not None]
        if not found:
            raise ValueError(
                f"{path} has no end-of-document token: tried {', '.join(tried)}; "
                'name the one it has with eod_token="..."'
            )
        name, self.eod_id = found[0]
        # Not the library's count: ids may have gaps, and the embedding needs a row for the largest.
        self.vocab_size = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = fingerprint_of(content, name)

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: ArrayLike) -> str:
        return str(self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=True))


def fingerprint_of(content: bytes, eod_token: str) -> str:
    """The fingerprint of a tokenizer file and the token that ends its documents."""
    return xxhash.xxh3_64_hexdigest(content + b"\0" + eod_token.encode())


def load_tokenizer(name: str | Path, eod_token: str | None = None) -> Tokenizer:
    """The tokenizer of a name.

    Args:
        name: "byte", a `tokenizer.json`, or a directory that holds one.
        eod_token: the token that ends a document in a tokenizer file; None looks for `END_OF_DOCUMENT_TOKENS`.

    Raises:
        FileNotFoundError: neither "byte" nor a file that exists.
        ValueError: not a tokenizer file, no end-of-document token in it, or `eod_token` was named for "byte".
    """
    if str(name) == "byte":
        if eod_token is not None:
            raise ValueError(f'the "byte" tokenizer ends documents with id 256; leave out eod_token={eod_token!r}')
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        meant = did_you_mean([f'"{one}"' for one in closest(str(name), ["byte"])], f"there is no file {path}")
        raise FileNotFoundError(f'tokenizer {str(name)!r} is neither "byte" nor a tokenizer.json file: {meant}')
    return FileTokenizer(path, eod_token)
