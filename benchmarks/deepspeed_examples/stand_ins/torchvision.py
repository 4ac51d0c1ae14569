"""Stands for torchvision and its modules in scripts that are compared: random images, transforms of tensors, narrow models.

Images are the same in every process; `EXAMPLES` in the environment says how many.  Random transforms take the middle, so
that nothing is drawn.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

datasets = models = transforms = utils = sys.modules[__name__]
sys.modules |= {f"{__name__}.{name}": datasets for name in ("datasets", "models", "transforms", "utils")}
Transform = Callable[[Any], Any]


class _Random(Dataset):
    def __init__(self, shape: tuple[int, int, int], classes: int, transform: Transform | None, seed: int) -> None:
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


class ImageFolder(_Random):
    """[3, 224, 224], 1000 classes."""

    def __init__(self, root: Any = None, transform: Any = None) -> None:
        super().__init__((3, 224, 224), 1000, transform, len(str(root)))


def save_image(*_: Any, **__: Any) -> None:
    """Write nothing."""


class Compose:
    """One after the other."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
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


class AlexNet(nn.Module):
    """Convolutions, a pool of fixed size and linear layers: `features`, `avgpool`, `classifier`.

    It drops nothing out: the two libraries draw from torch's generator at different times.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            *(nn.Dropout(0.0), nn.Linear(16 * 36, 64), nn.ReLU(inplace=True)),
            *(nn.Dropout(0.0), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, num_classes)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class _Residual(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, 3, stride=2, padding=1, bias=False)
        self.norm, self.skip = nn.BatchNorm2d(outer), nn.Conv2d(inner, outer, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + self.skip(x))


class ResNet(nn.Module):
    """Three residual blocks with batch norm, and a linear layer."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, stride=4, padding=3, bias=False)
        self.blocks = nn.Sequential(_Residual(8, 8), _Residual(8, 16), _Residual(16, 32))
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


alexnet = vgg19 = AlexNet
resnet18 = ResNet
