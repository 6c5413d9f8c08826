"""mkdocs hooks: add the pages outside docs/, rewrite links, and reject pages that load external resources."""

from __future__ import annotations

from pathlib import Path

from loads import external_loads
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from repository_paths import pages_outside_docs, text_of, with_links


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the page of every finding to the navigation, after the overview."""
    pages = [page for page in pages_outside_docs() if page.startswith("findings/")]
    [group] = [entry["Findings"] for entry in config.nav or [] if "Findings" in entry]
    group += [page for page in pages if page not in group]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, path in pages_outside_docs().items():
        files.append(File.generated(config, page, content=text_of(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    name = page.file.src_uri
    return with_links(markdown, pages_outside_docs().get(name, f"docs/{name}"))


def on_post_build(config: MkDocsConfig) -> None:
    loads = [f"{page} loads {address}" for page, address in external_loads(Path(config.site_dir))]
    if loads:
        raise PluginError("the site must not load external resources:\n  " + "\n  ".join(loads))
