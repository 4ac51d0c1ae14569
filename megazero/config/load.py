"""Reading a run: a TOML file, then overrides, then every check there is, then a value for every open key.

    file ------ tables --+-- types, ranges and names (problems) ---+
    key=value --/        +-- rules over the keys that hold --------+-- none wrong: ResolvedRun    some: ConfigError

All problems are reported in one error. Only a file that is not TOML ends it early, since there is nothing to check.
Resolving twice changes nothing: a resolved config is itself a config, which resolves to the same run.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megazero.config.derive import BatchSizes, batch_sizes, complete_model, data_parallel_size, fit
from megazero.config.problems import validate
from megazero.config.rules import broken_rules
from megazero.config.schema import RunConfig, sections
from megazero.settings import ConfigError, Problem

Tables = dict[str, Any]

# Run files may still have the old name of a key.
RENAMED = {"zero.resident_elements": "zero.persistent_elements"}


@dataclass(frozen=True)
class ResolvedRun:
    """A run on a known number of ranks: global_batch_size = micro_batch_size * dp * accumulation.

    An elastic run may have more room than samples; `read_batches` leaves the rest empty.
    """

    config: RunConfig
    """The config, with model sizes and batch sizes filled in, and an elastic one with the degrees of this world."""
    written: RunConfig = field(compare=False)
    """What its file says: as `config`, but an elastic run has the shape that it was written with, for any world."""
    world_size: int
    """Number of ranks that train: tp * pp * dp."""
    dp: int
    """Data-parallel degree."""
    global_batch_size: int
    """Samples in an optimizer step."""
    micro_batch_size: int
    """Samples in one forward pass."""
    accumulation: int
    """Micro-batches in a step on each data-parallel rank."""
    spare_ranks: int = 0
    """Ranks of an elastic run beyond those that train."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """What a user of an elastic run should know of its fit to this world, a line each."""


def load_config(path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None) -> ResolvedRun:
    """Read a run file, apply overrides, and resolve it for a number of ranks.

    Args:
        path: the TOML file.
        overrides: `section.key=value` each, the later ones winning. The value is read as TOML; what is not TOML, such
            as a bare word, is a string.
        world_size: number of ranks; None for the number that `launch.nproc_per_node` starts.

    Raises:
        ConfigError: with everything that is wrong with the file, the overrides, and the two together.
    """
    tables = _read(Path(path))
    problems = _rename(tables)
    problems += [problem for text in overrides if (problem := _override(tables, text))]
    schema_problems, config, wrong_keys = validate(tables)
    problems += schema_problems
    if world_size is None:
        ranks = config.launch.nproc_per_node
        if "launch.nproc_per_node" in wrong_keys:
            wrong_keys.add("world_size")
        found = broken_rules(config, ranks, wrong_keys)  # the number of ranks comes from this key
        problems += [replace(p, key="launch.nproc_per_node") if p.key == "world_size" else p for p in found]
    else:
        ranks = world_size
        problems += broken_rules(config, ranks, wrong_keys)
    if problems:
        raise ConfigError(problems, str(path))
    return resolve(config, ranks)


def resolve(config: RunConfig, world_size: int) -> ResolvedRun:
    """Check every rule and fill in the model and batch sizes left open.

    Args:
        config: the run, as written.
        world_size: number of ranks that were started.

    Raises:
        ConfigError: a rule is broken; the error lists every one that is.
    """
    problems = broken_rules(config, world_size)
    if problems:
        raise ConfigError(problems)
    fitted = fit(config, world_size)
    dp = data_parallel_size(fitted.config.parallel, fitted.world_size)
    batch = batch_sizes(fitted.config, dp)
    sizes: dict[str, object] = {
        "global_batch_size": batch.global_batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "accumulation": batch.accumulation,
    }
    if config.elastic.enabled:
        sizes = {}  # they follow dp, which another world changes
    filled = {
        "model": complete_model(config.model),
        "training": config.training.model_copy(update=sizes),
    }
    return ResolvedRun(
        config=fitted.config.model_copy(update=filled),
        written=config.model_copy(update=filled),
        world_size=fitted.world_size,
        dp=dp,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        spare_ranks=fitted.spare_ranks,
        notices=(*fitted.notices, *_empty_samples(batch, dp)),
    )


def _empty_samples(batch: BatchSizes, dp: int) -> list[str]:
    room, samples = batch.micro_batch_size * batch.accumulation * dp, batch.global_batch_size
    if room == samples:
        return []
    return [
        f"{room - samples} of {room} samples of each step are empty: global_batch_size={samples} is not divisible by "
        f"dp {dp} x micro_batch_size {batch.micro_batch_size}"
        + (f" x {batch.accumulation} micro-batches" if samples % (dp * batch.micro_batch_size) == 0 else "")
    ]


def _read(path: Path) -> Tables:
    def fail(rule: str, hint: str = "", line: int | None = None) -> ConfigError:
        where = str(path) if line is None else f"{path}:{line}"
        return ConfigError([Problem(where, None, rule, hint)], str(path))

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise fail("no such file", _similar_files(path)) from None
    except UnicodeDecodeError as error:
        raise fail(f"is not UTF-8 at byte {error.start}", "a run file is TOML text") from None
    except OSError as error:
        raise fail(f"cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        lines = text.split("\n")
        number = int(found[1]) if found else len(lines)  # "at end of document"
        raise fail(f"is not TOML: {error}", f"the line reads: {lines[number - 1].strip()}", number) from None


def _similar_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no directory {path.parent} either"
    close = get_close_matches(path.name, [other.name for other in path.parent.glob("*.toml")], n=1)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def _rename(tables: Tables) -> list[Problem]:
    """Give keys under an old name their new one, or say that a file has both."""
    problems = []
    for old, new in RENAMED.items():
        *outer, last = old.split(".")
        table: Any = tables
        for part in outer:
            table = table.get(part) if isinstance(table, dict) else None
        if not isinstance(table, dict) or last not in table:
            continue
        value, name = table.pop(last), new.rpartition(".")[2]
        if name in table:
            problems.append(Problem(old, value, f"is the old name of {new}, which is given too", f"keep {new}"))
        table.setdefault(name, value)
    return problems


def _override(tables: Tables, text: str) -> Problem | None:
    """Apply one `section.key=value` to the tables, or say why it cannot be."""
    name, separator, written = (part.strip() for part in text.partition("="))
    name = RENAMED.get(name, name)
    *outer, key = name.split(".")
    if not separator or not all((*outer, key)):
        return Problem("override", text, "must have the form section.key=value", "for example training.steps=100")
    if name in sections():
        return Problem("override", text, f"{name} is a section", f"name one of its keys: {name}.key=value")
    table: Any = tables
    for depth, part in enumerate(outer, start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            home = ".".join(outer[:depth])
            # If the file makes a section a value, the schema reports it.
            return None if home in sections() else Problem("override", text, f"{home} is no section")
    table[key] = _override_value(written)
    return None


def _override_value(written: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {written}")
    except tomllib.TOMLDecodeError:
        return written
    value = parsed["value"]
    # No key is a date, but a directory may well be named after one.
    return written if len(parsed) > 1 or isinstance(value, date | time) else value
