"""The yardstick is itself measured: against transformers for the models, against torch.optim for the step."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from plain_model import (
    PlainConfig,
    PlainTrainer,
    causal_attention,
    count,
    decays,
    gelu_tanh,
    layer_norm,
    logits,
    loss_sum,
    parameter_shapes,
    rms_norm,
    rope,
)
from torch import Tensor
from worlds import of_transformers

GROUPED = PlainConfig(
    family="llama",
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    vocab_size=61,
    seq_len=12,
    tie_embeddings=False,
    norm_eps=1e-3,  # large, so that an eps in the wrong place shows
    rope_theta=100.0,  # small, so that the slowest pair turns too
)
TIED = replace(GROUPED, tie_embeddings=True)
FULL_HEADS = replace(GROUPED, num_kv_heads=4)
ONE_KV_HEAD = replace(GROUPED, num_kv_heads=1)
GPT2 = replace(GROUPED, family="gpt2", num_kv_heads=4, tie_embeddings=True)

every_model = pytest.mark.parametrize(
    "config",
    [GROUPED, TIED, FULL_HEADS, ONE_KV_HEAD, GPT2],
    ids=["llama-gqa", "llama-gqa-tied", "llama-mha", "llama-mqa", "gpt2"],
)
both_families = pytest.mark.parametrize("config", [GROUPED, GPT2], ids=["llama", "gpt2"])


def hugging_face(config: PlainConfig) -> torch.nn.Module:
    """transformers' model with every weight random: at init norms are 1 and biases 0, which hides mistakes."""
    torch.manual_seed(0)
    model = of_transformers(config) if config.family == "llama" else _hugging_face_gpt2(config)
    with torch.no_grad():
        for parameter in model.parameters():
            offset = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(offset + 0.2 * torch.randn_like(parameter))
    return model.eval()


def _hugging_face_gpt2(config: PlainConfig) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.ffn_hidden_size,
            vocab_size=config.vocab_size,
            n_positions=config.seq_len,
            layer_norm_epsilon=config.norm_eps,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    )


def random_weights(config: PlainConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: 0.2 * torch.randn(shape, generator=generator) for n, shape in parameter_shapes(config).items()}


def random_batch(config: PlainConfig, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and labels, [3, seq_len]; the rows hold 5, 12 and 1 unmasked labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (3, config.seq_len), generator=generator)
    labels = torch.randint(config.vocab_size, (3, config.seq_len), generator=generator)
    labels[0, 5:] = -100
    labels[2, :-1] = -100
    return tokens, labels


def trainer(config: PlainConfig, weights: dict[str, Tensor], **changes: object) -> PlainTrainer:
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0}
    return PlainTrainer(weights, config, **(settings | {"dtype": torch.float64} | changes))


@every_model
def test_logits_equal_hugging_face(config: PlainConfig) -> None:
    model = hugging_face(config)
    tokens, _ = random_batch(config)
    with torch.no_grad():
        theirs = model(tokens).logits
        ours = logits(dict(model.named_parameters()), config, tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@every_model
def test_loss_and_gradients_equal_hugging_face(config: PlainConfig) -> None:
    model = hugging_face(config)
    tokens, labels = random_batch(config)
    their_loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    their_loss.backward()

    plain = trainer(config, dict(model.named_parameters()), dtype=torch.float32)
    loss, gradients = plain.gradients(tokens, labels)

    assert loss == pytest.approx(their_loss.item(), rel=1e-5)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_formulas_hold_to_the_last_digits_of_fp64() -> None:
    """transformers keeps parts of Llama in fp32, so the digits beyond are checked formula by formula."""
    torch.manual_seed(3)
    x, weight, bias = torch.randn(5, 8).double(), torch.randn(8).double(), torch.randn(8).double()
    torch.testing.assert_close(gelu_tanh(x), F.gelu(x, approximate="tanh"), atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), F.rms_norm(x, (8,), weight, 1e-3), atol=1e-14, rtol=1e-12)
    theirs = F.layer_norm(x, (8,), weight, bias, 1e-3)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-3), theirs, atol=1e-14, rtol=1e-12)

    q, k, v = torch.randn(2, 4, 7, 8).double(), torch.randn(2, 2, 7, 8).double(), torch.randn(2, 2, 7, 8).double()
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(causal_attention(q, k, v), theirs, atol=1e-14, rtol=1e-12)

    angles = torch.outer(torch.arange(7).double(), 100.0 ** -(torch.arange(4).double() / 4))
    turned = torch.complex(q[..., :4], q[..., 4:]) * torch.exp(1j * angles)
    torch.testing.assert_close(rope(q, 100.0), torch.cat([turned.real, turned.imag], -1), atol=1e-14, rtol=1e-12)


@both_families
def test_a_later_token_changes_no_earlier_logit(config: PlainConfig) -> None:
    weights = random_weights(config)
    tokens, _ = random_batch(config)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % config.vocab_size
    before, after = logits(weights, config, tokens), logits(weights, config, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("config", [GROUPED, GPT2, replace(GROUPED, sliding_window=3)], ids=["llama", "gpt2", "window"])
def test_a_packed_row_equals_its_documents_run_apart(config: PlainConfig) -> None:
    """Logits, and the loss and gradients of the sum; the second row has other borders than the first."""
    weights = {name: w.double().requires_grad_() for name, w in random_weights(config).items()}
    lengths = [[5, 1, 6], [2, 10], [12]]
    tokens, labels = random_batch(config)
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    pieces = [
        (tokens[row : row + 1, stop - length : stop], labels[row : row + 1, stop - length : stop])
        for row, parts in enumerate(lengths)
        for length, stop in zip(parts, torch.tensor(parts).cumsum(0).tolist(), strict=True)
    ]
    apart = torch.cat([logits(weights, config, piece)[0] for piece, _ in pieces])
    packed = logits(weights, config, tokens, documents)
    torch.testing.assert_close(packed.flatten(0, 1), apart, atol=1e-12, rtol=1e-12)
    whole = logits(weights, config, tokens)
    assert not torch.allclose(whole[0, 5:], packed[0, 5:], rtol=1e-3)
    torch.testing.assert_close(whole[2], packed[2], atol=1e-12, rtol=1e-12)

    total = loss_sum(weights, config, tokens, labels, documents)
    summed = sum((loss_sum(weights, config, *piece) for piece in pieces), torch.zeros(()).double())
    torch.testing.assert_close(total, summed, atol=1e-12, rtol=1e-12)
    for one, other in zip(*(torch.autograd.grad(x, list(weights.values())) for x in (total, summed)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_a_window_is_that_of_hugging_face() -> None:
    config = replace(GROUPED, sliding_window=4)
    theirs = of_transformers(config, "mistral", sliding_window=4, head_dim=config.head_dim).eval()
    weights = random_weights(config)
    theirs.load_state_dict(weights, strict=True)
    tokens, _ = random_batch(config)
    with torch.no_grad():
        torch.testing.assert_close(logits(weights, config, tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@both_families
def test_the_mean_is_over_the_whole_batch_not_over_rows(config: PlainConfig) -> None:
    weights = random_weights(config)
    tokens, labels = random_batch(config)
    rows = [(loss_sum(weights, config, tokens[i : i + 1], labels[i : i + 1]), count(labels[i])) for i in range(3)]
    assert [n for _, n in rows] == [5, 12, 1]

    loss, _ = trainer(config, weights).gradients(tokens, labels)

    assert loss == pytest.approx(sum(total.item() for total, _ in rows) / 18, rel=1e-5)
    mean_of_row_means = sum(total.item() / n for total, n in rows) / 3
    assert abs(loss - mean_of_row_means) > 1e-2


@both_families
@pytest.mark.parametrize("grad_clip", [0.0, 0.1, 1e6], ids=["off", "clipping", "never-reached"])
def test_steps_equal_torch_adamw(config: PlainConfig, grad_clip: float) -> None:
    weights = random_weights(config)
    plain = trainer(config, weights, grad_clip=grad_clip)
    theirs = {name: w.double().requires_grad_() for name, w in weights.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in theirs.values() if w.ndim >= 2], "weight_decay": 0.1},
            {"params": [w for w in theirs.values() if w.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step, lr in enumerate([1e-2, 2e-2, 5e-3]):
        tokens, labels = random_batch(config, seed=step)
        taken = plain.step(tokens, labels, lr=lr)

        optimizer.zero_grad()
        scores = logits(theirs, config, tokens)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        for name, w in theirs.items():
            torch.testing.assert_close(taken.gradients[name], w.grad, atol=1e-12, rtol=1e-9)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), grad_clip if grad_clip else float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()

        assert taken.loss == pytest.approx(loss.item(), rel=1e-12)
        assert taken.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    assert plain.steps_taken == 3
    for name, w in theirs.items():
        torch.testing.assert_close(plain.weights[name], w, atol=1e-9, rtol=1e-9)


@both_families
def test_decay_falls_on_matrices_and_embeddings_only(config: PlainConfig) -> None:
    spared = {name for name, shape in parameter_shapes(config).items() if not decays(name, shape)}
    assert spared == {name for name in parameter_shapes(config) if "norm" in name or "ln_" in name or "bias" in name}
