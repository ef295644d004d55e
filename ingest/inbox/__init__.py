"""The durable inbox: job events and samples on disk before they are acknowledged."""
