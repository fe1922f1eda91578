"""Tasks of the pocket world that come with the package; `tools.pocket.world` has more of them."""
