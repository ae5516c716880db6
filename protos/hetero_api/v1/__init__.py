"""Generated protobuf and gRPC stubs of `hetero.v1`; `make protos` writes them."""
