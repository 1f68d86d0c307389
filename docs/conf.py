"""The documentation site: ``python -m sphinx -W -b html docs docs/_build``."""

from grpo_lit import __version__

project = "grpo-lit"
author = "grpo-lit contributors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "results"]
html_theme = "furo"
html_title = "grpo-lit"
html_static_path: list[str] = []
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature in the source is clearer than its expansion
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_mock_imports = ["vllm"]
default_role = "code"
