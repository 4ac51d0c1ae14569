"""What context parallelism sends, in bytes, and which Ulysses degrees the heads allow: pure arithmetic.

    cp = u (Ulysses) x r (ring); a rank has S / cp of the S tokens of a sample

    u ranks exchange heads for tokens     q, k, v there and the output back; in the backward pass the same again
    r ranks pass keys and values on       forward K, V; backward K, V and the sums of dK, dV; r - 1 hops each

    With h and k' elements of all query and key/value heads, b samples and 16 bits, on each rank of a layer:

    8 (h + k') b (S / cp) (u - 1) / u  +  12 (k' / u) b S (r - 1) / r        16 instead of 12 with fp32 gradients

Fewer key/value heads than u are replicated, so k' = head size x max(key/value heads, u).
Source: Jacobs et al. 2023, section 3.2 (Ulysses); Liu et al. 2023 (ring); Fang and Zhao 2024 (both).
"""

from __future__ import annotations

from megazero.settings import divisors


def context_bytes(
    seq_len: int,
    batch: int,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    ulysses: int,
    ring: int,
    itemsize: int = 2,
    gradient_itemsize: int = 4,
) -> dict[str, int]:
    """Bytes that a rank sends in a layer's forward and backward pass, by operation as traffic is counted.

    Args:
        seq_len: tokens of a whole sample.
        batch: samples of the micro-batch.
        heads, kv_heads: query and key/value heads of a tensor-parallel rank, see `heads_of_rank`.
        head_size: elements of a head.
        ulysses, ring: the two degrees; their product is cp.
        itemsize: bytes of an element of q, k, v and of the output.
        gradient_itemsize: bytes of an element of dK and dV on the ring.
    """
    replicated = max(kv_heads, ulysses)
    exchanged = 4 * (heads + replicated) * head_size * batch * (seq_len // (ulysses * ring)) * itemsize
    passed = 2 * replicated // ulysses * head_size * batch * (seq_len // ring) * (2 * itemsize + gradient_itemsize)
    return {"all_to_all": exchanged * (ulysses - 1) // ulysses, "ring_shift": passed * (ring - 1)}


def heads_of_rank(num_heads: int, num_kv_heads: int | None, tp: int) -> tuple[int, int]:
    """Query heads and key/value heads of a tensor-parallel rank; where tp exceeds the latter, ranks share one."""
    return num_heads // tp, max(1, (num_kv_heads or num_heads) // tp)


def ulysses_degrees(heads: int, kv_heads: int) -> list[int]:
    """Degrees that cut the heads of a rank evenly: key/value heads too, or each is replicated equally often."""
    return [u for u in divisors(heads) if u % kv_heads == 0 or kv_heads % u == 0]
