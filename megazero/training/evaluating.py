"""Evaluates a checkpoint on the validation data of a run file, on any shape.  It writes nothing into the run."""

from contextlib import ExitStack

from megazero.checkpoint.folder import Folder, folder_at
from megazero.checkpoint.index import CheckpointError, check_complete, find_newest, step_folder
from megazero.checkpoint.load import reading
from megazero.checkpoint.lock import checkpoints_of
from megazero.comm.agreement import agree, on_first
from megazero.config import ResolvedRun, RunConfig
from megazero.data.sampler import DataError
from megazero.engine import StepStatistics, initialize
from megazero.engine.outline import read_own_schedule
from megazero.engine.phases import KEYS_OF
from megazero.parallel_state import ParallelState
from megazero.schedules.proof import ScheduleError
from megazero.training.batches import open_same_corpus, without_trained
from megazero.training.callbacks.evaluation import evaluate_on, validations_of
from megazero.training.trainer import explained


def evaluate_rank(
    run: ResolvedRun, state: ParallelState, requested: str | None
) -> tuple[str, dict[str, StepStatistics]]:
    """Evaluate a checkpoint on every validation source of a run.  Every rank calls this.

    Args:
        requested: a step directory, or the number of a step of the run; None for the newest step.

    Returns: the path of the checkpoint; the losses, by the names of `evaluate_on`.

    Raises:
        CheckpointError: there is no such checkpoint, or it is of another model.
        DataError: see `open_same_corpus`; or the run has no samples for evaluation.
    """
    corpus, own = open_same_corpus(run.config, state.world), run.config
    if corpus.validation is None and not corpus.named_validation:
        hint = "name data in data.validation_sources, or hold some out by data.validation_fraction"
        raise DataError(f"there is nothing to evaluate on: {hint}")
    path = on_first(lambda: str(_find(own, requested)), state.world, CheckpointError)
    checkpoint = own.checkpoint.model_copy(update={"accept_changes": tuple(KEYS_OF)})
    # a run that evaluates nothing is asked here for all
    training = own.training.model_copy(update={"eval_every_steps": own.training.eval_every_steps or 1})
    optimizer = own.optimizer.model_copy(update={"name": "sgd", "momentum": 0.0})  # which has no state
    config = own.model_copy(update={"checkpoint": checkpoint, "training": training, "optimizer": optimizer})
    schedule = agree(lambda: read_own_schedule(run), state.world, ScheduleError)
    with explained(run, state), ExitStack() as closing:
        if state.rank == 0:
            closing.enter_context(reading(path))
        engine = initialize(config, state, init_weights=False, schedule=schedule)
        closing.callback(engine.sharded_model.close)
        position = engine.load(path, corpus.fingerprint, with_optimizer=False)
        corpus = without_trained(corpus, position.trained, lambda _: None)
        return path, evaluate_on(validations_of(config, corpus.validation, corpus.named_validation), run, engine)


def _find(config: RunConfig, requested: str | None) -> Folder:
    root = checkpoints_of(config)
    if requested is None:
        if (newest := find_newest(root)) is None:
            raise CheckpointError(f"{root} holds no complete checkpoint: train the run first, or name a step directory")
        return newest
    folder = step_folder(root, int(requested)) if requested.isdigit() else folder_at(requested)
    check_complete(folder, f"{folder} (megazero checkpoint inspect {root} lists the steps)")
    return folder
