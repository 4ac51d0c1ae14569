"""Random images of the shape of known data sets, the same in every process; `EXAMPLES` in the environment says how many."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class _Random(Dataset):
    def __init__(
        self, shape: tuple[int, int, int], classes: int, transform: Callable[[Tensor], Any] | None, seed: int
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        count = int(os.environ.get("EXAMPLES", "64"))
        self.images = torch.rand(count, *shape, generator=draw)
        self.labels = torch.randint(classes, (count,), generator=draw)
        self.classes = [str(index) for index in range(classes)]
        self._transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        return (image if self._transform is None else self._transform(image)), int(self.labels[index])


class CIFAR10(_Random):
    """[3, 32, 32], 10 classes."""

    def __init__(self, root: Any = None, train: bool = True, transform: Any = None, download: bool = False) -> None:
        super().__init__((3, 32, 32), 10, transform, 1 + train)


class MNIST(_Random):
    """[1, 28, 28], 10 classes."""

    def __init__(self, root: Any = None, train: bool = True, transform: Any = None, download: bool = False) -> None:
        super().__init__((1, 28, 28), 10, transform, 1 + train)


class ImageFolder(_Random):
    """[3, 224, 224], 1000 classes."""

    def __init__(self, root: Any = None, transform: Any = None) -> None:
        super().__init__((3, 224, 224), 1000, transform, len(str(root)))


class FakeData(_Random):
    """Images of a size that is given."""

    def __init__(
        self, size: int = 0, image_size: Any = (3, 224, 224), num_classes: int = 10, transform: Any = None
    ) -> None:
        super().__init__(tuple(image_size), num_classes, transform, 3)
