"""Losses of short trainings on several ranks. Rank 0 writes them.

losses_on_ranks.py FOLDER NAME=OVERRIDES-AS-JSON...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from helpers.runs import losses, small
from safetensors.torch import save_file

from clipx.trainer.trainer import Trainer

folder = Path(sys.argv[1])
for word in sys.argv[2:]:
    name, _, overrides = word.partition("=")
    trainer = Trainer(small(folder / f"{name}.run", *json.loads(overrides)))
    trainer.fit()
    if trainer.comm.is_main:
        save_file({"loss": torch.tensor(losses(folder / f"{name}.run"))}, folder / f"{name}.safetensors")
