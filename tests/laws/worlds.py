"""What the laws share: small configurations, the global batch, and an engine on one rank of a world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import DEVICE, run_world
from plain_model import PlainConfig, PlainTrainer, is_hidden, parameter_shapes
from torch import Tensor

from megazero.checkpoint.save import gather_logical
from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.engine import Engine, initialize
from megazero.layers.counter_rng import derive_key, normal
from megazero.layers.recompute import Recomputation
from megazero.layers.sequence_shard import SequenceShard, sequence_shard
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import Links, ParallelState

# The second step has all that the first one leaves behind: moments, the order of units, weights that still travel.  The
# weights after it have what the second one leaves.
LR, STEPS, SAMPLES = 3e-3, 2, 8
# Adam divides by |g| + eps: with its usual 1e-8 an element whose gradient is rounding noise would take a full step in a
# direction that is noise too, in the plain model as in ours.
EPS = 1e-5

LLAMA = {"family": "llama", "num_kv_heads": 2}
MIXTRAL = {"family": "mixtral", "num_kv_heads": 2, "num_experts": 4, "experts_per_token": 2}
GPT2 = {"family": "gpt2", "num_kv_heads": 4}
DEEPSEEK = {"family": "deepseek_v3", "num_layers": 4, "first_dense_layers": 1, "num_experts": 8, "experts_per_token": 3}
DEEPSEEK |= {"expert_hidden_size": 20, "shared_experts": 1, "expert_groups": 4, "groups_per_token": 2}
DEEPSEEK |= {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK |= {"router_bias_rate": 0.01, "router_aux_coef": 0.1, "router_z_coef": 0.01}


def run_of(world: int, *, model: dict[str, Any], **sections: dict[str, Any]) -> ResolvedRun:
    """A small run: 2 layers, a vocabulary that no tp divides, 8 samples of 16 tokens."""
    small = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 64, "vocab_size": 61, "seq_len": 16}
    optimizer = sections.get("optimizer", {})
    eps = {"eps": EPS} if optimizer.get("name", "adamw") in ("adamw", "adam", "adagrad") else {}
    zero: dict[str, Any] = {"bucket_bytes": 8192}
    if sections.get("zero", {}).get("stage") == 3:
        zero["prefetch_bytes"] = 0  # two buffers, so that units take turns in them
    config: dict[str, Any] = {
        "zero": zero,
        "precision": {"dtype": "fp32"},
        "optimizer": {"lr": LR, "grad_clip": 0.5} | eps,
        "training": {"global_batch_size": SAMPLES, "seed": 7, "compile": False},
    }
    whole = over(config, sections) | {"model": small | model}
    return resolve(RunConfig.model_validate(whole), world)


def over(config: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """Sections of a run file with the keys of others laid over theirs."""
    for sections in changes:
        config = config | {name: config.get(name, {}) | keys for name, keys in sections.items()}
    return config


def loop_of(run_dir: Path, world: int, **sections: dict[str, Any]) -> ResolvedRun:
    """A small run of the whole loop: of bytes, at one learning rate, without TensorBoard."""
    config: dict[str, Any] = {
        "model": LLAMA | {"vocab_size": 257},
        "lr_schedule": {"name": "constant"},
        "training": {"run_dir": str(run_dir)},
        "logging": {"every_steps": 1, "tensorboard": False, "straggler_every_steps": 0},
    }
    return run_of(world, **over(config, sections))


def plain_config(run: ResolvedRun) -> PlainConfig:
    """The same model for the plain implementation."""
    model = run.config.model
    names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size", "seq_len")
    more = ("tie_embeddings", "norm_eps", "rope_theta", "sliding_window", "final_logit_softcapping")
    family = "gpt2" if model.family == "gpt2" else "llama"  # the others are the same but for a window and experts
    keys = "num_experts", "experts_per_token", "router_aux_coef", "router_z_coef"
    experts = {key: getattr(model, key) or 0 for key in keys}
    experts |= {"width_ratio": model.hidden_size / (model.mup_base_width or model.hidden_size)}
    experts |= {"base_head_dim": model.mup_base_head_dim}
    experts["z_loss_coef"] = run.config.training.z_loss_coef
    return PlainConfig(family=family, **experts, **{name: getattr(model, name) for name in names + more})


def of_transformers(model: Any, kind: str = "llama", **more: Any) -> torch.nn.Module:
    """transformers' own Llama, or one of its relatives, of a model's sizes; `more` are keys of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {name: getattr(model, name) for name in ("hidden_size", "vocab_size")}
    config = AutoConfig.for_model(
        kind,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        intermediate_size=model.ffn_hidden_size,
        max_position_embeddings=model.seq_len,
        tie_word_embeddings=model.tie_embeddings,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        **sizes,
        **more,
    )
    made: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return made


def initial_weights(run: ResolvedRun) -> dict[str, Tensor]:
    """What the weights must be at step 0, from (seed, name, element) alone."""
    config = plain_config(run)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            is_gain = name.endswith("weight")
            weights[name] = torch.ones(shape) if is_gain else torch.zeros(shape)
            continue
        onto_residual = any(word in name for word in ("o_proj", "down_proj", "c_proj", "w2"))
        std = run.config.model.init_std / ((2 * config.num_layers) ** 0.5 if onto_residual else 1.0)
        if is_hidden(name, shape) and config.width_ratio != 1.0:
            std /= config.width_ratio**0.5
        numbers = normal(derive_key(run.config.training.seed, name), torch.arange(torch.Size(shape).numel()))
        weights[name] = (numbers * std).view(shape)
    return weights


def global_batch(run: ResolvedRun, step: int, pattern: str = "none") -> tuple[Tensor, Tensor]:
    """Tokens and labels [samples, seq] of one step, masked unevenly: one sample in part, one wholly, and a document's last
    token where samples have documents; see `lengths_of`."""
    model = run.config.model
    generator = torch.Generator().manual_seed(100 + step)
    samples = torch.randint(0, model.vocab_size, (SAMPLES, model.seq_len + 1), generator=generator)
    labels = samples[:, 1:].clone()
    labels[0, : model.seq_len // 2] = -100
    labels[5] = -100
    if (
        pattern == "masked"
    ):  # the second quarter alone is counted: each way to cut a sample over ranks leaves one without
        labels[:, : model.seq_len // 4] = -100
        labels[:, model.seq_len // 2 :] = -100
    if (lengths := lengths_of(run, step, pattern)) is not None:
        for row, parts in zip(labels, lengths, strict=True):
            row[torch.tensor(parts).cumsum(0) - 1] = -100
            if pattern == "padded":
                row[-parts[-1] :] = -100
    return samples[:, :-1], labels


PATTERNS = ("none", "random", "ones", "edges", "cuts", "whole", "masked", "padded")


def lengths_of(run: ResolvedRun, step: int, pattern: str) -> list[list[int]] | None:
    """Lengths of the documents of each sample of a step; None for "none", where samples are not cut into documents.

    random      of any length
    ones        of one token among longer ones, and samples of nothing else
    edges       borders where the chunks of 2 and of 4 ranks have theirs
    cuts        as "ones" and as "edges", one sample after the other
    halves      two of the same length
    whole       one, as long as the sample
    masked      as "whole", with labels in its second quarter alone
    padded      two and a last one without labels, none of which 4 divides
    """
    seq = run.config.model.seq_len
    generator = torch.Generator().manual_seed(1000 + step)

    def random() -> list[int]:
        borders = torch.randperm(seq - 1, generator=generator)[:3].sort().values + 1
        return torch.diff(borders, prepend=torch.zeros(1), append=torch.full((1,), seq)).int().tolist()

    ones = [[1] * seq, [1, seq - 2, 1], [1, 1, 3, 1, seq - 6], [seq - 3, 1, 1, 1]]
    edges = [[seq // 4] * 4, [seq // 8, 7 * seq // 8], [seq // 2, seq // 8, 3 * seq // 8], [seq // 8] * 8]
    found = {
        "none": None,
        "random": [random() for _ in range(SAMPLES)],
        "ones": ones * (SAMPLES // 4),
        "edges": edges * (SAMPLES // 4),
        "cuts": [parts for pair in zip(ones, edges, strict=True) for parts in pair] * (SAMPLES // 8),
        "halves": [[seq // 2, seq // 2]] * SAMPLES,
        "whole": [[seq]] * SAMPLES,
        "masked": [[seq]] * SAMPLES,
        "padded": [[seq - 11, 6, 5]] * SAMPLES,
    }
    return found[pattern]


def documents_of(run: ResolvedRun, step: int, pattern: str) -> Tensor | None:
    """The number of each token's document, [samples, seq], as the plain model takes it."""
    lengths = lengths_of(run, step, pattern)
    if lengths is None:
        return None
    return torch.stack([torch.arange(len(parts)).repeat_interleave(torch.tensor(parts)) for parts in lengths])


def micro_batches(run: ResolvedRun, at: ParallelState, step: int, pattern: str = "none") -> list[MicroBatch]:
    """One rank's share of `global_batch`."""
    tokens, labels = global_batch(run, step, pattern)
    lengths = lengths_of(run, step, pattern)
    share = SAMPLES // at.dp.size
    first = at.dp.index * share
    size = run.micro_batch_size
    return [
        micro_batch(
            run,
            at,
            torch.arange(start, start + size) + step * SAMPLES,
            tokens[start : start + size],
            labels[start : start + size],
            None if lengths is None else lengths[start : start + size],
        )
        for start in range(first, first + share, size)
    ]


def micro_batch(
    run: ResolvedRun,
    at: ParallelState,
    sample_ids: Tensor,
    tokens: Tensor,
    labels: Tensor,
    lengths: list[list[int]] | None,
) -> MicroBatch:
    """A rank's shard of whole samples.  tokens, labels: [batch, seq]."""
    shard = None
    if lengths is not None or at.cp.size > 1:
        shard = sequence_shard(lengths, run.config.model.seq_len, at.cp_ulysses, at.cp_ring, at.device)
    tokens, labels = (rows_of(shard, whole.t().contiguous().to(at.device)) for whole in (tokens, labels))
    return MicroBatch(sample_ids.to(at.device), tokens, labels, shard)


def rows_of(shard: SequenceShard | None, whole: Tensor) -> Tensor:
    """A rank's tokens of whole samples: [seq, batch] -> [seq / cp, batch]."""
    return whole if shard is None else whole.gather(0, shard.rows.expand(-1, whole.shape[1]))


def state_on(rank: int, run: ResolvedRun, *, on_one_machine: bool = False, shares_memory: bool = True) -> ParallelState:
    """One rank's place; a process makes it once.  Where not said otherwise each rank has a machine of its own."""
    return ParallelState(
        run.grid,
        rank,
        Links(
            DEVICE,
            timeout_seconds=60,
            local_world_size=run.grid.world_size if on_one_machine else 1,
            shares_memory=shares_memory,
        ),
    )


def engine_on(rank: int, run: ResolvedRun, *, init_weights: bool = True, state: ParallelState | None = None) -> Engine:
    """One rank's engine; `state` is that of an earlier engine of the same shape, if there was one."""
    return initialize(run.config, state or state_on(rank, run), init_weights=init_weights)


def on_one_state(rank: int, runs: Sequence[ResolvedRun], body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(engine, run, *args)` for several runs of one shape, in one world."""
    state = state_on(rank, runs[0])
    results = []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        results.append(body(engine, run, *args))
        engine.sharded_model.close()
    return results


def traffic_and_memory(rank: int, runs: Sequence[ResolvedRun]) -> list[dict[str, Any]]:
    """Of the second step: bytes by (axis, operation); padded elements of each unit; bytes of memory, most of buffers."""
    state, found = state_on(rank, runs[0]), []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        engine.train_step(micro_batches(run, state, 0), LR)
        state.traffic.reset()
        engine.train_step(micro_batches(run, state, 1), LR)
        found.append(
            {
                "sent": dict(state.traffic.sent_bytes),
                "units": [bucket.layout.padded_numel for bucket in engine.sharded_model.parameters.buckets],
                "memory": engine.memory_bytes(),
                "most": engine.sharded_model.reducer.reductions.most_buffer_bytes,
            }
        )
    return found


def state_of(engine: Engine, kinds: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Copies of this rank's part of every logical tensor, by kind and name; of all kinds that are saved if not said."""
    state, found = engine.sharded_model.sharded_state, dict[str, Tensor]()
    for kind in state.state_kinds if kinds is None else kinds:
        found |= {f"{kind} {name}": value.clone() for name, value in gather_logical(state, kind, engine.state)}
    return found


def whole(engine: Engine, kind: str) -> dict[str, Tensor] | None:
    """Every logical tensor of a kind, on rank 0; None elsewhere."""
    mine = dict(gather_logical(engine.sharded_model.sharded_state, kind, engine.state))
    shapes = {name: tensor.shape for name, tensor in mine.items()}
    flat = (
        torch.cat([tensor.flatten().cpu() for tensor in mine.values()]) if mine else torch.empty(0)
    )  # one message, not many
    first = engine.state.rank == 0
    if engine.state.world.size == 1:
        return _merged([(shapes, flat)])
    everyone: list[Any] | None = [None] * engine.state.world.size if first else None
    dist.gather_object((shapes, flat), everyone)
    return _merged(everyone) if everyone is not None else None


def _merged(parts: list[tuple[dict[str, torch.Size], Tensor]]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for shapes, flat in parts:
        assert not set(shapes) & set(merged), "a logical tensor has two writers"
        pieces = flat.split([shape.numel() for shape in shapes.values()])
        merged |= {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
    return merged


def difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))


@contextmanager
def counted() -> Iterator[list[Recomputation]]:
    """The recomputations that have run again within it."""
    ran: list[Recomputation] = []
    run_again = Recomputation.run_again

    def counting(self: Recomputation) -> None:
        ran.append(self)
        run_again(self)

    Recomputation.run_again = counting  # type: ignore[method-assign]
    try:
        yield ran
    finally:
        Recomputation.run_again = run_again  # type: ignore[method-assign]


def pairwise(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Choices of a value for each axis: few, and with any two values of two axes together in one of them.

    Most of what goes wrong needs one value or two together, seldom three (Kuhn, Wallace, Gallo 2004): so this tests nearly
    what all combinations do, at the cost of about the two longest axes.
    """
    every = [
        dict(zip(axes, chosen, strict=True)) for chosen in product(*(range(len(values)) for values in axes.values()))
    ]
    pairs = [set(combinations(choice.items(), 2)) for choice in every]
    left, chosen = set().union(*pairs), []
    while left:
        best = max(range(len(every)), key=lambda index: len(pairs[index] & left))
        left -= pairs[best]
        chosen.append({axis: axes[axis][index] for axis, index in every[best].items()})
    return chosen


def train(rank: int, run: ResolvedRun, evaluates: bool = False) -> dict[str, Any] | None:
    """Some steps, if asked with an evaluation in between; rank 0 returns what they gave."""
    return train_on(engine_on(rank, run), run, evaluates)


def train_on(
    engine: Engine, run: ResolvedRun, evaluates: bool = False, masters: bool = False, pattern: str = "none"
) -> dict[str, Any] | None:
    """As `train`, on an engine that is there; if asked with the masters at the end, and with documents."""
    out: dict[str, Any] = {"initial": whole(engine, "model"), "loss": [], "norm": []}
    for step in range(STEPS):
        statistics = engine.compute_gradients(micro_batches(run, engine.state, step, pattern))
        out["loss"].append(statistics.loss)
        out["norm"].append(statistics.grad_norm)
        if step == 0:
            out["gradients"] = whole(engine, "gradient")
        engine.update(LR)
        if evaluates and step == 0:
            engine.evaluate(micro_batches(run, engine.state, 50, pattern))
    out["weights"] = whole(engine, "model")
    if masters:
        out["masters"] = whole(engine, "master")
    return out if engine.state.rank == 0 else None


def train_plainly(run: ResolvedRun, pattern: str = "none") -> dict[str, Any]:
    """The same steps on the plain model, in a process of its own: none can be forked from one that has touched a GPU, and
    where there is one, autograd does."""
    return run_world(1, lambda _: plain_steps(run, pattern=pattern))[0]


def plain_steps(
    run: ResolvedRun, trainer_class: type[PlainTrainer] = PlainTrainer, pattern: str = "none"
) -> dict[str, Any]:
    """What `train_plainly` gives, in this process and with any optimizer."""
    trainer = plain_trainer(run, trainer_class)
    batches = [(*global_batch(run, step, pattern), documents_of(run, step, pattern)) for step in range(STEPS)]
    return outcome(run, trainer, [trainer.step(*given, documents=documents) for *given, documents in batches])


def plain_trainer(run: ResolvedRun, trainer_class: type[PlainTrainer] = PlainTrainer) -> PlainTrainer:
    """The plain model with its initial weights and a run's optimizer."""
    given = run.config.optimizer
    weights, rates = initial_weights(run), (given.lr, given.betas, given.eps, given.weight_decay, given.grad_clip)
    return trainer_class(weights, plain_config(run), *rates)


def outcome(run: ResolvedRun, trainer: PlainTrainer, steps: Sequence[Any]) -> dict[str, Any]:
    """What the laws compare of a plain trainer that has taken these steps."""
    return {
        "initial": initial_weights(run),
        "gradients": steps[0].gradients,
        "loss": [step.loss for step in steps],
        "norm": [step.grad_norm for step in steps],
        "weights": {name: weight.detach() for name, weight in trainer.weights.items()},
    }
