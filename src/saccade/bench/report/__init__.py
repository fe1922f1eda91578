"""Reports of benchmark runs as an HTML page and as Markdown."""
