"""Training a draft for speculative decoding in JAX: ``python -m examples.draft_jax``.

Unlike distillation on text, the draft learns on what the teacher itself writes, which is what it
will be asked to continue.
"""

from examples import lab
from examples.distill_jax import LOSSES, acceptance, distill, logits, train_teacher


def run(steps, rounds, written=None):
    """``written`` replaces the teacher's text, so that two runs can learn from the same one."""
    ids, held_out = lab.text()
    teacher, curve = train_teacher(ids, steps)
    if written is None:
        written = lab.continuations(ids, logits(teacher))
    result = {"curves": {"teacher": curve}, "acceptance": {}}
    for name, loss in LOSSES.items():
        batches = lab.windows(written, steps, seed=3)
        draft, result["curves"][name] = distill(teacher, loss, batches, name)
        result["acceptance"][name] = lab.evaluate(
            held_out, logits(draft), logits(teacher), acceptance, rounds
        )
    return result


if __name__ == "__main__":
    lab.main("draft_jax", run)
