"""A small classifier trained by a script in DeepSpeed's style; only its JSON chooses the ZeRO stage.

torchrun --standalone --nproc_per_node 2 examples/deepspeed_style/train_zero.py \\
    --deepspeed_config examples/deepspeed_style/ds_config_zero2.json

The images are drawn from a seed: ten patterns with noise, in the shape of MNIST.  The JSON fixes the global batch, so that
any number of ranks that divides it sees the same batches and prints the same losses, up to rounding.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import megazero as deepspeed

STEPS, IMAGES, PIXELS, HIDDEN, CLASSES = 100, 6400, 784, 128, 10


def main() -> None:
    """Train for 100 steps; rank 0 prints the loss."""
    parser = argparse.ArgumentParser()
    args = deepspeed.add_config_arguments(parser).parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    engine, _, loader, _ = deepspeed.initialize(args=args, model=model, training_data=make_images())
    for step, (images, labels) in enumerate(deepspeed.RepeatingLoader(loader)):
        loss = F.cross_entropy(engine(images.to(engine.device)), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        report(engine, step + 1, loss.detach())
        if step + 1 == STEPS:
            break
    engine.close()


def make_images() -> TensorDataset:
    """Ten patterns, each with much noise."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (IMAGES,), generator=draw)
    patterns = torch.randn(CLASSES, PIXELS, generator=draw)
    return TensorDataset(patterns[labels] + 8 * torch.randn(IMAGES, PIXELS, generator=draw), labels)


def report(engine: nn.Module, step: int, loss: torch.Tensor) -> None:
    """Print the mean loss of all ranks now and then."""
    if step != 1 and step % 20:
        return
    if dist.is_initialized():
        dist.all_reduce(loss)
    if engine.global_rank == 0:
        print(f"step {step} loss {loss.item() / engine.world_size:.4f}", flush=True)


if __name__ == "__main__":
    main()
