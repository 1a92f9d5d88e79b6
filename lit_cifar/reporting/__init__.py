"""Output of a run, printed and in its folder: metrics, figures, accuracy per rank, throughput."""
