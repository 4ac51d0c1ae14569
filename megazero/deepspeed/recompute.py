"""`deepspeed.checkpointing`: activations recomputed in the backward, by torch's own checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

checkpoint: Callable[..., Any] = partial(torch_checkpoint.checkpoint, use_reentrant=False)
non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any, deepspeed_config: Any = None, **options: Any) -> None:
    """Accept what changes nothing: `num_checkpoints`, `synchronize`, `profile`; the configuration is initialize's.

    Raises: NotImplementedError: activations would be cut over ranks, packed into one buffer or moved to the host.
    """
    for name in ("partition_activations", "contiguous_checkpointing", "checkpoint_in_cpu"):
        if options.get(name):
            raise NotImplementedError(
                f"deepspeed.checkpointing.configure does not support {name}: activations stay where they were computed, "
                "whole on every rank; leave it out"
            )


def is_configured() -> bool:
    """True: there is nothing to configure."""
    return True


def reset() -> None:
    """Nothing is kept between steps."""
