"""When Lightning will validate, from the trainer's public attributes."""

from __future__ import annotations

from lightning.pytorch import Trainer


def validation_follows(trainer: Trainer, batch_idx: int) -> bool:
    """Whether a validation run comes right after the training batch numbered `batch_idx` in its epoch.

    What belongs to a step is written once it is complete, so the validation of that step has to be waited for.
    """
    if not trainer.enable_validation or sum(trainer.num_val_batches) == 0:
        return False
    every_n_epoch, check = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if every_n_epoch is not None and (trainer.current_epoch + 1) % every_n_epoch != 0:
        return False
    if trainer.should_stop:
        return True
    if check is None or check == float("inf"):
        return batch_idx + 1 == trainer.num_training_batches
    done = (trainer.fit_loop.total_batch_idx if every_n_epoch is None else batch_idx) + 1
    return done % int(check) == 0
