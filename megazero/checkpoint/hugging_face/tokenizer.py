"""The tokenizer of a model, as files that `transformers.AutoTokenizer` loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.checkpoint.folder import Folder, LocalFolder
from megazero.checkpoint.index import HF_CONFIG, CheckpointError, TrainerState, to_json
from megazero.data.identity import tokenizer_part
from megazero.data.sealed import parse_json
from megazero.data.tokenizer import END_OF_DOCUMENT_TOKENS, ByteTokenizer, fingerprint_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OTHERS = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")
_FILES = (TOKENIZER, TOKENIZER_CONFIG, GENERATION, *_OTHERS, "chat_template.jinja")


def tokenizer_files(folder: Folder) -> dict[str, bytes]:
    """The files of a directory that describe its tokenizer, and how to generate text with it.

    Raises: CheckpointError where the latter is no JSON object.
    """
    files = {name: folder.read(name) for name in _FILES if folder.has(name)}
    if not isinstance(_parsed(files.get(GENERATION, b"{}")), dict):
        raise CheckpointError(f"{folder}/{GENERATION} must hold a JSON object; mend or remove it")
    return files


def _parsed(text: bytes) -> object:
    try:
        return parse_json(text)
    except ValueError:
        return None


def tokenizer_of(folder: Folder, trainer: TrainerState) -> tuple[dict[str, bytes], str]:
    """The tokenizer's files of a checkpoint, and a line about them.

    An imported checkpoint has them in its own directory; for others `data.tokenizer` of the run names them.
    """
    own = tokenizer_files(folder)
    if TOKENIZER in own:
        return _completed(own, trainer), f"the tokenizer of {folder}"
    named = str(trainer.config.get("data", {}).get("tokenizer", ""))
    if named in ("", "byte"):
        return own, "no tokenizer: the run read bytes" if named else "no tokenizer: the checkpoint names none"
    path = Path(named) / TOKENIZER if Path(named).is_dir() else Path(named)
    if not path.is_file():
        missing = f"data.tokenizer={named} of the run does not exist; copy it beside the weights yourself"
        return own, f"no tokenizer: {missing}"
    content, wanted = path.read_bytes(), tokenizer_part(trainer.data_fingerprint)
    if _tokenizer_in(content) is None:
        return own, f"no tokenizer: {named} is no file of the tokenizers library, and was not copied"
    name = _end_of_document(content, trainer)[1]
    if wanted is not None and fingerprint_of(content, name or "") != wanted:
        return (
            own,
            f"no tokenizer: {named} is no longer the file that the run read; copy that one beside the weights yourself",
        )
    beside = tokenizer_files(LocalFolder(path.parent)) if path.name == TOKENIZER else {}
    return _completed(beside | {TOKENIZER: content}, trainer), f"the tokenizer {path}"


def _completed(files: dict[str, bytes], trainer: TrainerState) -> dict[str, bytes]:
    """With the configuration that transformers needs beside a tokenizer.json."""
    if TOKENIZER_CONFIG in files:
        return files
    name = _end_of_document(files[TOKENIZER], trainer)[1]
    ends = {"eos_token": name} if name is not None else {}
    return files | {TOKENIZER_CONFIG: to_json({"tokenizer_class": "PreTrainedTokenizerFast", **ends})}


def _end_of_document(tokenizer: bytes, trainer: TrainerState) -> tuple[int | None, str | None]:
    """Id and text of the token that ends a document: `data.eod_token` of the run, or the first of the usual ones."""
    inner = _tokenizer_in(tokenizer)
    if inner is None:
        return None, None
    named = trainer.config.get("data", {}).get("eod_token")
    known = ((inner.token_to_id(token), token) for token in ([named] if named else END_OF_DOCUMENT_TOKENS))
    return next(((id_, token) for id_, token in known if id_ is not None), (None, None))


def _tokenizer_in(content: bytes) -> Tokenizer | None:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(content)
    except Exception:  # the library raises nothing narrower
        return None


def token_ids(folder: Folder, trainer: TrainerState, files: Mapping[str, bytes], vocab_size: int) -> dict[str, Any]:
    """Ids of the tokens that begin and end a text, where they are known, below `vocab_size`.

    An imported checkpoint has them in its config.json; `files` are those of the tokenizer.
    """
    for text in (folder.read(HF_CONFIG) if folder.has(HF_CONFIG) else b"{}", files.get(GENERATION, b"{}")):
        config = json.loads(text)
        found = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
        if found:
            return found
    ends: int | None = None
    if TOKENIZER in files:
        ends = _end_of_document(files[TOKENIZER], trainer)[0]
    elif trainer.config.get("data", {}).get("tokenizer") == "byte":
        ends = ByteTokenizer.eod_id
    return {"eos_token_id": ends} if ends is not None and ends < vocab_size else {}
