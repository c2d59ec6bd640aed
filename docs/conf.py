"""The configuration of the documentation's site: `make docs` builds it into docs/_build/html."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from docutils import nodes
from flax import nnx
from latex2mathml.converter import convert
from sphinx.util import inspect

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lsm_jax import __version__  # noqa: E402

project = "lsm_jax"
author = "the authors of lsm_jax"
copyright = "the authors of lsm_jax, Apache-2.0"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
highlight_language = "bash"
nitpicky = False  # types of other libraries have no page here
suppress_warnings = ["mystnb.unknown_mime_type"]

myst_enable_extensions = ["attrs_inline", "dollarmath"]
html_math_renderer = "mathml"  # of `setup`
myst_heading_anchors = 4
# The site shows the outputs that `python -m scripts.run_notebooks` stored; tests/test_notebook.py executes the notebooks.
nb_execution_mode = "off"

html_theme = "sphinx_book_theme"
html_title = f"lsm_jax {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "logo": {
        "image_light": "static/logo-light.svg",
        "image_dark": "static/logo-dark.svg",
        "alt_text": f"lsm_jax {__version__}",
    },
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_light_style": "default",
    "pygments_dark_style": "monokai",
}

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
default_role = "code"
napoleon_custom_sections = [
    ("Attributes", "Parameters")
]  # of dataclasses and named tuples: their arguments
napoleon_use_rtype = False

# Files outside of docs/ that pages link to, and their pages in the site.
_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "site/changelog.md",
    "CONTRIBUTING.md": "site/contributing.md",
    "SECURITY.md": "site/security.md",
    "benchmarks/NOTES.md": "site/kernel_notes.md",
}


def relink(app, docname: str, source: list[str]) -> None:
    """Point links of a page to files outside of docs/ to the pages that include these files."""
    up = "../" * docname.count("/")

    def target(match: re.Match) -> str:
        page = _PAGES.get(match[2])
        return match[0] if page is None else f"]({up}{page}{match[3] or ''})"

    if docname.startswith("notebooks/"):  # which are copied from beside docs/ into it
        source[0] = source[0].replace("](../docs/", "](../")
    source[0] = re.sub(r"\]\((\.\./)+([\w/.]+\.md)(#[\w-]+)?\)", target, source[0])


def include(app, path: Path, docname: str, source: list[str]) -> None:
    """Rewrite the links of a file of the repository's root that a page of docs/site includes."""
    text = re.sub(r"\]\((\.\./)?docs/", "](../", source[0])
    source[0] = re.sub(
        r"\]\((\w+\.md)(#[\w-]+)?\)",
        lambda m: f"](../{_PAGES[m[1]]}{m[2] or ''})" if m[1] in _PAGES else m[0],
        text,
    )


def to_rst(app, what: str, name: str, obj, options, lines: list[str]) -> None:
    """Convert a docstring, which is plain text with code in single backticks and indented examples, into the lines of
    reStructuredText that napoleon reads."""
    text = "\n".join(lines)
    parts = re.split(r"(`+[^`]+`+)", text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"``{part.strip('`')}``"
            continue
        part = re.sub(r"(?<!\\)([*|\\])", r"\\\1", part)
        part = re.sub(r"(\w)_(?!\w)", r"\1\\_", part)
        if i and re.match(
            r"\w", part
        ):  # `x`s: a literal of reStructuredText ends before a space or punctuation
            part = f"\\ {part}"
        if i + 1 < len(parts) and re.search(r"[^\s(\[{\"'<-]$", part):
            part += "\\ "
        parts[i] = part
    text = "".join(parts)
    lines[:] = _examples(text.splitlines())


def _examples(lines: list[str]) -> list[str]:
    """Return the lines of a docstring in which each indented example, after an empty line, is a block of code."""
    result: list[str] = []
    section = False
    for i, line in enumerate(lines):
        if re.match(r"[A-Z]\w+:$", line):
            section = True
        elif line and not line.startswith(" "):
            section = False
        before = lines[i - 1].strip() if i else "x"
        starts = line.startswith("    ") and not before and not section
        if starts and not (result[-2:-1] and result[-2].startswith("    ")):
            result += [".. code-block:: python", ""]
        if line.startswith("    ") and not section:
            line = (
                line.replace("\\*", "*").replace("\\|", "|").replace("\\_", "_").replace("``", "`")
            )
            line = line.replace("\\\\", "\\")
        result.append(line)
    return result


def defaults(app, what: str, name: str, obj, options, signature: str | None, returns: str | None):
    """Replace the defaults of dataclasses that are computed, `<factory>`, by `...`, which Sphinx can parse, and the signature of
    flax's metaclass, (*args, **kwargs), by that of the module's constructor."""
    if what == "class" and issubclass(obj, nnx.Module):
        found = inspect.signature(obj.__init__, bound_method=True)
        return inspect.stringify_signature(found, unqualified_typehints=True), returns
    return None if signature is None else (signature.replace("<factory>", "..."), returns)


def skip(app, what: str, name: str, obj, skipped: bool, options) -> bool | None:
    """Leave out the fields of named tuples, which their class describes, and the op of a mixer, which `lsm_jax.ops` has."""
    if name == "op" and what == "class":
        return True
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def visit_formula(translator, node) -> None:
    """Write a formula as MathML, which browsers draw without a script from another server."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    formula = convert(node.astext(), display=display)
    tag = "div" if display == "block" else "span"
    translator.body.append(f'<{tag} class="formula">{formula}</{tag}>')
    raise nodes.SkipNode


def copy_notebooks(app, config) -> None:
    """Copy the notebooks of the repository into docs/notebooks, since pages must be below docs/."""
    folder = Path(app.srcdir) / "notebooks"
    folder.mkdir(exist_ok=True)
    for path in ROOT.glob("notebooks/*.ipynb"):
        shutil.copyfile(path, folder / path.name)


def setup(app) -> None:
    """Connect the functions above to Sphinx's events."""
    app.add_html_math_renderer("mathml", (visit_formula, None), (visit_formula, None))
    app.connect("config-inited", copy_notebooks)
    app.connect("source-read", relink)
    app.connect("include-read", include)
    app.connect("autodoc-process-signature", defaults)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", to_rst, priority=100)
