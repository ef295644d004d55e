"""Messages of foreign gRPC services.

`python -m tests.service.grpc_stubs` generates them from the .proto texts in this folder.
"""
