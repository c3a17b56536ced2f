"""Knowledge distillation in PyTorch, a plain loop: ``python -m examples.distill_torch``."""

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from examples import lab
from tvd_torch import hybrid_loss, tvd_from_logits


class Model(torch.nn.Module):
    """Logits ``[batch, vocab]`` of the byte after ``[batch, context]`` bytes."""

    def __init__(self, size, seed):
        super().__init__()
        self.context = size["context"]
        for name, value in lab.parameters(size, seed).items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value)))

    def forward(self, tokens):
        x = self.embedding[tokens[:, -self.context :]].flatten(1)
        return torch.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2


def kl_loss(student_logits, teacher_logits):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return F.kl_div(p, q, log_target=True, reduction="batchmean")


LOSSES = {"tvd": tvd_from_logits, "kl": kl_loss, "hybrid": hybrid_loss}


def train(model, loss_of_batch, batches, name):
    """Adam over the batches; the loss of every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lab.LEARNING_RATE, eps=lab.EPSILON)
    curve = []
    for batch in tqdm(torch.from_numpy(batches), desc=name, mininterval=1):
        loss = loss_of_batch(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def train_teacher(ids, steps):
    teacher = Model(lab.TEACHER, seed=0)
    curve = train(
        teacher,
        lambda model, batch: F.cross_entropy(model(batch[:, :-1]), batch[:, -1]),
        lab.batches(ids, steps, seed=1),
        "teacher",
    )
    return teacher.requires_grad_(False), curve


def distill(teacher, loss, batches, name):
    student = Model(lab.STUDENT, seed=2)
    curve = train(
        student,
        lambda model, batch: loss(model(batch[:, :-1]), teacher(batch[:, :-1])),
        batches,
        name,
    )
    return student, curve


def logits(model):
    @torch.no_grad()
    def of_contexts(contexts):
        return model(torch.from_numpy(np.ascontiguousarray(contexts))).numpy()

    return of_contexts


def acceptance(student_logits, teacher_logits):
    """``1 - TVD`` of each row, by the library."""
    pair = torch.from_numpy(student_logits), torch.from_numpy(teacher_logits)
    return tvd_from_logits(*pair, return_stats=True)[1].acceptance.numpy()


def run(steps, rounds):
    ids, held_out = lab.text()
    teacher, curve = train_teacher(ids, steps)
    result = {"curves": {"teacher": curve}, "acceptance": {}}
    for name, loss in LOSSES.items():
        batches = lab.batches(ids, steps, seed=3)
        student, result["curves"][name] = distill(teacher, loss, batches, name)
        result["acceptance"][name] = lab.evaluate(
            held_out, logits(student), logits(teacher), acceptance, rounds
        )
    return result


if __name__ == "__main__":
    lab.main("distill_torch", run)
