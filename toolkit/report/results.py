"""What a run writes beside its steps: the facts in config.json, and the results at its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from toolkit.config import LongTextSettings, section_in
from toolkit.data.encode import truncate_split
from toolkit.evaluation import Evaluation
from toolkit.training.optimizer import unwrapped_optimizer
from toolkit.training.resume import Resumed
from toolkit.training.verified import strategy_name
from toolkit.utils.features import features
from toolkit.utils.modules import unwrapped

if TYPE_CHECKING:
    from toolkit.run import Evaluate, Run


def config_facts(run: Run, resumed: Resumed | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section `data` of config.json, and further sections."""
    data = run.data
    facts = {
        "samples": data.sizes,
        **data.facts,
        **data.targets.source(),
        "text_column": data.text_column,
        "max_length": data.max_length,
        "digest": data.digest,
        "file_digests": data.file_digests,
        "notes": data.notes,
        **asdict(run.schedule),
        "metric_for_best_model": run.best.metric,
        "pipeline_tag": data.targets.pipeline_tag,
    }
    sections = {
        "identity": run.facts["identity"],
        "strategy": strategy_name(run.accelerator),
        "model_class": type(unwrapped(run.checkpoints.model)).__name__,
        "optimizer": type(unwrapped_optimizer(run.checkpoints.optimizer)).__name__,
        "resumed_from": str(resumed.folder) if resumed else None,
    }
    return facts, sections


@dataclass(frozen=True)
class Results:
    """The best model's evaluations."""

    evaluation: Evaluation
    """On the test rows, or else the validation rows."""
    truncated: Evaluation | None
    """On the same texts, truncated to `--compare_max_length`."""

    def write(self, run: Run, seconds: float) -> None:
        """Writes the files of features and the pages, and prints the results with any
        --log_level."""
        path, settings = run.folder.path, run.settings
        facts = (path, settings, run.data, self.evaluation, run.answers)
        files = [line for feature in features() for line in feature.results(*facts)]
        if not run.accelerator.is_main_process:
            return
        run.summary.write_pages(run.best.step)
        lines = [*run.answers.describe(self.evaluation), *files]
        end = run.summary.end_lines(self.evaluation, self.truncated, seconds, lines)
        print("\n".join(end), flush=True)


def evaluate_best_model(run: Run, evaluate: Evaluate) -> Results:
    """All processes call this, with the best model loaded."""
    split = run.data.test or run.data.validation
    truncated = None
    length = section_in(run.settings, LongTextSettings).compare_max_length
    if length:
        short = truncate_split(split, run.tokenizer, length, f"{split.name}_first_{length}")
        truncated = _answered(run, evaluate(short))
        run.files.append_evaluation(truncated, run.best.step, max_length=length)
    return Results(_answered(run, run.best_evaluation(split, evaluate)), truncated)


def _answered(run: Run, evaluation: Evaluation) -> Evaluation:
    """The evaluation of the answers that a feature makes of the model's outputs."""
    if evaluation.compute_metrics is None:
        return evaluation
    return run.answers.evaluation(evaluation, evaluation.compute_metrics)
