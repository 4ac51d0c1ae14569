"""The tokens of a micro-batch that this rank computes, in the form in which layers receive them.

    cp 1, one document a sample     TokenLayout(sample_ids)            positions are 0 ... seq - 1 on every rank
    cp 4 as 2 x 2, documents        TokenLayout(sample_ids, shard)

    sample            [ A0 A1 A2 A3 A4 A5 A6 A7 | B0 B1 B2 B3 ]
    ring rank 0       [ A0 A1 A6 A7 | B0 B3 ]   ring rank 1   [ A2 A3 A4 A5 | B1 B2 ]     see token_layout.py
    ulysses rank 0    [ A0 A1 A6 ]              ulysses rank 1  [ A7 B0 B3 ]              of ring rank 0

Everything that depends on a token's position in its sample or document reads it here: rotary and learned positions,
dropout, labels and attention.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh32_intdigest

from megazero.layers.token_layout import Ints, RingRanges, ring_ranges, tile_table
from megazero.parallel_state import Axis

T = TypeVar("T")


class AttentionPlan:
    """Which keys of each ring rank this rank's queries attend to.

    Args:
        samples: the intervals of tokens of every ring rank, for each sample of the micro-batch; one entry is valid for
            all samples.
        index: this rank's index on the ring.

    Attributes:
        documents: 32-bit hash of the documents' lengths.
    """

    def __init__(self, samples: Sequence[RingRanges], index: int) -> None:
        self._samples, self._own = samples, [of_ranks[index] for of_ranks in samples]
        self.documents = xxh32_intdigest(np.concatenate([np.append(sample.length, 0) for sample in samples]).tobytes())
        self._tables: dict[tuple[int, int | None, bool], list[Ints]] = {}

    def tables(self, source: int, window: int | None, *, masked: bool = True) -> list[Ints]:
        """Return the `tile_table` of this rank's queries and the keys of ring rank `source`: one per sample, or one for
        all.

        Args:
            masked: the kernel takes a window as a mask, see `tile_table`.
        """
        key = source, window, masked
        if key not in self._tables:
            ranges = zip(self._own, self._samples, strict=True)
            self._tables[key] = [tile_table(own, of_ranks[source], window, masked=masked) for own, of_ranks in ranges]
        return self._tables[key]


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """The tokens of each sample of a micro-batch that a rank holds.

    Args:
        rows: int64 [seq of the rank, 1 or batch], the index of each token in its sample; one column is valid for all
            samples.
        positions: like `rows`, the position of each token in its document.
        plan: which keys the tokens attend to.
        fits_any: valid for any number of samples of one document each; otherwise for as many as there are columns.
    """

    rows: Tensor
    positions: Tensor
    plan: AttentionPlan
    fits_any: bool = False
    _derived: dict[Hashable, object] = field(default_factory=dict)

    def fits(self, samples: int) -> bool:
        """Whether this shard is valid for a micro-batch of `samples` samples."""
        return self.fits_any or samples == self.rows.shape[1]

    def cut(self, whole: Tensor) -> Tensor:
        """Return the rows of this shard.  [seq of a sample, batch] -> [seq of the rank, batch].  Raises: ValueError: the
        batch has another number of samples.
        """
        if not self.fits(whole.shape[1]):
            raise ValueError(
                f"the documents of {self.rows.shape[1]} samples were given for {whole.shape[1]} samples; pass "
                "`sequence_shard` the document lengths of every sample"
            )
        return whole.take_along_dim(self.rows, 0)

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, computed once for this shard and shared by all layers."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Which tokens of which samples a rank holds in a micro-batch.

    Args:
        sample_ids: int64 [batch], the global index of each sample in the run.
        shard: None if the rank has whole samples of one document each.
        labels: int64 [seq, batch], negative where a token does not count in the loss; None if the rank has no labels.
    """

    sample_ids: Tensor
    shard: SequenceShard | None = None
    labels: Tensor | None = None


def sequence_shard(
    lengths: Sequence[Sequence[int]] | None, seq_len: int, ulysses: Axis, ring: Axis, device: torch.device
) -> SequenceShard:
    """Return this rank's shard of the samples of a micro-batch.

    Args:
        lengths: the lengths of the documents of each sample, in order; they add up to `seq_len`.  None: one document per
            sample.
        seq_len: tokens of a sample, divisible by ulysses x ring.
        ulysses, ring: the two axes of context parallelism.
        device: device of the tensors.

    Raises:
        ValueError: the lengths of the documents of a sample do not add up to `seq_len`.
    """
    place = ulysses.size, ulysses.index, ring.size, ring.index, device
    if lengths is None:
        return whole_samples(seq_len, *place)
    if wrong := [sum(documents) for documents in lengths if sum(documents) != seq_len]:
        raise ValueError(f"the documents of a sample must have model.seq_len={seq_len} tokens together: got {wrong[0]}")
    return shard_at([tuple(documents) for documents in lengths], *place)


@lru_cache(maxsize=16)
def whole_samples(seq_len: int, *place: int | torch.device) -> SequenceShard:
    """Return a rank's shard of any samples of one document each.  `place`: as in `shard_at`."""
    return replace(shard_at([(seq_len,)], *place), fits_any=True)  # type: ignore[arg-type]


def shard_at(
    lengths: Sequence[tuple[int, ...]],
    ulysses: int,
    ulysses_index: int,
    ring: int,
    ring_index: int,
    device: torch.device,
) -> SequenceShard:
    samples = [ring_ranges(documents, ring) for documents in lengths]
    held = [of_ranks[ring_index] for of_ranks in samples]
    begins = [np.cumsum(documents) - documents for documents in map(np.asarray, lengths)]
    positions = np.stack([ranges.positions for ranges in held], axis=1)
    rows = positions + np.stack([begin[ranges.documents] for begin, ranges in zip(begins, held, strict=True)], axis=1)
    size = len(rows) // ulysses
    own = slice(ulysses_index * size, (ulysses_index + 1) * size)
    of_rows, of_positions = (copied_to(device, np.ascontiguousarray(whole[own])) for whole in (rows, positions))
    return SequenceShard(of_rows, of_positions, AttentionPlan(samples, ring_index))


def copied_to(device: torch.device, array: NDArray[Any]) -> Tensor:
    """Copy an array to a device.  On CUDA the host does not wait for the copy.

    The result is never an inference tensor, even if an evaluation makes the first call, because training uses it, too.
    """
    with torch.inference_mode(False):
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
