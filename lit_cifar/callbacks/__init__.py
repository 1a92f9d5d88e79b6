"""What a run shows and leaves: progress, figures, accuracy per rank, throughput, predictions, checkpoints."""

from lit_cifar.callbacks.checkpoint import Checkpoint
from lit_cifar.callbacks.figures import EvaluationFigures
from lit_cifar.callbacks.per_rank import PerRankAccuracy
from lit_cifar.callbacks.predictions import PredictionWriter
from lit_cifar.callbacks.progress import ProgressBar
from lit_cifar.callbacks.run_report import RunReport
from lit_cifar.callbacks.tensorboard import FinalSettings, ModelGraph
from lit_cifar.callbacks.throughput import Throughput

__all__ = [
    "Checkpoint",
    "EvaluationFigures",
    "FinalSettings",
    "ModelGraph",
    "PerRankAccuracy",
    "PredictionWriter",
    "ProgressBar",
    "RunReport",
    "Throughput",
]
