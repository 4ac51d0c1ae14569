"""The optimizer step on flat fp32 shards, with one clipping coefficient for the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.zero.bucket import Bucket, Run, intersect

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019) over the owned elements of every bucket.

    Args:
        buckets: this rank's buckets; their `master` is stepped with their `gradient`.
        betas, eps, weight_decay: as in torch.optim.AdamW; decay acts only where a parameter's spec says so.

    torch's fused kernel sees a few long 1-D tensors: one per bucket and decay group.
    """

    def __init__(
        self, buckets: Sequence[Bucket], *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self._parts: list[tuple[Bucket, Run, torch.nn.Parameter]] = []
        groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for bucket in buckets:
            for decays, whole in bucket.layout.runs(lambda spec: spec.decay):
                run = intersect(whole, bucket.owned)
                if run is not None:
                    part = torch.nn.Parameter(bucket.owned_part(bucket.master, run).data, requires_grad=False)
                    part.grad = bucket.owned_part(bucket.gradient, run)
                    self._parts.append((bucket, run, part))
                    groups[decays].append(part)
        self._device = buckets[0].master.device
        self.torch_optimizer = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            betas=betas,
            eps=eps,
            fused=True,
        )
        for _, _, part in self._parts:
            moments = {name: torch.zeros_like(part) for name in MOMENTS}
            self.torch_optimizer.state[part] = {"step": torch.zeros((), device=self._device), **moments}

    def step(self, lr: float, clip_coefficient: float) -> None:
        """Step every owned element.

        Args:
            lr: learning rate of this step.
            clip_coefficient: factor on every gradient, 1 where the norm is within bounds.
        """
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        # The fused kernel divides gradients by grad_scale: clipping costs no pass of its own.
        scale = None if clip_coefficient == 1.0 else torch.tensor(1.0 / clip_coefficient, device=self._device)
        self.torch_optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self.torch_optimizer.step()

    def moment(self, name: str, bucket: Bucket, run: Run) -> Tensor:
        """Elements `run` of one moment; they must lie in one parameter and be owned."""
        for at, whole, part in self._parts:
            if at is bucket and whole.start <= run.start and run.stop <= whole.stop:
                moment: Tensor = self.torch_optimizer.state[part][name]
                return moment[run.start - whole.start : run.stop - whole.start]
        raise KeyError(f"elements {run.start}..{run.stop} of {bucket.layout.name} are not owned by this rank")

    @property
    def steps_taken(self) -> int:
        """Steps since the start of the run, for the bias correction."""
        return int(self.torch_optimizer.state[self._parts[0][2]]["step"].item()) if self._parts else 0

    @steps_taken.setter
    def steps_taken(self, steps: int) -> None:
        for _, _, part in self._parts:
            self.torch_optimizer.state[part]["step"].fill_(steps)

    def memory_bytes(self) -> int:
        """Bytes of the moments."""
        return sum(self.torch_optimizer.state[part][name].nbytes for name in MOMENTS for _, _, part in self._parts)
