"""Tasks of lm-evaluation-harness during a run: multiple choice and perplexity.  The engine computes the log-likelihoods.

Source: `lm_eval.models.huggingface.HFLM`, which gives the same scores for an exported model.
"""

import logging
from collections.abc import Sequence
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megazero.config import ConfigError
from megazero.settings import Problem
from megazero.training.callbacks.base import Callback, RunContext, StepRecord
from megazero.training.callbacks.samples import LIKELIHOOD, TextCallback

logging.getLogger("lm_eval").setLevel(logging.ERROR)


class EngineLM(TemplateLM):
    """The model of a run as lm-evaluation-harness calls it, on rank 0."""

    def __init__(self, callback: TextCallback, context: RunContext) -> None:
        super().__init__()
        self._ask, self._tokenizer = callback.ask, callback.tokenizer()
        self._at_once, self._seq_len = context.run.global_batch_size, context.run.config.model.seq_len

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod_id

    def tok_encode(self, string: str, *_: Any, **__: Any) -> list[int]:
        return self._tokenizer.encode(string).tolist()

    def loglikelihood(self, requests: Any, **_: Any) -> Any:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        texts = [([*context, *continuation], len(continuation)) for _, context, continuation in requests]
        groups = [texts[first : first + self._at_once] for first in range(0, len(texts), self._at_once)]
        return [(total, not others) for group in groups for total, others in self._ask(group, LIKELIHOOD)]

    def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
        sums = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.eot_token_id, self._seq_len, 1)
            scored = self._loglikelihood_tokens([(None, *make_disjoint_window(window)) for window in windows])
            sums.append(sum(total for total, _ in scored))
        return sums

    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        raise NotImplementedError("tasks that generate text are not scored during a run")


class Tasks(TextCallback):
    """Scores `evaluation.tasks`, and sets `record.metrics["tasks"]` on rank 0: "TASK/METRIC" -> number."""

    what = "scores of evaluation.tasks"

    def __init__(self, context: RunContext, before: Sequence[Callback]) -> None:
        self._own = context.run.config.evaluation
        super().__init__(context, before, self._own.every_steps)
        self._tasks: Any = None

    def on_start(self) -> None:
        """Load the tasks.  If that fails, a new run raises ConfigError, and a resumed run continues without them."""
        problem = self.do_on_first(self._load).problem
        if problem and self._context.start.step == 0:
            hint = f"{problem}; correct or leave out the task"
            raise ConfigError([Problem("evaluation.tasks", list(self._own.tasks), "must be tasks", hint)])
        if problem:
            self._context.log(f"evaluation.tasks cannot be loaded, and are tried again when they are due: {problem}")

    def _load(self) -> None:
        tasks = manager_of(self._own.tasks, self._own.include_path).load(list(self._own.tasks))
        texts = [name for name, task in tasks["tasks"].items() if task.OUTPUT_TYPE == "generate_until"]
        if texts:
            hint = "score it on a step by megazero evaluate STEP --tasks"
            raise ValueError(f"{', '.join(texts)} generates text, and a run scores by log-likelihood: {hint}")
        self._tasks = tasks

    def work(self, record: StepRecord) -> None:
        if self._tasks is None:
            self._load()
        lm = EngineLM(self, self._context)
        found = lm_eval.evaluate(lm, self._tasks, limit=self._own.limit, bootstrap_iters=0, log_samples=False)
        record.metrics["tasks"] = scores = scores_of(found)
        shown = [f"{name} {value:.4f}" for name, value in scores.items()]
        self._context.log(" | ".join([f"step {record.step}", *shown]))


def manager_of(names: Sequence[str], include_path: str | None) -> TaskManager:
    """Return the manager of the tasks in a directory, and of the harness's own tasks if `names` needs them.

    Listing the harness's own tasks takes a quarter of a minute.
    """
    if include_path is not None:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    return TaskManager(include_path=include_path)


def scores_of(found: Any) -> dict[str, float]:
    """Return the numbers of the harness's results as "TASK/METRIC"; the name of a filter follows in brackets."""
    return {
        f"{task}/{metric.removesuffix(',none')}": value
        for task, values in found["results"].items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    }
