"""Everything that a run does between its steps, one concern per file.

`base` defines callbacks; `registry` lists the callbacks of a run, in the order in which they see a step.
"""
