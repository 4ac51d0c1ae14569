"""Checks and describes a run without starting it: shape, memory, batch, schedule, learning rate, context, data.

    load_config(..., rules=FILE_RULES)     all problems, including those of the files that the run names
    describe(run, ...)                     (subject, text) of each line of `megazero check`

A file that is not on this machine is reported as unchecked; a file that is there must fit the run.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from megazero.config import ConfigError, ResolvedRun, RunConfig
from megazero.config.derive import batch_sizes
from megazero.config.rules import Rule, dp_of
from megazero.data import Corpus
from megazero.data.corpus import repeats, tokenizer_of
from megazero.engine.outline import elements_in, schedule_of, stages_of
from megazero.engine.phases import Phase, trained_steps, unfinished_schedule
from megazero.layers.fp8 import EMULATED, use_fp8
from megazero.layers.recompute import WHOLE
from megazero.models.activation_config import ActivationsConfig, layer_policies
from megazero.models.build_context import check_supports_shards
from megazero.models.wrappers import save_by_policy
from megazero.optim.lr_schedule import learning_rate_factor
from megazero.registry import added
from megazero.schedules.action import Schedule, read_schedule
from megazero.schedules.proof import ScheduleError, check_runnable, peak_activations, simulate
from megazero.settings import Problem, counted
from megazero.training.batches import open_corpus_of, open_sources, open_validation_source
from megazero.training.named_files import directory_problems, not_here, source_problems, tokenizer_problems

#: (subject, text) of each line of `megazero check`.
Lines: TypeAlias = Iterable[tuple[str, str]]


class DeviceNeeds(NamedTuple):
    """An annex's lines for `megazero check` on the device of a run, and whether the run fits it."""

    lines: Lines
    fits: bool = True


def _source_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that every source on this machine fits the tokenizer, the sample length and the vocabulary."""
    if config.data.tokenizer in not_here(config) or any(tokenizer_problems(config)):
        return
    trained, contents = [source.path for source in config.data.sources], set[str]()

    def check(path: str) -> None:
        if path in trained:
            contents.update(open_sources(config, [(path, 1.0)], log=_log).contents.values())
        else:
            open_validation_source(config, path, contents, _log)

    yield from source_problems(config, check)


def schedule_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that a schedule's file can be read, that it cannot deadlock, and that it has the run's pp and accumulation."""
    file = config.parallel.schedule_file
    if file is None:
        return
    try:
        schedule = read_schedule(Path(file), config.parallel.schedule_placement)
        check_runnable(schedule)
    except (ScheduleError, ValueError, OSError) as error:
        yield Problem("parallel.schedule_file", file, "cannot run", str(error))
        return
    count = schedule.microbatches
    with suppress(ConfigError):  # a rule of every run reports it
        count = batch_sizes(config, dp_of(config)).accumulation
    for key, wanted, found in (
        ("parallel.pp", schedule.pp, config.parallel.pp),
        ("training.accumulation", schedule.microbatches, count),
    ):
        if found != wanted:
            yield Problem(key, found, f"must be {wanted}, as parallel.schedule_file has it", f"write {wanted}")


# What only the files that a run names can tell.
FILE_RULES: tuple[Rule, ...] = (tokenizer_problems, _source_problems, schedule_problems, directory_problems)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # what follows on stdout may be long in coming


def describe(run: ResolvedRun, ranks_per_node: int, of_device: Callable[[Schedule], Lines] = lambda _: ()) -> Lines:
    """Describe a run that has no problems: (subject, text) of each line of `megazero check`.

    Args:
        ranks_per_node: neighbouring ranks that share a machine.
        of_device: lines on what the run's schedule needs of a device, which an annex adds.
    """
    config, training = run.config, run.config.training
    schedule, model = schedule_of(run), config.model
    (whole,) = map(elements_in, stages_of(config, tp=1))
    sizes = f"{model.num_layers} layers of {model.hidden_size}, vocabulary {model.vocab_size:,}"
    yield "model", f"{model.family}, {sizes}, {model.seq_len:,} tokens a sample: {whole:,} parameters"
    yield "shape", _shape(run, ranks_per_node)
    product = f"micro_batch_size {run.micro_batch_size} x accumulation {run.accumulation} x dp {run.dp}"
    tokens = run.global_batch_size * model.seq_len
    yield "batch", f"{run.global_batch_size:,} samples = {product}; {tokens:,} tokens a step"
    if ramp := training.batch_ramp:
        sizes = f"from {ramp.start:,} by {ramp.increment:,} to {run.global_batch_size:,} samples"
        yield "ramp", f"{sizes}, within {ramp.samples:,}"
    yield "length", f"{training.steps:,} steps, {run.samples_after(0, training.steps) * model.seq_len:.4g} tokens"
    yield "schedule", _pipeline(schedule)
    yield from (("rate", line) for line in _rate(config))
    yield from of_device(schedule)
    corpus = None if not_here(config) else open_corpus_of(config, _log)
    samples = corpus.train.first_documents() if corpus is not None and config.data.document_mask else None
    yield from (("context", line) for lines_of in added("context").values() for line in lines_of(run, samples))
    yield from (("data", line) for line in _data(run, corpus))
    yield from (("imported", name) for name in config.launch.extensions)
    yield from (("note", line) for line in run.notices)


def _shape(run: ResolvedRun, ranks_per_node: int) -> str:
    parallel, grid = run.config.parallel, run.grid
    nodes, rest = -(-run.world_size // ranks_per_node), run.world_size % ranks_per_node
    degrees, experts = [], ""
    for axis in parallel.order.split("-"):
        if (size := grid.size(axis)) > 1:
            where = "within a node" if grid.lies_within(axis, ranks_per_node) else "across nodes"
            ulysses = parallel.cp_ulysses or 1
            if axis == "cp" and 1 < ulysses < size and where == "across nodes":
                near = "within a node" if grid.lies_within(axis, ranks_per_node, ulysses) else where
                where = f"Ulysses {ulysses} {near}, ring {size // ulysses} {where}"
            degrees.append(f"{axis} {size} ({where})")
    if grid.ep > 1:
        homes = ({rank // ranks_per_node for rank in block} for block in zip(*grid.expert_table(0), strict=True))
        experts = f", ep {grid.ep} ({'within a node' if max(map(len, homes)) == 1 else 'across nodes'})"
    where = f"{nodes} nodes of {'up to ' if rest else ''}{ranks_per_node}" if nodes > 1 else "one node"
    return f"{counted(run.world_size, 'rank')} on {where}: {' x '.join(degrees) or 'nothing is split'}{experts}"


def _pipeline(schedule: Schedule) -> str:
    if schedule.pp == 1:
        return f"{schedule.name} on one stage"
    peak = max(peak_activations(schedule, rank) for rank in range(schedule.pp)) / schedule.chunks
    idle = simulate(schedule).bubble_fraction
    return f"{schedule.name}: ranks idle {idle:.1%} if every pass takes as long; a rank holds {peak:g} micro-batches at most"


def layer_problems(config: RunConfig) -> Iterator[Problem]:
    """Find features that layers do not support: attention over sequence shards or documents, or the configured
    recomputation.
    """
    own, fp8 = config.activations, config.precision.fp8_of_layers(config.model.num_layers)
    if not config.has_shards and own == ActivationsConfig() and not fp8:
        return
    blocks = [block for stage in stages_of(config) for block in stage.blocks]
    if config.has_shards:
        try:
            check_supports_shards(blocks, config.model.family)
        except ConfigError as error:
            yield from error.problems
    try:
        for layer, scaling in fp8.items():
            use_fp8(blocks[layer], scaling, EMULATED)
    except ConfigError as error:
        yield from error.problems
    if own != ActivationsConfig():
        yield from _recompute_problems(config, blocks)


def _recompute_problems(config: RunConfig, blocks: Sequence[torch.nn.Module]) -> Iterator[Problem]:
    """Check that the layers have the regions to recompute.  A layer with its own forward can only be recomputed as a
    whole.
    """
    own, layers = config.activations, range(config.model.num_layers)
    ranks = {item: rank for rank in range(config.parallel.pp) for item in layer_policies(own, layers, rank).items()}
    for (layer, policy), rank in ranks.items():  # those of most pipeline ranks are alike
        try:
            save_by_policy([(blocks[layer], policy)], WHOLE)
        except ValueError as error:
            rule, _, hint = str(error).partition(": ")[2].partition("; ")
            yield Problem("activations.recompute", own.of_stage(rank).recompute, rule, hint)
            return


def _rate(config: RunConfig) -> Iterator[str]:
    """Return the learning rates at some steps, and a warning if skipped steps leave the schedule unfinished."""
    shape, steps, peak = config.lr_schedule, config.training.steps, config.optimizer.lr
    trained = [*chain(*trained_steps(1, steps, config.training.skip_steps))]  # those that have an update
    updates = len(trained)
    marks = sorted({0, min(max(shape.warmup_steps - 1, 0), updates - 1), updates // 2, updates - 1}) if updates else []
    rates = [f"{peak * learning_rate_factor(shape, mark, steps):.3g} at step {trained[mark]:,}" for mark in marks]
    later = "; a phase that begins later counts its own steps" if config.checkpoint.accept_changes else ""
    yield f"{config.optimizer.name}, {shape.name}: {', '.join(rates) or 'no step has an update'}{later}"
    yield from unfinished_schedule(config, Phase(), 0, 0)


def _data(run: ResolvedRun, corpus: Corpus | None) -> Iterator[str]:
    """`corpus`: None where a part of it is not on this machine."""
    config = run.config
    if corpus is None:
        yield f"not on this machine, not checked: {', '.join(not_here(config))}"
        return
    held_out = f", {len(corpus.validation):,} for evaluation" if corpus.validation else ""
    names = [source.path for source in config.data.sources]
    ids = tokenizer_of(names, config.data.tokenizer, config.data.eod_token).vocab_size
    yield f"{', '.join(names)}: {corpus.train.num_windows:,} samples to train on{held_out}"
    yield f"tokenizer {config.data.tokenizer}: {ids:,} ids, of {config.model.vocab_size:,} rows"
    for name, stream in corpus.named_validation.items():
        left = stream.behind(corpus.train.ends())
        yield f"{name}: {len(left) if left else 0:,} samples for evaluation"
    if not config.checkpoint.accept_changes:  # else a phase may begin: its samples are known where it does
        yield from repeats(names, corpus.train, run.samples_after(0, config.training.steps))
