"""The format of a checkpoint: whole logical tensors in safetensors files, an index per state kind, and a manifest written
last.

    step-00000010/
      model-00001-of-00002.safetensors ...     weights under Hugging Face names, with model.safetensors.index.json
      exp_avg-..., exp_avg_sq-..., master-...  moments and fp32 masters by the same names, each with its index
      config.json                              what `transformers` needs to load the weights
      trainer_state.json                       step, samples consumed, shape of origin, configuration
      manifest.json                            size and xxh3 of every other file; the directory is complete when it exists
      evaluation.json                          validation loss of a step that was evaluated after it was saved; a note
      unfinished.json                          the names of the files to be written; there until it is complete
    latest                                     the name of the newest complete directory, for people and scripts

A file appears with all its bytes or not at all; see `folder`.  Only files that are named in the manifest or in
`unfinished.json` are ever removed, because other files in the directory are not ours.  Both lists have a checksum, so a
file of the same name that another program has written is not taken for such a list.
"""

import importlib.metadata
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Final

import torch
import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from megazero.checkpoint.folder import FileRecord, Folder, Location, folder_at, partial_of
from megazero.data.sealed import parse_json, seal

FORMAT_VERSION = 1
MANIFEST, TRAINER_STATE, LATEST, HF_CONFIG = "manifest.json", "trainer_state.json", "latest", "config.json"
UNFINISHED, DAMAGED_MANIFEST, EVALUATION = "unfinished.json", "damaged-manifest.json", "evaluation.json"
_LISTS = (MANIFEST, DAMAGED_MANIFEST, UNFINISHED)  # each of these names files that are ours
_STEP_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_TENSOR_FILE = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or cannot be used; the message names the files and what to do."""


class DamagedError(CheckpointError):
    """Files of a checkpoint have changed since they were written; the message names them."""


class OwnerError(CheckpointError):
    """A directory belongs to another run; the message says to which, and since when."""


Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


@dataclass(frozen=True)
class TrainerState:
    """The position of a run and its small state, independent of its shape."""

    step: Count  # optimizer steps completed
    consumed_samples: Count  # since the start; also the global index of the next sample
    consumed_tokens: Count  # counted tokens since the start
    optimizer_steps: Count  # steps that changed the weights, for the bias correction
    data_fingerprint: str
    model: dict[str, Any]  # the model section of the configuration
    config: dict[str, Any]  # the whole configuration; this and the next two are for information
    shape: dict[str, Any]  # parallel degrees, ZeRO stage and world size
    versions: dict[str, str]  # of megazero and torch
    optimizer_scalars: dict[str, dict[str, float]] = field(default_factory=dict)  # by group
    loss_scaler: dict[str, Any] | None = None  # under fp16
    script: dict[str, Any] = field(default_factory=dict)  # a DeepSpeed-style engine's counters, groups and schedule
    val_loss: float | None = None  # mean nats per token, if this very step was evaluated
    phases: list[dict[str, Any]] = field(default_factory=list)  # see engine/phases.py
    # By content of a source, the token up to which it is trained on.
    trained: dict[str, int] = field(default_factory=dict)


_TRAINER_STATE: Final = TypeAdapter(TrainerState)


def index_name(state_kind: str) -> str:
    """Return the name of the index file of a state kind, such as exp_avg."""
    return f"{state_kind}.safetensors.index.json"


def state_kinds_of(files: Iterable[str]) -> list[str]:
    """Return the state kinds that a checkpoint contains, weights first."""
    suffix = index_name("")
    state_kinds = (name.removesuffix(suffix) for name in files if name.endswith(suffix))
    return sorted(state_kinds, key=lambda state_kind: (state_kind != "model", state_kind))


def versions() -> dict[str, str]:
    """Return the versions of this package and of torch; "not installed" for a package that runs from its source folder."""
    try:
        mine = importlib.metadata.version("megazero")
    except importlib.metadata.PackageNotFoundError:
        mine = "not installed"
    return {"megazero": mine, "torch": str(torch.__version__)}


def to_index(files: Mapping[str, str], total_bytes: int) -> bytes:
    """Build the index of one state kind, in Hugging Face's format.  `files`: the file of each tensor."""
    return to_json({"metadata": {"total_size": total_bytes}, "weight_map": files})


def to_json(value: Any) -> bytes:
    """Format a value as readable JSON."""
    return (json.dumps(value, indent=2) + "\n").encode()


def _checksum(version: int, files: Mapping[str, Any] | Sequence[str]) -> str:
    """Compute the checksum of the list in a manifest.  Format 1 does not include the version."""
    return xxhash.xxh3_128_hexdigest(json.dumps(files if version == 1 else [version, files], sort_keys=True).encode())


def write_manifest(location: Location, files: Mapping[str, FileRecord]) -> None:
    """Declare a checkpoint complete.  `files`: all its files.  Raises: OSError."""
    listed = {name: asdict(record) for name, record in sorted(files.items())}
    manifest = {"format": FORMAT_VERSION, "checksum": _checksum(FORMAT_VERSION, listed), "files": listed}
    folder_at(location).write(MANIFEST, to_json(manifest))


def write_unfinished(folder: Folder, names: Iterable[str]) -> None:
    """List the files of a checkpoint that has no manifest yet, or is about to lose it.  Raises: OSError."""
    listed = sorted(names)
    folder.write(UNFINISHED, to_json({"checksum": _checksum(1, listed), "files": listed}))


def _named_in(folder: Folder, name: str) -> set[str]:
    """Return the files that one of our lists names; none if the list is missing, damaged, or written by another
    program.
    """
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        found = parse_json(folder.read(name))
        if found["checksum"] == _checksum(found.get("format", 1), found["files"]):
            return {*_LISTS, EVALUATION, *found["files"]}
    return set()


def own_files(folder: Folder) -> list[str]:
    """Return the files in a step directory that our checkpoints wrote: those in its lists, and the lists themselves."""
    named = set().union(*(_named_in(folder, name) for name in _LISTS))
    # A save writes UNFINISHED first: a partial file of it is ours, too.
    return [name for name in folder.files() if partial_of(name) in named or name != partial_of(name) == UNFINISHED]


def files_of_save(folder: Folder) -> list[str]:
    """Return our files in a directory that has a manifest.

    If the manifest is damaged, these are the files with names that only a save gives.

    Raises: CheckpointError: the storage fails, or the manifest was not written by a checkpoint of ours.
    """
    with read_errors(f"{folder}/{MANIFEST}"):
        if _named_in(folder, MANIFEST):
            return own_files(folder)
    files = folder.files()
    is_ours = False
    with suppress(DamagedError):
        is_ours = TRAINER_STATE in files and bool(read_trainer_state(folder))
    if not is_ours:
        raise CheckpointError(
            f"{folder} has a {MANIFEST} that no checkpoint of ours has written, or a damaged one and no {TRAINER_STATE} of "
            "ours: nothing was changed. Move that directory to another place, or remove it"
        )
    state_kinds = state_kinds_of(files)
    tensors = {name: match[1] for name in files if (match := _TENSOR_FILE.fullmatch(name)) and match[1] in state_kinds}
    names = {*tensors, *map(index_name, tensors.values()), TRAINER_STATE, HF_CONFIG, EVALUATION, *_LISTS}
    return sorted({*own_files(folder), *names.intersection(files)})


def remove_own_files(folder: Folder) -> None:
    """Remove our files from a step directory, and the directory if it is empty then.

    The lists are removed last, so that after an interruption they still name our files.
    """
    found = own_files(folder)
    folder.remove(*(name for name in found if name not in _LISTS))
    folder.remove(*(name for name in _LISTS if name in found))
    folder.remove_empty()


def discard(folder: Folder) -> None:
    """Remove a complete checkpoint.  If this is interrupted, the remainder does not count as a checkpoint."""
    write_unfinished(folder, files_of_save(folder))
    folder.remove(MANIFEST)
    remove_own_files(folder)


def mark_damaged(folder: Folder) -> None:
    """Rename the manifest, so that the checkpoint no longer counts.  Its files stay until the step is saved again or
    pruned.

    Raises: CheckpointError: the directory is a link, so it does not belong to this run; or see `files_of_save`.
    """
    if folder.is_link:
        hint = "remove the link"
        raise CheckpointError(f"{folder} is a link and belongs elsewhere: it is not marked as damaged; {hint}")
    write_unfinished(folder, files_of_save(folder))
    with suppress(FileNotFoundError):
        folder.write(DAMAGED_MANIFEST, folder.read(MANIFEST))
    folder.remove(MANIFEST)


def is_complete(location: Location) -> bool:
    """Whether every file of the checkpoint was written."""
    return folder_at(location).has(MANIFEST)


def unreadable(path: str, error: OSError) -> CheckpointError:
    """Build the error for a storage that fails.  EIO is such an error: on NFS it may be a timeout, unrelated to the
    file.
    """
    return CheckpointError(
        f"{path} cannot be read ({error}); nothing was changed. Try again; if it fails again, its disk may be lost: resume "
        "from another step directory (checkpoint.resume)"
    )


@contextmanager
def read_errors(path: str) -> Iterator[None]:
    """Convert errors of reading a file to CheckpointError (the storage fails) or DamagedError (the contents are
    wrong).  The message names the file.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise DamagedError(f"{path} is damaged ({error!r}); resume from another step directory") from error


def check_complete(folder: Folder, name: str = "") -> None:
    """Check that a folder is a complete checkpoint.  `name`: its name in the error, if given.

    Raises: CheckpointError: it is not; the message lists the complete steps in the folder, or beside a step.
    """
    if not is_complete(folder):
        root = folder.parent if is_step_name(folder.name) else folder
        steps = ", ".join([str(step) for step in step_folders(root) if is_complete(step)][-5:])
        hint = f"name a complete step, such as {steps}" if steps else "name a step"
        found = f"it has no {MANIFEST}" if folder.files() or folder.folders() else "nothing is there"
        raise CheckpointError(f"{name or folder} is not a complete checkpoint: {found}; {hint}")


def read_manifest(location: Location) -> dict[str, FileRecord]:
    """Return the files of a complete checkpoint.  Raises: as `read_errors`; CheckpointError: there is no manifest."""
    folder = folder_at(location)
    check_complete(folder)
    with read_errors(f"{folder}/{MANIFEST}"):
        data = folder.read(MANIFEST)
        manifest = parse_json(data)
        listed = manifest["files"]
        # compared byte for byte, so that every flipped bit is noticed
        if manifest["checksum"] != _checksum(manifest["format"], listed) or to_json(manifest) != data:
            raise ValueError("it is not what was written")
        if manifest["format"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} has format {manifest['format']} and this release reads format {FORMAT_VERSION}: "
                "a newer release of megazero wrote it; read it with that one"
            )
        return {name: FileRecord(**record) for name, record in listed.items()}


def find_damage(
    location: Location, files: Mapping[str, FileRecord] | None = None, *, by_hash: bool = True
) -> list[str]:
    """Return a line for every file that is missing, or that has a different size or hash than the manifest says.

    Checks `files`, or all files of the manifest; only their sizes unless `by_hash`.

    Raises:
        CheckpointError: the manifest is missing or damaged, or the storage does not answer, which says nothing about
            the files.
    """
    folder = folder_at(location)
    damage, listed = [], sorted(read_manifest(folder).items()) if files is None else files.items()
    folder.on_bytes(sum(record.bytes for _, record in listed), 0)
    for name, record in listed:
        try:
            size = folder.size(name)
            if size is None:
                damage.append(f"{folder}/{name} is missing")
            elif size != record.bytes:
                damage.append(f"{folder}/{name} has {size} bytes, {record.bytes} were written")
            elif by_hash and folder.hash(name) != record.xxh3:
                damage.append(f"{folder}/{name} has changed since it was written (its hash differs)")
        except OSError as error:
            raise unreadable(f"{folder}/{name}", error) from error
    return damage


def read_trainer_state(location: Location) -> TrainerState:
    """Read the trainer state of a checkpoint.  Raises: as `read_errors`, also for a value of a wrong type."""
    folder = folder_at(location)
    with read_errors(f"{folder}/{TRAINER_STATE}"):
        stored = parse_json(folder.read(TRAINER_STATE))
        try:
            _TRAINER_STATE.validate_python(stored)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        known = {key.name for key in fields(TrainerState)}  # a later release may have written further keys
        return TrainerState(**{name: value for name, value in stored.items() if name in known})


def note_val_loss(folder: Folder, val_loss: float) -> None:
    """Write the validation loss of a step next to its checkpoint, if the checkpoint is complete.  Raises: OSError."""
    if is_complete(folder):
        folder.write(EVALUATION, _note(float(val_loss)))


def _note(val_loss: float) -> bytes:
    return to_json(seal({"val_loss": val_loss}))


def val_loss_of(folder: Folder) -> float | None:
    """Read the validation loss of a step in nats per token; None if the step was not evaluated.

    Raises: CheckpointError: it cannot be read.  DamagedError: it is not what was written.
    """
    path = f"{folder}/{EVALUATION}"
    with read_errors(path):
        data = folder.read(EVALUATION) if folder.has(EVALUATION) else None
    if data is None:
        return read_trainer_state(folder).val_loss
    with suppress(ValueError, KeyError, TypeError, OverflowError):
        val_loss = float(parse_json(data)["val_loss"])
        if _note(val_loss) == data:
            return val_loss
    hint = "the validation loss of this step is unknown, so checkpoint.keep_best keeps it"
    raise DamagedError(f"{path} is damaged: {hint}")


def step_folder(root: Location, step: int) -> Folder:
    """Return the folder of a step: `root/step-00000010` for step 10."""
    return folder_at(root).child(f"step-{step:08d}")


def is_step_name(name: str) -> bool:
    """Whether a directory has the name of a step, like step-00000010.  Any other name, like step-10, is a user's."""
    return _STEP_NAME.fullmatch(name) is not None


def step_folders(root: Location) -> list[Folder]:
    """List every step directory, complete or not, in the order of steps."""
    folder = folder_at(root)
    return sorted((folder.child(name) for name in folder.folders() if is_step_name(name)), key=step_of)


def find_newest(root: Location) -> Folder | None:
    """Return the newest complete step directory.  Manifests decide, not `latest`: a run may stop between writing the
    two.
    """
    return next((folder for folder in reversed(step_folders(root)) if is_complete(folder)), None)


def renew_latest(root: Folder) -> None:
    """Point `latest`, if it exists, to the newest complete step, after a newer one was removed or marked as damaged."""
    with suppress(OSError):  # the manifests decide
        if root.has(LATEST):
            newest = find_newest(root)
            root.remove(LATEST) if newest is None else root.write(LATEST, (newest.name + "\n").encode())


def step_of(folder: Folder) -> int:
    """Return the step of a folder: 10 for `step-00000010`.  Raises: ValueError: another name."""
    if not is_step_name(folder.name):
        raise ValueError(f"{folder.name} is not the name of a step directory, like step-00000010")
    return int(folder.name.removeprefix("step-"))
