"""The interface of a model family to the rest of the package.  The built-in families are listed in `families.toml`.

config      open sizes, rules           complete, rules
plan        products per token          layer_weights, flops_per_token
files       transformers                hugging_face
engine      torch modules               embedding, blocks, head        (torch is imported inside these only)
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.models.config import ModelConfig
from megazero.settings import Problem, divisors, listed, nearest_multiples, nearest_of, nearest_text, toml_value

if TYPE_CHECKING:
    from torch import nn

    from megazero.models.build_context import BuildContext
    from megazero.models.gpt import Block, Embedding, Head


# Keys of any `config.json` that do not change what a model computes in training.
_IGNORED_KEYS = """
    _name_or_path _commit_hash architectures model_type transformers_version dtype torch_dtype use_cache output_attentions
    output_hidden_states return_dict is_decoder is_encoder_decoder chunk_size_feed_forward problem_type id2label label2id
    num_labels task_specific_params cache_implementation
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    tokenizer_class _attn_implementation _attn_implementation_autoset
"""
# Activations of transformers that are one function under several names (`ACT2FN` of its `activations`).
_TANH_FORMS = "pytorch_tanh", "python_tanh", "fast", "accurate"
_SAME_FUNCTION = {"swish": "silu"} | {f"gelu_{form}": "gelu_new" for form in _TANH_FORMS}
_MOST_SHOWN = 20
# By family, what differs from the format that it is a variant of.
_FORMATS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("hugging_face.json").read_text(encoding="utf-8")
)
_TABLES = "sizes", "defaults", "constants", "assumed"
# Keys of [model] that any family here computes where they are set, and transformers only where a `config.json` has them.
_OPTIONS = ("final_logit_softcapping", "mup_base_width", "mup_base_head_dim")
_HEADS = ("model.hidden_size", "model.num_heads", "model.head_dim")


def _shown(key: str, value: object) -> str:
    """Format a key and its value in a file of transformers, cut to 60 letters."""
    text = f"{key} = {value!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class HuggingFaceFormat:
    """How transformers writes a family: the keys of its `config.json` and the names of its weights.

        sizes       hidden_size, n_embd      <->  model.hidden_size     must be in the file
        defaults    rms_norm_eps             <->  model.norm_eps        may be left out of the file
        constants   hidden_act = "silu"      <->  nothing               the only value that our model computes

    Checkpoints hold the weights under exactly these names, so those of any step load in transformers without conversion.

    Args:
        architecture: name of the class, such as "LlamaForCausalLM".
        sizes: their key -> our key, for keys that a configuration must have.
        defaults: their key -> (our key, the default in transformers if the key is missing or null).
        constants: their key -> the only value that our model computes, which is also the default of the key.
        assumed: like `constants`, for keys that we do not write.
        prefix: prefix of weight names; a model without its head omits it.
        buffers: a pattern for names of stored tensors that are no parameters, which older releases wrote.
        embedding, head: names of these two weights; a file with tied embeddings may contain the weight under both.
        extra: (model) -> further keys to write.
        read_extra: (configuration) -> further keys of our section.
        problems: (configuration, `seq_len` of the import or None) -> further reasons why our model does not compute it.
        lost: (configuration) -> a line for the user on each setting that an import loses.
        aliases: other spellings of their keys -> the key that we write.
        model_type: their name of the family; None if it equals ours.
        reads: the keys that the three functions above read; an import lists keys that nothing reads.
    """

    architecture: str = ""
    sizes: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    buffers: str = ""
    embedding: str = ""
    head: str = "lm_head.weight"
    extra: Callable[[ModelConfig], dict[str, Any]] = field(default=lambda _: {})
    read_extra: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=lambda _: {})
    problems: Callable[[Mapping[str, Any], int | None], Iterator[str]] = field(default=lambda _, __: iter(()))
    lost: Callable[[Mapping[str, Any]], Iterator[str]] = field(default=lambda _: iter(()))
    aliases: Mapping[str, str] = field(default_factory=dict)
    model_type: str | None = None
    reads: tuple[str, ...] = ()

    def variant(self, name: str, **functions: Callable[..., Any]) -> HuggingFaceFormat:
        """Return this format with the changes that `hugging_face.json` lists under a name, and with these functions.

        A key in the file is removed from the table in which this format has it.  The file belongs to the package: a script
        uses `dataclasses.replace` for its own family.
        """
        own = _FORMATS[name]
        named = {*own.get("reads", ()), *(key for table in _TABLES for key in own.get(table, ()))}
        tables = {
            table: {key: value for key, value in getattr(self, table).items() if key not in named} | own.get(table, {})
            for table in _TABLES
        }
        aliases, reads = {**self.aliases, **own.get("aliases", {})}, (*self.reads, *own.get("reads", ()))
        return replace(self, **own | tables | {"aliases": aliases, "reads": reads} | functions)

    def config(self, model: ModelConfig, dtype: str) -> dict[str, Any]:
        """Build the `config.json` of a resolved model with weights stored in `dtype`: "fp32", "bf16" or "fp16"."""
        keys = dict(self.sizes) | {theirs: ours for theirs, (ours, _) in self.defaults.items()}
        return {
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.tie_embeddings,
            "initializer_range": model.init_std,
            "dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype],
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,  # a token that transformers would not train
            "architectures": [self.architecture],
            "model_type": self.model_type or model.family,
            **{theirs: getattr(model, ours) for theirs, ours in keys.items()},
            **self.constants,
            **self.extra(model),
        }

    def not_computed(self, model: ModelConfig) -> list[str]:
        """Return the options of a model that transformers does not compute in this family, in the form of a run file."""
        theirs = {ours for ours, _ in self.defaults.values()}
        chosen = {key: value for key in _OPTIONS if key not in theirs and (value := getattr(model, key)) is not None}
        return [f"model.{key} = {toml_value(value)}" for key, value in chosen.items()]

    def section(self, family: str, config: Mapping[str, Any], seq_len: int | None = None) -> dict[str, Any]:
        """Convert a `config.json` to the [model] section of a run file.

        Args:
            family: name of the family.
            config: contents of the file.
            seq_len: tokens in a sample; None for the number of positions in the configuration.

        Raises:
            ValueError: our model does not compute what this one does; the message lists every reason.
        """
        config = self._in_one_spelling(config)
        problems = [f"{key} is missing" for key in self.sizes if config.get(key) is None]
        for key, value in (*self.constants.items(), *self.assumed.items()):
            given = config.get(key, value)
            if _SAME_FUNCTION.get(str(value), value) != _SAME_FUNCTION.get(str(given), given):
                supported = "leave it out" if value is None else f"it must be {value!r}"
                problems.append(f"{key}={config[key]!r} is not supported in a {family}; {supported}")
        problems += self.problems(config, seq_len)
        if problems:
            raise ValueError("; ".join(problems))
        section = {"family": family} | {ours: config[theirs] for theirs, ours in self.sizes.items()}
        for theirs, (ours, default) in self.defaults.items():
            section[ours] = default if config.get(theirs) is None else config[theirs]
        section |= self.read_extra(config)
        return section if seq_len is None else section | {"seq_len": seq_len}

    def _in_one_spelling(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {self.aliases.get(key, key): value for key, value in config.items()}

    def dropped_settings(self, config: Mapping[str, Any], seq_len: int | None = None) -> tuple[str, ...]:
        """Return a line for each setting of a supported `config.json` that our model drops, and one line for all
        unknown keys.
        """
        config = self._in_one_spelling(config)
        lines = list(self.lost(config))
        positions = next((key for key, ours in self.sizes.items() if ours == "seq_len"), "")
        most = config.get(positions)
        if seq_len is not None and isinstance(most, int) and seq_len > most:
            lines.append(f"seq_len = {seq_len} exceeds {positions} = {most}, all that the model has learned")
        known = {*self.sizes, *self.defaults, *self.constants, *self.assumed, *self.reads, *_IGNORED_KEYS.split()}
        if unknown := [_shown(key, value) for key, value in config.items() if key not in known and value is not None]:
            lines.append(f"not read from its configuration: {listed(unknown, _MOST_SHOWN)}")
        return tuple("".join(letter if letter.isprintable() else "?" for letter in line) for line in lines)


@dataclass(frozen=True)
class ModelRule:
    """A relation between keys of [model], or between these keys and tp."""

    #: The keys it looks at, as `section.key`; it is not checked where one of them is wrong by itself.
    reads: tuple[str, ...]
    #: (section as written, tp) -> what is wrong.
    check: Callable[[ModelConfig, int], Iterator[Problem]]


class ModelFamily(ABC):
    """Base class of a family of GPTs.

    A script adds one with `FAMILIES.register("mine", Mine())`, and its run file sets `model.family = "mine"`.
    """

    #: Whether embeddings are tied if `model.tie_embeddings` is unset.
    ties_embeddings = False
    #: Whether it learns a vector for each position of a sample, so that the length of samples cannot change.
    learns_positions = False
    #: The keys of [model] that not every family reads and this one does, such as "rope_theta"; all others are refused.
    reads: tuple[str, ...] = ()
    #: Its form in transformers; None where transformers does not have it.
    hugging_face: HuggingFaceFormat | None = None

    @abstractmethod
    def layer_weights(self, model: ModelConfig) -> float:
        """Count the elements of a layer's matrices, each of which is multiplied once per token; where layers differ, their
        mean.  `model` is resolved.
        """

    @abstractmethod
    def embedding(self, context: BuildContext) -> Embedding:
        """Build the first unit: tokens to hidden states."""

    @abstractmethod
    def blocks(self, context: BuildContext, layers: Sequence[int]) -> list[Block]:
        """Build the transformer layers of one stage, given their indices in the whole model."""

    @abstractmethod
    def head(self, context: BuildContext, tied_weight: nn.Parameter | None) -> Head:
        """Build final norm, logits and loss.  `tied_weight`: the embedding's, if embeddings are tied and this stage
        holds both.
        """

    def ffn_hidden_size(self, model: ModelConfig) -> int:
        """Return the inner width of the MLP for models without `model.ffn_hidden_size`."""
        return 4 * model.hidden_size

    def complete(self, model: ModelConfig) -> ModelConfig:
        """Return the model with unset sizes filled in, and with sizes unset that are the default or have no effect."""
        unset: dict[str, object] = {
            "num_kv_heads": model.num_heads,
            "ffn_hidden_size": self.ffn_hidden_size(model),
            "tie_embeddings": self.ties_embeddings,
            "rope_local_theta": model.rope_theta if "rope_local_theta" in self.reads else None,
            "attention_multiplier": model.head_size**-0.5 if "attention_multiplier" in self.reads else None,
            "query_pre_attn_scalar": model.head_size if "query_pre_attn_scalar" in self.reads else None,
        }
        update = {key: value for key, value in unset.items() if getattr(model, key) is None}
        if "head_dim" not in self.reads or model.attention_size == model.hidden_size:
            update["head_dim"] = None
        if model.mup_base_head_dim == model.head_size:
            update["mup_base_head_dim"] = None
        if "sliding_window" not in self.reads:
            update["sliding_window"] = None
        if update.get("sliding_window", model.sliding_window) is None:
            update["full_attention_every"] = None
        return model.model_copy(update=update)

    def rules(self) -> tuple[ModelRule, ...]:
        """Return the rules that sizes must satisfy, in the order in which problems are shown."""
        return (
            ModelRule(_HEADS, self.check_hidden_size),
            ModelRule(("model.num_heads", "parallel.tp"), self.check_heads),
            ModelRule((*_HEADS, "model.num_kv_heads", "parallel.tp"), self.check_kv_heads),
            ModelRule(("model.hidden_size", "model.ffn_hidden_size", "parallel.tp"), self.check_ffn),
        )

    def hidden_size_divisor(self, model: ModelConfig) -> tuple[int, str]:
        """Return the number by which the hidden size must be divisible, and the reason in words."""
        return model.num_heads, f"num_heads={model.num_heads}"

    def check_hidden_size(self, model: ModelConfig, _: int) -> Iterator[Problem]:
        """Check that the number of heads divides the hidden size, unless the size of a head is given."""
        divisor, name = self.hidden_size_divisor(model)
        is_free = model.head_dim is not None and "head_dim" in self.reads
        if model.hidden_size % divisor and not is_free:
            nearest = nearest_text(nearest_multiples(model.hidden_size, divisor))
            yield Problem("model.hidden_size", model.hidden_size, f"must be divisible by {name}", nearest)

    def check_heads(self, model: ModelConfig, tp: int) -> Iterator[Problem]:
        """Check that tp divides the number of heads."""
        yield from tp_problems("num_heads", model.num_heads, tp)

    def check_kv_heads(self, model: ModelConfig, tp: int) -> Iterator[Problem]:
        """Check that kv heads are shared evenly, and that tp divides their number, or is a multiple of it and splits
        each head.
        """
        heads, kv_heads, head_size = model.num_heads, model.num_kv_heads, model.head_size
        if kv_heads is None:
            return

        def fits(count: int) -> bool:
            return count % tp == 0 or (tp % count == 0 and count * head_size % tp == 0)

        tp_fits = heads % tp == 0  # if not, `check_heads` reports it, and kv heads need only divide heads
        if heads % kv_heads or (tp_fits and not fits(kv_heads)):
            rule = f"must divide num_heads={heads}"
            if tp_fits and tp > 1:
                rule += f" and be a multiple of parallel.tp={tp}, or divide it and split a head of {head_size} evenly"
            valid = [d for d in divisors(heads) if not tp_fits or fits(d)]
            yield Problem("model.num_kv_heads", kv_heads, rule, nearest_text(nearest_of(kv_heads, valid)))

    def check_ffn(self, model: ModelConfig, tp: int) -> Iterator[Problem]:
        """Check that tp divides the width of the MLP."""
        yield from tp_problems("ffn_hidden_size", model.ffn_hidden_size or self.ffn_hidden_size(model), tp)

    def flops_per_token(self, model: ModelConfig, lengths: Collection[int] | None = None) -> float:
        """Compute 6 N + 12 layers * mean_reach * heads * head size, forward and backward (Chowdhery et al. 2022,
        appendix B).

        N is the number of weights of all matrix products, including the head's: 2 FLOPs per weight forward, 4 backward.
        The second term is q k^T and the weighted sum of v over the positions that a token sees: half a sample, or fewer
        with a window (the paper and nanoGPT count the whole sample).

        Args:
            model: resolved.
            lengths: of the documents within which tokens attend; None for whole samples.
        """
        weights = model.num_layers * self.layer_weights(model) + model.vocab_size * model.hidden_size
        reach = model.mean_reach if lengths is None else model.reach_in(lengths)
        return 6.0 * weights + 12.0 * model.num_layers * reach * model.mean_attention_size

    def hugging_face_config(self, model: ModelConfig, dtype: str) -> dict[str, Any]:
        """Build the `config.json` that is stored with the weights.

        If transformers lacks the family or an option, it contains our own [model] section instead.
        """
        if self.hugging_face is None:
            return model.model_dump() | {"model_type": model.family, "dtype": dtype}
        if self.hugging_face.not_computed(model):  # renamed, or transformers would compute another model
            return model.model_dump() | {"model_type": f"megazero-{model.family}", "dtype": dtype}
        return self.hugging_face.config(model, dtype)


def attention_weights(model: ModelConfig) -> int:
    """Count the elements of a layer's q, k, v and output projections."""
    kv_size = (model.num_kv_heads or model.num_heads) * model.head_size
    return 2 * model.hidden_size * (model.attention_size + kv_size)


def tp_problems(key: str, value: int, tp: int, why: str = "") -> Iterator[Problem]:
    """Check that a size of [model] is divisible by tp."""
    if value % tp:
        nearest = nearest_text(nearest_multiples(value, tp), key)
        other = nearest_text(nearest_of(tp, divisors(value)), "tp")
        yield Problem(f"model.{key}", value, f"must be divisible by parallel.tp={tp}{why}", f"{nearest}, {other}")
