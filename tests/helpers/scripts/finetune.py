"""Fine-tuning on several ranks: fsdp_training.py with locked towers, and the gradients that DDP sends.

finetune.py FOLDER NAME=OVERRIDES-AS-JSON...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from helpers.runs import small
from helpers.scripts.fsdp_training import FP64, trained
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from clipx.trainer.trainer import Trainer


def sent(run_dir: Path, overrides: list[str]) -> dict[str, torch.Tensor]:
    """Returns the bytes of the gradients that ranks average, and of those that are trained."""
    trainer = Trainer(small(run_dir, *FP64, *overrides))
    parallel = trainer.learner.parallel
    assert isinstance(parallel, DistributedDataParallel)
    learning = sum(p.nbytes for p in trainer.learner.model.parameters() if p.requires_grad)
    whole = sum(p.nbytes for p in trainer.learner.model.parameters())
    trainer.close()
    found = [parallel._get_ddp_logging_data()["total_parameter_size_bytes"], learning, whole]
    return {"bytes": torch.tensor(found)}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for word in sys.argv[2:]:
        name, _, overrides = word.partition("=")
        found = (sent if name == "sent" else trained)(folder / f"{name}.run", json.loads(overrides))
        if torch.distributed.get_rank() == 0:
            save_file(found, folder / f"{name}.safetensors")
