"""The outer layer of the HTTP servers: access, certificates, limits, request bodies and problem documents."""
