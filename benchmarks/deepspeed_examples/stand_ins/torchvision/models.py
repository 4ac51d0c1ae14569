"""Networks with the attributes of torchvision's, and few channels."""

import torch
from torch import Tensor, nn


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


def alexnet(num_classes: int = 1000) -> AlexNet:
    """A narrow AlexNet."""
    return AlexNet(num_classes)


def resnet18(num_classes: int = 1000) -> ResNet:
    """A small residual network."""
    return ResNet(num_classes)


def vgg19(num_classes: int = 1000) -> AlexNet:
    """As AlexNet here."""
    return AlexNet(num_classes)
