"""Tools beside the trainer: they check, measure, break and export trainings."""
