"""The durable inbox: it writes job events and samples to disk before it acknowledges them."""
