"""How transformers writes a model family: the keys of its `config.json` and the names of its weights.

    sizes       hidden_size, n_embd      <->  model.hidden_size     must be in the file
    defaults    rms_norm_eps             <->  model.norm_eps        may be left out of the file
    constants   hidden_act = "silu"      <->  nothing               the only value that our model computes

Checkpoints hold the weights under exactly these names, so those of any step load in transformers without conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megazero.models.config import ModelConfig


@dataclass(frozen=True)
class HuggingFaceFormat:
    """The form of one family in transformers; its `model_type` is the family's name.

    Args:
        architecture: the class, as "LlamaForCausalLM".
        sizes: their key -> ours, for keys that a configuration must have.
        defaults: their key -> (ours, the value that transformers takes where the key is missing or null).
        constants: their key -> the one value that our model computes; also what a missing key means.
        assumed: as `constants`, for keys that we do not write.
        prefix: of weight names, which a model without its head leaves out.
        buffers: names of stored tensors that are no parameters, which older releases wrote.
        embedding, head: names of these two weights; a file with tied embeddings may repeat the first under the second.
        extra: further keys to write.
        read_extra: further keys of our section, read from a configuration.
        problems: what else in a configuration our model does not compute; also given `seq_len` of the import, or None.
        lost: a line for the user on what an import cannot keep; empty where there is nothing.
    """

    architecture: str
    sizes: Mapping[str, str]
    defaults: Mapping[str, tuple[str, Any]]
    constants: Mapping[str, Any]
    assumed: Mapping[str, Any]
    prefix: str
    buffers: re.Pattern[str]
    embedding: str
    head: str = "lm_head.weight"
    extra: Callable[[ModelConfig], dict[str, Any]] = field(default=lambda _: {})
    read_extra: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=lambda _: {})
    problems: Callable[[Mapping[str, Any], int | None], Iterator[str]] = field(default=lambda _, __: iter(()))
    lost: Callable[[Mapping[str, Any]], str] = field(default=lambda _: "")

    def config(self, model: ModelConfig, dtype: str) -> dict[str, Any]:
        """The `config.json` of a resolved model whose weights are stored in `dtype`: "fp32", "bf16" or "fp16"."""
        keys = dict(self.sizes) | {theirs: ours for theirs, (ours, _) in self.defaults.items()}
        return {
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.tie_embeddings,
            "initializer_range": model.init_std,
            "dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype],
            "bos_token_id": None,
            "eos_token_id": None,
            "architectures": [self.architecture],
            "model_type": model.family,
            **{theirs: getattr(model, ours) for theirs, ours in keys.items()},
            **self.constants,
            **self.extra(model),
        }

    def section(self, family: str, config: Mapping[str, Any], seq_len: int | None = None) -> dict[str, Any]:
        """The [model] section of a `config.json`, as written in a run file.

        Args:
            family: its name.
            config: the contents of the file.
            seq_len: None for as many as the configuration has positions.

        Raises:
            ValueError: our model does not compute what this one does; the message lists every reason.
        """
        problems = [f"{key} is missing" for key in self.sizes if config.get(key) is None]
        for key, value in (*self.constants.items(), *self.assumed.items()):
            if config.get(key, value) != value:
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
