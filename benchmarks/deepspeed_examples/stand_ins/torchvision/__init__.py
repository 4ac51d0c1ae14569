"""Stands for torchvision in scripts that are compared: random images, transforms of tensors, narrow models."""

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
