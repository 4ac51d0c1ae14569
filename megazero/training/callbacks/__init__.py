"""Everything of a run that is not the step itself: one callback per file.  In the order in which they see a step:

    skip_steps          leaves out the steps that training.skip_steps names
    pipeline_trace      draws the measured pipeline of one step
    non_finite          stops, skips or rolls back where loss or gradient norm is not a number
    stragglers          names the ranks whose own work is slow
    loss_spikes         reports a loss far above those before it
    utilization         sets the MFU
    evaluation          evaluates on validation samples
    (training.callbacks those that a script registered, see registry.py)
    metrics_file        writes metrics.jsonl
    progress            prints a line per step
    tensorboard         writes TensorBoard events
    garbage_collection  collects Python's garbage between steps
    checkpointing       resumes, saves, rolls back

base.py says what a callback is; registry.py puts them in this order.
"""
