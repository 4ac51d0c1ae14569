"""The times that `megazero calibrate` measured on a machine, as a value and as a file.

    products     (dtype, m, n, k) -> seconds      a mean of the nearest measured sizes, or the measured time of the same size
    operators    name -> (bytes, seconds)...      interpolated between measured sizes, log-linearly
    collectives  (operation, ranks) -> (bytes, seconds)...

Operators are measured in one process, then scaled by the time of whole steps, in which ranks on all processors slow each
other down.  The file is JSON with a checksum; a temporary file is renamed into place.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from math import exp, log
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import AfterValidator, Field, TypeAdapter

from megazero.plan.devices import Device, Link, Positive
from megazero.settings import write_text

VERSION = 5
_NEAREST = 4  # measured products from which the time of another product is estimated


def _by_size(samples: Samples) -> Samples:
    if not samples or [size for size, _ in samples] != sorted({size for size, _ in samples}):
        raise ValueError("samples are missing, or not sorted by size")
    return samples


#: (size, seconds), by size.
Samples: TypeAlias = Annotated[tuple[tuple[Positive, Positive], ...], AfterValidator(_by_size)]


class MeasuredProduct(NamedTuple):
    """A measured matrix product [m, k] x [k, n]."""

    dtype: str
    m: Annotated[int, Field(gt=0)]
    n: Annotated[int, Field(gt=0)]
    k: Annotated[int, Field(gt=0)]
    seconds: Positive


@dataclass(frozen=True)
class OperatorTable:
    """Measured times of operators.

    Args:
        products: the measured matrix products.
        operators: (size, seconds) by torch's name; a size is bytes read and written, for attention FLOPs.
        host_seconds: host time per operator call, in addition to the operator's own: Python, autograd, dispatch.
    """

    products: tuple[MeasuredProduct, ...]
    operators: Mapping[str, Samples]
    host_seconds: float

    @cached_property
    def _by_dtype(self) -> dict[str, list[MeasuredProduct]]:
        found: dict[str, list[MeasuredProduct]] = {}
        for product in self.products:
            found.setdefault(product.dtype, []).append(product)
        return found

    def product(self, dtype: str, m: int, n: int, k: int) -> float | None:
        """Return the seconds of a product [m, k] x [k, n]; None if no product of this dtype was measured."""
        known = self._by_dtype.get(dtype)
        if not known:
            return None

        def distance(product: MeasuredProduct) -> float:
            return abs(log(m / product.m)) + abs(log(n / product.n)) + abs(log(k / product.k))

        near = sorted(known, key=distance)[:_NEAREST]
        if distance(near[0]) < 1e-9:
            return near[0].seconds
        weights = [distance(product) ** -2 for product in near]
        rates = [log(product.m * product.n * product.k / product.seconds) for product in near]
        rate = exp(sum(w * r for w, r in zip(weights, rates, strict=True)) / sum(weights))
        return m * n * k / rate

    def scaled(self, factor: float) -> OperatorTable:
        """Return the table with every time multiplied by `factor`."""
        products = tuple(product._replace(seconds=product.seconds * factor) for product in self.products)
        operators = {
            name: tuple((size, seconds * factor) for size, seconds in samples)
            for name, samples in self.operators.items()
        }
        return OperatorTable(products, operators, self.host_seconds * factor)

    def operator(self, name: str, size: float) -> float | None:
        """Return the seconds of an operator, by the unit of `operators`; None if it was not measured."""
        samples = self.operators.get(name)
        return None if samples is None else interpolated(samples, size)


def interpolated(samples: Samples, size: float) -> float:
    """Interpolate seconds by size: log-linear between samples, proportional above the largest, constant below the least."""
    sizes = [at for at, _ in samples]
    if size <= sizes[0]:
        return samples[0][1]
    if size >= sizes[-1]:
        return samples[-1][1] * size / sizes[-1]
    index = bisect_left(sizes, size)
    (low, before), (high, after) = samples[index - 1], samples[index]
    share = log(size / low) / log(high / low)
    return exp(log(before) * (1 - share) + log(after) * share)


@dataclass(frozen=True)
class Calibration:
    """Everything that `megazero calibrate` measured on a machine.

    Args:
        device: a GPU with fitted shares, or a host described as a device.
        processors: cores that the ranks of a node share; 0 for a GPU, for which plans use nothing but `device`.
        within: the link between ranks of one node.
        table: times of operators.
        collectives: (bytes, seconds) by operation and number of ranks on one host, as "all_reduce 4".
        probe_seconds: seconds of `SpeedProbe` alone, and on every processor at once, during the calibration.
    """

    device: Device
    processors: int
    within: Link
    table: OperatorTable
    collectives: Mapping[str, Samples] = field(default_factory=dict)
    probe_seconds: tuple[float, float] = (0.0, 0.0)

    def collective(self, operation: str, ranks: int, size: float) -> float | None:
        """Return the seconds of a collective within one host; None if it was not measured.

        Args:
            operation: such as "all_reduce".
            ranks: ranks of the group; the time is scaled from the nearest measured number.
            size: bytes that each rank sends.
        """
        known = sorted(int(key.split()[1]) for key in self.collectives if key.split()[0] == operation)
        nearest = min(known, key=lambda count: abs(log(count / ranks)), default=None)
        return nearest and interpolated(self.collectives[f"{operation} {nearest}"], size) * ranks / nearest


def read_calibration(path: Path) -> Calibration:
    """Read a file that `write_calibration` wrote.

    Raises:
        ValueError: the file is damaged or no calibration; the message says what to do.
        OSError: the file cannot be read.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["version"] not in (4, VERSION):
            raise ValueError(f"it has version {found['version']}, this program reads 4 and {VERSION}")
        if found.pop("sha256", None) not in (None, _checksum(found)):  # version 4 has no checksum
            raise ValueError("it was damaged or changed: its checksum does not match")
        found["device"]["link"] = found["within"]
        found.setdefault("table", found.get("alone"))  # the name in version 4
        return TypeAdapter(Calibration).validate_python(found)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(
            f"{path} is no calibration ({why}); write one with: megazero calibrate --out {path}"
        ) from error


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration to `path`, through a temporary file."""
    found = {"version": VERSION, **asdict(calibration)}
    del found["device"]["link"]  # equal to `within`
    write_text(path, json.dumps(found | {"sha256": _checksum(found)}))


def _checksum(found: Mapping[str, Any]) -> str:
    return sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
