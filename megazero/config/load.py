"""Reading a run: a TOML file, then overrides, then every check there is, then a value for every open key.

    file ------ tables --+-- types, ranges and names (problems) ---+
    key=value --/        +-- rules over the keys that hold --------+-- none wrong: ResolvedRun    some: ConfigError

All problems are reported in one error. Only a file that is not TOML ends it early, since there is nothing to check.
Resolving twice changes nothing: a resolved config is itself a config, which resolves to the same run.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date, time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megazero.config.derive import BatchSizes, batch_sizes, complete_model, data_parallel_size, fit
from megazero.config.extensions import import_extensions
from megazero.config.problems import validate
from megazero.config.rules import broken_rules
from megazero.config.schema import RunConfig, sections
from megazero.settings import ConfigError, Problem, file_error, read_text

Tables = dict[str, Any]

# Run files may still have the old name of a key.
RENAMED = {"zero.resident_elements": "zero.persistent_elements"}


@dataclass(frozen=True)
class ResolvedRun:
    """A run on a known number of ranks: global_batch_size = micro_batch_size * dp * accumulation.

    In an elastic run the product may be larger; the samples beyond the global batch are empty.
    """

    config: RunConfig
    """The config with model and batch sizes filled in; of an elastic run with the degrees of this world."""
    written: RunConfig = field(compare=False)
    """As `config`, but an elastic run has the degrees of its file, which are for any world."""
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
    """What fitting an elastic run to this world changed, a line each."""


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
    problems += _imported_extensions(tables)
    schema_problems, config, wrong_keys = validate(tables)
    problems += schema_problems
    ranks, source = world_size, "world_size"
    if ranks is None:
        ranks, source = config.launch.nproc_per_node, "launch.nproc_per_node"
    if source in wrong_keys:
        wrong_keys.add("world_size")
    found = broken_rules(config, ranks, wrong_keys)
    problems += [replace(problem, key=source) if problem.key == "world_size" else problem for problem in found]
    if problems:
        raise ConfigError(problems, str(path))
    return resolve(config, ranks)


def _imported_extensions(tables: Tables) -> list[Problem]:
    """Import what `launch.extensions` names, before the checks: they accept the names that it registers."""
    launch = tables.get("launch")
    return import_extensions(launch.get("extensions", ())) if isinstance(launch, dict) else []


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
    sizes = asdict(batch)
    written = {} if config.elastic.enabled else sizes  # in an elastic run they follow dp, which another world changes
    filled = {"model": complete_model(config.model), "training": config.training.model_copy(update=written)}
    return ResolvedRun(
        config=fitted.config.model_copy(update=filled),
        written=config.model_copy(update=filled),
        world_size=fitted.world_size,
        dp=dp,
        **sizes,
        spare_ranks=fitted.spare_ranks,
        notices=(*fitted.notices, *_empty_samples(batch, dp)),
    )


def _empty_samples(batch: BatchSizes, dp: int) -> list[str]:
    slots, samples = batch.micro_batch_size * batch.accumulation * dp, batch.global_batch_size
    if slots == samples:
        return []
    return [
        f"{slots - samples} of {slots} samples of each step are empty: global_batch_size={samples} is not divisible by "
        f"dp {dp} x micro_batch_size {batch.micro_batch_size}"
        + (f" x {batch.accumulation} micro-batches" if samples % (dp * batch.micro_batch_size) == 0 else "")
    ]


def _read(path: Path) -> Tables:
    if not path.exists():
        raise file_error(path, "no such file", _similar_files(path))
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        lines = text.split("\n")
        number = int(found[1]) if found else len(lines)  # "at end of document"
        raise file_error(
            path, f"is not TOML: {error}", f"the line reads: {lines[number - 1].strip()}", number
        ) from None


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
