"""Site histories, read from the site's own archive."""
