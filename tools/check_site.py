"""Follows every link of the built site: `python tools/check_site.py build/site`.

Files and anchors must exist; nothing may be loaded from elsewhere. Links to other sites are not
followed.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page, its links and what it loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors = {"", "__skip"}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes anchors and links."""
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in ("img", "link", "script"):
            self.loaded += [found[name] for name in ("src", "href") if name in found]


def main(site: Path) -> int:
    """Prints what leads nowhere; the exit status is 1 if there is something."""
    pages = {file.resolve(): Page(file) for file in site.rglob("*.html")}
    broken = []
    for file, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded:
                    broken.append(f"{file.name} loads {link}")
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if file.name == "404.html" and link.startswith("/"):
                target = site.resolve() / parts.path.lstrip("/")
            known = pages[target].anchors if target in pages else {""}
            if not target.is_file() or unquote(parts.fragment) not in known:
                broken.append(f"{file.relative_to(site.resolve())} links to {link}")
    print("\n".join(sorted(set(broken))) or f"all links of {len(pages)} pages lead somewhere")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
