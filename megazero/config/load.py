"""Reading a run: a TOML file, then overrides, then every check there is, then a value for every open key.

    file ------ tables --+-- types, ranges and names (problems) ---+
    key=value --/        +-- rules over the keys that hold --------+-- none wrong: ResolvedRun    some: ConfigError

All problems are reported in one error. Only a file that is not TOML ends it early, since there is nothing to check.
Resolving twice changes nothing: a resolved config is itself a config, which resolves to the same run.
"""

import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date, time
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from math import gcd
from pathlib import Path
from traceback import extract_tb
from typing import Any

from megazero.config.derive import BatchSizes, Fit, ResolvedRun, batch_sizes, ranks_of_a_sample
from megazero.config.problems import validate
from megazero.config.rules import Rule, check_rules
from megazero.config.schema import BatchRamp, RunConfig, keys, sections
from megazero.models.registry import FAMILIES
from megazero.registry import closest, did_you_mean
from megazero.settings import ConfigError, Problem, file_error, read_text, without_passwords

Tables = dict[str, Any]

_LAUNCHERS = "on several machines start torchrun (examples/launch_torchrun.sh) or srun (examples/pretrain.slurm)"

_UNSET = "unset"  # written on the command line, as docs/config.md says: the key is left out


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    varied: Collection[str] = (),
    rules: Sequence[Rule] = (),
    asks: str | None = None,
) -> ResolvedRun:
    """Read a run file, apply overrides, and resolve it for a number of ranks.

    Args:
        path: the TOML file.
        overrides: `section.key=value` each, the later ones winning. The value is read as TOML; what is not TOML, such
            as a bare word, is a string.
        world_size: number of ranks; None for the number that `launch.nproc_per_node` starts.
        varied: keys that take other values too, so that no key is refused for being without effect beside these.
        rules: further rules, of rooms above this one.
        asks: the option for `world_size` of a command that starts no ranks; None if this command starts them.

    Raises:
        ConfigError: with everything that is wrong with the file, the overrides, and the two together.
    """
    problems, config, is_whole = _checked(Path(path), overrides)
    ranks, source = world_size, "world_size"
    if ranks is None:
        ranks, source = vars(vars(config).get("launch", config)).get("nproc_per_node"), "launch.nproc_per_node"
    fitted, found, notes = check_rules(config, ranks, rules, varied, is_whole=is_whole)
    for problem in found:
        key, hint = source if problem.key == "world_size" else problem.key, problem.hint
        if ranks is not None and world_size is None and problem.key in ("world_size", "parallel.dp"):
            *_, each = ranks_of_a_sample(config.parallel)
            whole = each * (1 if config.parallel.dp == "auto" else config.parallel.dp)
            more = f"for more ranks write {asks} {whole}, or the number that you have" if asks else _LAUNCHERS
            hint = f"{hint}; {more}" if whole > ranks else hint
        problems.append(replace(problem, key=key, hint=hint))
    if any(problem.key == "launch.extensions" for problem in problems):  # which may register a name
        problems = [problem for problem in problems if "launch.extensions" not in problem.hint]
    if problems:
        raise ConfigError(problems, str(path))
    assert ranks is not None
    asked = config.launch.nproc_per_node
    if not asks and asked not in (1, ranks):
        notes.append(f"launch.nproc_per_node = {asked} has no effect where a launcher has started {ranks} ranks")
    return _filled(config, ranks, fitted, notes)


def _checked(path: Path, overrides: Sequence[str] = ()) -> tuple[list[Problem], RunConfig, bool]:
    """Check the keys of a file by themselves: what is wrong, the run without the wrong keys, whether all keys are right."""
    tables = _read(path)
    ordered = sorted(overrides, key=lambda text: not text.startswith("model.preset="))  # other keys go over it
    problems = [problem for text in ordered if (problem := _override(tables, text))]
    launch = tables.get("launch")
    if isinstance(launch, dict):  # before the checks: they accept the names that an extension registers
        problems += import_extensions(launch.get("extensions"))
    wrong, config = validate(tables)
    return [*problems, *wrong], config, not wrong


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file for its model and data only, on any number of ranks; the model is resolved.

    Raises: ConfigError: a key is wrong by itself, or [model] on one rank.
    """
    problems, config, _ = _checked(Path(path), overrides)
    if problems:
        raise ConfigError(problems, str(path))
    model = resolve(RunConfig(model=config.model), 1).config.model
    return config.model_copy(update={"model": model})


def resolve(config: RunConfig, world_size: int) -> ResolvedRun:
    """Check every rule and fill in the model and batch sizes left open.

    Args:
        config: the run, as written.
        world_size: number of ranks that were started.

    Raises:
        ConfigError: a rule is broken; the error lists every one that is.
    """
    fitted, problems, notes = check_rules(config, world_size)
    if problems:
        raise ConfigError(problems)
    return _filled(config, world_size, fitted, notes)


def _filled(config: RunConfig, world_size: int, fitted: Fit, notes: Sequence[str]) -> ResolvedRun:
    """Return the run with its model and batch sizes filled in.  Its last notices are `notes`, on keys without effect."""
    batch, dp, zero = batch_sizes(fitted.config, fitted.dp), fitted.dp, fitted.config.zero
    notices = [*fitted.notices, *_empty_samples(batch, dp, config.training.batch_ramp), *notes]
    quantized = [name for name in ("quantized_weights", "quantized_gradients") if getattr(zero, name)]
    if quantized and world_size > 1 and (zero.shard_group_size or dp * fitted.config.parallel.cp) == 1:
        notices.append(f"zero.{' and '.join(quantized)} have no effect: no other rank shares this rank's state")
    sizes = asdict(batch)
    # In an elastic run they follow dp, and the method of context parallelism cp, which another world changes.
    written = {} if config.elastic.enabled else sizes
    parallel = config.parallel if config.elastic.enabled else fitted.config.parallel
    if parallel.cp_method != "hybrid":  # it follows cp, which whoever trains by the written file may change
        parallel = parallel.model_copy(update={"cp_ulysses": None})
    model = FAMILIES[config.model.family].complete(config.model)
    filled = {"model": model, "training": config.training.model_copy(update=written)}
    return ResolvedRun(
        config=fitted.config.model_copy(update=filled),
        written=config.model_copy(update={**filled, "parallel": parallel}),
        world_size=world_size - fitted.spare_ranks,
        dp=dp,
        **sizes,
        spare_ranks=fitted.spare_ranks,
        notices=tuple(notices),
    )


def _empty_samples(batch: BatchSizes, dp: int, ramp: BatchRamp | None) -> Iterator[str]:
    """Yield a notice if empty samples fill up the micro-batches of an elastic run, or of a batch that ramps up."""
    if ramp and gcd(ramp.start, ramp.increment) % (batch.micro_batch_size * dp):
        sizes = f"start {ramp.start} and increment {ramp.increment} are not divisible by dp {dp} x micro_batch_size"
        yield f"training.batch_ramp: {sizes} {batch.micro_batch_size}: samples that are missing are empty"
    samples, slots = batch.global_batch_size, batch.micro_batch_size * batch.accumulation * dp
    if slots > samples:
        product = f"dp {dp} x micro_batch_size {batch.micro_batch_size}"
        if samples % (dp * batch.micro_batch_size) == 0:
            product += f" x {batch.accumulation} micro-batches"
        empty = f"{slots - samples} of {slots} samples of each step are empty"
        yield f"{empty}: global_batch_size={samples} is not divisible by {product}"


def _read(path: Path) -> Tables:
    if re.match(r"\w[\w+.-]+:/", str(path)):  # a URL, as pathlib leaves it
        raise file_error(without_passwords(str(path).replace(":/", "://", 1)), "must be on a disk", "copy it here")
    if not path.exists():
        hint = f"there is no directory {path.parent} either"
        if path.parent.is_dir():
            close = closest(path.name, [other.name for other in path.parent.glob("*.toml")])
            hint = did_you_mean([str(path.parent / name) for name in close])
        raise file_error(path, "no such file", hint)
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        lines = text.split("\n")
        number = int(found[1]) if found else len(lines)  # "at end of document"
        hint = f"the line reads: {lines[number - 1].strip()}"
        raise file_error(path, f"is not TOML: {error}", hint, number) from None
    except (ValueError, RecursionError) as error:
        raise file_error(path, f"cannot be read: {error}", "it holds a number or a table that is too long") from None


def _override(tables: Tables, text: str) -> Problem | None:
    """Apply one `section.key=value` to the tables, or say why it cannot be."""
    name, separator, written = (word.strip() for word in text.partition("="))
    *outer, key = name.split(".")
    if not separator or not all((*outer, key)) or "://" in name:  # a URL holds "=" where it has a query
        return Problem("override", text, "must have the form section.key=value", "for example training.steps=100")
    if name in sections():
        return Problem("override", text, f"{name} is a section", f"name one of its keys: {name}.key=value")
    table: Any = tables
    for depth, section in enumerate(outer, start=1):
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            home = ".".join(outer[:depth])
            # If the file makes a section a value, the schema reports it.
            return None if home in sections() else Problem("override", text, f"{home} is no section")
    if written == _UNSET and key in keys().get(".".join(outer), {}):
        table.pop(key, None)
        if outer == ["model"]:
            table[key] = None  # also where a preset has it
    else:
        if name == "model.preset":
            table.clear()  # the file's whole [model] is another model
        table[key] = _override_value(written)
    return None


def _override_value(written: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {written}")
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets as deep, is no TOML error
        return written
    # No key is a date, but a directory may well be named after one.
    return written if len(parsed) > 1 or isinstance(parsed["value"], date | time) else parsed["value"]


def import_extensions(names: object) -> list[Problem]:
    """Import each file or module of `launch.extensions` once per process; say which cannot be imported and why.

    Args:
        names: as the run file has them; the schema reports anything that is no list of names.
    """
    problems = []
    for name in names if isinstance(names, list | tuple) else ():
        if not isinstance(name, str) or not name:
            continue
        try:
            if name.endswith(".py"):
                _import_file(Path(name).expanduser().resolve())
            else:
                sys.path += [] if os.getcwd() in sys.path else [os.getcwd()]
                import_module(name)
        except (Exception, SystemExit) as error:  # a script without a __main__ guard may exit
            last = extract_tb(error.__traceback__)[-1]
            where = f" ({last.filename}:{last.lineno})" if Path(last.filename).is_file() else ""  # not inside importlib
            rule = f"cannot be imported: {type(error).__name__}: {error}{where}"
            problems.append(Problem("launch.extensions", name, rule))
    return problems


def _import_file(path: Path) -> None:
    key = f"extension {path}"  # no name that an import statement could mean
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    if any(file and Path(file).resolve() == path for file in files if isinstance(file, str)):
        return  # imported already, as an extension, a module or the running script
    spec = spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    sys.modules[key] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
