"""`baton verify --schedules K`: random schedules on the model that is verified."""

import sys

from tqdm import tqdm

from cli.local_config import ClusterConfig
from cli.local_nodes import EngineFactory
from cli.schedules.checks import Outcome
from cli.schedules.random_models import Weights
from cli.schedules.run import run_schedules
from cli.schedules.texts import Texts
from cli.verification import Report
from common.errors import ConfigError


def check_dtype(config: ClusterConfig) -> None:
    """Raises ConfigError where rounding alone would exceed what is allowed to differ."""
    if config.model.dtype != "float32":
        raise ConfigError(
            f"--schedules compares to 1e-4, which {config.model.dtype} cannot; add --dtype float32"
        )


def run_random_schedules(factory: EngineFactory, count: int, seed: int, report: Report) -> None:
    """``count`` schedules, every second through the hand-over; what came of them goes into ``report``."""
    built = factory.make()
    weights = Weights(report.model, built.trunk, built.modules, built.num_modules)
    texts, total = Texts(built.trunk), Outcome()
    for i in tqdm(range(count), unit="schedule", disable=None, file=sys.stderr):
        total.add(run_schedules(weights, texts, (1000 * seed + i // 2,), pair=i % 2 == 1))
    report.schedules = dict(total.counts)
    report.schedule_problems = total.problems
