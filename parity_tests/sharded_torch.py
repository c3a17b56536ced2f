"""Runs sharded calls for tests: ``python -m parity_tests.sharded_torch DIRECTORY [CASE ...]``.

Runs in 4 processes. To start them takes longer than most cases, so one group runs them all, and
writes down what failed.
"""

import contextlib
import copy
import datetime
import faulthandler
import functools
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from parity_tests import inputs, logits_oracle, oracle
from parity_tests.logits_budget import logits
from parity_tests.routes import Result, TorchRoute

PROCESSES = 4
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


@functools.cache
def mesh(*shape: int) -> Any:
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("tokens", "vocab")[: len(shape)])


# --- routes: the whole inputs go in, and the whole results come out ------------------------------


class DTensorRoute(TorchRoute):
    """Shards the inputs as DTensors, so that the checks of one device hold for them."""

    def __init__(self, implementation: str, mesh: Any, p_placements: Any, q_placements: Any = None):
        super().__init__(implementation)
        self.mesh = mesh
        self.placements = p_placements, q_placements or p_placements

    def call(self, p: Any, q: Any, labels: Any = None, **options: Any) -> Any:
        p, q = (self.shard(x, y) for x, y in zip((p, q), self.placements, strict=True))
        result = super().call(p, q, labels, **options)
        return result.full_tensor()

    def shard(self, x: Any, placements: Any) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(x, torch.Tensor):
            return x
        if any(y.is_partial() for y in placements):  # as a matrix product leaves it: x is a sum
            half = 0.5 * x
            if half.requires_grad:
                half.register_hook(lambda gradient: 2 * gradient)
            return DTensor.from_local(half, self.mesh, placements)
        whole = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim)
        return whole.redistribute(self.mesh, placements)


class GroupRoute(TorchRoute):
    """Cuts the inputs for process groups at the given tokens and columns."""

    def __init__(self, implementation: str, token_cuts: list[int], vocab_cuts: list[int]):
        super().__init__(implementation)
        t, v = len(token_cuts) - 1, len(vocab_cuts) - 1
        groups = mesh(t, v)
        at = groups.get_coordinate()
        self.rows, self.columns = (
            slice(cuts[i], cuts[i + 1])
            for cuts, i in zip((token_cuts, vocab_cuts), at, strict=True)
        )
        self.copies = v
        self.groups = {
            name: group
            for name, group, count in (
                ("token_group", groups.get_group(0), t),
                ("vocab_group", groups.get_group(1), v),
            )
            if count > 1
        }

    def call(self, p: Any, q: Any, labels: Any = None, **options: Any) -> Any:
        whole = p.shape
        p, q = (x[self.rows, self.columns] for x in (p, q))
        labels = None if labels is None else labels[self.rows]
        if options.get("weights") is not None:
            options["weights"] = options["weights"][self.rows]
        result = super().call(p, q, labels, **self.groups, **options)
        if result.dim() == 0:
            return result
        shape = whole[: result.dim()]
        at = (self.rows, self.columns)[: result.dim()]
        # The local part with its gradient, and beside it what the others hold.
        indices = (torch.arange(n)[s] for n, s in zip(shape, at, strict=True))
        part = result.new_zeros(shape).index_put(torch.meshgrid(*indices, indexing="ij"), result)
        everything = part.detach() / (self.copies if result.dim() == 1 else 1)
        dist.all_reduce(everything)
        others = torch.ones(shape, dtype=torch.bool, device=result.device)
        others[at] = False
        return torch.where(others, everything, part)

    def run(self, *arguments: Any, **options: Any) -> Result:
        result = super().run(*arguments, **options)
        return Result(result.loss, *(self.whole(x) for x in (result.dp, result.dq)))

    def whole(self, gradient: np.ndarray | None) -> np.ndarray | None:
        """Each process has the gradient of its shard, and 0 elsewhere."""
        if gradient is None:
            return None
        outside = np.ones(gradient.shape, bool)
        outside[self.rows, self.columns] = False
        assert not gradient[outside].any()
        parts: list[Any] = [None] * PROCESSES
        dist.all_gather_object(parts, gradient[self.rows, self.columns])
        places: list[Any] = [None] * PROCESSES
        dist.all_gather_object(places, (self.rows, self.columns))
        for place, part in zip(places, parts, strict=True):
            gradient[place] = part
        return gradient


def one_d(implementation: str, placement: Any) -> DTensorRoute:
    return DTensorRoute(implementation, mesh(PROCESSES), [placement])


def two_d(implementation: str, *placements: Any) -> DTensorRoute:
    return DTensorRoute(implementation, mesh(2, 2), *placements)


def dtensor_routes(implementation: str) -> Iterator[DTensorRoute]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    yield one_d(implementation, Shard(0))
    yield one_d(implementation, Shard(1))
    yield one_d(implementation, Replicate())
    yield two_d(implementation, [Shard(0), Shard(1)])
    yield two_d(implementation, [Shard(1), Shard(0)])
    yield two_d(implementation, [Shard(1), Shard(1)])
    yield two_d(implementation, [Shard(0), Shard(0)])
    yield two_d(implementation, [Shard(0), Replicate()], [Replicate(), Shard(1)])
    yield two_d(implementation, [Shard(0), Shard(1)], [Shard(1), Shard(0)])
    yield two_d(implementation, [Partial(), Replicate()], [Replicate(), Shard(1)])


def group_routes(implementation: str, tokens: int, vocab: int) -> Iterator[GroupRoute]:
    """Uneven shards and an empty one of each kind."""
    yield GroupRoute(implementation, [0, 2, 2, 3, tokens], [0, vocab])
    yield GroupRoute(implementation, [0, tokens], [0, 1, 30, 30, vocab])
    yield GroupRoute(implementation, [0, 1, tokens], [0, 40, vocab])


# --- what is checked on them ----------------------------------------------------------------------

TOKENS, VOCAB = 5, 70
# The second and third token have no shard with another: a process without a valid token.
LABELS = np.array([1, -100, -100, 69, 3])
WEIGHTS = np.array([0.5, 1.0, 2.0, 0.0, 1.5], np.float32)
EACH_REDUCTION: list[dict[str, Any]] = [
    {},
    {"reduction": "mean", "weights": WEIGHTS},
    {"reduction": "sum", "upstream": np.float32(-2)},
    {"reduction": "batchmean", "normalizer": 7.0},
    {"reduction": "mean", "normalizer": np.array(3.0, np.float32), "ignore_index": 69},
    {"reduction": "per_token", "weights": WEIGHTS},
]


def check_probabilities(route: TorchRoute) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    for options in EACH_REDUCTION:
        oracle.check(route, p, q, LABELS, **options)
    oracle.check(route, p, q, reduction="none")
    oracle.check(route, p, q, wrt="q")
    oracle.check(route, *inputs.rows(TOKENS, VOCAB, "bfloat16", "float16"))


def check_logits(route: TorchRoute) -> None:
    s, t = logits(TOKENS, VOCAB)
    for options in EACH_REDUCTION:
        if options.get("reduction") == "per_token" and "upstream" not in options:
            options = {**options, "upstream": 1.0}
        logits_oracle.check(route, s, t, LABELS, temperature=1.5, **options)
    logits_oracle.check(route, s, t, wrt="q")


def compare(
    route: TorchRoute, function: str, *arrays: Any, rtol: float = 2e-5, **options: Any
) -> Result:
    """With the call on one device."""
    right = TorchRoute(route.implementation).run(*arrays, function=function, **options)
    result = route.run(*arrays, function=function, **options)
    for name in ("loss", "dp", "dq"):
        np.testing.assert_allclose(
            getattr(result, name).astype(np.float64), getattr(right, name).astype(np.float64),
            rtol=rtol, atol=1e-7, err_msg=name,
        )  # fmt: skip
    return result


def check_relatives(route: TorchRoute) -> None:
    s, t = logits(TOKENS, VOCAB, masked=0.0)
    for function in ("acceptance_loss", "hybrid_loss", "cross_entropy_tvd_loss"):
        compare(route, function, s, t, LABELS, temperature=1.5)
    compare(route, "cross_entropy_tvd_loss", s, t, LABELS, reduction="mean", weights=WEIGHTS)


def check_special(route: TorchRoute) -> None:
    """NaN stays visible, ignored NaN stays out, and with no token kept there is 0, attached."""
    p, q = inputs.rows(TOKENS, VOCAB)
    p[1, 3] = np.nan
    right = compare(route, "tvd_loss", p, q, LABELS)
    assert np.isfinite(right.loss) and not right.dp[1:3].any()
    p[0, 60] = np.nan
    assert np.isnan(compare(route, "tvd_loss", p, q, LABELS).dp[0, 60])
    nothing = np.full(TOKENS, -100)
    for function in ("tvd_loss", "tvd_from_logits"):
        result = compare(route, function, p, q, nothing)
        assert result.loss == 0 and not result.dp.any() and not result.dq.any()
    s, t = logits(TOKENS, VOCAB)
    s[0, 60], t[3, 2], s[1], s[4, :30] = np.nan, np.inf, np.nan, -np.inf
    result = compare(route, "tvd_from_logits", s, t, LABELS, reduction="per_token")
    np.testing.assert_array_equal(np.isnan(result.loss), [True, False, False, True, False])
    assert np.isnan(result.dp[0]).all() and not result.dp[1].any()
    s[0] = -np.inf
    assert np.isnan(compare(route, "tvd_from_logits", s, t, reduction="per_token").loss[0])
    s, t = logits(TOKENS, VOCAB)
    same = route.run(t, t, function="tvd_from_logits")
    assert same.loss == 0 and not same.dp.any() and not same.dq.any(), same


def for_each_dtensor_route(check: Callable[[TorchRoute], None]) -> None:
    for route in dtensor_routes("eager"):
        check(route)


def for_each_group_route(check: Callable[[TorchRoute], None]) -> None:
    for route in group_routes("eager", TOKENS, VOCAB):
        check(route)


@case
def dtensor_probabilities() -> None:
    for_each_dtensor_route(check_probabilities)


@case
def dtensor_logits() -> None:
    for_each_dtensor_route(check_logits)


@case
def dtensor_other_losses() -> None:
    for_each_dtensor_route(check_relatives)


@case
def dtensor_nan_and_nothing_kept() -> None:
    for_each_dtensor_route(check_special)


@case
def dtensor_with_empty_shards() -> None:
    from torch.distributed.tensor import Shard

    for dim, shape in ((1, (3, 5)), (0, (2, 9))):  # 2, 2, 1, 0 columns; 1, 1, 0, 0 tokens
        route = one_d("eager", Shard(dim))
        oracle.check(route, *inputs.rows(*shape), reduction="mean")
        logits_oracle.check(route, *logits(*shape), reduction="mean")


@case
def groups_probabilities() -> None:
    for_each_group_route(check_probabilities)


@case
def groups_logits() -> None:
    for_each_group_route(check_logits)


@case
def groups_other_losses() -> None:
    for_each_group_route(check_relatives)


@case
def groups_nan_and_nothing_kept() -> None:
    for_each_group_route(check_special)


@case
def elements_of_logits() -> None:
    from torch.distributed.tensor import Shard

    options: dict[str, Any] = {"reduction": "none", "temperature": 1.5, "upstream": np.float32(3)}
    for route in (
        GroupRoute("eager", [0, 1, TOKENS], [0, 40, VOCAB]),
        two_d("eager", [Shard(0), Shard(1)]),
    ):
        compare(route, "tvd_from_logits", *logits(TOKENS, VOCAB), LABELS, rtol=1e-4, **options)


# In the interpreter, where a call takes a second.


@case
def triton_probabilities() -> None:
    p, q = inputs.rows(3, VOCAB)
    route = GroupRoute("triton", [0, 1, 3], [0, VOCAB // 2 + 3, VOCAB])
    oracle.check(route, p, q, LABELS[:3], reduction="mean", weights=WEIGHTS[:3])


@case
def triton_logits() -> None:
    from torch.distributed.tensor import Shard

    s, t = logits(2, VOCAB)
    for route in (
        GroupRoute("triton", [0, 2], [0, 1, VOCAB // 3, VOCAB // 3, VOCAB]),
        two_d("triton", [Shard(0), Shard(1)]),
    ):
        logits_oracle.check(route, s, t, LABELS[2:4], temperature=1.5)


@case
def triton_other_losses() -> None:
    s, t = logits(2, VOCAB, masked=0.0)
    route = GroupRoute("triton", [0, 1, 2], [0, VOCAB // 2 + 3, VOCAB])
    for function in ("hybrid_loss", "cross_entropy_tvd_loss"):
        compare(route, function, s, t, LABELS[3:], temperature=1.5)


@case
def triton_nan() -> None:
    """In the shard of one process it is seen by all; beside it a row that another lacks."""
    s, t = logits(4, VOCAB)
    s[0, 60], s[1], s[3, :40], t[2, 3] = np.nan, np.nan, -np.inf, np.inf
    route = GroupRoute("triton", [0, 2, 4], [0, 40, VOCAB])
    options: dict[str, Any] = {"function": "tvd_from_logits", "reduction": "per_token"}
    result = route.run(s, t, np.array([0, -100, 1, 2]), **options)
    np.testing.assert_array_equal(np.isnan(result.loss), [True, False, True, False])
    for gradient in (result.dp, result.dq):
        assert np.isnan(gradient[[0, 2]]).all() and np.isfinite(gradient[[1, 3]]).all()
    assert result.loss[1] == 0 and not result.dp[1].any() and not result.dq[1].any()


@case
def triton_logits_far_above_the_sample() -> None:
    """References of the shards far apart, and a maximum far above the first elements of a row."""
    s, t = logits(1, 4200)
    s[:, 2500] += 300.0
    t[:, 3900] += 200.0
    route = GroupRoute("triton", [0, 1], [0, 2100, 4100, 4150, 4200])
    logits_oracle.check(route, s, t)


# --- beside the loss ------------------------------------------------------------------------------


@case
def stats_are_of_the_local_tokens() -> None:
    from torch.distributed.tensor import Replicate, Shard

    import tvd_torch

    s, t = (torch.from_numpy(x) for x in logits(TOKENS, VOCAB))
    labels = torch.from_numpy(LABELS)
    _, right = tvd_torch.tvd_from_logits(s, t, labels, return_stats=True)
    route = two_d("eager", [Shard(0), Shard(1)])
    sharded = [route.shard(x, route.placements[0]) for x in (s, t)]
    _, stats = tvd_torch.tvd_from_logits(*sharded, labels, return_stats=True)
    for x, whole in zip(stats, right, strict=True):
        assert tuple(x.placements) == (Shard(0), Replicate())
        torch.testing.assert_close(x.full_tensor(), whole)


@case
def placements_of_results_and_gradients() -> None:
    """A gradient lies where its input does, and nothing was gathered on the way."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    import tvd_torch

    for function in (tvd_torch.tvd_loss, tvd_torch.tvd_from_logits):
        placements = (Shard(0), Shard(1))
        p, q = (
            distribute_tensor(torch.from_numpy(x), mesh(2, 2), placements).requires_grad_()
            for x in inputs.rows(TOKENS, VOCAB)
        )
        with CommDebugMode() as communication:
            loss = function(p, q)
            loss.backward()
        assert tuple(loss.placements) == (Replicate(), Replicate())
        assert tuple(p.grad.placements) == tuple(q.grad.placements) == placements
        # Of DTensors: what the loss sends round by itself is another test's business.
        counts = {str(op): count for op, count in communication.get_comm_counts().items()}
        assert not any("c10d_functional" in op and count for op, count in counts.items()), counts


@contextlib.contextmanager
def noting_what_is_sent() -> Iterator[list[int]]:
    sent: list[int] = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_into_tensor")}

    def noting(original: Any) -> Any:
        def collective(*arguments: Any, **options: Any) -> Any:
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            sent.append(tensors[-1].numel())  # the last is what this process gives
            return original(*arguments, **options)

        return collective

    for name, original in originals.items():
        setattr(dist, name, noting(original))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@case
def a_few_numbers_per_token_are_sent() -> None:
    tokens, vocab = 3, 4000
    route = GroupRoute("eager", [0, tokens], [0, 1000, 2000, 3000, vocab])
    p, q = (torch.from_numpy(x).requires_grad_() for x in inputs.rows(tokens, vocab))
    for function, numbers in (("tvd_loss", 1), ("tvd_from_logits", (2 + 2 + 7) * tokens)):
        with noting_what_is_sent() as sent:
            route.call(p, q, function=function).backward()
        assert sum(sent) == numbers, (function, sent)


@case
def second_derivative_of_shards() -> None:
    """Of loss**2: the processes' parts of a scalar of gradients, added up as the loss is."""
    from tvd_torch import sharded, tvd_loss

    p, q = (torch.from_numpy(x) for x in inputs.rows(TOKENS, VOCAB))
    v = torch.from_numpy(inputs.rows(TOKENS, VOCAB, seed=5)[0])
    x = p.clone().requires_grad_()
    (first,) = torch.autograd.grad(tvd_loss(x, q) ** 2, x, create_graph=True)
    (right,) = torch.autograd.grad((first * v).sum(), x)
    route = GroupRoute("eager", [0, 1, TOKENS], [0, 40, VOCAB])
    at = route.rows, route.columns
    x = p[at].clone().requires_grad_()
    loss = tvd_loss(x, q[at], **route.groups)
    (first,) = torch.autograd.grad(loss**2, x, create_graph=True)
    groups = tuple(route.groups.values())
    (second,) = torch.autograd.grad(sharded.sum_over((first * v[at]).sum(), groups), x)
    torch.testing.assert_close(second, right[at], rtol=1e-5, atol=1e-8)


def one_step(loss_of: Callable[[Any, slice], Any], wrap: Callable[[Any], Any]) -> list[Any]:
    """Gradients of a small model after a step in which process 2 has no valid token."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, VOCAB))
    wrapped = wrap(model)
    loss_of(wrapped, slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)).backward()
    gradients = [x.grad for x in wrapped.parameters()]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in gradients]


def check_data_parallel(wrap: Callable[[Any], Any]) -> None:
    """The step of the joined batch, its loss times the processes that their average divides by."""
    import tvd_torch

    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((2 * PROCESSES, 6)).astype(np.float32))
    teacher = torch.from_numpy(logits(2 * PROCESSES, VOCAB)[1])
    labels = torch.arange(2 * PROCESSES)
    labels[[1, 4, 5]] = -100

    def whole(model: Any, _: slice) -> Any:
        return tvd_torch.tvd_from_logits(model(x), teacher, labels)

    def part(model: Any, at: slice) -> Any:
        loss = tvd_torch.tvd_from_logits(
            model(x[at]), teacher[at], labels[at], token_group=dist.group.WORLD
        )
        return PROCESSES * loss

    def alone(model: Any, at: slice) -> Any:
        loss = tvd_torch.tvd_from_logits(model(x[at]), teacher[at], labels[at])
        assert loss.requires_grad and (bool(loss == 0) == (dist.get_rank() == 2))
        return loss

    right = one_step(whole, lambda model: model)
    for actual, expected in zip(one_step(part, wrap), right, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-7)
    assert all(x.isfinite().all() for x in one_step(alone, wrap))


@case
def ddp_step_with_no_valid_token_on_a_process() -> None:
    check_data_parallel(torch.nn.parallel.DistributedDataParallel)


@case
def fsdp_step_with_no_valid_token_on_a_process() -> None:
    from torch.distributed.fsdp import fully_shard

    check_data_parallel(lambda model: fully_shard(model, mesh=mesh(PROCESSES)))


@case
def modules_take_groups() -> None:
    import tvd_torch

    route = GroupRoute("eager", [0, 1, TOKENS], [0, 40, VOCAB])
    p, q = (torch.from_numpy(x) for x in inputs.rows(TOKENS, VOCAB))
    at = route.rows, route.columns
    for module, function in (
        (tvd_torch.TVDLoss, tvd_torch.tvd_loss),
        (tvd_torch.TVDFromLogitsLoss, tvd_torch.tvd_from_logits),
    ):
        loss = module(**route.groups)
        for one in (loss, copy.deepcopy(loss), copy.deepcopy(torch.nn.Sequential(loss))[0]):
            assert one.vocab_group is loss.vocab_group and one.token_group is loss.token_group
            torch.testing.assert_close(one(p[at], q[at]), function(p, q))


@case
def what_shards_have_no_rule_for_is_refused() -> None:
    """torch.func, dual numbers and second derivatives from logits: an error, no wrong number."""
    from torch.autograd import forward_ad

    import tvd_torch

    route = GroupRoute("eager", [0, 1, TOKENS], [0, 40, VOCAB])
    p, q = (torch.from_numpy(x)[route.rows, route.columns] for x in inputs.rows(TOKENS, VOCAB))
    words = "torch.func transforms and forward-mode derivatives take no inputs that are sharded"
    for loss in (tvd_torch.tvd_loss, tvd_torch.tvd_from_logits):

        def of(p: Any, loss: Any = loss) -> Any:
            return loss(p, q, **route.groups)

        def dual(of: Any = of) -> Any:
            with forward_ad.dual_level():
                return of(forward_ad.make_dual(p, torch.ones_like(p)))

        raises(NotImplementedError, words, lambda f=of: torch.func.grad(f)(p))
        raises(NotImplementedError, words, dual)
    labels = torch.zeros(p.shape[0], dtype=torch.int64)
    losses = ("tvd_from_logits", "acceptance_loss", "hybrid_loss", "cross_entropy_tvd_loss")
    for implementation in ("eager", "triton"):
        kind = GroupRoute(implementation, [0, 1, TOKENS], [0, 40, VOCAB])
        with kind.running():
            for name in losses:
                second_derivative_is_refused(getattr(tvd_torch, name), kind, p, q, labels)


def second_derivative_is_refused(loss_of: Any, route: GroupRoute, p: Any, q: Any, labels: Any):
    leaf = p.clone().requires_grad_()
    loss = loss_of(leaf, q, labels, implementation=route.implementation, **route.groups)
    (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
    penalty = loss + 10 * (first**2).sum()
    words = "rows are cut over processes have no second derivative"
    raises(NotImplementedError, words, lambda: penalty.backward(retain_graph=True))
    # On the way to a leaf alone, an error that hangs on nothing would not be met.
    raises(NotImplementedError, words, lambda: torch.autograd.grad(penalty, leaf))


@case
def compiled_without_a_graph_break() -> None:
    from torch.distributed.tensor import Shard

    import tvd_torch

    route = GroupRoute("eager", [0, 1, TOKENS], [0, 40, VOCAB])
    on_mesh = two_d("eager", [Shard(0), Shard(1)])
    p, q = (torch.from_numpy(x) for x in inputs.rows(TOKENS, VOCAB))

    def groups(p: Any, q: Any) -> Any:
        return tvd_torch.tvd_from_logits(p, q, **route.groups)

    for step, make in (
        (groups, lambda x: x[route.rows, route.columns].clone().requires_grad_()),
        (
            tvd_torch.tvd_loss,
            lambda x: on_mesh.shard(x, on_mesh.placements[0]).detach().requires_grad_(),
        ),
    ):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        results = []
        for function in (step, compiled):
            leaves = [make(x) for x in (p, q)]
            loss = function(*leaves)
            results.append([loss, *torch.autograd.grad(loss, leaves)])
        for actual, right in zip(results[1], results[0], strict=True):
            if hasattr(right, "to_local"):
                actual, right = actual.to_local(), right.to_local()
            torch.testing.assert_close(actual, right)


def raises(kind: type[Exception], words: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}: {words}")


@case
def bad_arguments_are_refused() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import tvd_torch

    p, q = (torch.from_numpy(x) for x in inputs.rows(4, 8))
    dp, dq = (distribute_tensor(x, mesh(PROCESSES), [Shard(0)]) for x in (p, q))
    other = distribute_tensor(q, mesh(2, 2), [Shard(0), Shard(1)])
    first_two = DeviceMesh("cpu", [0, 1])
    some = distribute_tensor(p, first_two, [Shard(0)])
    world: Any = dist.group.WORLD
    same = dist.new_group(list(range(PROCESSES)))
    for loss in (tvd_torch.tvd_loss, tvd_torch.tvd_from_logits):
        # Counted each token once for each process: gradients were that much too small.
        raises(
            ValueError,
            "must share no process but the calling one",
            lambda f=loss: f(p, q, vocab_group=world, token_group=same),
        )
        # Only rows that are cut may have an empty part.
        raises(ValueError, "vocab", lambda f=loss: f(p[:, :0], q[:, :0], token_group=world))
        raises(TypeError, "must both be DTensors or both be plain", lambda f=loss: f(dp, q))
        raises(TypeError, "must both be DTensors or both be plain", lambda f=loss: f(p, dq))
        raises(ValueError, "must be on the mesh of", lambda f=loss: f(dp, other))
        for name in ("labels", "weights", "normalizer"):
            x = torch.ones(() if name == "normalizer" else (TOKENS,))
            x = x.to(torch.int64) if name == "labels" else x
            plain, elsewhere = (
                {name: distribute_tensor(x, on, [Replicate()] * on.ndim)}
                for on in (dp.device_mesh, other.device_mesh)
            )
            raises(TypeError, f"{name} is a DTensor, but ", lambda f=loss, o=plain: f(p, q, **o))
            words = f"{name} must be on the mesh of "
            raises(ValueError, words, lambda f=loss, o=elsewhere: f(dp, dq, **o))
        if dist.get_rank() > 1:
            raises(ValueError, "a mesh that this process is not in", lambda f=loss: f(some, some))
        else:
            assert float(loss(some, some).to_local()) == 0
        raises(ValueError, "a DTensor has its mesh", lambda f=loss: f(dp, dq, token_group=world))
        raises(TypeError, "token_group must be None or a", lambda f=loss: f(p, q, token_group=3))
        raises(TypeError, "vocab_group must be None", lambda f=loss: f(p, q, vocab_group="vocab"))
        raises(
            ValueError,
            "must be two groups",
            lambda f=loss: f(p, q, vocab_group=world, token_group=world),
        )
        raises(
            ValueError,
            "labels must have the leading shape",
            lambda f=loss: f(dp, dq, torch.zeros(1, dtype=torch.int64)),
        )


# --- processes ------------------------------------------------------------------------------------


def work(rank: int, directory: str, chosen: list[str]) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # Triton's interpreter computes in NumPy
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=20),
    )
    for name in chosen:
        try:
            CASES[name]()
            words = ""
        except Exception:
            words = f"process {rank}:\n{traceback.format_exc()}"
        pathlib.Path(directory, f"{name}.{rank}").write_text(words)
        dist.barrier()  # where one waits in vain if another failed alone
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    # Forked, so that PyTorch is imported once: 20 of 67 CPU seconds. Nothing has run yet that a
    # fork would break, such as a thread.
    torch.multiprocessing.start_processes(
        work,
        (sys.argv[1], sys.argv[2:] or list(CASES)),
        nprocs=PROCESSES,
        join=True,
        start_method="fork",
    )
