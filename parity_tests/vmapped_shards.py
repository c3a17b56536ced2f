"""A route whose rows of logits are cut into shards on one device.

The mesh axis of the shards is an axis of ``vmap``, for which JAX's sums over devices are the same
functions: so the kernels of shards run on one GPU, compiled, and in Pallas's interpreter.
"""

from typing import Any

import jax

from parity_tests.routes import JaxRoute

AXIS = "shards"


class VmappedShards(JaxRoute):
    """``shards`` of a row are handed over at once; the vocab has to divide by their number."""

    def __init__(self, implementation: str, shards: int) -> None:
        super().__init__(implementation)
        self.shards = shards

    def call(self, p: Any, q: Any, labels: Any = None, **options: Any) -> Any:
        def cut(x: Any) -> Any:
            return x.reshape(*x.shape[:-1], self.shards, x.shape[-1] // self.shards)

        def of_shard(p: Any, q: Any) -> Any:
            return super(VmappedShards, self).call(p, q, labels, axis_name=AXIS, **options)

        # Without jit Pallas's interpreter knows no axis of vmap, in JAX 0.10.2.
        over = jax.jit(jax.vmap(of_shard, in_axes=-2, axis_name=AXIS))
        return jax.tree.map(lambda x: x[0], over(cut(p), cut(q)))  # the same of every shard
