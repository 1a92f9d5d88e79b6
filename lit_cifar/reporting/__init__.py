"""What a run prints and leaves in its folder: run folder, metrics, figures, accuracy per rank, throughput."""
