"""Evaluate a trained model: loss by position and perplexity, sampling, baselines without a network, plots.

evaluation = evaluate(run.model, make_eval_iterator(run.config.data, global_batch_size=8))
evaluation.curve.perplexity(16384)
plot_loss_by_position(evaluation.curve, "loss.png", train_length=4096)
"""

from lsm_jax.evaluation.baselines import (
    ContextModel,
    byte_baselines,
    store_documents,
    xz_bits,
)
from lsm_jax.evaluation.curve import LossCurve, report_lengths
from lsm_jax.evaluation.files import UnwrittenResults, check_writable, output_folder
from lsm_jax.evaluation.generate import Generation, generate, state_bytes
from lsm_jax.evaluation.harness import HarnessConfig, check_harness, run_harness
from lsm_jax.evaluation.maps import LayerMaps, MapsConfig, layer_maps, plot_maps
from lsm_jax.evaluation.needle import NeedleScores, contains, find_needles
from lsm_jax.evaluation.perplexity import Evaluation, Scorer, evaluate
from lsm_jax.evaluation.plots import (
    moving_average,
    plot_loss_by_position,
    plot_needle,
    plot_training,
    read_metrics,
)
from lsm_jax.evaluation.reader import Answerer
from lsm_jax.evaluation.request import Request
from lsm_jax.evaluation.router import count_routes, plot_router, specialisation
from lsm_jax.evaluation.tables import bits_table, needle_table, perplexity_table
from lsm_jax.evaluation.tasks import REPORTS, TASKS, check_tasks, plot_run

__all__ = [
    "REPORTS",
    "TASKS",
    "Answerer",
    "ContextModel",
    "Evaluation",
    "Generation",
    "HarnessConfig",
    "LayerMaps",
    "LossCurve",
    "MapsConfig",
    "NeedleScores",
    "Request",
    "Scorer",
    "UnwrittenResults",
    "bits_table",
    "byte_baselines",
    "check_harness",
    "check_tasks",
    "check_writable",
    "contains",
    "count_routes",
    "evaluate",
    "find_needles",
    "generate",
    "layer_maps",
    "moving_average",
    "needle_table",
    "output_folder",
    "perplexity_table",
    "plot_loss_by_position",
    "plot_maps",
    "plot_needle",
    "plot_router",
    "plot_run",
    "plot_training",
    "read_metrics",
    "report_lengths",
    "run_harness",
    "specialisation",
    "state_bytes",
    "store_documents",
    "xz_bits",
]
