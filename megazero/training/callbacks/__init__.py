"""Everything of a run that is not the step itself: `base` says what a callback is, `registry` orders those of a run."""
