"""From the seconds of a step to what a run costs: use of the devices, days, dollars, checkpoints, failures.

    tokens / s   = tokens of a step / seconds                     MFU = FLOPs of the model / (seconds * ranks * peak)
    days         = tokens of the run / tokens per second, longer by the share that failures and checkpoints take

    [----- work: interval -----][wait][----- work -----] x lost [restart][----- work again -----][wait]
                                checkpoint              failure, every M seconds in the mean

Sources: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006, "A higher order estimate of
the optimum checkpoint interval for restart dumps", equations 20 (expected time) and 37 (interval).  Rate of failures: the
Llama team 2024 ("The Llama 3 herd of models", section 3.3.4) counted 419 unexpected interruptions in 54 days on 16,384 GPUs.
Storage: the same (section 3.3.1) had 2 TB/s sustained for 2,048 nodes.
"""

from dataclasses import dataclass
from math import ceil, exp, sqrt

DAY, HOUR, MINUTE = 86_400, 3_600, 60

#: Of the Llama team; one in 50,700 hours.
FAILURES_PER_DEVICE_HOUR = 419 / (54 * 24 * 16_384)
#: Bytes per second that a node writes while all do; of the Llama team.
STORAGE_BANDWIDTH_PER_NODE = 2e12 / 2_048
#: From a failure until the run trains again: an assumption, since no paper says it for others' clusters.
RESTART_SECONDS = 600.0


@dataclass(frozen=True)
class Throughput:
    """Rates that follow from a step's duration.

    Args:
        mfu: the model's FLOPs over the peak; None if the peak is not known.
        flops_per_device: the model's FLOP/s of one device.
    """

    tokens_per_second: float
    flops_per_device: float
    mfu: float | None


def throughput(seconds: float, tokens: float, flops: float, ranks: int, peak_flops: float | None) -> Throughput:
    """Return the rates of a step.

    Args:
        flops: FLOPs of the model in the step, on all ranks.
        peak_flops: FLOP/s of one device; None if not known.
    """
    each = flops / seconds / ranks
    return Throughput(tokens / seconds, each, each / peak_flops if peak_flops else None)


@dataclass(frozen=True)
class Checkpoint:
    """Size and time of one checkpoint.

    Args:
        nbytes: of all files.
        write_seconds: until it is complete.
        wait_seconds: for which training waits: until a copy is in host memory, or until it is complete.
    """

    nbytes: int
    write_seconds: float
    wait_seconds: float


def checkpoint_cost(
    parameters: int,
    *,
    weight_bytes: int,
    moments: float,
    ranks: int,
    nodes: int,
    host_bandwidth: float,
    storage_bandwidth: float,
    asynchronous: bool = True,
) -> Checkpoint:
    """Return the cost of writing weights, fp32 masters of 16-bit weights and fp32 moments once, evenly by all ranks.

    Args:
        weight_bytes: bytes of one element of the weights.
        moments: numbers that the optimizer holds for each parameter.
        host_bandwidth: bytes per second from one device to its host; 0 if the device is the host.
        storage_bandwidth: bytes per second of a node while all nodes write.
    """
    nbytes = round(parameters * (weight_bytes + (4 if weight_bytes < 4 else 0) + 4 * moments))
    write = nbytes / (storage_bandwidth * nodes)
    copy = nbytes / ranks / host_bandwidth if host_bandwidth else 0.0
    return Checkpoint(nbytes, write + copy, copy if asynchronous else write + copy)


@dataclass(frozen=True)
class Failures:
    """Time that failures cost a run with the best checkpoint interval.

    Args:
        mean_seconds: between two failures of the whole cluster.
        interval_seconds: of training between two checkpoints.
        lost_share: fraction of the time without progress: checkpoints, repeated work, restarts.
    """

    mean_seconds: float
    interval_seconds: float
    lost_share: float


def failures(
    per_device_hour: float, ranks: int, checkpoint: Checkpoint, restart_seconds: float, step_seconds: float = 0.0
) -> Failures | None:
    """Return the best checkpoint interval and the time it loses; None for a cluster that never fails.

    An interval is a whole number of steps, and no shorter than writing a checkpoint, for which the next one waits.
    """
    if per_device_hour <= 0:
        return None
    mean = HOUR / (per_device_hour * ranks)
    interval = max(best_interval(checkpoint.wait_seconds, mean), checkpoint.write_seconds)
    if step_seconds:
        interval = ceil(interval / step_seconds) * step_seconds
    return Failures(mean, interval, lost_share(interval, checkpoint.wait_seconds, mean, restart_seconds))


def best_interval(wait: float, mean: float) -> float:
    """Return the best seconds of training between two checkpoints (Daly 2006, equation 37).

    Args:
        wait: seconds for which training waits at a checkpoint.
        mean: mean seconds between failures.
    """
    if wait >= 2 * mean:
        return mean
    part = wait / (2 * mean)
    return sqrt(2 * wait * mean) * (1 + sqrt(part) / 3 + part / 9) - wait  # the first factor is Young's (1974)


def lost_share(interval: float, wait: float, mean: float, restart: float) -> float:
    """Return the fraction of a run's time without progress, for exponential failures (Daly 2006, equation 20).

    The expected time of a run of work W is  mean e^(restart/mean) (e^((interval + wait)/mean) - 1) W / interval.
    """
    spread = (interval + wait) / mean
    if spread > 500 or restart / mean > 500:  # nothing is ever finished; e^709 is the largest float
        return 1.0
    return 1 - interval / (mean * exp(restart / mean) * (exp(spread) - 1))


@dataclass(frozen=True)
class RunCost:
    """Time and price of a run over `tokens`.

    Args:
        days: including the time that failures take.
        days_without: if nothing failed.
        dollars: None without a price.
    """

    tokens: float
    days_without: float
    days: float
    device_hours: float
    dollars: float | None


def run_cost(
    tokens: float, tokens_per_second: float, ranks: int, lost: float = 0.0, dollars_per_hour: float | None = None
) -> RunCost:
    """Return time and price of a run.

    Args:
        lost: fraction of the time without progress.
        dollars_per_hour: of one device; None for no price.
    """
    seconds = tokens / tokens_per_second
    spent = seconds / (1 - lost) if lost < 1 else float("inf")
    hours = spent / HOUR * ranks
    return RunCost(
        tokens, seconds / DAY, spent / DAY, hours, None if dollars_per_hour is None else hours * dollars_per_hour
    )
