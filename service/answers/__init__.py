"""Bodies of the answers as types, a file a capability: the service builds them, and OpenAPI shows them."""
