"""What a run prints and writes: progress, figures, accuracy per rank, throughput, predictions, checkpoints."""

from lit_cifar.callbacks.boundary import EXIT_STOPPED, Keystrokes, StepBoundary
from lit_cifar.callbacks.checkpoint import BestCheckpoint, LastCheckpoint
from lit_cifar.callbacks.exact_resume import ExactResume
from lit_cifar.callbacks.figures import EvaluationFigures
from lit_cifar.callbacks.model_graph import ModelGraph
from lit_cifar.callbacks.per_rank import PerRankAccuracy
from lit_cifar.callbacks.predictions import PredictionWriter
from lit_cifar.callbacks.progress import ProgressBar
from lit_cifar.callbacks.receipt import DataReceipt
from lit_cifar.callbacks.run_report import RunReport
from lit_cifar.callbacks.tensorboard import FinalSettings
from lit_cifar.callbacks.throughput import Throughput
from lit_cifar.callbacks.watchdog import Watchdog

__all__ = [
    "EXIT_STOPPED",
    "BestCheckpoint",
    "DataReceipt",
    "EvaluationFigures",
    "ExactResume",
    "FinalSettings",
    "Keystrokes",
    "LastCheckpoint",
    "ModelGraph",
    "PerRankAccuracy",
    "PredictionWriter",
    "ProgressBar",
    "RunReport",
    "StepBoundary",
    "Throughput",
    "Watchdog",
]
