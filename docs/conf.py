"""Sphinx: ``make docs``, or ``sphinx-build -W -b html docs docs/_build`` after ``pip install '.[docs]'``."""

from __future__ import annotations

import html
import importlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

sys.path.insert(0, str(Path(__file__).parent))

import charts
import native_functions
import public_names
from docutils import nodes

import distdl
from distdl.drawing import Drawing

HERE = Path(__file__).parent
(HERE / "details" / "native.md").write_text(native_functions.page())
public_names.write(HERE / "reference")
PICTURES = HERE / "pictures"
PICTURES.mkdir(exist_ok=True)
for page in HERE.rglob("*.md"):
    for command, name in re.findall(r"^distdl draw (.*) -o (\S+)$", page.read_text(), re.M):
        distdl.draw(command).save(PICTURES / name)
(PICTURES / "memory-chart.svg").write_text(charts.memory())
(PICTURES / "speed-chart.svg").write_text(charts.speed())
sys.path.insert(0, str(HERE.parent / "tests" / "programs"))
compiled_nets = importlib.import_module("compiled_nets")
distdl.report(compiled_nets.UNet(), (1, 1, 2, 2), (1, 1, 64, 64), HERE / "_static" / "unet.html")
_LISTED = {public_names.full_name(value) for value in public_names.public_names().values()}

project = "distdl"
version = release = distdl.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "mathml",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "gallery/index.rst"]
# The tutorials run once, and again when they have changed. Their entry is tutorials/index.md.
sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "gallery",
    "capture_repr": ("_repr_html_",),
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 3600,
    "image_srcset": ["2x"],
}
html_theme = "furo"
html_title = f"distdl {version}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_show_copyright = False
html_css_files = ["pages.css"]
html_search_scorer = str(HERE / "_static" / "search.js")
html_favicon = "_static/icon.svg"
html_theme_options = {
    "light_logo": "logo-light.svg",
    "dark_logo": "logo-dark.svg",
    "light_css_variables": {"color-brand-primary": "#1f6f9f", "color-brand-content": "#1f6f9f"},
    "dark_css_variables": {"color-brand-primary": "#7fc6ee", "color-brand-content": "#7fc6ee"},
}
copybutton_prompt_text = "$ "
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_block"]
myst_heading_anchors = 3

autodoc_mock_imports = ["mpi4py"]
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

# docstrings: 'Args:' and 'Attributes:' are lists; one entry may name several things
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

_HEADING = re.compile(r"^(Shapes|Returns|Raises|Source|Forward|Adjoint): +(\S.*)$")
_own_words = {}


def separate_headings(app, what, name, obj, options, lines):
    """Give 'Raises: text' and the like, whose text begins on the line of the heading, a paragraph of their own.

    napoleon knows only headings that stand alone on their line. The text goes on to the next heading or empty line.
    """
    separated, inside = [], False
    for line in lines:
        found = _HEADING.match(line)
        if found:
            separated += ["", f"**{found[1]}:** {found[2]}"]
            inside = True
        elif inside and line.strip() and not re.match(r"^\w+:$", line):
            separated.append(line.strip())
        else:
            separated += ["", line] if inside else [line]
            inside = False
    lines[:] = separated
    _own_words[name] = separated


def keep_own_words(app, what, name, obj, options, lines):
    """Undo what napoleon does to a property, whose text up to a colon it takes for a type."""
    if what == "property":
        lines[:] = _own_words[name]


def show_listed_bases(app, name, obj, options, bases):
    """Show no base that has no entry in the reference: its members stand with those of the class (see the page)."""
    if [*bases] == [*obj.__bases__]:  # (of a generic base, sphinx has the parameters, too)
        bases[:] = public_names.listed_bases(obj, _LISTED)


def link_by_last_name(app, env, node, contnode):
    """Link :class:`Name` to the one object of that name, in whatever module it stands."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    wanted = node["reftarget"].rpartition(".")[2]
    found = [full for full in domain.objects if full.rpartition(".")[2] == wanted and full.startswith("distdl.")]
    if len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], found[0], node, contnode)


def in_page(drawing, title):
    """A drawing of distdl.draw, given as SVG, that follows the page's dark mode and shows tool tips."""
    drawing = re.sub(r"<style>.*?</style>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'aria-label="[^"]*"', f'aria-label="{html.escape(title)}"', drawing, count=1)
    return f'<div class="picture">{drawing}</div>'


def put_pictures_into_pages(app, doctree, page):
    """Put drawings of distdl.draw into the page itself, so that they follow its dark mode and show tool tips."""
    if app.builder.format != "html":
        return
    for image in [*doctree.findall(nodes.image)]:
        path = HERE / image["uri"]
        if path.parent == PICTURES and path.suffix == ".svg":
            drawing = in_page(path.read_text(), image.get("alt", ""))
            image.replace_self(nodes.raw("", drawing, format="html"))


# so that a tutorial shows a drawing, as a notebook does
Drawing._repr_html_ = lambda drawing: in_page(drawing._repr_svg_(), drawing.scene.title)


def setup(app):
    app.connect("autodoc-process-docstring", separate_headings, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", keep_own_words, priority=600)  # after it
    app.connect("autodoc-process-bases", show_listed_bases)
    app.connect("missing-reference", link_by_last_name)
    app.connect("doctree-resolved", put_pictures_into_pages)
