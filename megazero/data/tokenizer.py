"""Converts text to ids and back: two tokenizers with the same interface.

    "byte"                  ByteTokenizer   UTF-8 bytes 0..255 and an end-of-document id 256; needs no file
    path/to/tokenizer.json  FileTokenizer   any fast Hugging Face tokenizer; also by its repository on the hub

Processes pass a tokenizer to one another by name: each calls `load_tokenizer` itself.
"""

import json
import os
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from megazero.data.sealed import LFS_HINT, parse_json
from megazero.registry import closest, did_you_mean

END_OF_DOCUMENT_TOKENS: Final = tuple(
    "<|endoftext|> <|end_of_text|> </s> <eos> <|eos|> [EOS] <EOS> <eod> <｜end▁of▁sentence｜>".split()  # noqa: SIM905
)
TOKENIZER: Final = "tokenizer.json"
# What may name the end of a text beside it, in the order in which it is asked.
_BESIDE: Final = [f"{name}.json" for name in ("tokenizer_config", "special_tokens_map", "generation_config", "config")]
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+(?<!\.json)")
_NEXT_STEP: Final = (
    "fetch a published one, hf download {} tokenizer.json tokenizer_config.json --local-dir FOLDER, let transformers "
    "write one of others, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW); or train one: megazero data tokenizer"
)


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, end of document 256.

    Attributes:
        vocab_size: the largest id plus one.
        eod_token: the argument for `load_tokenizer` that makes documents end in the same way.
        eod_id: the id that ends every document.
        fingerprint: a short name, valid in file names, that identifies the meaning of the ids, so that data of different
            tokenizers are never confused.
    """

    vocab_size: Final = 257
    eod_token: Final = None
    eod_id: Final = 256
    fingerprint: Final = "byte"

    def encode(self, text: str) -> NDArray[np.int32]:
        """Convert text to ids, int32 [length].  Never adds special tokens, even if the text contains the name of one.

        Raises: UnicodeEncodeError: the text contains half of a surrogate pair.
        """
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: ArrayLike) -> str:
        """Convert integer ids [length] to text, without special tokens.  Bytes that are not UTF-8 become U+FFFD."""
        array = np.asarray(ids, np.int64)
        return array[(array >= 0) & (array < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizers` JSON file; arguments as for `load_tokenizer`.

    Truncation and padding of the file are switched off, so a document keeps its length.  If a document contains the
    name of a special token, it is encoded as ordinary text, so that only the end of a document has the end-of-document
    token.

    Source: https://huggingface.co/docs/tokenizers
    """

    def __init__(
        self, path: str | Path, eod_token: str | None = None, written: str = "", files: dict[str, bytes] | None = None
    ) -> None:
        paths = {name: Path(path).with_name(name) for name in _BESIDE if Path(path).name == TOKENIZER}
        paths[TOKENIZER] = Path(path)
        files = files or {name: file.read_bytes() for name, file in paths.items() if file.is_file()}
        self._inner, content = _tokenizer_in(files[TOKENIZER], path), files[TOKENIZER]
        special = {id_: token.content for id_, token in self._inner.get_added_tokens_decoder().items() if token.special}
        usual = [token for token in END_OF_DOCUMENT_TOKENS if self._inner.token_to_id(token) is not None]
        known = (t for t in [*usual, *special.values()][:64] if written and fingerprint_of(content, t) in written)
        choices = {"eod_token": [eod_token], "the tokenized data": [next(known, None)]}
        choices |= {name: _ends_in(name, files.get(name, b"{}"), special) for name in _BESIDE}
        choices["its usual name"] = [token for token in usual if token in special.values()]
        named = ((by, [t for t in tokens if t and (len(tokens) == 1 or t in usual)]) for by, tokens in choices.items())
        chosen_by, found = next((choice for choice in named if choice[1]), ("nothing", []))
        if len(found) != 1 or self._inner.token_to_id(found[0]) is None:
            raise ValueError(
                f"{path} must have one token that ends documents, {chosen_by} names {found}; choose one with --eod-token "
                f"(data.eod_token in a run file), such as one of its special tokens {[*special.values()][:20]}"
            )
        self.eod_token, self.eod_id = found[0], self._inner.token_to_id(found[0])
        self.about = f"documents end with {self.eod_token!r}, id {self.eod_id}, by {chosen_by}"
        # Not the library's count: ids may have gaps, and the embedding needs a row for the largest id.
        self.vocab_size = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = fingerprint_of(content, self.eod_token)
        # A single character has no other spelling.
        self._names = {id_: name for id_, name in (special | {self.eod_id: self.eod_token}).items() if name[1:]}

    def encode(self, text: str) -> NDArray[np.int32]:
        ids = self._inner.encode(text, add_special_tokens=False).ids
        if not self._names.keys().isdisjoint(ids):  # a vocabulary may contain these names as words, too
            ids = self._without_names.encode(text, add_special_tokens=False).ids
        return np.array(ids, np.int32)

    @cached_property
    def _without_names(self) -> Any:
        """Return the tokenizer with its special tokens renamed to names that do not occur in text."""
        names, file = {*self._names.values()}, json.loads(self._inner.to_str())
        renamed = {json.dumps(name): json.dumps(f"{name}\0") for name in names}
        if merges := file["model"].get("merges"):
            file["model"]["merges"] = [pair for pair in merges if names.isdisjoint((*pair, "".join(pair)))]
        text = re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*"', lambda found: renamed.get(found[0], found[0]), json.dumps(file))
        return _tokenizer_in(text.encode(), "the renamed tokenizer")

    def decode(self, ids: ArrayLike) -> str:
        return str(self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=True))


#: What data and training need of a tokenizer.
Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer


def fingerprint_of(content: bytes, eod_token: str) -> str:
    """Return the fingerprint of a tokenizer file together with the token that ends documents."""
    return xxhash.xxh3_64_hexdigest(content + b"\0" + eod_token.encode())


def _ends_in(name: str, content: bytes, special: dict[Any, str]) -> list[str | None]:
    """Return the end-of-text tokens that a file next to a tokenizer's names.  None for an id that is not a special
    token's.
    """
    try:
        value = (found := parse_json(content)).get("eos_token", found.get("eos_token_id"))
        values = value if isinstance(value, list) else [value.get("content") if isinstance(value, dict) else value]
        return [token if isinstance(token, str) else special.get(token) for token in values]
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"the {name} beside a tokenizer has another form ({error}); mend or remove it") from None


def _tokenizer_in(content: bytes, path: str | Path) -> Any:
    import tokenizers  # slow to import, and not needed by runs on bytes

    try:
        inner = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception or ValueError
        forms = {b"v": LFS_HINT, b"\n": "a SentencePiece model (for data tokenize)", b"{": "other JSON, as tekken's"}
        what = f"{forms.get(content[:1], 'no JSON at all, as a tiktoken file')} ({error})"
        raise ValueError(f"{path} is not a tokenizer JSON file but {what}; {_NEXT_STEP.format('ORG/MODEL')}") from error
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    return inner


def tokenizer_path(name: str) -> str:
    """Return the file that a name stands for: the file itself, the one in a folder, or a hub repository's, fetched
    once.
    """
    if os.path.isdir(name):
        return os.path.join(name, TOKENIZER)
    if os.path.exists(name) or not _HUB_ID.fullmatch(name):
        return name
    from huggingface_hub import snapshot_download

    for is_local in (True, False):  # a cached repository needs no network
        with suppress(Exception):  # several libraries may raise here
            folder = snapshot_download(name, allow_patterns=[TOKENIZER, *_BESIDE], local_files_only=is_local)
            if os.path.isfile(path := os.path.join(folder, TOKENIZER)):
                return path
    return name


def load_tokenizer(name: str | Path, eod_token: str | None = None, written: str = "") -> Tokenizer:
    """Load a tokenizer by name.

    Args:
        name: "byte", a `tokenizer.json`, a directory that contains one, or the id of a repository on the Hugging Face
            hub.
        eod_token: the token that ends a document in a tokenizer file.  None takes the token of `written`; else the one
            named by the files next to a `tokenizer.json`; else the only special token among `END_OF_DOCUMENT_TOKENS`.
        written: text that contains the fingerprints of the tokenized data that the tokenizer must match.

    Raises:
        FileNotFoundError: the name is neither "byte" nor an existing file.
        ValueError: the file is not a tokenizer, has no or several end-of-document tokens, or `eod_token` was given for
            "byte".
    """
    if str(name) == "byte":
        if eod_token is not None:
            raise ValueError(f'the "byte" tokenizer ends documents with id 256; leave out eod_token={eod_token!r}')
        return ByteTokenizer()
    path = tokenizer_path(os.fspath(name))
    if not os.path.isfile(path):
        meant = did_you_mean([f'"{known}"' for known in closest(str(name), ["byte"])], f"there is no file {path}")
        is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?(?<!\.json)", str(name))
        meant += ", and none could be fetched from the Hugging Face hub" * bool(_HUB_ID.fullmatch(str(name)))
        step = _NEXT_STEP.format("ORG/MODEL" if os.path.isdir(name) or not is_id else name)
        raise FileNotFoundError(f'tokenizer {str(name)!r} is neither "byte" nor a tokenizer.json file: {meant}; {step}')
    return FileTokenizer(path, eod_token, written)
