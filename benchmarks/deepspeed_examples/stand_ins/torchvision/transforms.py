"""Transforms of tensors [channels, height, width]; random ones take the middle, so that nothing is drawn."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Compose:
    """One after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for one in self.transforms:
            image = one(image)
        return image


class ToTensor:
    """The images are tensors already."""

    def __call__(self, image: Tensor) -> Tensor:
        return image


class RandomHorizontalFlip(ToTensor):
    """Never flips."""


class Normalize:
    """(image - mean) / std, by channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std


class Resize:
    """Bilinear, to a square."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Tensor) -> Tensor:
        return F.interpolate(image[None], (self.size, self.size), mode="bilinear")[0]


class RandomResizedCrop(Resize):
    """The whole image."""


class CenterCrop:
    """The middle."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Tensor) -> Tensor:
        top, left = ((extent - self.size) // 2 for extent in image.shape[1:])
        return image[:, top : top + self.size, left : left + self.size]
