"""Which tokens of which samples a rank computes, as layers are told it.

    cp 1, one document a sample     TokenLayout(sample_ids)            positions are 0 ... seq - 1 on every rank
    cp 4 as 2 x 2, documents        TokenLayout(sample_ids, part)

    sample            [ A0 A1 A2 A3 A4 A5 A6 A7 | B0 B1 B2 B3 ]
    ring rank 0       [ A0 A1 A6 A7 | B0 B3 ]   ring rank 1   [ A2 A3 A4 A5 | B1 B2 ]     see `shards` in token_layout.py
    ulysses rank 0    [ A0 A1 A6 ]              ulysses rank 1  [ A7 B0 B3 ]              of ring rank 0

Whatever depends on where a token stands in its sample or document reads it here: rotary and learned positions, dropout,
labels, attention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh32_intdigest

from megazero.layers.token_layout import Ints, Shards, shards, tile_table
from megazero.parallel_state import Axis

T = TypeVar("T")


class AttentionPlan:
    """Which keys of every ring rank the queries of this rank see.

    Args:
        samples: the runs of every ring rank, for each sample of the micro-batch; one alone stands for all samples.
        index: this rank's index on the ring.

    Attributes:
        documents: a hash of the documents' lengths in 32 bits.
    """

    def __init__(self, samples: Sequence[Shards], index: int) -> None:
        self._samples, self._own = samples, [of_ranks[index] for of_ranks in samples]
        self.documents = xxh32_intdigest(np.concatenate([np.append(sample.length, 0) for sample in samples]).tobytes())
        self._tables: dict[tuple[int, int | None, bool], list[Ints]] = {}

    def tables(self, source: int, window: int | None, *, masked: bool = True) -> list[Ints]:
        """The `tile_table` of this rank's queries with the keys of ring rank `source`: of each sample, or one of all.

        masked: the kernel takes a window as a mask, see `tile_table`.
        """
        key = source, window, masked
        if key not in self._tables:
            runs = zip(self._own, self._samples, strict=True)
            self._tables[key] = [tile_table(own, of_ranks[source], window, masked=masked) for own, of_ranks in runs]
        return self._tables[key]


@dataclass(frozen=True, eq=False)
class SamplePart:
    """The tokens that a rank has of each sample of a micro-batch.

    Args:
        rows: int64 [seq of the rank, 1 or batch], the index of each token in its sample; one column holds for all samples.
        positions: as `rows`, the position of each token in its document.
        plan: which keys the tokens attend to.
        of_any: it is of any samples, whole ones of one document each; else of as many as it has columns.
    """

    rows: Tensor
    positions: Tensor
    plan: AttentionPlan
    of_any: bool = False
    _derived: dict[Hashable, object] = field(default_factory=dict)

    def is_of(self, samples: int) -> bool:
        """Whether it fits a micro-batch of so many samples."""
        return self.of_any or samples == self.rows.shape[1]

    def cut(self, whole: Tensor) -> Tensor:
        """[seq of a sample, batch] -> [seq of the rank, batch].  Raises: ValueError: it is of other samples."""
        if not self.is_of(whole.shape[1]):
            raise ValueError(
                f"the documents of {self.rows.shape[1]} samples were given for {whole.shape[1]} samples; give "
                "`part_of` the lengths of each"
            )
        return whole.take_along_dim(self.rows, 0)

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, computed once for this part and shared by all layers."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Which tokens of which samples a rank has in a micro-batch.

    Args:
        sample_ids: int64 [batch], the global index of each sample in the run.
        part: None where a rank has whole samples of one document each.
        labels: int64 [seq, batch], below 0 where none is to be learned; None where the rank has none.
    """

    sample_ids: Tensor
    part: SamplePart | None = None
    labels: Tensor | None = None


def part_of(
    lengths: Sequence[Sequence[int]] | None, seq_len: int, ulysses: Axis, ring: Axis, device: torch.device
) -> SamplePart | None:
    """This rank's part of the samples of a micro-batch; None where it has whole samples of one document each.

    Args:
        lengths: of the documents of each sample, in order; each sample's sum is `seq_len`.  None: one document a sample.
        seq_len: of a sample, divisible by ulysses x ring.
        ulysses, ring: the two axes of context parallelism.
        device: of the tensors.

    Raises: ValueError where a sample's documents have another sum.
    """
    if lengths is None:
        if ulysses.size * ring.size == 1:
            return None
        return whole_samples(seq_len, ulysses.size, ulysses.index, ring.size, ring.index, device)
    if wrong := [sum(documents) for documents in lengths if sum(documents) != seq_len]:
        raise ValueError(f"the documents of a sample must have model.seq_len={seq_len} tokens together: got {wrong[0]}")
    return _part(
        [tuple(documents) for documents in lengths], ulysses.size, ulysses.index, ring.size, ring.index, device
    )


@lru_cache(maxsize=16)
def whole_samples(seq_len: int, *place: int | torch.device) -> SamplePart:
    """The part of a rank in any samples of one document each.  `place`: as in `_part`."""
    return replace(_part([(seq_len,)], *place), of_any=True)  # type: ignore[arg-type]


def _part(
    lengths: Sequence[tuple[int, ...]],
    ulysses: int,
    ulysses_index: int,
    ring: int,
    ring_index: int,
    device: torch.device,
) -> SamplePart:
    samples = [shards(documents, ring) for documents in lengths]
    runs = [of_ranks[ring_index] for of_ranks in samples]
    begins = [np.cumsum(documents) - documents for documents in map(np.asarray, lengths)]
    positions = np.stack([ranges.positions for ranges in runs], axis=1)
    rows = positions + np.stack([begin[ranges.documents] for begin, ranges in zip(begins, runs, strict=True)], axis=1)
    size = len(rows) // ulysses
    own = slice(ulysses_index * size, (ulysses_index + 1) * size)
    of_rows, of_positions = (copied_to(device, np.ascontiguousarray(whole[own])) for whole in (rows, positions))
    return SamplePart(of_rows, of_positions, AttentionPlan(samples, ring_index))


def copied_to(device: torch.device, array: NDArray[Any]) -> Tensor:
    """Copy an array to a device; on CUDA the host does not wait for the copy.

    No inference tensor, also where an evaluation is the first to ask: training uses what is kept.
    """
    with torch.inference_mode(False):
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
