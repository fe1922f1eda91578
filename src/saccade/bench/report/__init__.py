"""Reports of benchmark runs as an HTML page, as Markdown, CSV and LaTeX."""
