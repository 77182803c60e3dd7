"""How many operators and messages a step has, and how many bytes these are."""

from __future__ import annotations

from typing import NamedTuple

from distdl.programs.calls import Step


class Counts(NamedTuple):
    """Of one worker.

    Attributes:
        operators: of torch.
        functions: of ours that are called as they are.
        exchanges: that begin.
        messages: that this worker sends; to a collective of the transport, one for each other member.
        nbytes: of these.
    """

    operators: int
    functions: int
    exchanges: int
    messages: int
    nbytes: int

    @classmethod
    def of(cls, step: Step) -> Counts:
        kinds = [call.kind for call in step.calls]
        sends = [nbytes for call in step.calls for _, nbytes in call.sends]
        return cls(
            kinds.count("operator"), kinds.count("function"), kinds.count("begin"), len(sends), sum(sends)
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.operators} operators, {self.functions} functions of distdl, {self.exchanges} exchanges with "
            f"{self.messages} messages of {self.nbytes} bytes"
        )
