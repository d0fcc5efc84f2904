"""TRL's trainers of fine-tuning and of preferences on a model of `auto_parallel`.

They make their losses outside the model, of outputs that steps return, and those are compiled with
it. Other trainers of TRL's become such by `merakc.integrations.trainer.parallel`.
"""

from __future__ import annotations

import trl

from merakc.integrations.trainer import parallel

SFTTrainer = parallel(trl.SFTTrainer)
DPOTrainer = parallel(trl.DPOTrainer)
