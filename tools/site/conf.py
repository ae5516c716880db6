"""Sphinx's configuration of the site; `python -m tools.site.build` lays out the pages and calls it."""

project = "HeteroInference"
extensions = ["myst_parser"]
root_doc = "index"
source_suffix = {".md": "markdown"}
# Pages are plain Markdown, as a repository shows it: anchors are made of headings as there.
myst_heading_anchors = 4
highlight_language = "none"
smartquotes = False
# Examples leave parts out by an ellipsis; some pages have small headings below large ones.
suppress_warnings = ["misc.highlighting_failure", "myst.header"]

html_theme = "furo"
html_title = "HeteroInference"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
