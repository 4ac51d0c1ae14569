"""DeepSpeed's constants for the names of schedules and of their parameters: `CYCLE_MIN_LR == "cycle_min_lr"`."""

from megazero.deepspeed.names import HOMES

_SCHEDULES = {
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
}
_TYPES = {"WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear"}


def __getattr__(name: str) -> str:
    if name not in HOMES["runtime.lr_schedules"]["lr_constants"].split():
        raise AttributeError(f"deepspeed.runtime.lr_schedules has no constant {name}")
    return (_SCHEDULES | _TYPES).get(name, name.lower())
