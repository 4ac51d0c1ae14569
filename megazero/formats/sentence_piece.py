"""Converts a SentencePiece model to a `tokenizer.json`, and checks the result on the first documents of the text."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megazero.data.tokenizer import TOKENIZER, FileTokenizer
from megazero.formats.documents import cut_files, documents_of, find_files
from megazero.settings import write_text

_BPE, _NORMAL, _CONTROL, _OWN = 2, 1, 3, 4  # of sentencepiece_model.proto: the model, and three types of pieces
_PROVED_ON = 1000  # documents


def convert(
    path: Path, out: Path, inputs: Sequence[str], jsonl_key: str, eod_token: str | None, *, overwrite: bool = False
) -> None:
    """Write a BPE model of SentencePiece as a file of the library `tokenizers` that gives the same ids.

    Args:
        path: the SentencePiece model.
        out: the file to write.
        inputs, jsonl_key: text on which both must agree; see `tokenize_files`.
        eod_token: see `load_tokenizer`.
        overwrite: replace another tokenizer at `out`.

    Raises:
        FileNotFoundError: the model does not exist.
        ModuleNotFoundError: SentencePiece is not installed.
        FileExistsError: `out` exists and is another tokenizer.
        ValueError: the model is damaged or no BPE model, or the ids differ.
    """
    try:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    except ImportError as error:
        raise ModuleNotFoundError(f"{path} needs SentencePiece ({error}): pip install 'megazero[data]'") from None
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    hint = "use the tokenizer.json that belongs to the model, where it has one, or another tokenizer"
    stored = path.read_bytes()
    try:
        theirs = SentencePieceProcessor(model_proto=stored)
    except RuntimeError:
        raise ValueError(f"{path} is not a SentencePiece model, or it is damaged; {hint}") from None
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(stored)  # type: ignore[attr-defined]
    trained, cleaned, pieces = proto.trainer_spec, proto.normalizer_spec, proto.pieces
    if trained.model_type != _BPE:
        raise ValueError(f"{path} is no BPE model: of spellings with equal scores its kind may take another; {hint}")
    normal = {piece.piece: piece.score for piece in pieces if piece.type == _NORMAL}
    ranked = sorted(normal, key=lambda piece: -normal[piece])
    halves = ((piece[:at], piece[at:]) for piece in ranked for at in range(1, len(piece)))
    merges = [pair for pair in halves if normal.keys() >= {*pair}]
    ids = {piece.piece: number for number, piece in enumerate(pieces)}
    options = {"unk_token": trained.unk_piece, "fuse_unk": True, "byte_fallback": trained.byte_fallback}
    inner, steps = Tokenizer(models.BPE(ids, merges, **options)), list[Any]()
    if cleaned.precompiled_charsmap:
        steps.append(normalizers.Precompiled(cleaned.precompiled_charsmap))
    if cleaned.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if cleaned.add_dummy_prefix:
        steps, back = [*steps, normalizers.Prepend("▁")], [*back, decoders.Strip(" ", 1, 0)]
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(back)
    added = [piece for piece in pieces if piece.type in (_CONTROL, _OWN)]
    inner.add_tokens([AddedToken(p.piece, normalized=False, special=p.type == _CONTROL) for p in added])
    ours = FileTokenizer(path, eod_token, files={TOKENIZER: (content := inner.to_str().encode())})
    ranges, _ = cut_files(find_files(inputs)[0], 1 << 24)
    texts = (text for file_range in ranges for _, text in documents_of(file_range, jsonl_key) if isinstance(text, str))
    for number, text in enumerate(islice(texts, _PROVED_ON)):
        if (wanted := theirs.encode(text)) != (got := ours.encode(text).tolist()):
            raise ValueError(f"document {number}: SentencePiece gives {wanted[:20]}, its conversion {got[:20]}; {hint}")
    if not overwrite and out.exists() and out.read_bytes() != content:
        raise FileExistsError(f"{out} exists and is another tokenizer: data may need it; name another output")
    write_text(out, content.decode())
