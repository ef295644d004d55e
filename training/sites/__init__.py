"""A site's own history, read from its archive."""
