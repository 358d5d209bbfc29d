"""What building the docs adds: pages of `benchmarks/results`, pages that the navigation forgot, a table of errors."""

import inspect
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))


def on_config(config):
    docs = Path(config.docs_dir)
    named = set(re.findall(r"[\w/]+\.md", repr(config.nav)))
    more = [str(p.relative_to(docs)) for p in sorted(docs.glob("**/*.md")) if str(p.relative_to(docs)) not in named]
    if more:
        config.nav.append({"More": more})
    config.nav.append({"Figures": ["results/index.md", *(f"results/{path.name}" for path in RESULTS)]})
    return config


def on_files(files, config):
    listed = "\n".join(f"- [{path.stem}]({path.name})" for path in RESULTS)
    index = f"# Figures\n\nEach says on what, with which versions and by which command it was measured.\n\n{listed}\n"
    pages = {"index.md": index, **{path.name: path.read_text() for path in RESULTS}}
    for name, text in pages.items():
        files.append(File.generated(config, f"results/{name}", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to files of the repository become links to the pages made of them; a mark becomes the table of errors."""
    markdown = markdown.replace("<!-- the table of errors -->", error_table())
    up = "../" * page.file.src_path.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+benchmarks/results/?\)", f"]({up}results/index.md)", markdown)
    return re.sub(r"\]\((?:\.\./)+benchmarks/results/", f"]({up}results/", markdown)


def error_table():
    """Every error and warning with what it means and what else it is."""
    from ejkernel import errors

    rows = ["| name | also a | meaning |", "|---|---|---|"]
    for name in ["EjkernelError", *sorted(errors._HOME_OF)]:
        error = getattr(errors, name)
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__ if base is not errors.EjkernelError)
        rows.append(f"| `{name}` | {bases} | {inspect.getdoc(error).splitlines()[0]} |")
    return "\n".join(rows)
