"""Makes the site of docs/ and of the pages that stand elsewhere, so that nothing is written twice."""

from __future__ import annotations

from pathlib import Path

from loads import loads_from_elsewhere
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from repository_paths import pages_from_elsewhere, text_of, with_links


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every explanation of a finding behind the overview of them."""
    pages = [page for page in pages_from_elsewhere() if page.startswith("findings/")]
    [group] = [entry["Findings"] for entry in config.nav or [] if "Findings" in entry]
    group += [page for page in pages if page not in group]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, path in pages_from_elsewhere().items():
        files.append(File.generated(config, page, content=text_of(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    name = page.file.src_uri
    return with_links(markdown, pages_from_elsewhere().get(name, f"docs/{name}"))


def on_post_build(config: MkDocsConfig) -> None:
    found = [f"{page} loads {address}" for page, address in loads_from_elsewhere(Path(config.site_dir))]
    if found:
        raise PluginError("the site must need nothing but itself:\n  " + "\n  ".join(found))
