"""What a run prints and writes: progress, figures, accuracy per rank, throughput, predictions, checkpoints."""

from lit_cifar.checkpoint.callbacks import BestCheckpoint, LastCheckpoint
from lit_cifar.checkpoint.exact_resume import ExactResume
from lit_cifar.checkpoint.step_boundary import EXIT_STOPPED, Keystrokes, StepBoundary
from lit_cifar.reporting.confusion import ConfusionCounts
from lit_cifar.reporting.figures import EvaluationFigures
from lit_cifar.reporting.model_graph import ModelGraph
from lit_cifar.reporting.per_rank import PerRankAccuracy
from lit_cifar.reporting.predictions import PredictionWriter
from lit_cifar.reporting.progress_bar import ProgressBar
from lit_cifar.reporting.run_report import RunReport
from lit_cifar.reporting.tensorboard import FinalSettings
from lit_cifar.reporting.throughput import Throughput
from lit_cifar.sample_audit.callback import SampleAudit
from lit_cifar.watchdog.callback import Watchdog

__all__ = [
    "EXIT_STOPPED",
    "BestCheckpoint",
    "ConfusionCounts",
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
    "SampleAudit",
    "StepBoundary",
    "Throughput",
    "Watchdog",
]
