"""Losses of inputs that are sharded over processes: plain local shards, or DTensors.

What crosses between processes is one number for a reduced loss and a few for each token whose row
is cut; never rows. Every process of a group then holds the loss that a single device would give,
and its backward gives the gradient of its own shard of the inputs.
"""

import copy
import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tvd_core.contract import (
    NORMALIZED_REDUCTIONS,
    group_message,
    logit_scale,
    no_second_derivative_of_shards_message,
    no_sharded_transform_message,
)
from tvd_torch import eager, logits_eager
from tvd_torch.logits_eager import Rows

Groups = tuple[Any, ...]


class Shards(NamedTuple):
    """The processes that hold the other shards of a call's inputs."""

    vocab: Groups
    """Groups over which rows are cut; of several the first cuts first. The shards of a group follow
    one another in the order of its ranks."""
    tokens: Groups
    """Groups over which the tokens are spread."""
    vocab_size: int | None = None
    """Columns of a whole row, if they are known."""
    layout: "Layout | None" = None
    """How results become DTensors, if that is what the inputs were."""


class Layout(NamedTuple):
    """The mesh of DTensors, and their placements: shards of whole dimensions, or replicas."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size

    def wrapped(self, x: Tensor) -> Tensor:
        """A result of the shape of the inputs, of their leading shape, or 0-d, as a DTensor."""
        from torch.distributed.tensor import DTensor

        shape = self.shape[: x.dim()]
        result: Tensor = DTensor.from_local(
            x,
            self.mesh,
            _placements(self.placements, x.dim()),
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        return result


def is_sharded(p: Any, q: Any, vocab_group: Any, token_group: Any) -> bool:
    """Whether this is a call for this module. Dynamo traces through it."""
    if vocab_group is not None or token_group is not None:
        return True
    return _is_dtensor(p) or _is_dtensor(q)


def check_meshes(
    p: Any, q: Any, names: tuple[str, str], **constants: Any
) -> None:  # before anything of a call is looked at
    """Raises for constants that are DTensors beside plain inputs, or on another mesh."""
    mesh = next((x.device_mesh for x in (p, q) if _is_dtensor(x)), None)
    for name, x in constants.items():
        if x is None or not _is_dtensor(x):
            continue
        if mesh is None:
            raise TypeError(f"{name} is a DTensor, but {names[0]} and {names[1]} are plain tensors")
        if x.device_mesh != mesh:
            raise ValueError(_mesh_message(name, names[0], mesh, x.device_mesh))


def _is_dtensor(x: Any) -> bool:
    # A parameter is no plain Tensor either. Importing DTensor to ask would take a second. Dynamo
    # cannot ask a number that it traces, of a normalizer, for attributes.
    return type(x) is not Tensor and isinstance(x, Tensor) and hasattr(x, "device_mesh")


def _mesh_message(name: str, other: str, expected: Any, actual: Any) -> str:
    return f"{name} must be on the mesh of {other} ({expected}), got {actual}"


def check_groups(vocab_group: Any, token_group: Any) -> None:
    """Raises unless both are ``None`` or process groups that share this process only."""
    for name, group in (("vocab_group", vocab_group), ("token_group", token_group)):
        if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            continue
        raise TypeError(group_message(name, "torch.distributed.ProcessGroup", group))
    if vocab_group is None or token_group is None:
        return
    if vocab_group is token_group:
        raise ValueError("vocab_group and token_group must be two groups, got one for both")
    # Two groups of the same processes would count each token once for each of them.
    ranks = [set(dist.get_process_group_ranks(group)) for group in (vocab_group, token_group)]
    common = sorted(ranks[0] & ranks[1])
    if len(common) > 1:
        raise ValueError(
            "vocab_group and token_group must share no process but the calling one, got both with "
            f"ranks {common}"
        )


def deep_copy(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """A copy of a module with the same process groups, which cannot be copied."""
    copied = type(module).__new__(type(module))
    memo[id(module)] = copied
    for group in (module.vocab_group, module.token_group):
        memo[id(group)] = group
    copied.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return copied


def of(p: Tensor, q: Tensor, names: tuple[str, str], vocab_group: Any, token_group: Any) -> Shards:
    """The shards of a call, whose arguments are checked here."""
    check_groups(vocab_group, token_group)
    if not torch.compiler.is_compiling() and eager.transformed():
        raise NotImplementedError(no_sharded_transform_message("torch.autograd"))
    if any(hasattr(x, "device_mesh") for x in (p, q)):
        return _of_dtensors(p, q, names, vocab_group, token_group)
    vocab, tokens = (() if group is None else (group,) for group in (vocab_group, token_group))
    return Shards(vocab, tokens)


def _of_dtensors(
    p: Any, q: Any, names: tuple[str, str], vocab_group: Any, token_group: Any
) -> Shards:
    """The shards of a call on DTensors, which both inputs have to be."""
    from torch.distributed.tensor import DTensor

    for name, x in zip(names, (p, q), strict=True):
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{names[0]} and {names[1]} must both be DTensors or both be plain tensors, got "
                f"{name} as a {type(x).__name__}"
            )
    if vocab_group is not None or token_group is not None:
        raise ValueError("vocab_group and token_group are for plain shards: a DTensor has its mesh")
    if p.device_mesh != q.device_mesh:
        raise ValueError(_mesh_message(names[1], names[0], p.device_mesh, q.device_mesh))
    if p.device_mesh.get_coordinate() is None:
        raise ValueError(
            f"{names[0]} is on a mesh that this process is not in ({p.device_mesh}): call the loss "
            "on the processes of the mesh only"
        )
    pairs = zip(p.placements, q.placements, strict=True)
    placements = tuple(_common(a, b) for a, b in pairs)
    last = p.dim() - 1
    vocab: list[Any] = []
    tokens: list[Any] = []
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            groups = vocab if placement.dim % p.dim() == last else tokens
            groups.append(p.device_mesh.get_group(dimension))
    layout = Layout(p.device_mesh, placements, p.shape)
    return Shards(tuple(vocab), tuple(tokens), p.shape[-1], layout)


def _common(a: Any, b: Any) -> Any:
    """Where two tensors can meet: on a shard of either, else replicated."""
    from torch.distributed.tensor import Replicate, Shard

    # By type: a strided shard, which composes with another, is a kind of its own.
    return next((x for x in (a, b) if type(x) is Shard), Replicate())


def _placements(placements: tuple[Any, ...], dims: int) -> tuple[Any, ...]:
    """Those of a tensor that has only the first dimensions."""
    from torch.distributed.tensor import Replicate

    return tuple(x if x.is_shard() and x.dim < dims else Replicate() for x in placements)


def local(x: Any, layout: Layout | None) -> Any:
    """The local shard of an argument; a plain tensor beside DTensors is the same everywhere."""
    if layout is None or not isinstance(x, Tensor):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, layout.mesh, [Replicate()] * layout.mesh.ndim, run_check=False)
    return x.redistribute(layout.mesh, _placements(layout.placements, x.dim())).to_local()


def wrapped(x: Tensor, shards: Shards) -> Tensor:
    """A result as what the inputs were."""
    return x if shards.layout is None else shards.layout.wrapped(x)


# --- sums over processes -------------------------------------------------------------------------


def all_reduced(x: Tensor, groups: Groups, op: str = "sum") -> Tensor:
    """The sum or maximum over the processes of all groups, without a gradient."""
    x = x.clone(memory_format=torch.contiguous_format)
    for group in groups:
        dist.all_reduce(x, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group=group)
    return x


def _gathered(x: Tensor, group: Any) -> Tensor:
    """``x`` of each process, in the order of the ranks, along a new first dimension."""
    count = dist.get_world_size(group)
    everywhere = x.new_empty((count * x.numel(),))
    dist.all_gather_into_tensor(everywhere, x.reshape(-1).contiguous(), group=group)
    return everywhere.reshape(count, *x.shape)


def sum_in_order(x: Tensor, groups: Groups) -> Tensor:
    """The sum over processes in the order of their ranks, without a gradient.

    An all-reduce adds each number in an order that hangs on its place, so that the softmaxes of
    equal rows would differ.
    """
    for group in groups:
        x = functools.reduce(torch.add, _gathered(x, group).unbind())
    return x


class _Sum(torch.autograd.Function):
    """The sum over processes, all of which hold it then.

    They hold one loss, not one each, so the gradient of a shard is that of the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return all_reduced(x, groups)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _Copy.apply(upstream, ctx.groups), None


class _OrderedSum(_Sum):
    """The same, in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return sum_in_order(x, groups)


class _Copy(torch.autograd.Function):
    """What all processes hold and each uses for its shard: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(upstream, ctx.groups), None


def sum_over(x: Tensor, groups: Groups) -> Tensor:
    """The sum over the processes of the groups, differentiable; ``x`` if there are none."""
    return _Sum.apply(x, groups) if groups else x


def vocab_size(local_size: int, shards: Shards, device: torch.device) -> Tensor | int:
    """Columns of a whole row: a number, or a 0-d tensor where only the processes together know."""
    if shards.vocab_size is not None:
        return shards.vocab_size
    if not shards.vocab:
        return local_size
    # Filled on the device: a copy from the host would wait for it, and fail in a CUDA graph.
    return all_reduced(torch.full((), local_size, dtype=torch.int64, device=device), shards.vocab)


def vocab_start(local_size: int, shards: Shards, device: torch.device) -> Tensor:
    """Where in the row the local shard starts, int64."""
    size = torch.full((1,), local_size, dtype=torch.int64, device=device)
    start = torch.zeros_like(size)
    for group in reversed(shards.vocab):
        sizes = _gathered(size, group)
        start = start + sizes[: dist.get_rank(group)].sum(0)
        size = sizes.sum(0)
    return start


def reduced(
    total: Tensor,
    row_weights: Tensor | None,
    tokens: int,
    normalizer: Tensor | float | None,
    reduction: str,
    vocab: int,
    shards: Shards,
) -> Tensor:
    """The loss from the sum over the local tokens, their number and weights; ``vocab`` is local."""
    if reduction not in NORMALIZED_REDUCTIONS:
        return sum_over(total, shards.tokens)
    if normalizer is None:
        kept = torch.full_like(total, tokens) if row_weights is None else row_weights.sum()
        total, divisor = sum_over(torch.stack([total, kept]), shards.tokens).unbind()
        divisor = divisor.detach()
    else:
        total = sum_over(total, shards.tokens)
        divisor = (
            normalizer.to(total)
            if isinstance(normalizer, Tensor)
            else torch.full_like(total, float(normalizer))
        )
    if reduction == "mean":
        divisor = divisor * vocab_size(vocab, shards, total.device)
    return eager.divided(total, divisor)


def no_columns(p: Tensor, q: Tensor, reduction: str) -> Tensor:
    """What the empty shards of rows come to, attached to both."""
    dtype = eager.accumulation_dtype(p, q)
    empty = p.to(dtype) - q.to(dtype)
    if reduction == "none":
        return empty
    return empty.sum() if reduction == "sum" else empty.sum(-1)


# --- rows of logits that are cut ------------------------------------------------------------------


def rows(
    student: Tensor,
    teacher: Tensor,
    row_weights: Tensor | None,
    temperature: float,
    shards: Shards,
    use_kernels: bool,
    *,
    want_kl: bool = False,
    targets: Tensor | None = None,
) -> Rows:
    """See :func:`tvd_torch.logits_eager.rows`: of shards of the rows.

    ``targets`` are positions in the whole row. Three times a few numbers a token go round: the
    maxima, the sums of exponentials, and what the values and their gradients are made of.
    """
    keep = torch.is_grad_enabled() and (student.requires_grad or teacher.requires_grad)
    if keep:
        student, teacher = eager.saveable(student), eager.saveable(teacher)
    if targets is not None:
        targets = _local_targets(targets, student.shape[1], shards)
    if use_kernels:
        from tvd_torch import logits_rows

        values = logits_rows.ShardedRows.apply(
            student, teacher, row_weights, targets, temperature, want_kl, keep, shards.vocab
        )
    else:
        kept = None if row_weights is None else row_weights != 0
        values = _Rows.apply(student, teacher, kept, targets, temperature, want_kl, shards.vocab)
    return Rows(*values)


def elementwise(
    student: Tensor,
    teacher: Tensor,
    row_weights: Tensor | None,
    temperature: float,
    groups: Groups,
) -> Tensor:
    """See :func:`tvd_torch.logits_eager.elementwise`: of shards of the rows."""
    kept = None if row_weights is None else row_weights != 0

    def probabilities(x: Tensor) -> Tensor:
        top = all_reduced(_highest(x.detach()), groups, "max")[:, None]
        total = logits_eager.exponentials(x, logit_scale(temperature), top)[0].sum(-1, keepdim=True)
        total = _Copy.apply(_OrderedSum.apply(total, groups), groups)
        return logits_eager.softmax(x, temperature, top, total)[0]

    p, q = (probabilities(x) for x in logits_eager.kept_rows(student, teacher, kept))
    values = 0.5 * eager.masked_difference(p, q, kept)
    return values if row_weights is None else values * row_weights[:, None]


def _local_targets(targets: Tensor, local_size: int, shards: Shards) -> Tensor:
    """Positions in the local shard, -1 for those in another."""
    targets = targets - vocab_start(local_size, shards, targets.device)
    return torch.where((targets >= 0) & (targets < local_size), targets, -1)


class _Rows(torch.autograd.Function):
    """As the one of ``logits_eager``, of rows that are cut. Keeps the shards as they came."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        kept: Tensor | None,
        targets: Tensor | None,
        temperature: float,
        want_kl: bool,
        groups: Groups,
    ) -> tuple[Tensor | None, ...]:
        logits = logits_eager.kept_rows(student, teacher, kept)
        top = torch.stack([_highest(x) for x in logits])
        top = all_reduced(top, groups, "max")[..., None]
        total = torch.stack(
            [
                logits_eager.exponentials(x, logit_scale(temperature), m)[0].sum(-1)
                for x, m in zip(logits, top, strict=True)
            ]
        )
        total = sum_in_order(total, groups)[..., None]
        (p, log_p, student_lse), (q, log_q, teacher_lse) = (
            logits_eager.softmax(x, temperature, *sums)
            for x, *sums in zip(logits, top, total, strict=True)
        )
        signs = eager.sign(p - q)
        sums = [0.5 * (p - q).abs().sum(-1)]
        sums += logits_eager.sums_by_sign(p, signs) + logits_eager.sums_by_sign(q, -signs)
        if want_kl:
            sums.append(logits_eager.divergence(q, log_q, log_p)[0].sum(-1))
        if targets is not None:
            sums.append(_at_targets(logits[0], targets, temperature))
        summed = list(all_reduced(torch.stack(sums), groups))
        tvd, by_sign = summed[0], torch.stack(summed[1:7])
        kl = summed[7] if want_kl else None
        ctx.save_for_backward(student, teacher, kept, targets, top, total, by_sign, kl)
        ctx.temperature, ctx.want_kl = temperature, want_kl
        values = tvd, student_lse, teacher_lse, kl, None if targets is None else summed[-1]
        if kept is None:
            return values
        return tuple(None if x is None else torch.where(kept, x, 0.0) for x in values)

    @staticmethod
    def backward(ctx: Any, *upstreams: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = _Rows._gradients(ctx, *upstreams)
        sources = (*ctx.saved_tensors[:2], *upstreams)
        return without_second_derivative(found, sources, no_second_derivative_of_shards_message())

    @staticmethod
    def _gradients(ctx: Any, *upstreams: Any) -> tuple[Tensor | None, ...]:
        student, teacher, kept, targets, top, total, by_sign, kl = ctx.saved_tensors
        tvd, student_lse, teacher_lse, kl_upstream, target = upstreams
        if targets is not None:
            target = torch.where(targets >= 0, target, 0.0)
            targets = targets.clamp(min=0) if student.shape[1] else None
        gradients = logits_eager.gradients(
            (student, teacher),
            kept,
            targets,
            ctx.temperature,
            (tvd, student_lse, teacher_lse, kl_upstream if ctx.want_kl else None, target),
            ctx.needs_input_grad[:2],
            logits_eager.RowSums(top, total, by_sign[..., None], kl),
        )
        return *gradients, None, None, None, None, None


class _NoSecondDerivative(torch.autograd.Function):
    """A gradient whose own derivative is an error.

    ``torch.autograd.function.once_differentiable`` lets ``torch.autograd.grad`` leave it out: no
    path leads from its error to the tensors that the gradient was made of.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, message: str, *_: Any) -> Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(ctx.message)


def without_second_derivative(
    gradients: tuple[Tensor | None, ...], sources: tuple[Any, ...], message: str
) -> tuple[Tensor | None, ...]:
    """The gradients, which were made of ``sources``; an error where one is differentiated."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradients
    apply: Any = _NoSecondDerivative.apply
    return tuple(apply(x, message, *sources) if isinstance(x, Tensor) else x for x in gradients)


def _highest(x: Tensor) -> Tensor:
    """The highest logit of each row; -inf where there is none, or it is NaN.

    How a maximum over processes takes a NaN is not defined. The sum of the exponentials shows it.
    """
    if not x.shape[1]:
        return x.new_full((x.shape[0],), -torch.inf)
    top = x.amax(-1)
    return torch.where(top.isnan(), -torch.inf, top)


def _at_targets(x: Tensor, targets: Tensor, temperature: float) -> Tensor:
    if not x.shape[1]:
        return x.new_zeros(x.shape[0])
    found = x.gather(-1, targets.clamp(min=0)[:, None])[:, 0] * logit_scale(temperature)
    return torch.where(targets >= 0, found, 0.0)
