"""Drawing: a picture that shows as SVG in a notebook and as text in a terminal, and that can be saved."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from distdl.drawing.scene import Scene
from distdl.drawing.svg import svg
from distdl.drawing.text import text
from distdl.environment.arguments import check_fields


@dataclass(frozen=True)
class Drawing:
    """A picture.

    ``print`` shows it as text, and a notebook as SVG.

    Attributes:
        scene: the shapes that it consists of.
    """

    scene: Scene

    def __post_init__(self) -> None:
        check_fields(self)

    def save(self, path: str | Path) -> None:
        """Write the picture to a file: SVG or PNG, as the path ends.

        Raises: ValueError for another ending; ImportError for PNG where what draws it is not installed.
        """
        ending = Path(path).suffix.lower()
        if ending == ".svg":
            Path(path).write_text(self._repr_svg_(), encoding="utf-8")
        elif ending == ".png":
            Path(path).write_bytes(self.png())
        else:
            raise ValueError(f"a drawing is saved as .svg or .png, by the ending of its path; got {str(path)!r}")

    def png(self, zoom: float = 2.0) -> bytes:
        """The picture as PNG.

        Args:
            zoom: pixels of the image for one of the SVG.
        Raises: ImportError where what draws it is not installed.
        """
        try:
            resvg = import_module("resvg_py")
        except ImportError:
            raise ImportError(
                'a drawing is saved as PNG by resvg-py, which is not installed: pip install "distdl[draw]". '
                "SVG needs nothing more"
            ) from None
        return bytes(resvg.svg_to_bytes(svg_string=self._repr_svg_(), zoom=zoom))

    def _repr_svg_(self) -> str:
        return svg(self.scene)

    def __str__(self) -> str:
        return text(self.scene)

    def __repr__(self) -> str:
        return f"<distdl.drawing.Drawing: {self.scene.title}>"
