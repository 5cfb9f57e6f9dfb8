"""MkDocs hooks of the site: pages from the repository, links between them, and `llms.txt`."""

from __future__ import annotations

import re
from pathlib import Path

import pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

_repository_paths: dict[str, str] = {}
"""Path within the repository by path within the site, of pages that come from there."""


def on_config(config: MkDocsConfig) -> None:
    """Names headings and tabs in links as GitHub does."""
    for extension in ("toc", "pymdownx.tabbed"):
        config.mdx_configs[extension]["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that no file of `docs` has."""
    docs = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    _repository_paths.update({pages.site_path(path): path for path in docs})
    for path, text in pages.repository_pages(docs).items():
        _repository_paths[pages.site_path(path)] = path
        files.append(File.generated(config, pages.site_path(path), content=text))
    for site_path, text in pages.reference_pages().items():
        files.append(File.generated(config, site_path, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Moves links, and shows two programs that stand side by side as tabs."""
    path = _repository_paths.get(page.file.src_uri)
    return pages.with_tabs(pages.with_site_links(markdown, path)) if path else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Tells MkDocs of anchors that it does not see: the tabs of a page have some too."""
    page.present_anchor_ids.update(re.findall(r' id="([^"]+)"', html))


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Keeps the navigation for `llms.txt`."""
    config.extra["pages"] = nav.pages


def on_post_build(config: MkDocsConfig) -> None:
    """Writes `llms.txt`, with a link to the Markdown of each page, which is beside its HTML."""
    lines = ["# isotrain", "", f"> {config.site_description}", ""]
    for page in config.extra["pages"]:
        markdown = page.markdown or ""
        file = Path(config.site_dir, page.file.src_uri)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(markdown, encoding="utf-8")
        lines.append(f"- [{page.title}]({page.file.src_uri}): {pages.first_sentence(markdown)}")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
