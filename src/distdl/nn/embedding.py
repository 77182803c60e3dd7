"""The distributed embedding."""

from __future__ import annotations

from typing import Any

import torch

from distdl.agreement import Headers
from distdl.nn.layer import Application, Layer
from distdl.nn.module import Option
from distdl.nn.parametrised import check_unfit, trained, unfit
from distdl.nn.placement import keep_sequential_keys, normal_parameter
from distdl.ops import Op
from distdl.ops.embedding import Embedding
from distdl.partition import Layout, Partition, dims
from distdl.partition.arguments import checks_arguments
from distdl.tensors.memory import kind_without_memory


class DistributedEmbedding(Layer):
    r"""Look up rows of a table that is split over workers, by rows, by columns, or both.

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

    P_x = Option[Partition]()
    P_y = Option[Partition]()
    P_w = Option[Partition]()
    num_embeddings = Option[int]()
    embedding_dim = Option[int]()
    padding_idx = Option[int | None]()
    max_norm = Option[None]()
    norm_type = Option[float]()
    scale_grad_by_freq = Option[bool]()
    sparse = Option[bool]()

    @checks_arguments
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
        rows, row = int(num_embeddings), _row(padding_idx, int(num_embeddings))
        table = Layout.balanced(
            work[(slice(0, 1),) * P_x.workers.ndim].reshape(*work.workers.shape[-2:]), (rows, int(embedding_dim))
        )
        name = f"DistributedEmbedding (P_x: {P_x}; P_y: {P_y}; {num_embeddings} rows, {embedding_dim} columns)"
        everyone = P_x | P_y | work
        application = Application(Embedding(P_y, row), (P_x, table), work, self._configure)
        super().__init__(name, everyone, application, (rows, int(embedding_dim)))
        self.P_x, self.P_y, self.P_w = P_x, P_y, P_w
        self.num_embeddings, self.embedding_dim, self.padding_idx = rows, int(embedding_dim), row
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, norm_type, False, False
        self._table, self._everyone = table, everyone
        self.weight = normal_parameter(table)
        if row is not None and work.comm.rank in table.partition:
            start, stop = table[work.comm.rank][0]
            if start <= row < stop:
                self.weight.data[row - start] = 0
        keep_sequential_keys(self)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Where the blocks of the weight live, and which part of the sequential layer's weight they are."""
        return trained(self, {"weight": self._table})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight  # read once: a parametrisation computes it each time
        setup = self.agree(x, weight, extra=(*self._wrong_index(x), unfit(self, "weight", self._table)))
        moved = setup.move_in(x, weight)
        y: torch.Tensor = setup.move_out(setup.local(*moved))
        return y

    def _configure(self, op: Any, headers: Headers) -> Op:
        # checked here and not in the operation, as only headers tell which indices a worker has
        for worker, (wrong, index, _) in zip(
            self.P_x.workers.flat, headers.extras(self.P_x).reshape(-1, 3), strict=True
        ):
            if wrong:
                raise ValueError(
                    f"{self.label} needs indices from 0 to {self.num_embeddings - 1}; worker {worker} has {index}"
                )
        check_unfit(str(self.label), "weight", int(headers.extras(self._everyone)[..., 2].max()), self._table)
        configured: Op = op
        return configured

    def _wrong_index(self, x: Any) -> tuple[int, int]:
        """Whether there is an index that is no row, and the first one that was found."""
        integers = isinstance(x, torch.Tensor) and x.dtype in (torch.int32, torch.int64)
        if integers and x.numel() and not kind_without_memory(x):
            for index in torch.stack(torch.aminmax(x)).tolist():
                if not 0 <= index < self.num_embeddings:
                    return 1, index
        return 0, 0

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
