"""Two networks that are called one after the other, where one worker takes another order, or leaves something out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from chains import Chain, Found, Network
from hypothesis import strategies as st
from layers import chains
from team import Failed

from distdl.partition import Partition

# what one worker does otherwise: calls the second network first; goes backward through the first one first, where the
# others begin with the second; does not call the first one, or not its backward; or calls it twice
KINDS = ("crosses", "crosses backward", "skips", "skips backward", "repeats")
_ORDERS = {
    "crosses": ("y1", "y0", "dx1", "dx0"),
    "crosses backward": ("y0", "y1", "dx0", "dx1"),
    "skips": ("y1", "dx1"),
    "skips backward": ("y0", "y1", "dx1"),
    "repeats": ("y0", "y0", "y1", "dx1", "dx0"),
}
_USUAL = ("y0", "y1", "dx1", "dx0")


@dataclass(frozen=True)
class Disorder:
    """Two chains, of each of which the first call is made.

    Attributes:
        worker: the one that does otherwise.
        kind: one of KINDS.
    """

    chains: tuple[Chain, Chain]
    worker: int
    kind: str

    def distributed(self, world: Partition) -> Any:
        """For each network what this worker finds, None if it has not called it; or the failure."""
        try:
            networks = [Network(chain, world) for chain in self.chains]
        except Exception as error:
            return Failed(type(error).__name__, str(error))
        given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        try:
            for what in _ORDERS[self.kind] if world.rank == self.worker else _USUAL:
                number = int(what[-1])
                if what.startswith("y"):
                    given[number] = networks[number].forward(self.chains[number].calls[0])
                else:
                    networks[number].backward(given[number][1])
        except Exception as error:
            return Failed(type(error).__name__, str(error))
        found: list[Found | None] = [
            network.found(*given[number]) if number in given else None for number, network in enumerate(networks)
        ]
        return found


@st.composite
def disorders(draw: st.DrawFn) -> Disorder:
    pair = (draw(chains()), draw(chains()))
    members = sorted({worker for chain in pair for layer in chain.layers for worker in layer.members})
    return Disorder(pair, draw(st.sampled_from(members)), draw(st.sampled_from(KINDS)))
