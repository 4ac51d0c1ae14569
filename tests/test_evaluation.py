"""Evaluation: each source has a loss and an interval of its own, and the loss is the plain model's on those windows."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from harness import metrics_of, run_command, run_world
from numpy.typing import NDArray
from plain_model import count, loss_sum
from quickstart import QUICKSTART, TINY
from test_data_corpus import write_pair
from tokenizer_files import write_tokenizer
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from worlds import loop_of, over, plain_config, plain_trainer, state_on

from megazero.checkpoint.index import find_newest
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.config import ConfigError, ResolvedRun, RunConfig, load_config, resolve
from megazero.config.document import to_toml
from megazero.config.schema import ValidationSource
from megazero.data import open_corpus
from megazero.engine.micro_batches import BatchSlice
from megazero.parallel_state import Axis
from megazero.training.batches import DataError, open_corpus_of
from megazero.training.callbacks import samples
from megazero.training.trainer import train

Average = Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor] | None]
VOCABULARY, SEQ, STEPS, SEED = 257, 16, 5, 7


def _tokens(name: str) -> NDArray[Any]:
    return np.random.default_rng(len(name)).integers(0, VOCABULARY, 40 * SEQ + 1)


def _run(folder: Path, world: int, parallel: dict[str, Any], stage: int, **more: dict[str, Any]) -> ResolvedRun:
    one, other = (write_pair(folder / name, _tokens(name)) for name in ("one", "other"))
    named = [{"path": one, "name": "held", "every_steps": 2, "samples": 6}, other]
    sections = {
        "parallel": parallel,
        "zero": {"stage": stage},
        "data": {"sources": [one], "validation_fraction": 0.25, "validation_sources": named},
        "training": {"steps": STEPS, "eval_every_steps": 3, "eval_samples": 9},
    }
    return loop_of(folder / "run", world, **over(sections, more))


def _plainly(run: ResolvedRun) -> dict[int, dict[str, float]]:
    """After each step the mean loss on the windows that each evaluation reads: cut from the tokens, in their order."""
    return {step: losses for step, (losses, _) in enumerate(_plain_steps(run), 1)}


def _plain_steps(
    run: ResolvedRun, average: Average = lambda *_: None
) -> list[tuple[dict[str, float], dict[str, Tensor]]]:
    """As `_plainly`, of the weights that `average` makes of those of a step; None leaves them."""
    trainer, config = plain_trainer(run), plain_config(run)
    corpus = open_corpus(
        [(run.config.data.sources[0].path, 1.0)],
        tokenizer="byte",
        seq_len=SEQ,
        seed=SEED,
        validation_fraction=0.25,
        cache_dir=Path(run.config.training.run_dir).parent / "cache",
        vocab_size=VOCABULARY,
    )

    def loss(name: str, windows: range) -> float:
        tokens = torch.from_numpy(_tokens(name))
        cut = torch.stack([tokens[index * SEQ : index * SEQ + SEQ + 1] for index in windows])
        with torch.no_grad():
            return float(loss_sum(weights, config, cut[:, :-1], cut[:, 1:])) / count(cut[:, 1:])

    found = []
    for step in range(1, STEPS + 1):
        batch = torch.from_numpy(corpus.train.batch(range(8 * step - 8, 8 * step)))
        trainer.step(batch[:, :-1], batch[:, 1:])
        weights = average(step, trainer.weights) or trainer.weights
        # 40 windows: the last 10 of `one` are held out
        losses = {"": loss("one", range(30, 39)), "held": loss("one", range(30, 36)), "other": loss("other", range(9))}
        found.append((losses, {name: weight.detach().clone() for name, weight in weights.items()}))
    return found


def _train(rank: int, run: ResolvedRun) -> list[str]:
    shown: list[str] = []
    train(run, state_on(rank, run), shown.append)
    return shown


@pytest.mark.parametrize(("world", "parallel", "stage"), [(1, {}, 0), (4, {"pp": 2}, 2)])
def test_each_source_has_the_plain_models_loss_at_its_own_interval(
    world: int, parallel: dict[str, Any], stage: int, tmp_path: Path
) -> None:
    run = _run(tmp_path, world, parallel, stage)
    wanted = run_world(1, lambda _: _plainly(run))[0]
    shown = run_world(world, _train, run)[0]
    lines = metrics_of(tmp_path / "run")
    due = {1: [], 2: ["held"], 3: ["", "other"], 4: ["held"], 5: ["", "held", "other"]}
    for line in lines:
        step = line["step"]
        found = line.get("val_losses", {}) | ({"": line["val_loss"]} if "val_loss" in line else {})
        assert found == pytest.approx({name: wanted[step][name] for name in due[step]}, rel=1e-5), step
    told = next(line for line in shown if line.startswith("step 5/5"))
    assert told.endswith(
        f"| validation loss {wanted[5]['']:.4f} | held loss {wanted[5]['held']:.4f} | other loss {wanted[5]['other']:.4f}"
    )


class _Torchs:
    """torch's average of the weights: at these steps, by its rule for an EMA or for a mean."""

    def __init__(self, steps: Collection[int], decay: float | None) -> None:
        self._steps, self._rule = steps, {} if decay is None else {"multi_avg_fn": get_ema_multi_avg_fn(decay)}
        self._averaged: AveragedModel | None = None

    def __call__(self, step: int, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        names, module = list(weights), torch.nn.ParameterList([weight.detach() for weight in weights.values()])
        if step in self._steps:
            self._averaged = self._averaged or AveragedModel(module, **self._rule)
            self._averaged.update_parameters(module)
        return self._averaged and dict(zip(names, self._averaged.module, strict=True))


EMA = {"kind": "ema", "decay": 0.5}, _Torchs(range(1, STEPS + 1), 0.5)
LAST_SAVES = {"kind": "saves", "last": 3}, _Torchs((2, 4, 5), None)  # of saves after steps 2, 4 and 5


@pytest.mark.parametrize(
    ("averages", "first", "then"),
    [
        (EMA, (4, {"tp": 2, "pp": 2}, 0, {}), (2, {}, 3, {})),
        (EMA, (2, {}, 2, {"optimizer": "nvme"}), (4, {"pp": 2}, 1, {})),
        (LAST_SAVES, (2, {"tp": 2}, 1, {"optimizer": "cpu"}), (4, {"pp": 2}, 3, {})),
    ],
)
def test_averages_are_torchs_on_any_shape_and_go_on_on_any_other(
    averages: Any, first: Any, then: Any, tmp_path: Path
) -> None:
    section, rule = averages
    plain, resume = None, "auto"
    for number, (world, parallel, stage, offload) in enumerate((first, then)):
        own = {"average": section, "checkpoint": {"save_every_steps": 2, "resume": resume}}
        own["training"] = {"run_dir": str(tmp_path / f"run{number}")}
        own["zero"] = {
            "offload": offload | ({"nvme_path": str(tmp_path)} if offload.get("optimizer") == "nvme" else {})
        }
        run = _run(tmp_path, world, parallel, stage, **own)
        run_world(world, _train, run)
        plain = plain or run_world(1, lambda _, run=run: _plain_steps(run, rule))[0]
        losses, weights = plain[-1]
        checkpoints = tmp_path / f"run{number}" / "checkpoints"
        stored = StoredTensors(find_newest(checkpoints), "average")
        for name, wanted in weights.items():
            torch.testing.assert_close(stored[name].whole(), wanted, rtol=1e-5, atol=1e-6)
        last = metrics_of(tmp_path / f"run{number}")[-1]
        found = {name: last["val_losses"][f"{name} averaged".lstrip()] for name in losses}
        assert found == pytest.approx(losses, rel=1e-5)
        resume = str(checkpoints / "step-00000002")
    again = own | {"training": {"run_dir": str(tmp_path / "without")}, "average": {}}
    run_world(world, _train, _run(tmp_path, world, parallel, stage, **again))
    of_steps = [[line["loss"] for line in metrics_of(tmp_path / name)] for name in ("run1", "without")]
    assert of_steps[0] == of_steps[1], "the average changed the run"


def test_a_source_that_is_trained_on_is_known_by_its_tokens_under_every_path(tmp_path: Path) -> None:
    run = _run(tmp_path, 1, {}, 0)
    one = Path(run.config.data.sources[0].path)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"link{suffix}").symlink_to(f"{one}{suffix}")
    paths = [str(one), f"{one.parent}/./{one.name}", str(tmp_path / "link")]
    wanted = len(open_corpus_of(_with_validation(run.config, paths[0])).named_validation["v"])
    for path in paths:
        assert len(open_corpus_of(_with_validation(run.config, path)).named_validation["v"]) == wanted
        unheld = _with_validation(run.config, path, validation_fraction=0.0)
        with pytest.raises(DataError, match=r"the same tokens as one of data\.sources"):
            open_corpus_of(unheld)


def _with_validation(config: RunConfig, path: str, **more: Any) -> RunConfig:
    source = ValidationSource(path=path, name="v", every_steps=1)
    return config.model_copy(update={"data": config.data.model_copy(update={"validation_sources": (source,), **more})})


def test_validation_sources_are_strings_or_tables_and_are_written_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nvalidation_sources = ["/data/books/", { path = "/data/code", name = "C", every_steps = 5 }]\n'
        "[training]\neval_every_steps = 100\n"
    )
    run = load_config(path)
    books, code = run.config.data.validation_sources
    assert (books.label, code.label) == ("books", "C")
    assert code == ValidationSource(path="/data/code", name="C", every_steps=5)
    assert 'validation_sources = ["/data/books/", { path = "/data/code", name = "C", every_steps = 5 }]' in to_toml(run)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"validation_sources": ["a/x", "b/x"]}, "must be the name of one source; give each a name: { path, name }"),
        ({"validation_sources": ["a/x"]}, "every_steps: must be set where training.eval_every_steps = 0"),
        (
            {"sources": ["a/x"], "validation_fraction": 0.0, "validation_sources": [{"path": "a/x", "every_steps": 5}]},
            "must not be among data.sources where data.validation_fraction = 0: nothing of it is held out",
        ),
    ],
)
def test_validation_sources_that_cannot_be_evaluated_are_told(data: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(RunConfig.model_validate({"data": data}), 1)
    assert told in str(error.value)
    fine = {"validation_fraction": 0.0, "validation_sources": ["a/x"]}
    resolve(RunConfig.model_validate({"data": fine, "training": {"eval_every_steps": 5}}), 1)


SMALL = [*TINY, "launch.device=cpu", "parallel.tp=2", "zero.stage=3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on tp 2, pp 2, ZeRO 3, with the checkpoints of steps 1 and 2."""
    run_dir = tmp_path_factory.mktemp("trained")
    words = ["training.steps=2", "checkpoint.save_every_steps=1", "training.eval_every_steps=1", "optimizer.lr=0.01"]
    words += [
        "average.kind=ema",
        "average.decay=0.5",
        "lr_schedule.warmup_steps=0",
        "training.eval_samples=8",
        f"training.run_dir={run_dir}",
    ]
    done = run_command("train", QUICKSTART, *SMALL, "parallel.pp=2", "launch.nproc_per_node=4", *words)
    assert done.returncode == 0, done.stderr
    return run_dir


def test_a_checkpoint_has_the_loss_of_its_step_on_another_shape_and_the_run_is_as_it_was(trained: Path) -> None:
    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in trained.rglob("*") if path.is_file()}

    before = content()
    for step, words in ((2, []), (1, ["1"])):
        other = ["parallel.pp=1", "parallel.tp=1", "parallel.sequence_parallel=false", "launch.nproc_per_node=1"]
        done = run_command("evaluate", trained / "config.toml", *words, *other)
        assert done.returncode == 0, done.stderr
        loss = float(re.search(r"held out +256 +([\d.]+) ", done.stdout)[1])
        assert loss == pytest.approx(metrics_of(trained)[step - 1]["val_loss"], abs=1e-4)
        assert "\n averaged " in done.stdout
    assert content() == before
    done = run_command("evaluate", trained / "config.toml", "7")
    assert done.returncode == 1
    assert "nothing is there; name a complete step, such as " in done.stderr


def test_the_mean_of_steps_and_the_average_of_a_run_are_models_of_transformers(trained: Path, tmp_path: Path) -> None:
    steps = [trained / "checkpoints" / f"step-0000000{number}" for number in (1, 2)]
    done = run_command("checkpoint", "average", *steps, tmp_path / "mean")
    assert done.returncode == 0, done.stderr
    done = run_command("checkpoint", "export", steps[1], tmp_path / "ema", "--averaged")
    assert done.returncode == 0, done.stderr
    one, two = (StoredTensors(step, "model") for step in steps)
    mean = {key: (one[key].whole() + two[key].whole()) / 2 for key in one.files}
    averages = StoredTensors(steps[1], "average")
    for name, tensors in (("mean", mean), ("ema", {key: averages[key].whole() for key in averages.files})):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert all(torch.equal(model.state_dict()[key], tensors[key]) for key in tensors)
    done = run_command("evaluate", trained / "config.toml", tmp_path / "mean")
    assert done.returncode == 0, done.stderr
    done = run_command("checkpoint", "average", tmp_path / "mean")
    assert "name the steps to average" in done.stderr


def test_a_step_continues_a_text_as_transformers_does(trained: Path) -> None:
    step = trained / "checkpoints" / "step-00000002"
    done = run_command("generate", step, "--prompt", "import", "--max-new-tokens", "5", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    ids = torch.tensor([list(b"import")])
    made = AutoModelForCausalLM.from_pretrained(step).generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=256)
    assert done.stdout == bytes(made[0].tolist()).decode(errors="replace") + "\n"
    done = run_command("generate", step, "--prompt", "import" * 6)
    assert "so shorten the prompt" in done.stderr


WORDS = "a the of run and is in to cat dog sat mat"
TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/documents.jsonl}}}}
test_split: test
"""
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: choices\ndoc_to_target: label\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]",
    "likelihood": "output_type: loglikelihood\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{choices[1]}}'\n"
    "metric_list: [{metric: perplexity}, {metric: acc}]",
    "written": "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: label\n"
    "metric_list: [{metric: exact_match}]",
}


def _write_tasks(folder: Path) -> None:
    import lm_eval.evaluator  # noqa: F401  before ranks are forked

    random, words = np.random.default_rng(3), WORDS.split()
    documents = [
        {
            "text": " ".join(random.choice(words, 2 + 5 * at)),
            "choices": [f" {word}" for word in random.choice(words, 3)],
        }
        for at in range(6)  # up to 27 tokens: some are longer than a sample
    ]
    lines = [json.dumps(document | {"label": at % 3}) for at, document in enumerate(documents)]
    (folder / "documents.jsonl").write_text("\n".join(lines))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{text}{TASK.format(folder=folder)}")


def test_tasks_and_samples_are_those_of_transformers_on_the_step_on_any_shape(tmp_path: Path) -> None:
    _write_tasks(tmp_path)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", f"{WORDS} </s>")
    source = write_pair(tmp_path / "words", np.random.default_rng(1).integers(0, 12, 40 * SEQ + 1))
    names = [name for name in TASKS if name != "written"]
    scores, shown = [], []
    for parallel, stage in (({"cp": 2}, 3), ({"tp": 2, "pp": 2, "sequence_parallel": True}, 1)):
        run = loop_of(
            tmp_path / f"run{stage}",
            4,
            parallel=parallel,
            zero={"stage": stage},
            data={"sources": [source], "tokenizer": str(tokenizer), "validation_fraction": 0.0},
            training={"steps": 2},
            evaluation={"tasks": names, "every_steps": 1, "include_path": str(tmp_path)},
            logging={"sample_prompts": ["the cat", "run"], "sample_tokens": 6, "sample_every_steps": 1},
        )
        shown += run_world(4, _train, run)[0]
        first, last = (line["tasks"] for line in metrics_of(tmp_path / f"run{stage}"))
        assert first.keys() == last.keys()
        assert first != last
        scores.append(last)
    step = find_newest(tmp_path / "run1" / "checkpoints").path
    done = run_command("evaluate", step, "--tasks", ",".join(names), "--include-path", tmp_path)
    assert done.returncode == 0, done.stderr
    found = {name: float(value) for name, value in re.findall(r"(\w+/\S+) +([\d.]+) *\n", done.stdout)}
    assert len(found) == 6
    for last in scores:
        assert last == pytest.approx(found, rel=1e-4, abs=1e-4)
    model, words = AutoModelForCausalLM.from_pretrained(step), WORDS.split()
    for prompt in ("the cat", "run"):
        ids = torch.tensor([[words.index(word) for word in prompt.split()]])
        made = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=12)[0, ids.shape[1] :]
        text = " ".join(words[token] for token in made if token < 12)
        assert sum(line.startswith(f"step 2 | {prompt!r} goes on {text!r}"[:-1]) for line in shown) == 2, (text, shown)


def test_what_goes_wrong_with_tasks_is_told_before_the_first_step_and_later_never_ends_the_run(tmp_path: Path) -> None:
    _write_tasks(tmp_path)
    run = _run(tmp_path, 1, {}, 0, evaluation={"tasks": ["written"], "include_path": str(tmp_path)})
    with pytest.raises(AssertionError, match="written generates text"):
        run_world(1, _train, run)
    documents = (tmp_path / "documents.jsonl").read_text().splitlines()
    (tmp_path / "documents.jsonl").write_text(
        "\n".join([*documents, json.dumps({"text": "a", "choices": None, "label": 0})])
    )
    run = _run(tmp_path, 2, {}, 0, evaluation={"tasks": ["choice"], "include_path": str(tmp_path)})
    shown = run_world(2, _train, run)[0]
    assert any("no scores of evaluation.tasks" in line for line in shown), shown
    assert len(metrics_of(tmp_path / "run")) == STEPS


def _train_where_rank_0_has_no_task_file(rank: int, run: ResolvedRun) -> list[str]:
    if rank == 0:
        patch("megazero.training.callbacks.tasks.manager_of", side_effect=OSError("no task file")).start()
    try:
        return _train(rank, run)
    except ConfigError as error:
        return [str(error)]


def test_a_task_file_that_rank_0_lacks_ends_a_new_run_on_every_rank_and_never_one_that_goes_on(tmp_path: Path) -> None:
    _write_tasks(tmp_path)
    evaluation = {"tasks": ["choice"], "include_path": str(tmp_path)}
    run = _run(tmp_path, 2, {}, 1, evaluation=evaluation)
    for lines in run_world(2, _train_where_rank_0_has_no_task_file, run):
        assert "evaluation.tasks" in lines[0]
        assert "no task file" in lines[0]
    run_world(2, _train, _run(tmp_path, 2, {}, 1, training={"steps": STEPS - 1}))
    shown = run_world(2, _train_where_rank_0_has_no_task_file, run)[0]
    assert sum("no task file" in line for line in shown) == 2, shown  # at the start, and when they are due
    assert metrics_of(tmp_path / "run")[-1]["step"] == STEPS


def _train_with_a_slow_metric(rank: int, run: ResolvedRun) -> list[str]:
    """The harness goes on on rank 0 after the ranks have met a few times, and never before."""
    import lm_eval

    met, meet, evaluate = threading.Semaphore(0), samples.from_first, lm_eval.evaluate

    def from_first(value: Any, axis: Any) -> Any:
        if value is None:
            met.release()
        return meet(value, axis)

    def slow(*args: Any, **more: Any) -> Any:
        assert all(met.acquire(timeout=60) for _ in range(5))
        return evaluate(*args, **more)

    patch.multiple(samples, from_first=from_first, seconds_between_meetings=lambda _: 0.01).start()
    patch("lm_eval.evaluate", slow).start()
    return _train(rank, run)


def test_ranks_meet_while_rank_0_computes_a_metric(tmp_path: Path) -> None:
    _write_tasks(tmp_path)
    run_world(
        2,
        _train_with_a_slow_metric,
        _run(tmp_path, 2, {}, 1, evaluation={"tasks": ["choice"], "include_path": str(tmp_path)}),
    )
    assert "choice/acc" in metrics_of(tmp_path / "run")[-1]["tasks"]


SAMPLED = {
    "training": {"eval_every_steps": 0},
    "data": {"validation_sources": []},
    "checkpoint": {"save_every_steps": 2},
    "logging": {"sample_prompts": ["a"], "sample_every_steps": 2, "sample_tokens": 50},
}


def _train_and_read(rank: int, run: ResolvedRun, reads: int, error: Exception | None) -> int:
    """Rank 1 wants to stop when it has read so many texts, or reading them fails.  Returns: how many were read."""
    with patch.object(samples, "read_texts", wraps=samples.read_texts, side_effect=error) as read:
        if error is None:
            train(run, state_on(rank, run), lambda _: None, lambda: rank == 1 and read.call_count >= reads)
        else:
            with pytest.raises(type(error)):
                train(run, state_on(rank, run), lambda _: None)
        return read.call_count


@pytest.mark.parametrize(("reads", "error"), [(3, None), (1, ValueError("what reads texts is broken"))])
def test_a_step_is_kept_before_texts_are_read_and_a_stop_ends_their_reading(
    reads: int, error: Exception | None, tmp_path: Path
) -> None:
    assert run_world(2, _train_and_read, _run(tmp_path, 2, {}, 1, **SAMPLED), reads, error) == [reads, reads]
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2]
    assert find_newest(tmp_path / "run" / "checkpoints").name == "step-00000002"


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.nbytes = max(self.nbytes, made.untyped_storage().nbytes() if isinstance(made, Tensor) else 0)
        return made


def test_a_rank_holds_the_tokens_of_its_own_texts_alone(tmp_path: Path) -> None:
    run, ranks, index = _run(tmp_path, 1, {}, 0), 512, 3
    engine, each = Mock(), run.micro_batch_size
    texts = [([1, 2, at], 1) for at in range(ranks * each)]
    engine.batch_slice = BatchSlice(
        Axis("dp", tuple(range(ranks)), index), torch.device("cpu"), tokens=True, labels=True
    )
    engine.state.world, engine.state.at.tp = Axis("world"), 0
    with _Largest() as largest:
        samples.read_texts(Mock(run=run, engine=engine), texts, samples.LIKELIEST)
    (batch,) = engine.read_logits.call_args.args[0]
    assert batch.labels[1].tolist() == list(range(index * each, (index + 1) * each))
    assert largest.nbytes <= 8 * (2 * SEQ * each + len(texts))  # tokens and labels, and a number of each text
