"""Knowledge distillation in JAX with Equinox and Optax: ``python -m examples.distill_jax``."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from examples import lab
from tvd_jax import hybrid_loss, tvd_from_logits


class Model(eqx.Module):
    """Logits ``[batch, vocab]`` of the byte after ``[batch, context]`` bytes."""

    embedding: jax.Array
    w1: jax.Array
    b1: jax.Array
    w2: jax.Array
    b2: jax.Array
    context: int = eqx.field(static=True)

    def __init__(self, size, seed):
        self.context = size["context"]
        for name, value in lab.parameters(size, seed).items():
            setattr(self, name, jnp.asarray(value))

    def __call__(self, tokens):
        x = self.embedding[tokens[:, -self.context :]].reshape(len(tokens), -1)
        return jnp.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2


def kl_loss(student_logits, teacher_logits):
    p, q = jax.nn.log_softmax(student_logits), jax.nn.log_softmax(teacher_logits)
    return (jnp.exp(q) * (q - p)).sum(-1).mean()


LOSSES = {"tvd": tvd_from_logits, "kl": kl_loss, "hybrid": hybrid_loss}


def train(model, loss_of_batch, batches, name):
    """Adam over the batches; the trained model and the loss of every step."""
    optimizer = optax.adam(lab.LEARNING_RATE, eps=lab.EPSILON)

    @eqx.filter_jit
    def step(model, state, batch):
        loss, gradient = eqx.filter_value_and_grad(loss_of_batch)(model, batch)
        updates, state = optimizer.update(gradient, state, model)
        return eqx.apply_updates(model, updates), state, loss

    state = optimizer.init(eqx.filter(model, eqx.is_array))
    curve = []
    for batch in tqdm(batches.astype(np.int32), desc=name, mininterval=1):
        model, state, loss = step(model, state, batch)
        curve.append(float(loss))
    return model, curve


def cross_entropy(model, batch):
    loss = optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, -1])
    return loss.mean()


def train_teacher(ids, steps):
    batches = lab.batches(ids, steps, seed=1)
    return train(Model(lab.TEACHER, seed=0), cross_entropy, batches, "teacher")


def distill(teacher, loss, batches, name):
    def loss_of_batch(model, batch):
        return loss(model(batch[:, :-1]), teacher(batch[:, :-1]))

    return train(Model(lab.STUDENT, seed=2), loss_of_batch, batches, name)


def logits(model):
    call = eqx.filter_jit(model)
    return lambda contexts: np.asarray(call(contexts.astype(np.int32)))


def acceptance(student_logits, teacher_logits):
    """``1 - TVD`` of each row, by the library."""
    pair = jnp.asarray(student_logits), jnp.asarray(teacher_logits)
    return np.asarray(tvd_from_logits(*pair, return_stats=True)[1].acceptance)


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
    lab.main("distill_jax", run)
