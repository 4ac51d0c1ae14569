"""DeepSpeed's constants for the names of schedules and of their parameters: `CYCLE_MIN_LR == "cycle_min_lr"`."""

_OTHERS = {"WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear", "LR_RANGE_TEST": "LRRangeTest"}
_OTHERS |= {"ONE_CYCLE": "OneCycle", "WARMUP_LR": "WarmupLR"}
_OTHERS |= {"WARMUP_DECAY_LR": "WarmupDecayLR", "WARMUP_COSINE_LR": "WarmupCosineLR"}


def __getattr__(name: str) -> str:
    if not name.isupper():
        raise AttributeError(name)
    return _OTHERS.get(name, name.lower())
