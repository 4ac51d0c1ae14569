"""Everything of a run that is not the step itself: one callback per file.

base.py says what a callback is; registry.py puts them in the order in which they see a step.
"""
