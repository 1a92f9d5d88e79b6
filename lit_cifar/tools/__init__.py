"""What is not the trainer: it checks, measures, breaks, reports and exports. No training imports it."""
