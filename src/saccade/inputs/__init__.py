"""From what a user has (messages, images, videos) to what a model takes."""
