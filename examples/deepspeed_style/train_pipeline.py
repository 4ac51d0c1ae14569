"""A small character model cut into pipeline stages, in DeepSpeed's style; `engine.train_batch` runs whole steps.

torchrun --standalone --nproc_per_node 4 examples/deepspeed_style/train_pipeline.py \\
    --stages 2 --deepspeed_config examples/deepspeed_style/ds_config_pipeline.json

Further ranks are data-parallel; the JSON sets their ZeRO stage.  The text is drawn from a seed.  Every number of
ranks and stages gives the same losses, up to rounding.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megazero as deepspeed
from megazero.pipe import LayerSpec, PipelineModule, TiedLayerSpec

STEPS, LAYERS, SEQ, WIDTH, VOCAB = 40, 4, 16, 32, 27


class Block(nn.Module):
    """Pre-norm causal attention and an MLP.  [batch, seq, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Later tokens see earlier ones."""
        future = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=future, need_weights=False)[0]
        return x + self.mlp(x)


def to_logits(embedding: nn.Module, x: Tensor) -> Tensor:
    """The output layer shares the embedding's weight."""
    return x @ embedding.weight.t() * WIDTH**-0.5


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def micro_batches(engine: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """This data-parallel rank's part of an endless text in which each letter follows from the two before."""
    dp = engine.parallel_state.dp
    draw = torch.Generator().manual_seed(1)
    while True:
        for _ in range(engine.gradient_accumulation_steps()):
            rows = [torch.randint(VOCAB, (engine.train_micro_batch_size_per_gpu() * dp.size,), generator=draw)]
            rows.append(rows[0] * 2 % VOCAB)
            while len(rows) <= SEQ:
                rows.append((rows[-1] + rows[-2]) % VOCAB)
            mine = torch.stack(rows, 1).chunk(dp.size)[dp.index]
            yield mine[:, :-1], mine[:, 1:]


def main() -> None:
    """Train for 40 steps; rank 0 prints the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages; they must divide the ranks")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, zb-h1, ...")
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    layers = [
        TiedLayerSpec("embedding", nn.Embedding, VOCAB, WIDTH),
        *(LayerSpec(Block, WIDTH, 4) for _ in range(LAYERS)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", nn.Embedding, VOCAB, WIDTH, forward_fn=to_logits),
    ]
    model = PipelineModule(layers, num_stages=args.stages, loss_fn=loss_of, schedule=args.schedule)

    engine, *_ = deepspeed.initialize(args=args, model=model)
    data = micro_batches(engine)
    for step in range(STEPS):
        loss = engine.train_batch(data)
        if engine.global_rank == 0 and (step == 0 or (step + 1) % 10 == 0):
            print(f"step {step + 1} loss {float(loss):.4f}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
