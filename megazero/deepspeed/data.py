"""A user's dataset, cut over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from megazero.parallel_state import Axis


def make_dataloader(
    dataset: Dataset[Any],
    micro_batch_size: int,
    dp: Axis,
    *,
    seed: int,
    drop_last: bool,
    collate_fn: Callable[..., Any] | None = None,
    num_workers: int = 0,
) -> DataLoader[Any]:
    """Micro-batches of this rank's part of a dataset: every dp-th sample of an order shuffled by `seed`.

    An iterable dataset is taken as it is: it cuts itself.  `collate_fn`, `num_workers` and `drop_last` are as in torch.
    """
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, dp.size, dp.index, shuffle=True, seed=seed)
    return DataLoader(
        dataset, micro_batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last, num_workers=num_workers
    )


class RepeatingLoader:
    """Goes through a loader again and again, in a new order each time."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self._epoch = loader, 0
        self._items = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._epoch += 1
            sampler = getattr(self._loader, "sampler", None)
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(self._epoch)
            self._items = iter(self._loader)
            return next(self._items)
