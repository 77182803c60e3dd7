"""The distributed embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from distdl.agreement import Agreement
from distdl.agreement.header import Carried, Headers
from distdl.exchange.route import Route, move
from distdl.geometry.boxes import Interval, Shape, shape
from distdl.nn.fixed import Fixed, takes_partitions
from distdl.nn.module import Module, blank_shape, local, zeros_on
from distdl.nn.parametrised import check_unfit, trained, unfit
from distdl.nn.placement import keep_sequential_keys, normal_parameter
from distdl.partition import Partition
from distdl.partition.groups import dims
from distdl.partition.layout import Layout
from distdl.plan import Plan
from distdl.plan.planners import broadcast
from distdl.tensors.connection import outside
from distdl.tensors.memory import kind_without_memory
from distdl.transport.label import Label


@dataclass(frozen=True)
class Movements:
    """What follows from the headers: routes (None where nothing has to move), dtypes, and the shape of the local y.

    Attributes:
        spread: indices along rows and columns.
        weights: the weight along the axes of the indices.
        add: y along rows, to P_y.
        dtypes: of indices and weight.
        result: shape of what this worker looks up; None on workers outside P_w.
    """

    spread: Route | None
    weights: Route | None
    add: Route | None
    dtypes: tuple[torch.dtype, torch.dtype]
    result: Shape | None


class DistributedEmbedding(Module):
    r"""Look up rows of a table that is cut up over workers, by rows, by columns, or both.

    Forward: :math:`y_{n,:} = W_{x_n,:}`. The indices are copied to the workers of ``P_w``; each looks up those that are
    rows of its block, and has zeros for the others; the results add up along the rows. In every sum all terms but one
    are 0, so y is exact.
    Adjoint: the gradient of y is copied along the rows, and each worker adds it to the rows that it looked up; along
    split axes of the indices, the gradients of copies of W add up where W is stored. Indices have no gradient.

    Args:
        P_x: partition of the indices, one axis for each of their dims.
        P_y: partition of the output: the axes of P_x, then columns.
        P_w: partition of the work: the axes of P_x, then ``rows x columns``; or ``rows x columns`` alone, if P_x splits
            nothing. Its workers at place 0 along the axes of P_x store W.
        num_embeddings, embedding_dim: global numbers of rows and columns.
        padding_idx: a row that begins as zeros and gets no gradient.
        max_norm, norm_type, scale_grad_by_freq, sparse: torch's defaults.
    Shapes: x local, in elements, any split that is a grid, in int32 or int64. y has the split of x and one dim more,
        split as evenly as possible, longer blocks first; ``(batch, 0)`` on workers outside P_y.
    Attributes:
        weight: this worker's block, split as evenly as possible; of zero volume where it stores none.
    Raises: ValueError, on every worker, if options or partitions do not fit; in forward, on every member, if the input
        does not: its rank, its dtype, or an index that is no row.
    """

    P_x, P_y, P_w, num_embeddings, embedding_dim, padding_idx = Fixed(), Fixed(), Fixed(), Fixed(), Fixed(), Fixed()
    max_norm, norm_type, scale_grad_by_freq, sparse = Fixed(), Fixed(), Fixed(), Fixed()

    @takes_partitions
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        P_w: Partition,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> None:
        work = _work(P_x, P_y, P_w)
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise ValueError(
                "DistributedEmbedding needs max_norm=None, scale_grad_by_freq=False and sparse=False; "
                f"got {max_norm}, {scale_grad_by_freq} and {sparse}"
            )
        super().__init__()
        self.P_x, self.P_y, self.P_w, self._work = P_x, P_y, P_w, work
        self.num_embeddings, self.embedding_dim = int(num_embeddings), int(embedding_dim)
        self.padding_idx = _row(padding_idx, self.num_embeddings)
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, norm_type, False, False
        self._everyone = P_x | P_y | work
        self.label = Label(
            f"DistributedEmbedding (P_x: {P_x}; P_y: {P_y}; {num_embeddings} rows, {embedding_dim} columns)"
        )
        options = (self.num_embeddings, self.embedding_dim, self.padding_idx, work.workers.shape)
        self._agreement = Agreement.among(self._everyone, self.label, options, self._derive)
        self._stored = work[(slice(0, 1),) * P_x.workers.ndim]
        table = self._stored.reshape(work.workers.shape[-2:])
        self._weights = Layout.balanced(table, (self.num_embeddings, self.embedding_dim))
        self.weight = normal_parameter(self._weights)
        self._clear_padding()
        keep_sequential_keys(self)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Where the blocks of the weight live, and which part of the sequential layer's weight they are."""
        return trained(self, {"weight": self._weights})

    def _clear_padding(self) -> None:
        me = self._work.comm.rank
        if self.padding_idx is not None and me in self._weights.partition:
            start, stop = self._weights[me][0]
            if start <= self.padding_idx < stop:
                self.weight.data[self.padding_idx - start] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._work.comm.rank not in self._everyone:
            return outside(x, self.weight)
        weight: torch.Tensor = self.weight  # read once: a parametrisation computes it each time
        asked = (*self._wrong_index(x), unfit(self, "weight", self._weights))
        decision = self._agreement.reach((x, weight), asked)
        go, carried = decision.outcome, decision.carried[1]
        blank = blank_shape(x, preserve_batch=True)
        indices = x if x.numel() else x.detach().to(weight.device, go.dtypes[0])
        if go.spread is not None:
            indices = move(go.spread, indices, go.dtypes[0], (0,), Carried(False))
        if go.weights is not None:
            weight = move(go.weights, weight, go.dtypes[1], (0,), carried)
        if carried.gradient and not weight.requires_grad:
            weight = weight.detach().requires_grad_()  # a checkpoint computes again on all members, or on none
        result = blank if go.result is None else go.result
        y = local(self._look_up, result, (indices, (1,) * self.P_x.workers.ndim), (weight, (1, 1)))
        if x.requires_grad:  # of zero volume, as indices have no gradient
            y = y + zeros_on(x, ()).to(y.dtype)
        return y if go.add is None else move(go.add, y, go.dtypes[1], blank, carried)

    def _look_up(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        start, stop = self._rows
        padding = -1 if self.padding_idx is None else self.padding_idx - start
        own = padding if 0 <= padding < weight.shape[0] else None
        if stop - start == self.num_embeddings:
            return functional.embedding(x, weight, own)
        elsewhere = (x < start) | (x >= stop)
        y = functional.embedding((x - start).masked_fill(elsewhere, 0), weight, own)
        return y.masked_fill(elsewhere.unsqueeze(-1), 0)

    @property
    def _rows(self) -> Interval:
        """The rows that this worker looks up."""
        me = self._work.comm.rank
        return self._weights.intervals[0][self._work.index_of(me)[-2]] if me in self._work else (0, 0)

    def _wrong_index(self, x: Any) -> tuple[int, int]:
        """Whether there is an index that is no row, and the first one that was found."""
        integers = isinstance(x, torch.Tensor) and x.dtype in (torch.int32, torch.int64)
        if integers and x.numel() and not kind_without_memory(x):
            for index in torch.stack(torch.aminmax(x)).tolist():
                if not 0 <= index < self.num_embeddings:
                    return 1, index
        return 0, 0

    def _derive(self, headers: Headers) -> Movements:
        name, P_x, work, me = type(self).__name__, self.P_x, self._work, self._work.comm.rank
        owned = Layout.tiled(P_x, headers.shapes(P_x, name, P_x.workers.ndim))
        columns = self._weights.intervals[1]
        computed = Layout.of(self.P_y, [*owned.intervals, columns])
        dtype = torch.int64 if 0 in owned.extents else headers.dtype(P_x, name)
        if dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{self.label} needs indices in int32 or int64; got {dtype}")
        for worker, (wrong, index) in zip(P_x.workers.flat, headers.extras(P_x).reshape(-1, 3)[:, :2], strict=True):
            if wrong:
                raise ValueError(
                    f"{self.label} needs indices from 0 to {self.num_embeddings - 1}; worker {worker} has {index}"
                )
        check_unfit(str(self.label), "weight", headers.extras(self._everyone)[..., 2].max().item(), self._weights)
        headers.check_blocks(self._weights, f"{self.label}: weight", tensor=1)
        p_x = P_x.workers.shape
        P_along_both, P_along_rows = P_x.reshape(*p_x, 1, 1), self.P_y.reshape(*p_x, 1, len(columns))
        plans: dict[str, Plan | None] = {
            "spread": None if P_along_both == work else broadcast(P_along_both, work, owned.shapes, me),
            "weights": None if self._stored == work else broadcast(self._stored, work, self._weights.shapes, me),
            "add": None if P_along_rows == work else broadcast(P_along_rows, work, computed.shapes, me).T,
        }
        result = None
        if me in work:
            *places, _, column = work.index_of(me)
            result = shape(computed.at((*places, column)))
        return Movements(
            **{way: self._route(headers, plan) for way, plan in plans.items()},
            dtypes=(dtype, headers.dtype(self._stored, name, tensor=1)),
            result=result,
        )

    def _route(self, headers: Headers, plan: Plan | None) -> Route | None:
        return None if plan is None else Route(plan, self._work.comm, headers.members, self.label)

    def extra_repr(self) -> str:
        options = f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"
        return f"{options}, P_x: {self.P_x}; P_y: {self.P_y}; P_w: {self.P_w}"


def _work(P_x: Partition, P_y: Partition, P_w: Partition) -> Partition:
    p_x, p_y, p_w = (P.workers.shape for P in (P_x, P_y, P_w))
    work = (*p_x, *p_w) if len(p_w) == 2 and set(p_x) == {1} else p_w
    if work[:-2] != p_x or p_y != (*p_x, work[-1]):
        raise ValueError(
            "DistributedEmbedding needs P_x: the axes of the indices, P_y: these x columns and P_w: these x rows x "
            f"columns; got P_x: {dims(p_x)}, P_y: {dims(p_y)}, P_w: {dims(p_w)}"
        )
    reshaped: Partition = P_w.reshape(*work)
    return reshaped


def _row(padding_idx: int | None, rows: int) -> int | None:
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"DistributedEmbedding needs a padding_idx that is one of {rows} rows; got {padding_idx}")
    return None if padding_idx is None else int(padding_idx) % rows
