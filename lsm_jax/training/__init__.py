"""Train models: the config of a run, the training step, the loop, and the run's directory."""

from lsm_jax.training.checkpoints import Checkpoints
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.config_json import differences, from_dict, to_dict
from lsm_jax.training.loop import TrainingDiverged, TrainingStopped, TrainResult
from lsm_jax.training.metrics import read_rows
from lsm_jax.training.optimizer import learning_rate, make_optimizer
from lsm_jax.training.optimizer_config import OptimizerConfig
from lsm_jax.training.recall_config import RecallConfig, SmallModelsConfig, TrackingConfig
from lsm_jax.training.recall_sweep import CompiledSweep, compile_recall, train_recall
from lsm_jax.training.run_files import read_config
from lsm_jax.training.runs import Run, best_step, load_run
from lsm_jax.training.samples_config import SamplesConfig
from lsm_jax.training.seeds import train_seeds
from lsm_jax.training.start import TrainingNotSaved, train
from lsm_jax.training.step import Program, TrainState, make_program
from lsm_jax.training.sweep import Sweep, SweepState

__all__ = [
    "Checkpoints",
    "CompiledSweep",
    "OptimizerConfig",
    "Program",
    "RecallConfig",
    "Run",
    "SamplesConfig",
    "SmallModelsConfig",
    "Sweep",
    "SweepState",
    "TrackingConfig",
    "TrainConfig",
    "TrainResult",
    "TrainState",
    "TrainingDiverged",
    "TrainingNotSaved",
    "TrainingStopped",
    "best_step",
    "compile_recall",
    "differences",
    "from_dict",
    "learning_rate",
    "load_run",
    "make_optimizer",
    "make_program",
    "read_config",
    "read_rows",
    "to_dict",
    "train",
    "train_recall",
    "train_seeds",
]
