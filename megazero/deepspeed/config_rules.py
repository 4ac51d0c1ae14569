"""What ties several keys of a DeepSpeed configuration together: a table of rules, each naming the keys it reads.

    train_batch_size = 30, train_micro_batch_size_per_gpu = 4, dp = 8      must divide by 32; the nearest is 32

A rule that reads a key already known to be wrong is left out, as in `rules`: it could only mislead.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megazero.deepspeed.config_check import Written
from megazero.settings import Problem, divisors, nearest_multiples, nearest_of, nearest_text

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
ZERO = "zero_optimization"
OPTIMIZER_OFFLOAD, PARAMETER_OFFLOAD = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"


@dataclass(frozen=True)
class Rule:
    """A relation between keys."""

    reads: tuple[str, ...]
    """The keys it looks at; it is not judged where one of them is wrong by itself."""
    check: Callable[[Written, int], Iterator[Problem]]
    """(what is written, dp) -> what is wrong."""


def broken_rules(written: Written, dp: int) -> list[Problem]:
    """Check every rule that reads no key already known to be wrong.

    Args:
        written: the configuration, with what is wrong in it.
        dp: number of data-parallel ranks.
    """
    judged = [rule for rule in RULES if not set(rule.reads) & written.wrong]
    return [problem for rule in judged for problem in rule.check(written, dp)]


def device_of(written: Written, block: str) -> str:
    """Give the device that a block names, or the deprecated key in its place."""
    old = f"{ZERO}.{'cpu_offload' if block == OPTIMIZER_OFFLOAD else 'cpu_offload_param'}"
    return written[f"{block}.device"] or ("cpu" if written[old] else "none")


def nvme_paths(written: Written) -> list[str]:
    """Give the different directories that the blocks in use name for their files."""
    blocks = [b for b in (OPTIMIZER_OFFLOAD, PARAMETER_OFFLOAD) if written[f"{b}.device"] == "nvme"]
    paths = [written[f"{block}.nvme_path"] for block in blocks]
    return list(dict.fromkeys(path for path in paths if path))


def _batch_sizes_agree(written: Written, dp: int) -> Iterator[Problem]:
    train, micro, accumulation = (written[key] for key in (TRAIN, MICRO, ACCUMULATION))
    if train is None and micro is None:
        rule = f"must be given: samples in a step, {MICRO} * {ACCUMULATION} * dp={dp}"
        yield Problem(TRAIN, None, rule, f"write it, or {MICRO}, with {ACCUMULATION} or without")
    if train is None:
        return
    known = [(MICRO, micro), (ACCUMULATION, accumulation), ("dp", dp)]
    names = "*".join(name for name, value in known if value is not None)
    product = (micro or 1) * (accumulation or 1) * dp
    if micro is not None and accumulation is not None:
        if train != product:
            rule = f"must be {names}={micro}*{accumulation}*{dp}={product}"
            yield Problem(TRAIN, train, rule, f"write {product}, or leave one of the three out")
    elif train % product:
        yield Problem(
            TRAIN, train, f"must divide by {names}={product}", nearest_text(nearest_multiples(train, product))
        )


def _one_format(written: Written, _: int) -> Iterator[Problem]:
    if written["fp16.enabled"] and written["bf16.enabled"]:
        yield Problem("bf16.enabled", True, "cannot be together with fp16.enabled", "keep one of them")


def _half_formats_have_half_weights(written: Written, _: int) -> Iterator[Problem]:
    if written["fp16.enabled"] or written["bf16.enabled"]:
        return
    for key in ("communication_data_type", "data_types.grad_accum_dtype"):
        if written[key] not in (None, "fp32"):
            rule = "must be fp32 where neither fp16 nor bf16 is enabled: gradients of fp32 weights stay in fp32"
            yield Problem(key, written[key], rule, "leave it out")


def _scale_starts_above_its_least(written: Written, _: int) -> Iterator[Problem]:
    least, start = written["fp16.min_loss_scale"], 2 ** written["fp16.initial_scale_power"]
    if written["fp16.enabled"] and least > start:
        yield Problem("fp16.min_loss_scale", least, f"must be <= 2**initial_scale_power={start}", f"write {start}")


def _types_are_named(written: Written, _: int) -> Iterator[Problem]:
    for entry in ("optimizer", "scheduler"):
        if f"{entry}.params" in written and not written[f"{entry}.type"]:
            yield Problem(f"{entry}.type", None, "must be given, since parameters are", "name it")


def _offload_has_its_place(written: Written, _: int) -> Iterator[Problem]:
    for block in (OPTIMIZER_OFFLOAD, PARAMETER_OFFLOAD):
        if block in written and written[f"{block}.device"] is None:
            yield Problem(f"{block}.device", None, "must be given", 'write "cpu", "nvme" or "none"')
        if written[f"{block}.device"] == "nvme" and not written[f"{block}.nvme_path"]:
            yield Problem(f"{block}.nvme_path", None, "must be given for nvme", "name a directory on a local disk")
    for old, block in ((f"{ZERO}.cpu_offload", OPTIMIZER_OFFLOAD), (f"{ZERO}.cpu_offload_param", PARAMETER_OFFLOAD)):
        if written[old] and block in written:
            yield Problem(old, True, f"cannot be together with {block}", "leave it out, it is deprecated")
    paths = nvme_paths(written)
    if len(paths) > 1:
        rule = f"must be {OPTIMIZER_OFFLOAD}.nvme_path={paths[0]}: one directory holds the files of both"
        yield Problem(f"{PARAMETER_OFFLOAD}.nvme_path", paths[1], rule, "write the same directory twice")


def _offload_fits_the_stage(written: Written, _: int) -> Iterator[Problem]:
    stage = written[f"{ZERO}.stage"]
    if device_of(written, OPTIMIZER_OFFLOAD) != "none" and stage == 0:
        place = f"{OPTIMIZER_OFFLOAD}.device" if OPTIMIZER_OFFLOAD in written else f"{ZERO}.cpu_offload"
        yield Problem(place, written[place], "needs stage 1, 2 or 3: stage 0 shards nothing", f"write {ZERO}.stage")
    if device_of(written, PARAMETER_OFFLOAD) != "none" and stage != 3:
        place = f"{PARAMETER_OFFLOAD}.device" if PARAMETER_OFFLOAD in written else f"{ZERO}.cpu_offload_param"
        rule = f"needs stage 3: stage {stage} keeps the weights whole"
        yield Problem(place, written[place], rule, f"write {ZERO}.stage = 3, or leave it out")


def _shard_groups_fill_dp(written: Written, dp: int) -> Iterator[Problem]:
    size = written[f"{ZERO}.mics_shard_size"]
    if size > 0 and dp % size:
        nearest = nearest_text(nearest_of(size, divisors(dp)))
        yield Problem(f"{ZERO}.mics_shard_size", size, f"must divide dp={dp}", nearest)


def _below(block: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{block}.{name}" for name in names)


_OFFLOAD = (
    *_below(OPTIMIZER_OFFLOAD, "device", "nvme_path"),
    *_below(PARAMETER_OFFLOAD, "device", "nvme_path"),
    *_below(ZERO, "cpu_offload", "cpu_offload_param"),
)
RULES = (
    Rule((TRAIN, MICRO, ACCUMULATION), _batch_sizes_agree),
    Rule(("fp16.enabled", "bf16.enabled"), _one_format),
    Rule(
        ("fp16.enabled", "bf16.enabled", "communication_data_type", "data_types.grad_accum_dtype"),
        _half_formats_have_half_weights,
    ),
    Rule(_below("fp16", "enabled", "min_loss_scale", "initial_scale_power"), _scale_starts_above_its_least),
    Rule(("optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params"), _types_are_named),
    Rule(_OFFLOAD, _offload_has_its_place),
    Rule((*_OFFLOAD, f"{ZERO}.stage"), _offload_fits_the_stage),
    Rule((f"{ZERO}.mics_shard_size",), _shard_groups_fill_dp),
)
