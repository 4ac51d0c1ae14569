"""Everything of a run that is not the step itself, one concern per file.

`base` says what a callback is; `registry` lists those of a run in the order in which they see a step.
"""
