"""FastCLIP's comparison in an hour: prepares stored features, runs the sweeps of fastclip_small, tests hypotheses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from clipx.bench.findings import Findings, Table
from clipx.bench.spec import BenchSpec
from clipx.config.registry import option
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.bench.fastclip_parts.study import Report, Study, StudyData

SWEEPS = {
    "core": "fastclip_small",
    "gamma": "fastclip_small_gamma",
    "optimizers": "fastclip_small_optimizers",
    "successors": "fastclip_small_successors",
    "openclipart": "fastclip_small_openclipart",
}
"""Experiment of each part that is one sweep."""

TUNINGS = ("tuning", "tuning_successors")


@option("bench")
@dataclass(kw_only=True, slots=True)
class FastclipSpec(BenchSpec):
    """FastCLIP's comparison on stored features of drawn scenes, in parts.

    The same command continues where a killed one stopped: finished runs are not repeated.
    """

    kind: str = "fastclip"
    """Name of this benchmark in the registry."""

    parts: list[str] = field(default_factory=lambda: ["core"])
    """Parts to run: core (ten objectives, three batch sizes, with and without exchanged captions), gamma (constant
    against cosine γ), optimizers (FastCLIP v3 with each optimizer), successors (DRRho-CLIP and NeuCLIP), openclipart
    (real pictures, from pixels), tuning and tuning_successors (the search that found the values in
    conf/experiment/fastclip_small, on other scenes and another seed)."""

    processes: int = 0
    """Number of runs at the same time, each on one core. 0 or more. 0: the number of available cores."""

    overrides: list[str] = field(default_factory=list)
    """Further overrides of every sweep, such as [duration=40ep], or [seed=0] for a sweep over fewer seeds."""

    samples: int = 1000
    """Number of training scenes. At least 256, the largest batch."""

    gallery: int = 960
    """Number of held-out scenes, among which retrieval ranks. At least 2."""

    trunk: str = "9ep"
    """Duration of the training of the model whose image embeddings are stored, on 12,000 other scenes."""

    resumable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        for name in self.parts:
            require(
                name in (*SWEEPS, *TUNINGS), f"parts={name} is not a part: choose from {', '.join((*SWEEPS, *TUNINGS))}"
            )
        require(bool(self.parts), "parts=[] measures nothing: give parts=[core]")
        require(self.processes >= 0, f"processes={self.processes} must be 0, for all cores, or more")
        require(self.samples >= 256, f"samples={self.samples} must be at least 256, the largest batch")
        require(self.gallery >= 2, f"gallery={self.gallery} must be at least 2")
        require(
            self.device != "cuda", "device=cuda has no effect on this benchmark, whose runs are on the CPU: remove it"
        )

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench.fastclip_parts.hypotheses import verdict_table
        from clipx.bench.fastclip_parts.study import CONTENDER, Study
        from clipx.bench.fastclip_parts.tuning import tune_contenders, tune_successors
        from clipx.distributed.launch_env import cores

        study = Study(Path(self.run_dir), self.processes or cores(), tuple(self.overrides), log)
        tables: list[Table] = []
        reports = {}
        trunk = study.train_trunk(self.trunk)
        for part in self.parts:
            if part in TUNINGS:
                data = study.prepare("tuning", trunk, self.samples, self.gallery, seed=2)
                tables.append((tune_successors if part == "tuning_successors" else tune_contenders)(study, data))
                continue
            if part == "openclipart":
                data = study.prepare_openclipart()
            else:
                data = study.prepare("features", trunk, self.samples, self.gallery, seed=0)
            if part == "successors":
                reports[part] = self._successors(study, data)
            else:
                sweep = study.sweep(f"{part}-sweep" if part == "openclipart" else part, SWEEPS[part], data)
                reports[part] = study.report(part, sweep.name, by="optimizer" if part == "optimizers" else CONTENDER)
            tables.append(reports[part].table(part))
        hypotheses = verdict_table(reports)
        figures = {"parts": self.parts, "hypotheses": {row[0]: row[-1] for row in hypotheses.rows}}
        details = {part: report.cells for part, report in reports.items()}
        return Findings(figures, details, [*tables, hypotheses] if hypotheses.rows else tables)

    def _successors(self, study: Study, data: StudyData) -> Report:
        """Runs the successors. Their page also has the contenders of the core, if that part has a report."""
        from clipx.bench.fastclip_parts.study import CONTENDER, REFERENCED

        referenced = study.train_references(data, itertools.product((0.0, 0.2), range(5)))
        sweeps = []
        for name, words in (("neuclip", ()), (REFERENCED, referenced.references)):
            sweeps.append(f"successors-{name}")
            study.sweep(sweeps[-1], SWEEPS["successors"], data, f"{CONTENDER}={name}", *words)
        core = ["core"] if (study.folder / "core.json").is_file() else []
        return study.report("successors", *core, *sweeps)
