"""Check that every link inside a built site leads to a file and, behind #, to an element of it:
`python -m scripts.check_links docs/_build/html`."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links and the ids of one page."""

    def __init__(self):
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the id of an element, and where it links to."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken(folder: Path) -> list[str]:
    """Return "PAGE: LINK" for every link inside the site that leads nowhere; links to other sites are not checked."""
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        if "_static" in path.parts:  # templates of the theme
            continue
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text())
    found = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            missing = not target.exists()
            if not missing and parts.fragment and target in pages:
                missing = unquote(parts.fragment) not in pages[target].ids | {"", "top"}
            if missing:
                found.append(f"{path.relative_to(folder.resolve())}: {link}")
    return found


def main(arguments: list[str]) -> int:
    """Print the broken links of the site in the folder that the command line names; return 1 if there are any."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(f"check_links: arguments={arguments}; accepted is the folder of a built site", file=sys.stderr)  # fmt: skip
        return 2
    found = broken(Path(arguments[0]))
    print(*found, f"{len(found)} broken links", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
