"""The commands `megazero evaluate` and `megazero generate`, which show what a checkpoint has learned."""

from __future__ import annotations

import os
import re
from functools import partial
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Column, Table

from megazero.cli._common import fail, load_run, print_table
from megazero.cli.checkpoint import user_errors
from megazero.training.signals import EXIT_REFUSED

if TYPE_CHECKING:
    from megazero.checkpoint.folder import Folder
    from megazero.checkpoint.index import TrainerState

_STEP = "A step directory, or the number of a step of the run; the newest by default."


def evaluate(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[STEP] [key.sub=value]...", help=_STEP)] = None,
    tasks: Annotated[str | None, typer.Option(help="Score a step directory on tasks of lm_eval: a,b.")] = None,
    include_path: Annotated[str | None, typer.Option(help="With --tasks: a directory of task files.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: most documents of each.")] = None,
) -> None:
    """Evaluate a checkpoint on the run's validation data, on any shape.  Ranks are started as by `megazero train`."""
    if tasks is not None:
        with user_errors():
            _print_scores(str(config), tasks.split(","), include_path, limit)
        return
    if config.is_dir():
        fail(f"{config} is a directory: name the run's TOML file, then the step; --tasks scores a step", EXIT_REFUSED)
    steps = [word for word in words or [] if not re.match(r"\w+(\.\w+)+=", word)]  # a path may hold "=", too
    overrides = [word for word in words or [] if word not in steps]
    if len(steps) > 1:
        fail(f"name one step, not {', '.join(steps)}; what sets a key has the form key.sub=value", EXIT_REFUSED)
    run = load_run(config, overrides)
    from megazero.training.evaluating import evaluate_rank
    from megazero.training.launch import Failed, leave_at_once, run_ranks

    found = run_ranks(run, partial(evaluate_rank, requested=steps[0] if steps else None))
    if isinstance(found, Failed):
        leave_at_once(found.status)
    if os.environ.get("RANK", "0") != "0":
        return
    path, losses = found
    right = (Column(name, justify="right") for name in ("tokens", "loss", "perplexity"))
    table = Table("validation data", *right, box=None)
    for name, measured in losses.items():  # nan where no token is counted
        perplexity = exp(min(measured.loss, 700.0))  # exp(710) overflows
        table.add_row(name or "held out", f"{measured.tokens:,}", f"{measured.loss:.4f}", f"{perplexity:,.2f}")
    print(path)
    print_table(table)


def _print_scores(step: str, tasks: list[str], include_path: str | None, limit: int | None) -> None:
    """Score a step on tasks through transformers.  (`evaluation.tasks` of a run scores through the engine.)"""
    from tempfile import TemporaryDirectory

    try:
        import lm_eval

        from megazero.training.callbacks.tasks import manager_of, scores_of
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ValueError(f"--tasks needs lm-evaluation-harness ({error}): pip install lm_eval") from None
    from megazero.checkpoint.hugging_face.tokenizer import tokenizer_of

    folder_and_state, device = _open_step(step)
    files, about = tokenizer_of(*folder_and_state)
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        if not files:
            hint = "transformers needs a tokenizer file: name tasks in [evaluation] of a run"
            raise ValueError(f"{step} has {about}; {hint}")
        model, options = {"pretrained": step, "tokenizer": folder}, {"limit": limit, "bootstrap_iters": 0}
        known = manager_of(tasks, include_path)
        found = lm_eval.simple_evaluate("hf", model, tasks, device=device, task_manager=known, **options)
    table = Table("task", Column("score", justify="right"), box=None)
    for name, value in scores_of(found).items():
        table.add_row(name, f"{value:.4f}")
    print_table(table)


def _open_step(step: str) -> tuple[tuple[Folder, TrainerState], str]:
    """Open a complete step; return it, its trainer state, and the device on which transformers computes."""
    import torch

    from megazero.checkpoint import index
    from megazero.checkpoint.folder import folder_at

    index.read_manifest(step)
    return (folder_at(step), index.read_trainer_state(step)), "cuda" if torch.cuda.is_available() else "cpu"


def generate(
    step: Annotated[str, typer.Argument(help="A step directory.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to add; 100 by default.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Below 1: likelier tokens; 0: the likeliest.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Draw from the likeliest with this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
) -> None:
    """Continue a text with a checkpoint's model, by transformers: tokens are printed as they are generated."""
    with user_errors():
        try:
            from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, TextStreamer, set_seed
        except ImportError:
            raise ValueError("megazero generate needs transformers: pip install transformers") from None
        import torch

        from megazero.checkpoint.hugging_face.tokenizer import load_tokenizer_of

        folder_and_state, device = _open_step(step)
        if (family := PretrainedConfig.get_config_dict(step)[0]["model_type"]) not in CONFIG_MAPPING:
            raise ValueError(f"transformers does not compute a {family}, as {step} is: generate from your own script")
        tokenizer = load_tokenizer_of(*folder_and_state)
        model: Any = AutoModelForCausalLM.from_pretrained(step, dtype="auto", local_files_only=True)
        model.to(device)
        ids = torch.tensor([tokenizer.encode(prompt).tolist() or [tokenizer.eod_id]], device=model.device)
        left = model.config.max_position_embeddings - ids.shape[1]
        if (asked := max_new_tokens or min(100, left)) > left or left < 1:
            hint = f"--max-new-tokens can be {max(left, 0):,} at most{'' if left > 0 else ', so shorten the prompt'}"
            raise ValueError(f"the prompt has {ids.shape[1]:,} tokens of {left + ids.shape[1]:,} that are read: {hint}")
        set_seed(seed)
        drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature else {}
        ends = {"eos_token_id": tokenizer.eod_id, "pad_token_id": tokenizer.eod_id, "max_new_tokens": asked}
        streamer = TextStreamer(cast(Any, tokenizer))  # it asks for `decode` alone
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, streamer=streamer, do_sample=bool(drawn), **drawn, **ends)
