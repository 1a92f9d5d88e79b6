"""Tools beside the trainer: they check, measure and break trainings."""
