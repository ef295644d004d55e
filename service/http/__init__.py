"""The HTTP server's edge: access, certificates, limits, request bodies and problem documents."""
