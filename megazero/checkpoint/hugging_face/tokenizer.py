"""The tokenizer of a model, as files that `transformers.AutoTokenizer` loads."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from megazero.checkpoint.folder import Folder, LocalFolder
from megazero.checkpoint.index import HF_CONFIG, CheckpointError, TrainerState, to_json
from megazero.data.identity import tokenizer_hash
from megazero.data.sealed import parse_json
from megazero.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, tokenizer_path

TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OTHERS = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")
_FILES = (TOKENIZER, TOKENIZER_CONFIG, GENERATION, *_OTHERS, "chat_template.jinja")


def tokenizer_files(folder: Folder) -> dict[str, bytes]:
    """Return the files of a directory that describe its tokenizer and how to generate text.

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
    """Return the tokenizer's files of a checkpoint, and a line about them.

    An imported checkpoint has them in its own directory; for others `data.tokenizer` of the run names them.
    """
    own = tokenizer_files(folder)
    if TOKENIZER in own:
        return _completed(own, trainer), f"the tokenizer of {folder}"
    named = str(trainer.config.get("data", {}).get("tokenizer", ""))
    if named in ("", "byte"):
        return own, "no tokenizer: the run read bytes" if named else "no tokenizer: the checkpoint names none"
    path = Path(tokenizer_path(named))
    if not path.is_file():
        missing = f"data.tokenizer={named} of the run does not exist; copy it beside the weights yourself"
        return own, f"no tokenizer: {missing}"
    files = tokenizer_files(LocalFolder(path.parent)) if path.name == TOKENIZER else {}
    files |= {TOKENIZER: path.read_bytes()}
    try:
        found, wanted = _read(files, trainer, path).fingerprint, tokenizer_hash(trainer.data_fingerprint)
    except ValueError as error:
        return own, f"no tokenizer: {named} is no file of the tokenizers library, and was not copied: {error}"
    if wanted not in (None, found):
        changed = "is no longer the file that the run read; copy that one beside the weights yourself"
        return own, f"no tokenizer: {named} {changed}"
    return _completed(files, trainer), f"the tokenizer {path}"


def load_tokenizer_of(folder: Folder, trainer: TrainerState) -> Tokenizer:
    """Load the tokenizer of a checkpoint.  Raises: CheckpointError: it has none."""
    files, about = tokenizer_of(folder, trainer)
    if TOKENIZER in files:
        return _read(files, trainer)
    if trainer.config.get("data", {}).get("tokenizer") != "byte":
        raise CheckpointError(f"{folder} has {about}")
    return ByteTokenizer()


def _completed(files: dict[str, bytes], trainer: TrainerState) -> dict[str, bytes]:
    """Return the files with the configuration that transformers needs in addition to a tokenizer.json."""
    if TOKENIZER_CONFIG in files:
        return files
    ends = {}
    with suppress(ValueError):
        ends["eos_token"] = _read(files, trainer).eod_token
    return files | {TOKENIZER_CONFIG: to_json({"tokenizer_class": "PreTrainedTokenizerFast", **ends})}


def _read(files: dict[str, bytes], trainer: TrainerState, path: Path = Path(TOKENIZER)) -> FileTokenizer:
    """Load the tokenizer from these files, as the run would load it for its data.  Raises: ValueError."""
    return FileTokenizer(path, trainer.config.get("data", {}).get("eod_token"), trainer.data_fingerprint, files)


def token_ids(folder: Folder, trainer: TrainerState, files: dict[str, bytes], vocab_size: int) -> dict[str, Any]:
    """Return the ids of the tokens that begin and end a text, as far as they are known and below `vocab_size`.

    An imported checkpoint has them in its config.json; `files` are those of the tokenizer.  A run that read data of its
    own ends a text as that data does.
    """
    texts = (folder.read(HF_CONFIG) if folder.has(HF_CONFIG) else b"{}", files.get(GENERATION, b"{}"))
    named = [{key: its[key] for key in TOKEN_IDS if its.get(key) is not None} for its in map(json.loads, texts)]
    found = named[0] or named[1]
    ends: int | None = None
    if TOKENIZER in files:
        with suppress(ValueError):
            ends = _read(files, trainer).eod_id
    elif trainer.config.get("data", {}).get("tokenizer") == "byte":
        ends = ByteTokenizer.eod_id
    known = found.get("eos_token_id")
    is_known = ends in known if isinstance(known, list) else ends == known
    if ends is None or ends >= vocab_size or is_known or (found and "data" not in trainer.config):
        return found
    return found | {"eos_token_id": ends}
