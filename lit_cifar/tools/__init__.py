"""Tools beside the trainer: they check, measure, break, report and export trainings."""
