"""Knowledge distillation with the Hugging Face Trainer: ``python -m examples.distill_trainer``.

The loss enters through ``compute_loss``. The curve is that of ``distill_torch``: the same batches
in the same order, Adam without decay, clipping or a schedule.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments

from examples import lab
from examples.distill_torch import LOSSES, Model, acceptance, logits, train_teacher


class Distiller(Trainer):
    """Trains the model to match ``teacher`` in the sense of ``loss``; ``curve`` keeps each loss."""

    def __init__(self, *args, teacher, loss, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.loss, self.curve = teacher, loss, []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            teacher_logits = self.teacher(inputs["tokens"])
        student_logits = model(inputs["tokens"])
        loss = self.loss(student_logits, teacher_logits)
        self.curve.append(loss.item())  # the Trainer's log rounds
        return (loss, student_logits) if return_outputs else loss

    def _get_train_sampler(self, *args):
        return None  # in the order of the data set, as the other examples


def distill(teacher, loss, batches):
    student = Model(lab.STUDENT, seed=2)
    windows = torch.from_numpy(batches[..., :-1].reshape(-1, lab.CONTEXT))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Distiller(
            model=student,
            teacher=teacher,
            loss=loss,
            train_dataset=[{"tokens": window} for window in windows],
            optimizers=(
                torch.optim.Adam(student.parameters(), lr=lab.LEARNING_RATE, eps=lab.EPSILON),
                None,
            ),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=lab.BATCH,
                num_train_epochs=1,
                learning_rate=lab.LEARNING_RATE,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                remove_unused_columns=False,  # Model.forward has no argument of the column's name
                use_cpu=True,
                dataloader_pin_memory=False,
            ),
        )
        trainer.train()
    return student, trainer.curve


def run(steps, rounds):
    ids, held_out = lab.text()
    teacher, curve = train_teacher(ids, steps)
    result = {"curves": {"teacher": curve}, "acceptance": {}}
    for name, loss in LOSSES.items():
        student, losses = distill(teacher, loss, lab.batches(ids, steps, seed=3))
        result["curves"][name] = losses
        result["acceptance"][name] = lab.evaluate(
            held_out, logits(student), logits(teacher), acceptance, rounds
        )
    return result


if __name__ == "__main__":
    lab.main("distill_trainer", run)
