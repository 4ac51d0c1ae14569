"""From the seconds of a step to the cost of a run: use of the devices, days, dollars, checkpoints, failures.

    tokens / s   = tokens of a step / seconds                     MFU = FLOPs of the model / (seconds * ranks * peak)
    days         = tokens of the run / tokens per second, longer by the share that failures and checkpoints take

    [----- work: interval -----][wait][- lost work -] x [restart][----- the same work -----][wait]
                                checkpoint            failure, every M seconds on average

Sources: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006, "A higher order estimate of
the optimum checkpoint interval for restart dumps", equations 20 (expected time) and 37 (interval).  Rate of failures: the
Llama team 2024 ("The Llama 3 herd of models", section 3.3.4) counted 419 unexpected interruptions in 54 days on 16,384 GPUs.
Storage: the same (section 3.3.1) had 2 TB/s sustained for 2,048 nodes.
"""

from dataclasses import dataclass
from math import ceil, exp, sqrt

DAY, HOUR, MINUTE = 86_400, 3_600, 60

#: Failure rate of the Llama team: one in 50,700 device hours.
FAILURES_PER_DEVICE_HOUR = 419 / (54 * 24 * 16_384)
#: Bytes per second that a node writes while all nodes write; of the Llama team's cluster.
STORAGE_BANDWIDTH_PER_NODE = 2e12 / 2_048
#: Seconds from a failure until the run trains again: an assumption, since it depends on the cluster.
RESTART_SECONDS = 600.0


@dataclass(frozen=True)
class Throughput:
    """Rates of a run.

    Args:
        tokens_per_second: of all ranks together.
        flops_per_device: FLOP/s of one device, counting the FLOPs of the model alone.
        mfu: `flops_per_device` / peak FLOP/s; None if the peak is not known.
    """

    tokens_per_second: float
    flops_per_device: float
    mfu: float | None


def throughput(seconds: float, tokens: float, flops: float, ranks: int, peak_flops: float | None) -> Throughput:
    """Return the rates of a run from one of its steps.

    Args:
        seconds: duration of the step.
        tokens: tokens of the step, on all ranks.
        flops: FLOPs of the model in the step, on all ranks.
        ranks: number of devices.
        peak_flops: peak FLOP/s of one device; None if not known.
    """
    each = flops / seconds / ranks
    return Throughput(tokens / seconds, each, each / peak_flops if peak_flops else None)


@dataclass(frozen=True)
class Checkpoint:
    """Size and time of one checkpoint.

    Args:
        nbytes: bytes of all files.
        write_seconds: time until the checkpoint is complete.
        wait_seconds: time for which training stands still: until host memory holds a copy, or the checkpoint is complete.
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
    """Return the cost of writing weights, fp32 masters of 16-bit weights, and fp32 moments once, evenly by all ranks.

    Args:
        parameters: number of parameters of the model.
        weight_bytes: bytes of one weight.
        moments: numbers that the optimizer holds for each parameter.
        ranks, nodes: how many there are.
        host_bandwidth: bytes per second from one device to its host; 0 if the device is the host.
        storage_bandwidth: bytes per second that a node writes while all nodes write.
        asynchronous: training waits for the copy to host memory only.
    """
    nbytes = round(parameters * (weight_bytes + (4 if weight_bytes < 4 else 0) + 4 * moments))
    write = nbytes / (storage_bandwidth * nodes)
    copy = nbytes / ranks / host_bandwidth if host_bandwidth else 0.0
    return Checkpoint(nbytes, write + copy, copy if asynchronous else write + copy)


@dataclass(frozen=True)
class Failures:
    """The time that failures cost a run with the best checkpoint interval.

    Args:
        mean_seconds: average time between two failures of the whole cluster.
        interval_seconds: time of training between two checkpoints.
        lost_share: fraction of the time without progress: checkpoints, repeated work, restarts.
    """

    mean_seconds: float
    interval_seconds: float
    lost_share: float


def failures(
    per_device_hour: float, ranks: int, checkpoint: Checkpoint, restart_seconds: float, step_seconds: float = 0.0
) -> Failures | None:
    """Return the best checkpoint interval and the share of time lost; None for a cluster that never fails.

    The interval is a whole number of steps.  It is at least the time to write a checkpoint, since the next one waits for it.

    Args:
        per_device_hour: failures of one device in an hour.
        ranks: number of devices.
        checkpoint: cost of a checkpoint.
        restart_seconds: time from a failure until the run trains again.
        step_seconds: duration of a step; 0 allows any interval.
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
        mean: average seconds between failures.
    """
    if wait >= 2 * mean:
        return mean
    ratio = wait / (2 * mean)
    return sqrt(2 * wait * mean) * (1 + sqrt(ratio) / 3 + ratio / 9) - wait  # the first factor is Young's (1974)


def lost_share(interval: float, wait: float, mean: float, restart: float) -> float:
    """Return the fraction of a run's time without progress; times between failures are exponential (Daly 2006, equation 20).

    Args:
        interval: seconds of training between two checkpoints.
        wait: seconds for which training waits at a checkpoint.
        mean: average seconds between failures.
        restart: seconds from a failure until the run trains again.

    The expected time of a run of work W is  mean e^(restart/mean) (e^((interval + wait)/mean) - 1) W / interval.
    """
    spread = (interval + wait) / mean
    if spread > 500 or restart / mean > 500:  # no interval is ever completed; e^709 is the largest float
        return 1.0
    return 1 - interval / (mean * exp(restart / mean) * (exp(spread) - 1))


@dataclass(frozen=True)
class RunCost:
    """Time and price of a run.

    Args:
        tokens: tokens that the run consumes.
        days_without: days if nothing failed.
        days: days with the time that failures cost.
        device_hours: hours of all devices together.
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
        tokens: tokens that the run consumes.
        tokens_per_second: rate of all ranks together.
        ranks: number of devices.
        lost: fraction of the time without progress.
        dollars_per_hour: price of one device; None without a price.
    """
    seconds = tokens / tokens_per_second
    spent = seconds / (1 - lost) if lost < 1 else float("inf")
    hours = spent / HOUR * ranks
    return RunCost(
        tokens, seconds / DAY, spent / DAY, hours, None if dollars_per_hour is None else hours * dollars_per_hour
    )
