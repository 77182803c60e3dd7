"""Pictures of where tensors lie and of who sends what to whom.

thing  --draw-->  boxes and moves  --tiles, lanes-->  a scene of rectangles and arrows  --svg, text-->  what one sees
"""

from distdl.drawing.drawing import Drawing
from distdl.drawing.things import draw

__all__ = ["Drawing", "draw"]
